// Transposed block & multiply: a thread per column of a column-major matrix and section of WIDTH of its rows.
// excerpt multiply of blocks.cuh
// counters: sectors a load request; L1 hits, %; occupancy, %
#include "blocks.cuh"

template <class TA, class TX, class TY, int WIDTH>
__global__ void __launch_bounds__(1024, 1) block_multiply_transposed(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  const BlockPlace at(p, WIDTH);
  const TA* a = (const TA*)p.a + at.batch * p.a_batch + at.row * p.a_row + at.first;
  multiply_block<Acc, WIDTH, TA, TX>(p, at, a, 1);
}
