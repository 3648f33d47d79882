// One thread per column of a column-major matrix, for A^T x: the thread walks down its column. Seen as the product
// of the row-major transpose, this is a thread per row.
// counters: sectors a load request; L1 hits, %
#include "args.cuh"

template <class TA, class TX, class TY, int BLOCK>
__global__ void __launch_bounds__(BLOCK, 1) col_transposed(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  const i64 blocks_per_batch = (p.m + BLOCK - 1) / BLOCK;
  const i64 batch = blockIdx.x / blocks_per_batch;
  const i64 column = (blockIdx.x % blocks_per_batch) * BLOCK + threadIdx.x;  // of the stored matrix
  if (column >= p.m) return;
  // excerpt
  const TA* a = (const TA*)p.a + batch * p.a_batch + column * p.a_row;
  const TX* x = (const TX*)p.x + batch * p.x_batch;
  Acc sum = 0;
  for (i64 i = 0; i < p.n; ++i) sum += wide<Acc>(a[i]) * wide<Acc>(x[i * p.x_step]);
  finish((TY*)p.y + batch * p.y_batch + column * p.y_step, sum, p.alpha, p.beta);
  // end of excerpt
}
