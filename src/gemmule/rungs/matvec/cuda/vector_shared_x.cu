// Two-step reduction with x in shared memory: the block copies TILE values of x, then all its rows multiply from
// there, and so on along the columns. blockDim is (p, rows). Loads of A are under way as in two_step (see rows.cuh).
// counters: L1 hits, %; shared-memory passes, millions; issue slots used, %
#include "rows.cuh"

// Adds L pieces of W columns, `stride` columns apart, of a row times the tile: all loads of A before the first product.
template <int L, int W, class TA, class TX, class Acc>
__device__ __forceinline__ void add_pieces(const TA* a, const TX* tile, int stride, Acc& sum) {
  typedef ptx::Vec<TA, W> Piece;
  constexpr int N = W * int(sizeof(TX)) < 16 ? W : 16 / int(sizeof(TX));
  Piece av[L];
#pragma unroll
  for (int l = 0; l < L; ++l) av[l] = load_piece<Piece>(a + l * stride);
#pragma unroll
  for (int l = 0; l < L; ++l)
#pragma unroll
    for (int i = 0; i < W / N; ++i) {
      const ptx::Vec<TX, N> xv = ((const ptx::Vec<TX, N>*)(tile + l * stride))[i];
#pragma unroll
      for (int k = 0; k < N; ++k) sum += wide<Acc>(av[l][i * N + k]) * wide<Acc>(xv[k]);
    }
}

template <class TA, class TX, class TY, int ALIGN, int VALUES, int TILE>
__global__ void __launch_bounds__(RowRead<TA, ALIGN, VALUES>::most_threads, 1) vector_shared_x(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  typedef RowRead<TA, ALIGN, VALUES> Read;
  constexpr int W = Read::width, L = Read::loads, C = ALIGN < 16 ? 1 : 16 / int(sizeof(TX));
  typedef ptx::Vec<TX, C> Copied;
  static_assert(TILE % 32 == 0, "a tile is whole pieces of the row");
  extern __shared__ __align__(16) unsigned char smem[];
  TX* tile = (TX*)smem;
  const int t = threadIdx.x, threads = blockDim.x, all = threads * blockDim.y, thread = threadIdx.y * threads + t;
  const RowPlace at(p);
  const i64 row = at.row;
  const TA* a = (const TA*)p.a + at.batch * p.a_batch + row * p.a_row;
  const TX* x = (const TX*)p.x + at.batch * p.x_batch;
  Acc sum = 0;
  // excerpt
  for (i64 first = 0; first < p.n; first += TILE, a += TILE) {
    const int count = p.n - first < TILE ? int(p.n - first) : TILE;
    const int pieces = p.x_step == 1 ? count / C : 0;
    for (int k = thread; k < pieces; k += all) ((Copied*)tile)[k] = ptx::ld_nc((const Copied*)(x + first) + k);
    for (int k = pieces * C + thread; k < count; k += all) tile[k] = x[(first + k) * p.x_step];
    __syncthreads();
    if (row < p.m) {
      const int whole = count - count % W, stride = threads * W;
      int j = t * W;
#pragma unroll 1
      for (; j + (L - 1) * stride < whole; j += L * stride) add_pieces<L, W>(a + j, tile + j, stride, sum);
#pragma unroll 1
      for (; j < whole; j += stride) add_pieces<1, W>(a + j, tile + j, stride, sum);
#pragma unroll 1
      for (j = whole + t; j < count; j += threads) sum += wide<Acc>(a[j]) * wide<Acc>(tile[j]);
    }
    __syncthreads();
  }
  // end of excerpt
  sum = row_sum(sum);
  if (t == 0 && row < p.m) finish((TY*)p.y + at.batch * p.y_batch + row * p.y_step, sum, p.alpha, p.beta);
}
