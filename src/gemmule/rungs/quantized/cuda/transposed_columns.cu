// The transposed product of several columns: blocks that stand side by side read the same codes for one column each.
// counters: DRAM read, MB; L2 hits, %; issue slots used, %
#include "transposed_fragments.cuh"

struct OneColumn : OneBlock {};
template <> struct BlockOf<OneColumn> {
  __device__ static __forceinline__ unsigned at(const QuantArgs& p) { return blockIdx.x / (unsigned)p.columns; }
};

template <class TX, class TY, class TS, int BITS, bool ZEROS, int SPLIT, int SHIFT, int ACROSS, int DOWN, int TILES, int ROWS, int AHEAD>
__global__ void __launch_bounds__(32 * ACROSS * DOWN, AHEAD ? 1 : 16 / (ACROSS * DOWN)) transposed_columns(const QuantArgs given) {
  // excerpt
  const i64 column = blockIdx.x % (unsigned)given.columns;
  QuantArgs p = given;
  p.x = (const TX*)p.x + column * p.x_col;
  p.y = (TY*)p.y + column * p.y_col;
  multiply_transposed<TX, TY, TS, BITS, ZEROS, SPLIT, SHIFT, ACROSS, DOWN, TILES, ROWS, AHEAD, OneColumn>(p);
  // end of excerpt
}
