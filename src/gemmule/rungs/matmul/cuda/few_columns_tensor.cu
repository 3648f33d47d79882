// Few columns on tensor cores: fragments come from global memory as they lie, 16 bytes a lane.
// counters by columns: warp instructions, millions; FMA pipe, %; tensor pipe, %
#include "few_columns.cuh"

typedef ptx::u32 u32;

// Which mma a pair of formats takes: halves by 16 steps, bytes by 32.
#define MMA_OF(TA, TB, D, name) \
  __device__ __forceinline__ void mma(D (&d)[4], const u32 (&a)[4], const u32 (&b)[2], TA, TB) { ptx::name(d, a, b); }
MMA_OF(__half, __half, float, mma_f16)
MMA_OF(__nv_bfloat16, __nv_bfloat16, float, mma_bf16)
MMA_OF(signed char, signed char, int, mma_s8)
MMA_OF(unsigned char, unsigned char, int, mma_u8)
MMA_OF(unsigned char, signed char, int, mma_u8s8)
#undef MMA_OF

// d += a b for 16 rows and 8 columns, over the steps of one vector of each of the four lanes of a row. Lane (g, t)
// gives its vectors of rows g and g + 8 and of column g. An instruction wants steps 2 t and 2 t + 8 of a lane, say,
// and gets two neighbouring words of the vector: the order of the steps within a sum is free as long as both
// operands keep to one.
template <class Acc, class TA, class TB>
__device__ __forceinline__ void multiply(Acc (&d)[4], const Chunk<TA>& low, const Chunk<TA>& high, const Chunk<TB>& b) {
  const u32 *l = (const u32*)&low, *h = (const u32*)&high, *c = (const u32*)&b;
#pragma unroll
  // excerpt
  for (int i = 0; i < 4; i += 2) {
    const u32 rows[4] = {l[i], h[i], l[i + 1], h[i + 1]}, column[2] = {c[i], c[i + 1]};
    mma(d, rows, column, TA(), TB());
  // end of excerpt
  }
}
__device__ __forceinline__ void multiply(double (&d)[4], const Chunk<double>& low, const Chunk<double>& high,
                                         const Chunk<double>& b) {
  double top[2] = {d[0], d[1]}, bottom[2] = {d[2], d[3]};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    ptx::mma_f64(top, low[i], b[i]);
    ptx::mma_f64(bottom, high[i], b[i]);
  }
  d[0] = top[0], d[1] = top[1], d[2] = bottom[0], d[3] = bottom[1];
}

// A load of one warp covers PIECES * 64 neighbouring bytes of 8 / PIECES rows: the memory likes long pieces. Row g of
// an instruction is piece g % PIECES of row g / PIECES then, and columns are cut alike; of its sums those count whose
// pieces agree. Sizes are below 2^31 (a constraint of the rung). DIRECT: columns have unit stride and are aligned, so
// that they need no packing; columns past the end repeat the last one.
template <class TA, class TB, class TC, int WARPS, int TILES, int U, int PIECES, int NT, bool TURNED, bool DIRECT>
__global__ void __launch_bounds__(32 * WARPS, 16 / WARPS) few_columns_tensor(const GemmArgs args) {
  typedef typename AccOf<TC>::type Acc;
  constexpr int V = Lanes<TA>::count, LANES = 4 * PIECES, CHUNK = LANES * V, HEIGHT = 8 / PIECES;
  constexpr int R = 2 * TILES, ROWS = HEIGHT * R, N = HEIGHT * NT, B_STEP = DIRECT ? CHUNK : N * CHUNK;
  const GemmArgs p = seen<TURNED>(args);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / LANES, t = lane % LANES;
  const Slab at = slab_of(p, ROWS, N);
  const int m = (int)p.m, n = (int)p.n, k = (int)p.k, chunks = (k + CHUNK - 1) / CHUNK;
  const TA* base = (const TA*)p.a + at.batch * p.a_batch;
  const int end = rows_aligned(base, p.a_row) ? k / CHUNK : 0;  // chunks before it are whole and aligned
  const TA* a[R];
#pragma unroll
  for (int r = 0; r < R; ++r)  // rows past the end repeat the last one: no predicate in the loop
    a[r] = base + (i64)min(at.row + r * HEIGHT + g, m - 1) * p.a_row + t * V;
  const TB* b[NT];
  const i64 entry = (p.b_batch ? at.batch : 0) * ((p.n + N - 1) / N) + at.group;
#pragma unroll
  for (int i = 0; i < NT; ++i) {
    const int column = i * HEIGHT + g, there = min(at.group * N + column, n - 1);
    if constexpr (DIRECT) b[i] = (const TB*)p.b + at.batch * p.b_batch + there * p.b_col + t * V;
    else b[i] = (const TB*)p.work + entry * chunks * B_STEP + column * CHUNK + t * V;
  }
  Acc sum[TILES][NT][4] = {};

  Chunk<TA> va[U][R];
  int c = warp * U;
  if (c < end) load_rows<CHUNK>(va, a, c, end);
  if constexpr (!DIRECT) wait_for_columns();
  while (c < end) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      Chunk<TB> vb[NT];
#pragma unroll
      for (int i = 0; i < NT; ++i) vb[i] = load_packed<TB, V>(b[i] + (i64)min(c + u, end - 1) * B_STEP).part[0];
      if (c + u < end)
#pragma unroll
        for (int i = 0; i < NT; ++i)
#pragma unroll
          for (int r = 0; r < TILES; ++r) multiply(sum[r][i], va[u][2 * r], va[u][2 * r + 1], vb[i]);
    }
    c += WARPS * U;
    if (c < end) load_rows<CHUNK>(va, a, c, end);
  }
#pragma unroll 1
  for (c = end + warp; c < chunks; c += WARPS) {  // the last, partial chunk; all of them where rows are unaligned
    const int first = c * CHUNK + t * V;
#pragma unroll
    for (int r = 0; r < R; ++r) va[0][r] = load_guarded(a[r] - t * V, first, k);
#pragma unroll
    for (int i = 0; i < NT; ++i) {
      Chunk<TB> vb;
      if constexpr (DIRECT) vb = load_guarded(b[i] - t * V, first, k);
      else vb = load_packed<TB, V>(b[i] + (i64)c * B_STEP).part[0];
#pragma unroll
      for (int r = 0; r < TILES; ++r) multiply(sum[r][i], va[0][2 * r], va[0][2 * r + 1], vb);
    }
  }

  __shared__ Acc part[WARPS][PIECES][ROWS][N];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int column = lane % 4 * 2 + e % 2, piece = lane / 4 % PIECES;
    if (column % PIECES == piece)
#pragma unroll
      for (int r = 0; r < TILES; ++r)
#pragma unroll
        for (int i = 0; i < NT; ++i)
          part[warp][piece][(2 * r + e / 2) * HEIGHT + g][i * HEIGHT + column / PIECES] = sum[r][i][e];
  }
  __syncthreads();
  for (int e = threadIdx.x; e < ROWS * N; e += 32 * WARPS) {
    const int row = TURNED ? e % ROWS : e / N, column = TURNED ? e / ROWS : e % N;
    Acc total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w)
#pragma unroll
      for (int i = 0; i < PIECES; ++i) total += part[w][i][row][column];
    finish_at<TC>(p, at.batch, (i64)at.row + row, (i64)at.group * N + column, total);
  }
}
