// One thread per element of C: it walks a row of A and a column of B, both in global memory.
// counters: load requests, thousands; L1 hits, %; FMA pipe, %
#include "tiles.cuh"
#include "sums.cuh"

template <class TA, class TB, class TC, bool IN_C, bool FMA>
__global__ void __launch_bounds__(1024) naive(const GemmArgs p) {
  typedef typename AccOf<TC>::type Acc;
  const Tile tile = tile_of(p, blockDim.y, blockDim.x);
  const i64 i = tile.row + threadIdx.y, j = tile.col + threadIdx.x;
  if (i >= p.m || j >= p.n) return;
  const TA* a = entry<TA>(p.a, tile.batch, p.a_batch) + i * p.a_row;
  const TB* b = entry<TB>(p.b, tile.batch, p.b_batch) + j * p.b_col;
  TC* c = (TC*)p.c + tile.batch * p.c_batch + i * p.c_row + j * p.c_col;
  Acc sum = 0;
  if constexpr (IN_C) {
    volatile TC* running = c;  // volatile: every step reads and writes memory, as it is written here
    const TC old = p.beta != 0.0 ? *c : TC(0);
    *running = 0;
    for (i64 l = 0; l < p.k; ++l)
      *running = (TC)add_product<FMA>((Acc)*running, wide<Acc>(a[l * p.a_col]), wide<Acc>(b[l * p.b_row]));
    sum = (Acc)*running;
    *running = old;
  } else {
    // excerpt
    for (i64 l = 0; l < p.k; ++l)
      sum = add_product<FMA>(sum, wide<Acc>(a[l * p.a_col]), wide<Acc>(b[l * p.b_row]));
    // end of excerpt
  }
  finish(c, sum, p.alpha, p.beta);
}
