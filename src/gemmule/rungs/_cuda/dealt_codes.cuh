// Codes of 4 and 8 bits as halves in the registers of tensor cores, each instruction within 32 codes of a row.
#pragma once
#include "args.cuh"
#include "ptx.cuh"

typedef ptx::u32 u32;
typedef ptx::Vec<u32, 4> Words;
typedef ptx::Vec<u32, 2> Pair;

__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], __half) { ptx::mma_f16(d, a, b); }
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], __nv_bfloat16) {
  ptx::mma_bf16(d, a, b);
}
__device__ __forceinline__ u32 ones(__half) { return 0x3c003c00; }
__device__ __forceinline__ u32 ones(__nv_bfloat16) { return 0x3f803f80; }

// The codes of a word as pairs of halves: of 4 bits (i, i + 4) for i up to 3, of 8 bits in order.
__device__ __forceinline__ void halves(u32 q, u32 (&out)[4], __half) { ptx::u4x8_to_f16(q, out); }
__device__ __forceinline__ void halves(u32 q, u32 (&out)[4], __nv_bfloat16) { ptx::u4x8_to_bf16(q, out); }
__device__ __forceinline__ void halves(u32 q, u32 (&out)[2], __half) { ptx::u8x4_to_f16(q, out); }
__device__ __forceinline__ void halves(u32 q, u32 (&out)[2], __nv_bfloat16) {   // the upper half of a float holds a byte
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float low = __uint_as_float(__byte_perm(q, 0x4b000000, 0x7440 + 2 * i)) - 8388608.0f;
    const float high = __uint_as_float(__byte_perm(q, 0x4b000000, 0x7441 + 2 * i)) - 8388608.0f;
    out[i] = __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
  }
}

// Four lanes hold four words each, and each gets the word of its number from every one of them: what a lane holds of a
// vector was 16 bytes in a row, and is now a word of each quarter, so that an instruction stays within one group.
__device__ __forceinline__ void deal(Words& w) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 got = __shfl_xor_sync(~0u, odd ? w[i] : w[i + 1], 1);
    if (odd) w[i] = got;
    else w[i + 1] = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 got = __shfl_xor_sync(~0u, upper ? w[i] : w[i + 2], 2);
    if (upper) w[i] = got;
    else w[i + 2] = got;
  }
}
