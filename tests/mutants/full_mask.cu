// Wrong on purpose: the lanes of rows that exist shuffle with the mask of the whole warp, while the lanes of rows
// that do not exist wait behind the row guard.
#include "args.cuh"

template <class TA, class TX, class TY>
__global__ void p_threads(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  const int t = threadIdx.x, threads = blockDim.x;
  const i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y;
  if (row < p.m) {
    const TA* a = (const TA*)p.a + row * p.a_row;
    Acc sum = 0;
    for (i64 j = t; j < p.n; j += threads) sum += wide<Acc>(a[j]) * wide<Acc>(((const TX*)p.x)[j * p.x_step]);
    for (int d = threads / 2; d > 0; d /= 2) sum += __shfl_down_sync(0xffffffffu, sum, d, threads);
    if (t == 0) finish((TY*)p.y + row * p.y_step, sum, p.alpha, p.beta);
  }
  __syncwarp();
}
