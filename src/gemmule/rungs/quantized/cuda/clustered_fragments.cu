// The transposed product, its rows shared by the blocks of a cluster.
// excerpt meeting of transposed_fragments.cuh
// counters: DRAM read, MB; occupancy, %
#include "cluster.cuh"
#include "transposed_fragments.cuh"

template <class TX, class TY, class TS, int BITS, bool ZEROS, int SPLIT, int SHIFT, int ACROSS, int DOWN, int TILES, int ROWS, int AHEAD, int CLUSTER>
__global__ void __launch_bounds__(32 * ACROSS * DOWN, AHEAD ? 1 : 16 / (ACROSS * DOWN)) clustered_fragments(const QuantArgs p) {
  multiply_transposed<TX, TY, TS, BITS, ZEROS, SPLIT, SHIFT, ACROSS, DOWN, TILES, ROWS, AHEAD, Cluster<CLUSTER>>(p);
}
