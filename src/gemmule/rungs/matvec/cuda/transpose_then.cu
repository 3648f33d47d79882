// Transpose, then block & multiply: the matrix is copied into the workspace with its other order, through tiles of
// shared memory, and then read coalesced. The copy lies behind the sums, at the next multiple of 256 bytes.
// counters: DRAM read, MB; DRAM written, MB; sectors a load request
#include "blocks.cuh"

constexpr int kTile = 32, kTileRows = 8;  // a tile's side; rows of threads

template <class TA, class Acc>
__device__ __forceinline__ TA* transposed_copy(const GemvArgs& p) {
  const i64 sums = p.m * p.batch * (i64)sizeof(Acc);
  return (TA*)((char*)p.work + (sums + 255) / 256 * 256);
}

template <class TA, class TY>
__global__ void __launch_bounds__(kTile * kTileRows) transpose_tiles(const GemvArgs p) {
  // excerpt
  __shared__ TA tile[kTile][kTile + 1];  // one more column, so that a tile's column meets every bank
  const i64 across = (p.n + kTile - 1) / kTile, down = (p.m + kTile - 1) / kTile;
  const i64 rest = blockIdx.x / across, batch = rest / down;
  const i64 column0 = blockIdx.x % across * kTile, row0 = rest % down * kTile;
  const TA* a = (const TA*)p.a + batch * p.a_batch;
  TA* copy = transposed_copy<TA, typename AccOf<TY>::type>(p) + batch * p.m * p.n;
#pragma unroll
  for (int i = threadIdx.y; i < kTile; i += kTileRows) {
    const i64 row = row0 + i, column = column0 + threadIdx.x;
    if (row < p.m && column < p.n) tile[i][threadIdx.x] = a[row * p.a_row + column];
  }
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.y; i < kTile; i += kTileRows) {
    const i64 row = row0 + threadIdx.x, column = column0 + i;
    if (row < p.m && column < p.n) copy[column * p.m + row] = tile[threadIdx.x][i];
  // end of excerpt
  }
}

template <class TA, class TX, class TY, int WIDTH>
__global__ void __launch_bounds__(1024, 1) transpose_then(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  const BlockPlace at(p, WIDTH);
  const i64 matrix = p.a_batch == 0 ? 0 : at.batch;  // a shared matrix is transposed once
  const TA* a = transposed_copy<TA, Acc>(p) + matrix * p.m * p.n + at.row + at.first * p.m;
  multiply_block<Acc, WIDTH, TA, TX>(p, at, a, p.m);
}
