// Split columns: as clustered columns, but the rows are split over the whole grid: SPLIT blocks write
// partial sums to the workspace, and a second kernel adds them in fixed order.
#include "stream.cuh"

template <class TA, class TX, class TY, int LANES, int SPLIT, bool ALIGNED, bool BATCHED>
__global__ void __launch_bounds__(256) split_columns(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
#if __CUDA_ARCH__ >= 900 || defined(CUEMU)
  ptx::pdl_launch_dependents();
#endif
  constexpr int V = Lanes<TA>::count, U = !ALIGNED ? 2 : V <= 8 ? 8 : 4, STRIP = LANES * V, DEPTH = 32 / LANES, WALKERS = SPLIT * 8 * DEPTH;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = blockIdx.x % SPLIT;
  const int m = (int)p.m, n = (int)p.n;  // both below 2^31: a constraint of the rung
  const unsigned batch = BATCHED ? blockIdx.y : 0;
  const int strip0 = blockIdx.x / SPLIT * STRIP, i0 = strip0 + lane % LANES * V;
  const TA* a = (const TA*)p.a + (BATCHED ? batch * p.a_batch : 0) + i0;
  const TX* x = (const TX*)p.x + (BATCHED ? batch * p.x_batch : 0);
  Acc sum[V];
#pragma unroll
  for (int i = 0; i < V; ++i) sum[i] = 0;
  int j = (rank * 8 + warp) * DEPTH + lane / LANES;
  const bool whole = ALIGNED ? i0 + V <= m : i0 > 0 && i0 + 2 * V <= m;
  for (; whole && j + (U - 1) * WALKERS < n; j += U * WALKERS) {
    Chunk<TA> va[U];
    TX vx[U];
#pragma unroll
    for (int u = 0; u < U; ++u) va[u] = load_a<ALIGNED>(a + (j + u * WALKERS) * p.a_col);
#pragma unroll
    for (int u = 0; u < U; ++u) vx[u] = x[(j + u * WALKERS) * p.x_step];
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int i = 0; i < V; ++i) sum[i] += wide<Acc>(va[u].v[i]) * wide<Acc>(vx[u]);
  }
  if (whole) {
    Chunk<TA> va[U];  // what is left of one turn: all its loads at once too
    TX vx[U];
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (j + u * WALKERS < n) {
        va[u] = load_a<ALIGNED>(a + (j + u * WALKERS) * p.a_col);
        vx[u] = x[(j + u * WALKERS) * p.x_step];
      }
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (j + u * WALKERS < n)
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i] += wide<Acc>(va[u].v[i]) * wide<Acc>(vx[u]);
  } else {
#pragma unroll 1
    for (; j < n; j += WALKERS) {
      const Acc vx = wide<Acc>(x[j * p.x_step]);
#pragma unroll
      for (int i = 0; i < V; ++i)
        if (i0 + i < m) sum[i] += wide<Acc>(a[j * p.a_col + i]) * vx;
    }
  }
  __shared__ Acc part[8][STRIP];
#pragma unroll
  for (int i = 0; i < V; ++i) {
#pragma unroll
    for (int o = LANES; o < 32; o <<= 1) sum[i] += __shfl_xor_sync(~0u, sum[i], o);
    if (lane < LANES) part[warp][lane % LANES * V + i] = sum[i];
  }
  __syncthreads();
  Acc* work = (Acc*)p.work + ((i64)batch * SPLIT + rank) * m + strip0;
  for (int c = threadIdx.x; c < STRIP && strip0 + c < m; c += 256) {
    Acc s = 0;
#pragma unroll
    for (int w = 0; w < 8; ++w) s += part[w][c];
    work[c] = s;
  }
}

// One warp per 32 results would leave the chip idle; one thread per (result, quarter of the splits).
template <class TY, int SPLIT>
__global__ void __launch_bounds__(256) add_splits(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
#if __CUDA_ARCH__ >= 900 || defined(CUEMU)
  ptx::pdl_wait();  // launched early: the partial sums are there only now
#endif
  constexpr int PARTS = SPLIT < 8 ? SPLIT : 8, EACH = SPLIT / PARTS, ROWS = 32;
  __shared__ Acc part[PARTS][ROWS];
  const Place at = place_of(p.batch, blockIdx.x, (p.m + ROWS - 1) / ROWS);
  const int c = threadIdx.x % ROWS, s = threadIdx.x / ROWS;
  const i64 row = (i64)at.block * ROWS + c;
  if (s < PARTS && row < p.m) {
    const Acc* work = (const Acc*)p.work + at.batch * SPLIT * p.m + row;
    Acc v[EACH], total = 0;
#pragma unroll
    for (int e = 0; e < EACH; ++e) v[e] = work[(s * EACH + e) * p.m];
#pragma unroll
    for (int e = 0; e < EACH; ++e) total += v[e];
    part[s][c] = total;
  }
  __syncthreads();
  if (s > 0 || row >= p.m) return;
  Acc total = 0;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) total += part[i][c];
  finish((TY*)p.y + at.batch * p.y_batch + row * p.y_step, total, p.alpha, p.beta);
}
