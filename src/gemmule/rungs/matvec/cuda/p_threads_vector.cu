// p threads per dot product with 16-byte loads: a thread takes VALUES columns in one step (see rows.cuh);
// blockDim is (p, rows).
#include "rows.cuh"

template <class TA, class TX, class TY, int ALIGN, int VALUES>
__global__ void __launch_bounds__(RowRead<TA, ALIGN, VALUES>::most_threads, 1) p_threads_vector(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  const int t = threadIdx.x, threads = blockDim.x, rows = blockDim.y;
  const i64 blocks_per_batch = (p.m + rows - 1) / rows;
  const i64 batch = blockIdx.x / blocks_per_batch;
  const i64 row = (blockIdx.x % blocks_per_batch) * rows + threadIdx.y;
  const unsigned mask = group_mask(threads);
  if (row >= p.m) return;
  const TA* a = (const TA*)p.a + batch * p.a_batch + row * p.a_row;
  const TX* x = (const TX*)p.x + batch * p.x_batch;
  Acc sum = share_of_row<ALIGN, VALUES, Acc>(a, x, p.x_step, 0, p.n, t, threads);
  sum = group_sum(sum, threads, mask);
  if (t == 0) finish((TY*)p.y + batch * p.y_batch + row * p.y_step, sum, p.alpha, p.beta);
}
