// p threads per dot product with 16-byte loads: a thread takes VALUES columns in one step (see rows.cuh);
// blockDim is (p, rows).
// excerpt loads of rows.cuh
// counters: load requests, thousands; warp instructions, millions
#include "rows.cuh"

template <class TA, class TX, class TY, int ALIGN, int VALUES>
__global__ void __launch_bounds__(RowRead<TA, ALIGN, VALUES>::most_threads, 1) p_threads_vector(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  const int t = threadIdx.x, threads = blockDim.x;
  const RowPlace at(p);
  const i64 row = at.row;
  const unsigned mask = group_mask(threads);
  if (row >= p.m) return;
  const TA* a = (const TA*)p.a + at.batch * p.a_batch + row * p.a_row;
  const TX* x = (const TX*)p.x + at.batch * p.x_batch;
  Acc sum = share_of_row<ALIGN, VALUES, Acc>(a, x, p.x_step, 0, p.n, t, threads);
  sum = group_sum(sum, threads, mask);
  if (t == 0) finish((TY*)p.y + at.batch * p.y_batch + row * p.y_step, sum, p.alpha, p.beta);
}
