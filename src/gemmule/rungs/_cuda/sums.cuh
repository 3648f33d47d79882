// A product added to a sum, fused or rounded apart: what documents 001 and 002's kernels differ in.
#pragma once

// A product and a sum, rounded apart. The intrinsics keep the compiler from fusing them.
__device__ __forceinline__ float add_rounded(float sum, float a, float b) {
  return __fadd_rn(sum, __fmul_rn(a, b));
}
__device__ __forceinline__ double add_rounded(double sum, double a, double b) {
  return __dadd_rn(sum, __dmul_rn(a, b));
}
template <bool FMA, class Acc>
__device__ __forceinline__ Acc add_product(Acc sum, Acc a, Acc b) {
  if constexpr (FMA) return sum + a * b;  // one instruction: NVRTC fuses by default
  else return add_rounded(sum, a, b);
}
