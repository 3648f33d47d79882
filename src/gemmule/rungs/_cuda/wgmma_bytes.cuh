// Operands of 8 bits on wgmma: an instruction takes 32 steps of them, a stage 128, and both lie along the reduction, for
// it reads bytes in no other order. Integers are summed exactly, modulo 2^32. Of float8 the tensor cores keep 14 bits of a
// sum, so sums leave them after each stage, and float32 registers sum the stages.
#pragma once
#include "float8.cuh"
#include "wgmma_specialized.cuh"

template <class TA, class TB> struct Bytes {};   // the types of two operands

struct WgmmaIntegers {
  typedef int Sum;
  enum { STEPS = 128, PROMOTED = false };
};
struct WgmmaFloat8 {
  typedef float Sum;
  enum { STEPS = 128, PROMOTED = true };
};

#define WGMMA_BYTES(TA, TB, S, HOW, op)                                                                      \
  template <> struct Wgmma<TA, TB> : HOW { typedef Bytes<TA, TB> Both; };                                    \
  template <int N, bool, bool>                                                                               \
  __device__ __forceinline__ void multiply(S (&d)[N / 2], u64 a, u64 b, bool more, Bytes<TA, TB>) {          \
    ptx::op<N>(d, a, b, more);                                                                               \
  }
WGMMA_BYTES(signed char, signed char, int, WgmmaIntegers, wgmma_s8)
WGMMA_BYTES(unsigned char, unsigned char, int, WgmmaIntegers, wgmma_u8)
WGMMA_BYTES(signed char, unsigned char, int, WgmmaIntegers, wgmma_s8u8)
WGMMA_BYTES(unsigned char, signed char, int, WgmmaIntegers, wgmma_u8s8)
WGMMA_BYTES(e4m3, e4m3, float, WgmmaFloat8, wgmma_e4m3)
WGMMA_BYTES(e5m2, e5m2, float, WgmmaFloat8, wgmma_e5m2)
WGMMA_BYTES(e4m3, e5m2, float, WgmmaFloat8, wgmma_e4m3e5m2)
WGMMA_BYTES(e5m2, e4m3, float, WgmmaFloat8, wgmma_e5m2e4m3)
#undef WGMMA_BYTES

template <> struct Staged<int> {
  static constexpr int COLS = 32;
  static __device__ __forceinline__ void put(u32 to, const int* d, int alpha) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half, d += 2)
        ptx::st_shared(ptx::swizzle<ptx::Swizzle::b128>(to + (lane / 4 + 8 * half) * 128 + j * 32 + lane % 4 * 8),
                       make_float2(__int_as_float(alpha * d[0]), __int_as_float(alpha * d[1])));
  }
};
