// Y blocks per row: block s of a row sums section s of the columns into the workspace, which holds
// partial[batch][row][s]; a second kernel adds each row's Y partial sums, in order. blockDim is (p, rows), and
// blockIdx.y the section.
// counters: warp instructions, millions; DRAM written, MB
#include "rows.cuh"

template <class TA, class TX, class TY, int ALIGN, int VALUES, int Y>
__global__ void __launch_bounds__(RowRead<TA, ALIGN, VALUES>::most_threads, 1) y_blocks(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  constexpr int W = RowRead<TA, ALIGN, VALUES>::width;
  const int t = threadIdx.x, section = blockIdx.y;
  const RowPlace at(p);
  const i64 row = at.row;
  // Sections are whole pieces; the last one also takes the columns that fill no piece.
  // excerpt
  const i64 pieces = p.n / W, first = pieces * section / Y * W;
  const i64 last = section == Y - 1 ? p.n : pieces * (section + 1) / Y * W;
  const TA* a = (const TA*)p.a + at.batch * p.a_batch + row * p.a_row;
  const TX* x = (const TX*)p.x + at.batch * p.x_batch;
  Acc sum = 0;
  if (row < p.m) sum = share_of_row<ALIGN, VALUES, Acc>(a, x, p.x_step, first, last, t, blockDim.x);
  sum = row_sum(sum);
  if (t == 0 && row < p.m) ((Acc*)p.work)[(at.batch * p.m + row) * Y + section] = sum;
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
  const i64 batch = p.batch == 1 ? 0 : entry / p.m;  // one product needs no division
  finish((TY*)p.y + batch * p.y_batch + (entry - batch * p.m) * p.y_step, sum, p.alpha, p.beta);
}
