// Few rows: a thread sums columns of its own, alone or with the warps of its block, each of which takes some of the rows.
// counters: sectors a load request; occupancy, %; warp instructions, millions
#include "stream.cuh"

// A thread has EACH columns, and U rows of all of them under way. SHARE warps bring the sums of 32 columns together;
// where SHARE is 1 each warp has columns of its own.
template <class TA, class TX, class TY, int SHARE, int EACH, int U, bool BATCHED>
__global__ void __launch_bounds__(SHARE == 1 ? 128 : 32 * SHARE) few_rows(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  static_assert(SHARE == 1 || EACH == 1, "shared columns are a thread's only ones");
  constexpr int COLUMNS = SHARE == 1 ? 128 : 32;  // of a block, EACH times
  const int m = (int)p.m, n = (int)p.n;           // both below 2^31: a constraint of the rung
  const int lane = SHARE == 1 ? threadIdx.x : threadIdx.x % 32, sharer = SHARE == 1 ? 0 : threadIdx.x / 32;
  const int column = (int)(blockIdx.x * (EACH * COLUMNS)) + lane;
  const unsigned batch = BATCHED ? blockIdx.y : 0;
  const TA* a = (const TA*)p.a + (BATCHED ? batch * p.a_batch : 0) + column;
  const TX* x = (const TX*)p.x + (BATCHED ? batch * p.x_batch : 0);
  Acc sum[EACH];
#pragma unroll
  for (int e = 0; e < EACH; ++e) sum[e] = 0;
#pragma unroll 1
  for (int j = sharer * U; j < n; j += SHARE * U) {
    // excerpt
    ptx::Vec<TX, 1> vx[U];
    ptx::Vec<TA, 1> va[U][EACH];
#pragma unroll
    for (int u = 0; u < U; ++u) vx[u] = Again::load((const ptx::Vec<TX, 1>*)(x + (j + u) * p.x_step), j + u < n);
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int e = 0; e < EACH; ++e)
        va[u][e] = Once::load((const ptx::Vec<TA, 1>*)(a + (j + u) * p.a_col + e * COLUMNS), j + u < n && column + e * COLUMNS < m);
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int e = 0; e < EACH; ++e) sum[e] += wide<Acc>(va[u][e].v[0]) * wide<Acc>(vx[u].v[0]);
    // end of excerpt
  }
  TY* y = (TY*)p.y + (BATCHED ? batch * p.y_batch : 0);
  if constexpr (SHARE > 1) {
    __shared__ Acc parts[SHARE][32];
    parts[sharer][lane] = sum[0];
    __syncthreads();
    if (sharer > 0) return;
    sum[0] = 0;
#pragma unroll
    for (int s = 0; s < SHARE; ++s) sum[0] += parts[s][lane];
  }
#pragma unroll
  for (int e = 0; e < EACH; ++e)
    if (column + e * COLUMNS < m) store_sum(p, y + (column + e * COLUMNS) * p.y_step, sum[e]);
}
