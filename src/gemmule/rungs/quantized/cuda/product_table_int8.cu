// A table of all products that 8-bit codes can meet, 256 for each value of x; then p threads per row look their
// products up and add them. blockDim is (p, rows), p a multiple of 32.
// excerpt table of codes.cuh
// counters: sectors a load request; L1 hits, %; L2 hits, %
#include "codes.cuh"

template <class TX, class TS>
__global__ void __launch_bounds__(256) fill_table_int8(const QuantArgs p) {
  fill_table<TX, TS, 8>(p);
}

template <class TY, class TS, int ALIGN, int VALUES>
__global__ void __launch_bounds__(CodeRead<8, ALIGN, VALUES>::most_threads, 1) product_table_int8(const QuantArgs p) {
  const i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y;
  float sum = 0;
  if (row < p.m) {
    const CodeRow<TS, 8> codes(p, row);
    sum = share_of_table<8, ALIGN, VALUES>(codes, (const float*)p.work, threadIdx.x, blockDim.x);
  }
  sum = row_sum(sum);
  if (threadIdx.x == 0 && row < p.m) finish((TY*)p.y + row * p.y_step, sum, p.alpha, p.beta);
}
