// Codes one by one, wherever they lie: 32 x 8 threads a block.
// excerpt weight of any_codes.cuh
// counters: DRAM read, MB; issue slots used, %
#include "any_codes.cuh"

template <class TX, class TY, class TS, int BITS, bool ROW, bool TRANSPOSED>
__global__ void __launch_bounds__(256) any_codes(const QuantArgs p) {
  multiply_any<TX, TY, TS, BITS, ROW, TRANSPOSED>(p, (i64)blockIdx.x * (TRANSPOSED ? 32 : 8), 0);
}
