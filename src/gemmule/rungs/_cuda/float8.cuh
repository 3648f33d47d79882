// float8 as element types: structs of their bits, which are widened to float32 through halves.
#pragma once
#include "args.cuh"
#include "ptx_float8.cuh"

// T(0) is zero, as of other element types; no other number is made so.
struct e4m3 {
  unsigned char bits;
  e4m3() = default;
  __device__ __forceinline__ explicit e4m3(int) : bits(0) {}
};
struct e5m2 {
  unsigned char bits;
  e5m2() = default;
  __device__ __forceinline__ explicit e5m2(int) : bits(0) {}
};

// Four codes, the first in the lowest byte, as pairs of halves.
__device__ __forceinline__ void to_halves(unsigned codes, __half2 (&out)[2], e5m2) {
  ptx::e5m2x4_to_f16(codes, (ptx::u32(&)[2])out);
}
__device__ __forceinline__ void to_halves(unsigned codes, __half2 (&out)[2], e4m3) {
  ptx::e4m3x4_to_f16(codes, (ptx::u32(&)[2])out);
}
template <class T> __device__ __forceinline__ float float8_to_float(T v) {
  __half2 out[2];
  to_halves(v.bits, out, v);
  return __low2float(out[0]);
}
template <> __device__ __forceinline__ float wide<float, e4m3>(e4m3 v) { return float8_to_float(v); }
template <> __device__ __forceinline__ float wide<float, e5m2>(e5m2 v) { return float8_to_float(v); }
