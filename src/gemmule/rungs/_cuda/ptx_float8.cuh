// float8 to halves, exact. e5m2 is a half's upper byte; the bits of e4m3, moved to a half's place, are 2^8 too small,
// subnormals too, for its exponents have a bias less by 8.
#pragma once
#include "ptx.cuh"

namespace ptx {
// Four codes, the first in the lowest byte, as pairs of halves.
__device__ __forceinline__ void e5m2x4_to_f16(u32 codes, u32 (&out)[2]) {
  out[0] = __byte_perm(codes, 0, 0x1404);
  out[1] = __byte_perm(codes, 0, 0x3424);
}
// By an instruction from sm_89 on; before, and on the CPU, by what it does.
__device__ __forceinline__ void e4m3x4_to_f16(u32 codes, u32 (&out)[2]) {
#if !defined(CUEMU) && __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out[0]) : "h"(u16(codes)));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out[1]) : "h"(u16(codes >> 16)));
#else
  constexpr u32 kScale = 0x5c005c00, kZero = 0x80008000;   // 256, and the zero that changes no sign
  e5m2x4_to_f16(codes, out);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 size = out[i] & 0x7f007f00, nan = (size + 0x01000100) & 0x80008000;   // 0x7f alone; Inf there is none
    out[i] = fma_f16x2((out[i] & 0x80008000) | size >> 1 | nan >> 1, kScale, kZero);   // NaN by all bits of its exponent
  }
#endif
}
}  // namespace ptx
