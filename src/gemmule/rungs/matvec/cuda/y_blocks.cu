// Y blocks per row: block s of a row sums section s of the columns into the workspace, which holds
// partial[batch][row][s]; a second kernel adds each row's Y partial sums, in order. blockDim is (p, rows).
// counters: warp instructions, millions; DRAM written, MB
#include "rows.cuh"

template <class TA, class TX, class TY, int ALIGN, int VALUES, int Y>
__global__ void __launch_bounds__(RowRead<TA, ALIGN, VALUES>::most_threads, 1) y_blocks(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  constexpr int W = RowRead<TA, ALIGN, VALUES>::width;
  const int t = threadIdx.x, rows = blockDim.y;
  const i64 blocks_per_batch = (p.m + rows - 1) / rows;
  const i64 rest = blockIdx.x / Y, batch = rest / blocks_per_batch;
  const int section = blockIdx.x % Y;
  const i64 row = (rest % blocks_per_batch) * rows + threadIdx.y;
  // Sections are whole pieces; the last one also takes the columns that fill no piece.
  // excerpt
  const i64 pieces = p.n / W, first = pieces * section / Y * W;
  const i64 last = section == Y - 1 ? p.n : pieces * (section + 1) / Y * W;
  const TA* a = (const TA*)p.a + batch * p.a_batch + row * p.a_row;
  const TX* x = (const TX*)p.x + batch * p.x_batch;
  Acc sum = 0;
  if (row < p.m) sum = share_of_row<ALIGN, VALUES, Acc>(a, x, p.x_step, first, last, t, blockDim.x);
  sum = row_sum(sum);
  if (t == 0 && row < p.m) ((Acc*)p.work)[(batch * p.m + row) * Y + section] = sum;
  // end of excerpt
}

template <class TA, class TX, class TY, int Y>
__global__ void __launch_bounds__(256) add_sections(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  const i64 entry = (i64)blockIdx.x * 256 + threadIdx.x;
  if (entry >= p.m * p.batch) return;
  const Acc* partial = (const Acc*)p.work + entry * Y;
  Acc sum = partial[0];
#pragma unroll
  for (int s = 1; s < Y; ++s) sum += partial[s];
  finish((TY*)p.y + entry / p.m * p.y_batch + entry % p.m * p.y_step, sum, p.alpha, p.beta);
}
