// x in shared memory by phases: in each phase the block copies BLOCK values of x, one a thread, and every
// thread goes on along its row with them.
// counters: load requests, thousands; sectors a load request; L1 hits, %; warp instructions, millions
#include "args.cuh"

template <class TA, class TX, class TY, int BLOCK>
__global__ void __launch_bounds__(BLOCK, 1) shared_x(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  extern __shared__ __align__(16) unsigned char smem[];
  TX* tile = (TX*)smem;
  const i64 blocks_per_batch = (p.m + BLOCK - 1) / BLOCK;
  const i64 batch = blockIdx.x / blocks_per_batch;
  const i64 row = (blockIdx.x % blocks_per_batch) * BLOCK + threadIdx.x;
  const TA* a = (const TA*)p.a + batch * p.a_batch + row * p.a_row;
  const TX* x = (const TX*)p.x + batch * p.x_batch;
  Acc sum = 0;
  // excerpt
  for (i64 first = 0; first < p.n; first += BLOCK) {
    const i64 mine = first + threadIdx.x;
    if (mine < p.n) tile[threadIdx.x] = x[mine * p.x_step];
    __syncthreads();
    const int count = p.n - first < BLOCK ? int(p.n - first) : BLOCK;
    if (row < p.m)  // threads past the last row still copy x and meet the barriers
      for (int k = 0; k < count; ++k) sum += wide<Acc>(a[(first + k) * p.a_col]) * wide<Acc>(tile[k]);
    __syncthreads();  // nobody may overwrite the tile while another thread still reads it
  // end of excerpt
  }
  if (row < p.m) finish((TY*)p.y + batch * p.y_batch + row * p.y_step, sum, p.alpha, p.beta);
}
