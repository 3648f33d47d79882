// float8 by wgmma, e4m3 and e5m2 in any mix. Tensor cores keep 14 bits of its sums, so each stage of 128 steps is a sum
// of its own there, which float32 registers then add up while the other warpgroup multiplies.
// excerpt promote of wgmma_tiles.cuh
// counters: warp instructions, millions; tensor pipe, %
#include "wgmma_bytes_kernels.cuh"
