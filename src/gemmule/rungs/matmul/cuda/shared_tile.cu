// A block computes a square tile of C from square tiles of A and B that it stages in shared memory.
// counters: load requests, thousands; L1 hits, %; shared-memory passes, millions; issue slots used, %
#include "tiles.cuh"
#include "sums.cuh"

template <class TA, class TB, class TC, int TILE, bool FMA>
__global__ void __launch_bounds__(TILE * TILE) shared_tile(const GemmArgs p) {
  typedef typename AccOf<TC>::type Acc;
  __shared__ TA as[TILE][TILE];
  __shared__ TB bs[TILE][TILE];
  const Tile tile = tile_of(p, TILE, TILE);
  const TA* a = entry<TA>(p.a, tile.batch, p.a_batch);
  const TB* b = entry<TB>(p.b, tile.batch, p.b_batch);
  const int ty = threadIdx.y, tx = threadIdx.x;
  const i64 i = tile.row + ty, j = tile.col + tx;
  Acc sum = 0;
  // Threads without an element of C stay: they load, and every thread must reach both barriers.
  // excerpt
  for (i64 first = 0; first < p.k; first += TILE) {
    as[ty][tx] = element_or_zero(a, i, first + tx, p.m, p.k, p.a_row, p.a_col);
    bs[ty][tx] = element_or_zero(b, first + ty, j, p.k, p.n, p.b_row, p.b_col);
    __syncthreads();  // both tiles are there
#pragma unroll
    for (int l = 0; l < TILE; ++l) sum = add_product<FMA>(sum, wide<Acc>(as[ty][l]), wide<Acc>(bs[l][tx]));
    __syncthreads();  // nobody reads them any more
  // end of excerpt
  }
  finish_at<TC>(p, tile.batch, i, j, sum);
}
