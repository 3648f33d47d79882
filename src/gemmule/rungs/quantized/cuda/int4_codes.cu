// p threads per row of 4-bit codes; blockDim is (p, rows), p a multiple of 32.
// excerpt nibble of codes.cuh
// counters: DRAM read, MB; warp instructions, millions
#include "codes.cuh"

template <class TX, class TY, class TS, int ALIGN, int VALUES>
__global__ void __launch_bounds__(CodeRead<4, ALIGN, VALUES>::most_threads, 1) int4_codes(const QuantArgs p) {
  const i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y;
  float sum = 0;
  if (row < p.m) {
    const CodeRow<TS, 4> codes(p, row);
    sum = share_of_codes<4, ALIGN, VALUES>(codes, (const TX*)p.x, p.x_step, threadIdx.x, blockDim.x);
  }
  sum = row_sum(sum);
  if (threadIdx.x == 0 && row < p.m) finish((TY*)p.y + row * p.y_step, sum, p.alpha, p.beta);
}
