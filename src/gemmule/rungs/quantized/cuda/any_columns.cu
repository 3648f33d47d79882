// Codes one by one and several columns of x: a block for each column and each 8 or 32 results.
// counters: DRAM read, MB; L2 hits, %
#include "any_codes.cuh"

template <class TX, class TY, class TS, int BITS, bool ROW, bool TRANSPOSED>
__global__ void __launch_bounds__(256) any_columns(const QuantArgs p) {
  // excerpt
  const i64 blocks = gridDim.x / p.columns;
  multiply_any<TX, TY, TS, BITS, ROW, TRANSPOSED>(p, blockIdx.x % blocks * (TRANSPOSED ? 32 : 8), blockIdx.x / blocks);
  // end of excerpt
}
