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
// The larger number, or NaN where one is.
__device__ __forceinline__ float max_nan(float x, float y) {
#ifdef CUEMU
  return x != x ? x : y != y ? y : fmaxf(x, y);
#else
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
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
