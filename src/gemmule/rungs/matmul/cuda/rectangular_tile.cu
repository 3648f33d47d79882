// A block computes a tile of C twice as wide as high, from one tile of A and two tiles of B.
// counters: L1 hits, %; shared-memory passes, millions; issue slots used, %
#include "tiles.cuh"

template <class TA, class TB, class TC, int TILE>
__global__ void __launch_bounds__(TILE * TILE) rectangular_tile(const GemmArgs p) {
  typedef typename AccOf<TC>::type Acc;
  extern __shared__ __align__(16) unsigned char smem[];
  TA* as = (TA*)smem;                                // TILE rows of TILE
  TB* bs = (TB*)(smem + TILE * TILE * sizeof(TA));   // TILE rows of 2 TILE: 3 TILE^2 elements in all
  constexpr int ROW = 2 * TILE;
  const Tile tile = tile_of(p, TILE, ROW);
  const TA* a = entry<TA>(p.a, tile.batch, p.a_batch);
  const TB* b = entry<TB>(p.b, tile.batch, p.b_batch);
  const int ty = threadIdx.y, tx = threadIdx.x;
  const i64 i = tile.row + ty, j = tile.col + tx;
  Acc left = 0, right = 0;
  for (i64 first = 0; first < p.k; first += TILE) {
    as[ty * TILE + tx] = element_or_zero(a, i, first + tx, p.m, p.k, p.a_row, p.a_col);
    bs[ty * ROW + tx] = element_or_zero(b, first + ty, j, p.k, p.n, p.b_row, p.b_col);
    bs[ty * ROW + TILE + tx] = element_or_zero(b, first + ty, j + TILE, p.k, p.n, p.b_row, p.b_col);
    __syncthreads();  // all three tiles are there
#pragma unroll
    // excerpt
    for (int l = 0; l < TILE; ++l) {
      const Acc v = wide<Acc>(as[ty * TILE + l]);
      left += v * wide<Acc>(bs[l * ROW + tx]);
      right += v * wide<Acc>(bs[l * ROW + TILE + tx]);
    // end of excerpt
    }
    __syncthreads();  // nobody reads them any more
  }
  finish_at<TC>(p, tile.batch, i, j, left);
  finish_at<TC>(p, tile.batch, i, j + TILE, right);
}
