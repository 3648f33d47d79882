// Codes in layout mma16 as operands of mma.m16n8k16: what a lane holds of a tile, and how it becomes numbers.
//
// A tile is 16 rows by 64 (4-bit) or 32 (8-bit) columns in 512 bytes, 16 a lane. Lane 4 g + t holds rows g and g + 8
// of the columns C t .. C t + C - 1, C = 16 or 8, and step j of its C / 4 instructions multiplies the columns
// 4 j .. 4 j + 3 of each lane. The order of the columns within a sum is free, as long as x keeps to it too.
#pragma once
#include "args.cuh"
#include "float4.cuh"
#include "ptx.cuh"

typedef ptx::u32 u32;
typedef ptx::Vec<u32, 4> Words;  // a lane's 16 bytes of a tile

template <int BITS> struct Tile {
  static constexpr int columns = 256 / BITS, of_lane = columns / 4, steps = columns / 16;
};

// What codes are multiplied as: beside float16 as float16, else as bfloat16, of which three hold a float32.
template <class TX> struct OperandOf { typedef __nv_bfloat16 type; };
template <> struct OperandOf<__half> { typedef __half type; };
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], __half) { ptx::mma_f16(d, a, b); }
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], __nv_bfloat16) {
  ptx::mma_bf16(d, a, b);
}

// fragment(): operand registers of step j; register hi + 2 p has rows g + 8 hi and the columns 4 j + 2 p, + 1. A number
// is (code - less) / lift(hi); all of them are exact. ones: the operand whose rows sum up x.
template <class T, int BITS> struct Numbers;

// Bits alone are a float16 already, a subnormal one: code * 2^-24, and code * 2^-20 four bits higher.
template <> struct Numbers<__half, 4> {
  static constexpr float less = 0;
  static constexpr u32 ones = 0x3c003c00u;
  __device__ static __forceinline__ float lift(int hi) { return hi ? 1048576.f : 16777216.f; }
  __device__ static __forceinline__ void fragment(const Words& w, int j, u32 (&a)[4]) {
    const u32 low = w[j], high = w[j] >> 8;
    a[0] = low & 0x000f000fu, a[1] = low & 0x00f000f0u, a[2] = high & 0x000f000fu, a[3] = high & 0x00f000f0u;
  }
};
template <> struct Numbers<__half, 8> {
  static constexpr float less = 0;
  static constexpr u32 ones = 0x3c003c00u;
  __device__ static __forceinline__ float lift(int) { return 16777216.f; }
  __device__ static __forceinline__ void fragment(const Words& w, int j, u32 (&a)[4]) {
#pragma unroll
    for (int p = 0; p < 2; ++p) a[2 * p] = w[2 * j + p] & 0x00ff00ffu, a[2 * p + 1] = w[2 * j + p] >> 8 & 0x00ff00ffu;
  }
};
// The low 8 bits of a bfloat16 count as well, from subnormal numbers into the next: code * 2^-133. Too small to multiply
// with; one exact operation lifts it to code * 2^-6 and takes off the middle code.
template <> struct Numbers<__nv_bfloat16, 4> {
  static constexpr float less = 8;
  static constexpr u32 ones = 0x3f803f80u;
  __device__ static __forceinline__ float lift(int) { return 64; }
  __device__ static __forceinline__ void fragment(const Words& w, int j, u32 (&a)[4]) {
    const u32 low = w[j], high = w[j] >> 8, up = 0x7f007f00u, up_four_less = 0x7d007d00u, eighth = 0xbe00be00u;
    a[0] = ptx::fma_bf16x2(low & 0x000f000fu, up, eighth), a[1] = ptx::fma_bf16x2(low & 0x00f000f0u, up_four_less, eighth);
    a[2] = ptx::fma_bf16x2(high & 0x000f000fu, up, eighth), a[3] = ptx::fma_bf16x2(high & 0x00f000f0u, up_four_less, eighth);
  }
};
template <> struct Numbers<__nv_bfloat16, 8> {
  static constexpr float less = 128;
  static constexpr u32 ones = 0x3f803f80u;
  __device__ static __forceinline__ float lift(int) { return 64; }
  __device__ static __forceinline__ void fragment(const Words& w, int j, u32 (&a)[4]) {
#pragma unroll
    for (int r = 0; r < 4; ++r)
      a[r] = ptx::fma_bf16x2(w[2 * j + r / 2] >> 8 * (r % 2) & 0x00ff00ffu, 0x7f007f00u, 0xc000c000u);
  }
};

