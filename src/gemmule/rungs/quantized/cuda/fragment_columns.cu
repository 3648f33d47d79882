// Several columns: x is packed as operands first, then every fragment of codes meets all columns.
// counters: L2 hits, %; issue slots used, %; tensor pipe, %
#include "fragments.cuh"

// Column q of an instruction is unit q % SPLIT of part q / SPLIT % PARTS of one of COLUMNS columns of x.
template <class TX, int SPLIT, int NT> struct Packed {
  static constexpr int PARTS = sizeof(TX) == 4 ? 3 : 1, WIDE = SPLIT * PARTS, COLUMNS = 8 * NT / WIDE;
};
// A pass is COLUMNS columns. Tiles are counted to whole turns (TURN), those past the end are zeros.
constexpr int TURN = 8;
template <int BITS> __device__ __forceinline__ int padded_tiles(const QuantArgs& p) {
  return ((int)p.n + Tile<BITS>::columns * TURN - 1) / (Tile<BITS>::columns * TURN) * TURN;
}
template <class TX, int BITS, int SPLIT, int NT> __device__ __forceinline__ float* sums_of(const QuantArgs& p) {
  const int passes = ((int)p.columns + Packed<TX, SPLIT, NT>::COLUMNS - 1) / Packed<TX, SPLIT, NT>::COLUMNS;
  return (float*)((Words*)p.work + (i64)passes * padded_tiles<BITS>(p) * NT * 8 * Tile<BITS>::of_lane / 2);
}

// operands[pass][tile][8 columns][16 bytes of a lane][lane], then sums[pass][tile][column] of x over a unit.
template <class TX, int BITS, int SPLIT, int NT>
__global__ void __launch_bounds__(256) pack_operands(const QuantArgs p) {
#if __CUDA_ARCH__ >= 900 || defined(CUEMU)
  ptx::pdl_launch_dependents();
#endif
  typedef Packed<TX, SPLIT, NT> Shape;
  constexpr int C = Tile<BITS>::of_lane, V = C / 8;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = blockIdx.x * 8 + threadIdx.x / 32;
  const int tiles = padded_tiles<BITS>(p), eight = warp % NT, tile = warp / NT % tiles, pass = warp / NT / tiles;
  const int q = eight * 8 + g, part = q / SPLIT % Shape::PARTS, column = pass * Shape::COLUMNS + q / Shape::WIDE;
  if (pass * Shape::COLUMNS >= (int)p.columns) return;
  const bool wanted = q / Shape::WIDE < Shape::COLUMNS && column < (int)p.columns && t * SPLIT / 4 == q % SPLIT;
  const PartOf of(part);
  float sum = 0;
  u32 pairs[C / 2];
#pragma unroll
  for (int i = 0; i < C; i += 2) {
    TX x[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int j = tile * Tile<BITS>::columns + t * C + i + e;
      x[e] = wanted && j < (int)p.n ? ((const TX*)p.x)[(p.perm ? (i64)p.perm[j] : (i64)j) * p.x_step + column * p.x_col] : TX(0.f);
      if constexpr (sizeof(TX) == 4) sum += __uint_as_float(of.bits(x[e]) & 0xffff0000u);
      else sum += wide<float>(x[e]);
    }
    if constexpr (sizeof(TX) == 4) pairs[i / 2] = of.pair(x[0], x[1]);
    else pairs[i / 2] = *(const u32*)x;
  }
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const Words w = {{pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]}};
    ((Words*)p.work)[((i64)warp * V + i) * 32 + lane] = w;
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (t == 0) sums_of<TX, BITS, SPLIT, NT>(p)[(i64)warp * 8 + g] = sum;
}

// DOWN x ALONG warps: those side by side share the columns of codes among them, those below each other have other rows
// and meet in the L1, where each brings what the next one wants of x. Products are for 16 ROWS rows a warp.
template <class TX, class TY, class TS, int BITS, bool ZEROS, int SPLIT, int SHIFT, int DOWN, int ALONG, int TILES, int ROWS, int NT>
__global__ void __launch_bounds__(32 * DOWN * ALONG, DOWN * ALONG < 16 && ROWS * NT < 8 ? 16 / (DOWN * ALONG) : 1) fragment_columns(const QuantArgs p) {
  typedef typename OperandOf<TX>::type T;
  typedef NumbersOf<T, BITS, TS> N;
  typedef Packed<TX, SPLIT, NT> Shape;
  constexpr int STEPS = Tile<BITS>::steps, V = STEPS / 2, OWN = SPLIT > 1 ? 2 : 1, HEIGHT = 16 * DOWN;
  constexpr int EACH = SHIFT < 1 || SPLIT > 1 ? 1 : SHIFT == 1 || TILES == 2 ? 2 : TILES;
  static_assert(TURN % TILES == 0 && TILES % EACH == 0, "whole turns");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int m = (int)p.m, across = ((int)p.n + Tile<BITS>::columns - 1) / Tile<BITS>::columns, tiles = padded_tiles<BITS>(p);
  const int blocks = (m + HEIGHT * ROWS - 1) / (HEIGHT * ROWS), pass = blockIdx.x / blocks, last = (m + 15) / 16 - 1;
  const int first = (blockIdx.x % blocks * ROWS * DOWN + warp / ALONG);  // row tiles of a warp are DOWN apart
  const Words* w[ROWS];
  int row[ROWS][2];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    w[r] = (const Words*)p.codes + (i64)min(first + r * DOWN, last) * across * 32 + lane;
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) row[r][hi] = min((first + r * DOWN) * 16 + hi * 8 + g, m - 1);
  }
  const Words* x = (const Words*)p.work + (i64)pass * tiles * NT * V * 32 + lane;
  const float* sums = sums_of<TX, BITS, SPLIT, NT>(p) + (i64)pass * tiles * NT * 8 + 2 * t;
  const Groups<SHIFT> groups(p, Tile<BITS>::columns / SPLIT);
  float total[ROWS][NT][4] = {};
  bool waited = false;

