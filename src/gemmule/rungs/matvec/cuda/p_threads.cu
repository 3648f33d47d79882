// p threads per dot product: thread t of a row takes columns t, t + p, ...; blockDim is (p, rows).
// counters: sectors a load request; L1 hits, %; occupancy, %
#include "rows.cuh"

template <class TA, class TX, class TY>
__global__ void __launch_bounds__(1024, 1) p_threads(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  const int t = threadIdx.x, threads = blockDim.x, rows = blockDim.y;
  const i64 blocks_per_batch = (p.m + rows - 1) / rows;
  const i64 batch = blockIdx.x / blocks_per_batch;
  const i64 row = (blockIdx.x % blocks_per_batch) * rows + threadIdx.y;
  // excerpt
  const unsigned mask = group_mask(threads);
  if (row >= p.m) return;  // whole groups leave, and a group waits for its own lanes only
  const TA* a = (const TA*)p.a + batch * p.a_batch + row * p.a_row;
  const TX* x = (const TX*)p.x + batch * p.x_batch;
  Acc sum = 0;
  for (i64 j = t; j < p.n; j += threads) sum += wide<Acc>(a[j]) * wide<Acc>(x[j * p.x_step]);
  sum = group_sum(sum, threads, mask);
  if (t == 0) finish((TY*)p.y + batch * p.y_batch + row * p.y_step, sum, p.alpha, p.beta);
  // end of excerpt
}
