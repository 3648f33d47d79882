// Codes that are floats of 4 bits (e2m1), told from integers by the type of their scales: e8m0 (MXFP4), a power of two, or e4m3
// (NVFP4), beside which `zeros` holds a float32 for each row.
//
// In layout row a code lies as integers do. In layout mma16 each 16 bits hold four codes, those that lie at bit 4 r as integers: the
// sign of code r at bit 15 - r, the three others at bit (6 + 3 r) % 12. So all of them come to where a bfloat16 has them, or a
// float16, by eleven or thirteen shifts and masks for a word.
#pragma once
#include "float8.cuh"

struct e8m0 {
  unsigned char bits;
  e8m0() = default;
  __device__ __forceinline__ explicit e8m0(int) : bits(0) {}  // fills what nobody multiplies with
};
template <> __device__ __forceinline__ float wide<float, e8m0>(e8m0 v) {
  return __uint_as_float(v.bits ? unsigned(v.bits) << 23 : 0x400000u);  // 2^-127 is no normal number
}

// Codes that are floats of 8 bits (e4m3) are told by this, in the place of the type S of their scales.
template <class S> struct OfFloat8 {
  S scale;
  OfFloat8() = default;
  __device__ __forceinline__ explicit OfFloat8(int) : scale(narrow<S, float>(0.f)) {}
};
template <> __device__ __forceinline__ float wide<float, OfFloat8<float>>(OfFloat8<float> v) { return v.scale; }
template <> __device__ __forceinline__ float wide<float, OfFloat8<__half>>(OfFloat8<__half> v) { return wide<float>(v.scale); }
template <> __device__ __forceinline__ float wide<float, OfFloat8<__nv_bfloat16>>(OfFloat8<__nv_bfloat16> v) {
  return wide<float>(v.scale);
}
template <class TS> struct Float8 { enum : bool { is = false }; };
template <class S> struct Float8<OfFloat8<S>> { enum : bool { is = true }; };

// Enumerators, as static members would be data of every kernel that includes this.
template <class TS> struct Float4 { enum : bool { is = false, factors = false }; };
template <> struct Float4<e8m0> { enum : bool { is = true, factors = false }; };
template <> struct Float4<e4m3> { enum : bool { is = true, factors = true }; };

// What a code stands for: as the top bits of a float32 it is 2^126 times too small.
__device__ __forceinline__ float float4_value(unsigned code) {
  return __uint_as_float((code & 8) << 28 | (code & 7) << 22) * 0x1p126f;
}
__device__ __forceinline__ float float8_value(unsigned code) {
  return __uint_as_float((code & 128) << 24 | (code & 127) << 20) * 0x1p120f;
}
// Code r of 16 bits of layout mma16.
__device__ __forceinline__ unsigned woven_code(unsigned bits, int r) {
  return (bits >> (15 - r) & 1) << 3 | (bits >> (6 + 3 * r) % 12 & 7);
}
// A row's sum times its factor.
template <class TS, class Args> __device__ __forceinline__ float by_factor(const Args& p, long long row, float sum) {
  if constexpr (Float4<TS>::factors) return sum * ((const float*)p.zeros)[row];
  else return sum;
}