#pragma unroll 1
  for (int c = warp % ALONG * TILES; c < across; c += ALONG * TILES) {
    Words v[ROWS][TILES];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int u = 0; u < TILES; ++u) v[r][u] = ptx::ld_stream(w[r] + min(c + u, across - 1) * 32);
#if __CUDA_ARCH__ >= 900 || defined(CUEMU)
    if (!waited) ptx::pdl_wait();
#endif
    waited = true;
#pragma unroll
    for (int f = 0; f < TILES; f += EACH) {  // tiles of one group are scaled together
      float scale[ROWS][2][OWN], zero[ROWS][2][OWN];
#pragma unroll
      for (int own = 0; own < OWN; ++own) {
        const int group = groups.of((c + f) * SPLIT + (2 * t + own) % SPLIT);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
          for (int hi = 0; hi < 2; ++hi) {
            const i64 at = scale_at(p, row[r][hi], group);
            scale[r][hi][own] = wide<float>(((const TS*)p.scales)[at]);
            if constexpr (ZEROS) zero[r][hi][own] = ((const float*)p.zeros)[at];
            else zero[r][hi][own] = 1 << (BITS - 1);
          }
      }
      Words b[EACH][NT][V];
      ptx::Vec<float, 2> of_x[NT] = {};
#pragma unroll
      for (int u = 0; u < EACH; ++u)
#pragma unroll
        for (int k = 0; k < NT; ++k) {
          const int at = (c + f + u) * NT + k;
#pragma unroll
          for (int i = 0; i < V; ++i) b[u][k][i] = x[(at * V + i) * 32];
          if constexpr (N::less == 0 || ZEROS) {
            const ptx::Vec<float, 2> of_tile = *(const ptx::Vec<float, 2>*)(sums + at * 8);
            of_x[k][0] += of_tile[0], of_x[k][1] += of_tile[1];
          }
        }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        float d[NT][4] = {};
#pragma unroll
        for (int u = 0; u < EACH; ++u)
#pragma unroll
          for (int j = 0; j < STEPS; ++j) {
            // excerpt
            u32 a[4];
            N::fragment(v[r][f + u], j, a);
#pragma unroll
            for (int k = 0; k < NT; ++k) multiply(d[k], a, {b[u][k][j / 2][2 * j % 4], b[u][k][j / 2][2 * j % 4 + 1]}, T());
            // end of excerpt
          }
#pragma unroll
        for (int k = 0; k < NT; ++k)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int hi = i / 2, own = OWN == 2 ? i % 2 : 0;
            const float dot = fmaf(d[k][i], N::lift(hi), (N::less - zero[r][hi][own]) * of_x[k][i % 2]);
            total[r][k][i] = fmaf(scale[r][hi][own], dot, total[r][k][i]);
          }
      }
    }
  }

  __shared__ float shares[ALONG][HEIGHT][8 * NT];
#pragma unroll 1
  for (int r = 0; r < ROWS; ++r) {
    if (r) __syncthreads();
#pragma unroll
    for (int k = 0; k < NT; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float v = total[0][k][i];
#pragma unroll
        for (int other = 1; other < ROWS; ++other) v = r == other ? total[other][k][i] : v;
        shares[warp % ALONG][warp / ALONG * 16 + i / 2 * 8 + g][8 * k + 2 * t + i % 2] = v;
      }
    __syncthreads();
    for (int i = threadIdx.x; i < HEIGHT * Shape::COLUMNS; i += 32 * DOWN * ALONG) {
      const bool rows_first = p.y_step == 1;
      const int at = rows_first ? i % HEIGHT : i / Shape::COLUMNS, c = rows_first ? i / HEIGHT : i % Shape::COLUMNS;
      float sum = 0;
#pragma unroll 1
      for (int a = 0; a < ALONG; ++a)
#pragma unroll
        for (int q = 0; q < Shape::WIDE; ++q) sum += shares[a][at][c * Shape::WIDE + q];
      const int to = (blockIdx.x % blocks * ROWS * DOWN + r * DOWN + at / 16) * 16 + at % 16, column = pass * Shape::COLUMNS + c;
      if (to < m && column < (int)p.columns) store_quantised<TY>(p, to, column, by_factor<TS>(p, to, sum));
    }
  }
}