// Floats of 4 bits, as if zero points of 8 were taken off. A float16 of their bits is 2^14 times too small, subnormal or not; a
// bfloat16 2^126 times, too small to multiply with: one exact operation lifts it.
template <class T, class TS> struct Floats;
template <class TS> struct Floats<__half, TS> {
  static constexpr float less = 8;
  static constexpr u32 ones = 0x3c003c00u;
  __device__ static __forceinline__ float lift(int) { return 16384; }
  __device__ static __forceinline__ void bits(u32 w, u32 (&a)[4]) {
    const u32 w3 = w << 3, sign = 0x80008000u, size = 0x0e000e00u;
    a[0] = (w3 & size) | (w & sign), a[1] = (w & size) | (w << 1 & sign);
    a[2] = (w << 9 & size) | (w << 2 & sign), a[3] = (w << 6 & size) | (w3 & sign);
  }
  __device__ static __forceinline__ void fragment(const Words& words, int j, u32 (&a)[4]) { bits(words[j], a); }
};
template <class TS> struct Floats<__nv_bfloat16, TS> {
  static constexpr float less = 8;
  static constexpr u32 ones = 0x3f803f80u;
  __device__ static __forceinline__ float lift(int) { return 1; }
  __device__ static __forceinline__ void bits(u32 w, u32 (&a)[4]) {
    const u32 sign = 0x80008000u, size = 0x01c001c0u;
    a[0] = w & (sign | size), a[1] = (w >> 3 & size) | (w << 1 & sign);
    a[2] = (w << 6 & size) | (w << 2 & sign), a[3] = w << 3 & (sign | size);
  }
  __device__ static __forceinline__ void fragment(const Words& words, int j, u32 (&a)[4]) {
    bits(words[j], a);
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] = ptx::fma_bf16x2(a[r], 0x7e807e80u, 0x80008000u);  // + -0, which changes nothing
  }
};
// By the type of their scales.
template <class T, int BITS, class TS> struct NumbersOf : Numbers<T, BITS> {};
template <class T> struct NumbersOf<T, 4, e8m0> : Floats<T, e8m0> {};
template <class T> struct NumbersOf<T, 4, e4m3> : Floats<T, e4m3> {};

// Part `part` of float32 numbers that three bfloat16 hold exactly: the leading 8 bits, the next 8, the last 8; part 3
// is nothing. (Below 2^-110 in size the last bits are lost: bfloat16 has no smaller numbers than 2^-133.)
struct PartOf {
  u32 first, second;
  __device__ __forceinline__ explicit PartOf(int part)
      : first(part == 3 ? ~0u : part >= 1 ? 0xffff0000u : 0u), second(part >= 2 ? 0xffff0000u : 0u) {}
  __device__ __forceinline__ u32 bits(float v) const {
    v -= __uint_as_float(__float_as_uint(v) & first);
    v -= __uint_as_float(__float_as_uint(v) & second);
    return __float_as_uint(v);
  }
  __device__ __forceinline__ u32 pair(float a, float b) const { return __byte_perm(bits(a), bits(b), 0x7632); }
};

// Which group a unit of columns lies in; units never straddle groups. Where a group is 2^SHIFT units, no division.
template <int SHIFT>
struct Groups {
  int each, last;
  __device__ __forceinline__ Groups(const QuantArgs& p, int unit)
      : each(SHIFT < 0 ? (int)p.group_size / unit : 1), last((int)p.groups - 1) {}
  __device__ __forceinline__ int of(int at) const { return min(SHIFT < 0 ? at / each : at >> (SHIFT < 0 ? 0 : SHIFT), last); }
};
// Beside such codes scales and zero points lie group by group, those of neighbouring rows side by side.
__device__ __forceinline__ i64 scale_at(const QuantArgs& p, int row, int group) { return p.scale_row ? group * p.m + row : 0; }

template <class T>
__device__ __forceinline__ void store_quantised(const QuantArgs& p, i64 row, i64 column, float sum) {
  T* out = (T*)p.y + row * p.y_step + column * p.y_col;
  if (__double_as_longlong(p.alpha) == 0x3ff0000000000000ll && __double_as_longlong(p.beta) == 0) *out = narrow<T, float>(sum);
  else finish(out, sum, p.alpha, p.beta);
}
