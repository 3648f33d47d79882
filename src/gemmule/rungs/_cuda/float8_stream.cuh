// float8 in matrices that are streamed: stream.cuh's `dot` of a vector of 16 codes, which are widened by fours.
#pragma once
#include "float8.cuh"
#include "stream.cuh"

template <class T> __device__ __forceinline__ void wide_four(const ptx::Vec<T, 16>& v, int first, float (&out)[4]) {
  __half2 pairs[2];
  to_halves(((const unsigned*)&v)[first / 4], pairs, T());
#pragma unroll
  for (int i = 0; i < 2; ++i) out[2 * i] = __low2float(pairs[i]), out[2 * i + 1] = __high2float(pairs[i]);
}
template <class TX> struct WideX {
  static __device__ __forceinline__ void four(const XChunk<TX, 16>& x, int first, float (&out)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = wide<float>(x[first + i]);
  }
};
struct WideFloat8 {
  template <class XC> static __device__ __forceinline__ void four(const XC& x, int first, float (&out)[4]) {
    wide_four(x.part[0], first, out);
  }
};
template <> struct WideX<e4m3> : WideFloat8 {};
template <> struct WideX<e5m2> : WideFloat8 {};

template <class T, class TX>
__device__ __forceinline__ float dot_float8(const ptx::Vec<T, 16>& a, const XChunk<TX, 16>& x, float sum) {
#pragma unroll
  for (int first = 0; first < 16; first += 4) {
    float wa[4], wx[4];
    wide_four(a, first, wa), WideX<TX>::four(x, first, wx);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += wa[i] * wx[i];
  }
  return sum;
}
template <class TX> __device__ __forceinline__ float dot(const ptx::Vec<e4m3, 16>& a, const XChunk<TX, 16>& x, float sum) {
  return dot_float8(a, x, sum);
}
template <class TX> __device__ __forceinline__ float dot(const ptx::Vec<e5m2, 16>& a, const XChunk<TX, 16>& x, float sum) {
  return dot_float8(a, x, sum);
}
