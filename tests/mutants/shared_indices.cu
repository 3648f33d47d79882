// Block & multiply as its authors lay it out, with three shared indices that thread 0 computes. Right as it stands:
// the tests take its barriers away one by one.
#include "blocks.cuh"

template <class TA, class TX, class TY, int WIDTH>
__global__ void block_multiply(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  __shared__ int elements;
  __shared__ i64 first_column, first_row;
  __shared__ TX slice[WIDTH];
  if (threadIdx.x == 0) {
    const i64 sections = (p.n + WIDTH - 1) / WIDTH;
    first_column = blockIdx.x % sections * WIDTH;
    first_row = blockIdx.x / sections * blockDim.x;
    elements = p.n - first_column < WIDTH ? int(p.n - first_column) : WIDTH;
  }
  __syncthreads();  // the indices are written
  if (threadIdx.x < elements) slice[threadIdx.x] = ((const TX*)p.x)[(first_column + threadIdx.x) * p.x_step];
  __syncthreads();  // x is staged
  const i64 row = first_row + threadIdx.x;
  if (row >= p.m) return;
  const TA* a = (const TA*)p.a + row + first_column * p.a_col;
  Acc sum = 0;
  for (int k = 0; k < elements; ++k) sum += wide<Acc>(a[k * p.a_col]) * wide<Acc>(slice[k]);
  atomicAdd((Acc*)p.work + row, sum);
}
