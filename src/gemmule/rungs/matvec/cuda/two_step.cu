// Two-step reduction: p threads share a row, p up to 1024. Step 1: each warp sums by shuffles and writes its own
// slot of shared memory. Step 2: the row's first warp sums the slots. blockDim is (p, rows).
// counters: occupancy, %; shared-memory passes, millions
#include "rows.cuh"

template <class TA, class TX, class TY, int ALIGN, int VALUES>
__global__ void __launch_bounds__(RowRead<TA, ALIGN, VALUES>::most_threads, 1) two_step(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  __shared__ Acc slots[32];  // one for each warp of the block, so one for each (row, warp)
  const int t = threadIdx.x, warps = blockDim.x / 32;
  const RowPlace at(p);
  const i64 row = at.row;
  const TA* a = (const TA*)p.a + at.batch * p.a_batch + row * p.a_row;
  const TX* x = (const TX*)p.x + at.batch * p.x_batch;
  Acc sum = 0;
  // excerpt
  if (row < p.m) sum = share_of_row<ALIGN, VALUES, Acc>(a, x, p.x_step, 0, p.n, t, blockDim.x);
  sum = group_sum(sum, 32, 0xffffffffu);  // no thread has left: the mask of the whole warp is right
  if (t % 32 == 0) slots[threadIdx.y * warps + t / 32] = sum;
  __syncthreads();
  if (t >= 32 || row >= p.m) return;  // one whole warp of each row stays
  sum = t < warps ? slots[threadIdx.y * warps + t] : Acc(0);
  sum = group_sum(sum, 32, 0xffffffffu);
  if (t == 0) finish((TY*)p.y + at.batch * p.y_batch + row * p.y_step, sum, p.alpha, p.beta);
  // end of excerpt
}
