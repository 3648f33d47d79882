// Block & multiply over a column-major matrix: what document 004's algorithms share. A block of threads owns as many
// neighbouring rows as it has threads and WIDTH columns; its sums meet those of other blocks by atomics, in a
// workspace sums[batch][row] that is zeroed before and converted once after.
#pragma once
#include "args.cuh"

constexpr int kSumThreads = 256;

template <class Acc>
__global__ void __launch_bounds__(kSumThreads) zero_sums(const GemvArgs p) {
  const i64 entry = (i64)blockIdx.x * kSumThreads + threadIdx.x;
  if (entry < p.m * p.batch) ((Acc*)p.work)[entry] = 0;
}

template <class TY>
__global__ void __launch_bounds__(kSumThreads) store_sums(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  const i64 entry = (i64)blockIdx.x * kSumThreads + threadIdx.x;
  if (entry >= p.m * p.batch) return;
  const Acc sum = ((const Acc*)p.work)[entry];
  finish((TY*)p.y + entry / p.m * p.y_batch + entry % p.m * p.y_step, sum, p.alpha, p.beta);
}

// Where a block of threads stands: column sections run fastest, then row blocks, then the batch. Every thread
// computes its place in registers, so nothing has to be shared before it is used.
struct BlockPlace {
  i64 batch, row, first;
  int count;
  __device__ __forceinline__ BlockPlace(const GemvArgs& p, int width) {
    const i64 sections = (p.n + width - 1) / width, row_blocks = (p.m + blockDim.x - 1) / blockDim.x;
    const i64 rest = blockIdx.x / sections;
    first = blockIdx.x % sections * width;
    count = p.n - first < width ? int(p.n - first) : width;  // the last section may be narrower
    batch = rest / row_blocks;
    row = rest % row_blocks * blockDim.x + threadIdx.x;
  }
};

// One section's share of a row: `count` columns from `a`, `step` elements apart, times x in shared memory.
template <class Acc, int WIDTH, class TA, class TX>
__device__ __forceinline__ void multiply_block(const GemvArgs& p, const BlockPlace& at, const TA* a, i64 step) {
  __shared__ TX slice[WIDTH];
  const TX* x = (const TX*)p.x + at.batch * p.x_batch;
  // excerpt multiply
  for (int k = threadIdx.x; k < at.count; k += blockDim.x) slice[k] = x[(at.first + k) * p.x_step];
  __syncthreads();
  if (at.row >= p.m) return;
  Acc sum = 0;
#pragma unroll 8
  for (int k = 0; k < at.count; ++k) sum += wide<Acc>(a[k * step]) * wide<Acc>(slice[k]);
  atomicAdd((Acc*)p.work + at.batch * p.m + at.row, sum);
  // end of excerpt
}
