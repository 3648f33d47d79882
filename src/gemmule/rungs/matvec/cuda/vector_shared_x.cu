// Two-step reduction with x in shared memory: the block copies TILE values of x, then all its rows multiply from
// there, and so on along the columns. blockDim is (p, rows).
// counters: L1 hits, %; shared-memory passes, millions; issue slots used, %
#include "rows.cuh"

template <class TA, class TX, class TY, int ALIGN, int TILE>
__global__ void __launch_bounds__(1024, 1) vector_shared_x(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  constexpr int W = RowRead<TA, ALIGN, 16>::width;
  static_assert(TILE % 16 == 0, "a tile is whole pieces of the row");
  extern __shared__ __align__(16) unsigned char smem[];
  TX* tile = (TX*)smem;
  const int t = threadIdx.x, threads = blockDim.x, rows = blockDim.y;
  const i64 blocks_per_batch = (p.m + rows - 1) / rows;
  const i64 batch = blockIdx.x / blocks_per_batch;
  const i64 row = (blockIdx.x % blocks_per_batch) * rows + threadIdx.y;
  const TA* a = (const TA*)p.a + batch * p.a_batch + row * p.a_row;
  const TX* x = (const TX*)p.x + batch * p.x_batch;
  Acc sum = 0;
  // excerpt
  for (i64 first = 0; first < p.n; first += TILE) {
    const int count = p.n - first < TILE ? int(p.n - first) : TILE;
    for (int k = threadIdx.y * threads + t; k < count; k += threads * rows) tile[k] = x[(first + k) * p.x_step];
    __syncthreads();
    if (row < p.m) {
      const int whole = count - count % W;
      for (int j = t * W; j < whole; j += threads * W) {
        Acc av[W], xv[W];
        load_values<ALIGN < 16 ? int(sizeof(TA)) : 16>(a + first + j, av);
        load_values<16, true>(tile + j, xv);
#pragma unroll
        for (int k = 0; k < W; ++k) sum += av[k] * xv[k];
  // end of excerpt
      }
      for (int j = whole + t; j < count; j += threads) sum += wide<Acc>(a[first + j]) * wide<Acc>(tile[j]);
    }
    __syncthreads();
  }
  sum = row_sum(sum);
  if (t == 0 && row < p.m) finish((TY*)p.y + batch * p.y_batch + row * p.y_step, sum, p.alpha, p.beta);
}
