// Block & multiply: a thread per row and section of WIDTH columns of a column-major matrix.
// counters: sectors a load request; occupancy, %
#include "blocks.cuh"

template <class TA, class TX, class TY, int WIDTH>
__global__ void __launch_bounds__(1024, 1) block_multiply(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  // excerpt
  const BlockPlace at(p, WIDTH);
  const TA* a = (const TA*)p.a + at.batch * p.a_batch + at.row + at.first * p.a_col;
  multiply_block<Acc, WIDTH, TA, TX>(p, at, a, p.a_col);
  // end of excerpt
}
