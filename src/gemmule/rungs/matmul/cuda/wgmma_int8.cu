// Bytes by wgmma: 32 steps an instruction, sums exact in int32. The frame is that of the halves; operands that do not lie
// along the reduction, or not as TMA wants them, are copied into the workspace first.
// excerpt transpose of bytes.cuh
// counters: warp instructions, millions; tensor pipe, %
#include "wgmma_bytes_kernels.cuh"
