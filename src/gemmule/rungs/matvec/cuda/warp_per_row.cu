// A warp per row: lane l takes columns l, l + 32, ..., so a warp reads 32 neighbours at once; then the lanes'
// sums meet in five exchanges.
// counters: sectors a load request; L1 hits, %; occupancy, %
#include "rows.cuh"

template <class TA, class TX, class TY>
__global__ void __launch_bounds__(1024, 1) warp_per_row(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  const int lane = threadIdx.x, warps = blockDim.y;
  const i64 blocks_per_batch = (p.m + warps - 1) / warps;
  const i64 batch = blockIdx.x / blocks_per_batch;
  const i64 row = (blockIdx.x % blocks_per_batch) * warps + threadIdx.y;
  if (row >= p.m) return;  // the whole warp leaves
  const TA* a = (const TA*)p.a + batch * p.a_batch + row * p.a_row;
  const TX* x = (const TX*)p.x + batch * p.x_batch;
  // excerpt
  Acc sum = 0;
  for (i64 j = lane; j < p.n; j += 32) sum += wide<Acc>(a[j]) * wide<Acc>(x[j * p.x_step]);
  sum = group_sum(sum, 32, 0xffffffffu);
  if (lane == 0) finish((TY*)p.y + batch * p.y_batch + row * p.y_step, sum, p.alpha, p.beta);
  // end of excerpt
}
