// Codes of 4 and 8 bits as halves in the registers of tensor cores: (code - middle) / LIFT, exactly.
#pragma once
#include "args.cuh"
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
