// One thread an element of C: it looks up whose row it is in, then walks that row of A and a column of the expert's
// matrix.
#include "groups.cuh"
#include "tiles.cuh"

template <class TA, class TB, class TC>
__global__ void __launch_bounds__(256) row_by_row(const GemmArgs p) {
  typedef typename AccOf<TC>::type Acc;
  take_turn();
  const Tile tile = tile_of(p, 8, 32);
  const i64 i = tile.row + threadIdx.x / 32, j = tile.col + threadIdx.x % 32;
  if (i >= p.m || j >= p.n) return;
  // excerpt
  const int expert = expert_of((const int*)p.work, (int)p.batch, i);
  if (expert == (int)p.batch) return;   // behind the last group
  const TA* a = (const TA*)p.a + i * p.a_row;
  const TB* b = (const TB*)p.b + expert * p.b_batch + j * p.b_col;
  Acc sum = 0;
  for (i64 l = 0; l < p.k; ++l) sum += wide<Acc>(a[l * p.a_col]) * wide<Acc>(b[l * p.b_row]);
  // end of excerpt
  finish_at<TC>(p, 0, i, j, sum);
}
