// One thread per row: thread i walks row i of A and all of x, and writes y[i].
// counters: sectors a load request; L1 hits, %; occupancy, %
#include "complex.cuh"
#include "float8.cuh"

template <class TA, class TX, class TY, int BLOCK>
__global__ void __launch_bounds__(BLOCK) thread_per_row(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  const i64 blocks_per_batch = (p.m + BLOCK - 1) / BLOCK;
  const i64 batch = blockIdx.x / blocks_per_batch;
  const i64 row = (blockIdx.x % blocks_per_batch) * BLOCK + threadIdx.x;
  if (row >= p.m) return;
  // excerpt
  const TA* a = (const TA*)p.a + batch * p.a_batch + row * p.a_row;
  const TX* x = (const TX*)p.x + batch * p.x_batch;
  Acc sum = 0;
  for (i64 j = 0; j < p.n; ++j) sum += wide<Acc>(a[j * p.a_col]) * wide<Acc>(x[j * p.x_step]);
  finish((TY*)p.y + batch * p.y_batch + row * p.y_step, sum, p.alpha, p.beta);
  // end of excerpt
}
