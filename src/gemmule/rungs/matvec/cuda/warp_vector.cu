// A warp per row with LOADS 16-byte loads a lane under way before the first is used, each with its own sum.
// counters: load requests, thousands; warp instructions, millions
#include "rows.cuh"

template <class TA, class TX, class TY, int ALIGN, int LOADS>
__global__ void __launch_bounds__(256, 2) warp_vector(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  constexpr int W = RowRead<TA, ALIGN, 16>::width, align_x = ALIGN < 16 ? int(sizeof(TX)) : 16;
  typedef ptx::Vec<TA, W> Piece;
  const int lane = threadIdx.x, warps = blockDim.y;
  const i64 blocks_per_batch = (p.m + warps - 1) / warps;
  const i64 batch = blockIdx.x / blocks_per_batch;
  const i64 row = (blockIdx.x % blocks_per_batch) * warps + threadIdx.y;
  if (row >= p.m) return;  // the whole warp leaves
  const TA* a = (const TA*)p.a + batch * p.a_batch + row * p.a_row;
  const TX* x = (const TX*)p.x + batch * p.x_batch;
  constexpr int stride = 32 * W;
  const i64 whole = p.n - p.n % W;
  Acc sums[LOADS], xv[W];
#pragma unroll
  for (int l = 0; l < LOADS; ++l) sums[l] = 0;
  Piece av[LOADS];
  i64 j = (i64)lane * W;
#pragma unroll 1
  // excerpt
  for (; j + (LOADS - 1) * stride < whole; j += LOADS * stride) {
#pragma unroll
    for (int l = 0; l < LOADS; ++l) av[l] = ptx::ld_stream((const Piece*)(a + j + l * stride));
#pragma unroll
    for (int l = 0; l < LOADS; ++l) {
      load_vector<align_x>(x, p.x_step, j + l * stride, xv);
#pragma unroll
      for (int k = 0; k < W; ++k) sums[l] += wide<Acc>(av[l][k]) * xv[k];
  // end of excerpt
    }
  }
#pragma unroll 1
  for (; j < whole; j += stride) {
    av[0] = ptx::ld_stream((const Piece*)(a + j));
    load_vector<align_x>(x, p.x_step, j, xv);
#pragma unroll
    for (int k = 0; k < W; ++k) sums[0] += wide<Acc>(av[0][k]) * xv[k];
  }
  for (j = whole + lane; j < p.n; j += 32) sums[0] += wide<Acc>(a[j]) * wide<Acc>(x[j * p.x_step]);
#pragma unroll
  for (int l = 1; l < LOADS; ++l) sums[0] += sums[l];
  const Acc sum = group_sum(sums[0], 32, 0xffffffffu);
  if (lane == 0) finish((TY*)p.y + batch * p.y_batch + row * p.y_step, sum, p.alpha, p.beta);
}
