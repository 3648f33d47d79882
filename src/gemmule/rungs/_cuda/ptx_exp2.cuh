// Powers of two and reciprocals as the special function units have them: within 2 and 1 units in the last place.
#pragma once
#include "ptx.cuh"

namespace ptx {
// 2^x, or 0 where that is no normal number.
__device__ __forceinline__ float exp2_ftz(float x) {
#ifdef CUEMU
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.0f : y;
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}
// 1 / x, or 0 where that is no normal number.
__device__ __forceinline__ float reciprocal_ftz(float x) {
#ifdef CUEMU
  const float y = 1.0f / x;
  return fabsf(y) < 1.17549435e-38f ? copysignf(0.0f, y) : y;
#else
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}
}  // namespace ptx
