// The transposed product on tensor cores: x is scaled before, codes are turned in registers.
// excerpt turned of transposed_fragments.cuh
// counters: DRAM read, MB; issue slots used, %
#include "transposed_fragments.cuh"

template <class TX, class TY, class TS, int BITS, bool ZEROS, int SPLIT, int SHIFT, int ACROSS, int DOWN, int TILES, int ROWS, int AHEAD>
__global__ void __launch_bounds__(32 * ACROSS * DOWN, AHEAD ? 1 : 16 / (ACROSS * DOWN)) transposed_fragments(const QuantArgs p) {
  multiply_transposed<TX, TY, TS, BITS, ZEROS, SPLIT, SHIFT, ACROSS, DOWN, TILES, ROWS, AHEAD, OneBlock>(p);
}
