// float8 by wgmma with scales by blocks: each stage of 128 steps is a sum of its own in the tensor cores, as in wgmma_float8,
// and joins the others times the scale of its block of A and of B.
// excerpt factors of block_scales.cuh
// counters: warp instructions, millions; tensor pipe, %
#include "block_scales.cuh"
#include "wgmma_bytes_kernels.cuh"
