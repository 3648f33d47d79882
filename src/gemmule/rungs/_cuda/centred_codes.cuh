// Codes of 4 and 8 bits as halves in the registers of tensor cores, exactly: integers as (code - middle) / LIFT, floats as
// they are.
#pragma once
#include "args.cuh"
#include "float4.cuh"
#include "ptx.cuh"

typedef ptx::u32 u32;

// of(): the codes of a word as pairs, of 4 bits (i, i + 4) for i up to 3, of 8 bits (i, i + 2).
template <class T, int BITS> struct Centred;

template <> struct Centred<__half, 4> {   // bits below a float16 that is 1024 count one, or sixteen
  static constexpr float LIFT = 1;
  __device__ static __forceinline__ void of(u32 q, u32 (&out)[4]) {
    constexpr int kAndOr = (0xf0 & 0xcc) | 0xaa;
    constexpr u32 kBias = 0x64006400, kLess = 0x64086408, kSixteenth = 0x2c002c00, kMinus72 = 0xd480d480;
    const u32 top = q >> 8;
    out[0] = ptx::sub_f16x2(ptx::lop3<kAndOr>(q, 0x000f000f, kBias), kLess);
    out[1] = ptx::fma_f16x2(ptx::lop3<kAndOr>(q, 0x00f000f0, kBias), kSixteenth, kMinus72);
    out[2] = ptx::sub_f16x2(ptx::lop3<kAndOr>(top, 0x000f000f, kBias), kLess);
    out[3] = ptx::fma_f16x2(ptx::lop3<kAndOr>(top, 0x00f000f0, kBias), kSixteenth, kMinus72);
  }
};
template <> struct Centred<__half, 8> {
  static constexpr float LIFT = 1;
  __device__ static __forceinline__ void of(u32 q, u32 (&out)[2]) {
    constexpr int kAndOr = (0xf0 & 0xcc) | 0xaa;
    constexpr u32 kBias = 0x64006400, kLess = 0x64806480;
    out[0] = ptx::sub_f16x2(ptx::lop3<kAndOr>(q, 0x00ff00ff, kBias), kLess);
    out[1] = ptx::sub_f16x2(ptx::lop3<kAndOr>(q >> 8, 0x00ff00ff, kBias), kLess);
  }
};
// The low bits of a bfloat16 are a subnormal number, code * 2^-133; one multiply-add lifts it and takes off the middle.
template <> struct Centred<__nv_bfloat16, 4> {
  static constexpr float LIFT = 64;
  __device__ static __forceinline__ void of(u32 q, u32 (&out)[4]) {
    constexpr u32 kUp = 0x7f007f00, kUpFourLess = 0x7d007d00, kMinusEighth = 0xbe00be00;
    const u32 top = q >> 8;
    out[0] = ptx::fma_bf16x2(q & 0x000f000f, kUp, kMinusEighth);
    out[1] = ptx::fma_bf16x2(q & 0x00f000f0, kUpFourLess, kMinusEighth);
    out[2] = ptx::fma_bf16x2(top & 0x000f000f, kUp, kMinusEighth);
    out[3] = ptx::fma_bf16x2(top & 0x00f000f0, kUpFourLess, kMinusEighth);
  }
};
template <> struct Centred<__nv_bfloat16, 8> {
  static constexpr float LIFT = 64;
  __device__ static __forceinline__ void of(u32 q, u32 (&out)[2]) {
    constexpr u32 kUp = 0x7f007f00, kMinus2 = 0xc000c000;
    out[0] = ptx::fma_bf16x2(q & 0x00ff00ff, kUp, kMinus2);
    out[1] = ptx::fma_bf16x2(q >> 8 & 0x00ff00ff, kUp, kMinus2);
  }
};

// Floats of 4 bits. The bits of a code come to where a half has its sign, two of its exponent and one more: of a bfloat16
// by one product of each pair, 2^126 times too small, of a float16 2^14 times; one exact product lifts them.
template <class T> struct Small;
template <> struct Small<__nv_bfloat16> {
  __device__ static __forceinline__ u32 lifted(u32 bits, u32 up) { return ptx::fma_bf16x2(bits & 0x81c081c0, up, 0x80008000); }
  // up: 2^126, and whatever a weight is times its code.
  __device__ static __forceinline__ void of(u32 q, u32 (&out)[4], u32 up = 0x7e807e80) {
    const u32 top = q >> 8;
    out[0] = lifted((q & 0x000f000f) * 0x1040, up), out[1] = lifted((q & 0x00f000f0) * 0x0104, up);
    out[2] = lifted((top & 0x000f000f) * 0x1040, up), out[3] = lifted((top & 0x00f000f0) * 0x0104, up);
  }
};
template <> struct Small<__half> {
  __device__ static __forceinline__ u32 lifted(u32 sign, u32 size) {
    return ptx::fma_f16x2((sign & 0x80008000) | (size & 0x0e000e00), 0x74007400, 0x80008000);
  }
  __device__ static __forceinline__ void of(u32 q, u32 (&out)[4]) {
    out[0] = lifted(q << 12, q << 9), out[1] = lifted(q << 8, q << 5);
    out[2] = lifted(q << 4, q << 1), out[3] = lifted(q, q >> 3);
  }
};
// Floats of 8 bits: of a bfloat16 2^120 times too small, of a float16 2^8 times.
template <class T> struct Large;
template <> struct Large<__nv_bfloat16> {
  __device__ static __forceinline__ u32 lifted(u32 sign, u32 size) {
    return ptx::fma_bf16x2((sign & 0x80008000) | (size & 0x07f007f0), 0x7b807b80, 0x80008000);
  }
  __device__ static __forceinline__ void of(u32 q, u32 (&out)[2]) { out[0] = lifted(q << 8, q << 4), out[1] = lifted(q, q >> 4); }
};
template <> struct Large<__half> {
  __device__ static __forceinline__ u32 lifted(u32 sign, u32 size) {
    return ptx::fma_f16x2((sign & 0x80008000) | (size & 0x3f803f80), 0x5c005c00, 0x80008000);
  }
  __device__ static __forceinline__ void of(u32 q, u32 (&out)[2]) { out[0] = lifted(q << 8, q << 7), out[1] = lifted(q, q >> 1); }
};
// By the type of their scales. (A number of a whole specialisation would be data of every kernel.)
template <class T, class TS, int BITS> struct Halves : Centred<T, BITS> {};
template <class T> struct Halves<T, e8m0, 4> : Small<T> { static constexpr float LIFT = 1; };
template <class T, class S> struct Halves<T, OfFloat8<S>, 8> : Large<T> { static constexpr float LIFT = 1; };
