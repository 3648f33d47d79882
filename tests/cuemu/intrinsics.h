// Per-thread intrinsics of CUDA C++ that the CPU has no name for.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "sched.h"

// ---- bits and integers -------------------------------------------------------------------------
template <class To, class From>
inline To cuemu_bits(From v) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To r;
  memcpy(static_cast<void*>(&r), &v, sizeof r);
  return r;
}
inline int __float_as_int(float v) { return cuemu_bits<int>(v); }
inline unsigned __float_as_uint(float v) { return cuemu_bits<unsigned>(v); }
inline float __int_as_float(int v) { return cuemu_bits<float>(v); }
inline float __uint_as_float(unsigned v) { return cuemu_bits<float>(v); }
inline long long __double_as_longlong(double v) { return cuemu_bits<long long>(v); }
inline double __longlong_as_double(long long v) { return cuemu_bits<double>(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline unsigned __brev(unsigned v) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (v >> i & 1) << (31 - i);
  return r;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = uint64_t(b) << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = selector >> (4 * i) & 15, byte = unsigned(both >> (8 * (s & 7)) & 0xff);
    r |= (s & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << (8 * i);   // bit 3: the byte's sign, repeated
  }
  return r;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) << (shift & 31) >> 32);
}
inline int __mulhi(int a, int b) { return int((int64_t(a) * b) >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c = int(unsigned(c) + unsigned(int(int8_t(a >> (8 * i))) * int(int8_t(b >> (8 * i)))));
  return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 4; ++i) c += (a >> (8 * i) & 0xff) * (b >> (8 * i) & 0xff);
  return c;
}

// ---- floating point: single roundings that the compiler may not fuse ---------------------------
#define CUEMU_ROUNDED(name, T, expression)      \
  inline T name(T a, T b) {                     \
    T r = expression;                           \
    asm volatile("" : "+x"(r));                 \
    return r;                                   \
  }
CUEMU_ROUNDED(__fadd_rn, float, a + b)
CUEMU_ROUNDED(__fsub_rn, float, a - b)
CUEMU_ROUNDED(__fmul_rn, float, a * b)
CUEMU_ROUNDED(__fdiv_rn, float, a / b)
CUEMU_ROUNDED(__dadd_rn, double, a + b)
CUEMU_ROUNDED(__dsub_rn, double, a - b)
CUEMU_ROUNDED(__dmul_rn, double, a * b)
#undef CUEMU_ROUNDED
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __expf(float a) { return expf(a); }
inline float __logf(float a) { return logf(a); }
inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
inline float __saturatef(float a) { return a >= 0.0f ? (a < 1.0f ? a : 1.0f) : 0.0f; }
inline int __float2int_rn(float a) { return int(nearbyintf(a)); }
inline int __float2int_rz(float a) { return int(a); }
inline unsigned __float2uint_rn(float a) { return unsigned(nearbyintf(a)); }
inline float __int2float_rn(int a) { return float(a); }
inline float __uint2float_rn(unsigned a) { return float(a); }
inline long long __double2ll_rn(double a) { return llrint(a); }
inline float __double2float_rn(double a) { return float(a); }

// CUDA has min and max for mixed arithmetic types in the global namespace.
template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) < T(b) ? T(b) : T(a);
}

// ---- halves: what NVIDIA's headers define for device code only -----------------------------------
// One rounding, from a product and sum that are exact in double (11 and 8 bit significands).
inline __half __hfma(__half a, __half b, __half c) {
  return __double2half(fma(double(__half2float(a)), double(__half2float(b)), double(__half2float(c))));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return {__hfma(__low2half(a), __low2half(b), __low2half(c)), __hfma(__high2half(a), __high2half(b), __high2half(c))};
}
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
  return __double2bfloat16(fma(double(__bfloat162float(a)), double(__bfloat162float(b)), double(__bfloat162float(c))));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return {__hfma(__low2bfloat16(a), __low2bfloat16(b), __low2bfloat16(c)),
          __hfma(__high2bfloat16(a), __high2bfloat16(b), __high2bfloat16(c))};
}
inline int __half2int_rn(__half h) { return int(nearbyintf(__half2float(h))); }

// ---- memory ------------------------------------------------------------------------------------
#define CUEMU_LOAD(name) \
  template <class T>     \
  inline T name(const T* p) { return *p; }
CUEMU_LOAD(__ldg)
CUEMU_LOAD(__ldcs)
CUEMU_LOAD(__ldcg)
CUEMU_LOAD(__ldca)
CUEMU_LOAD(__ldlu)
CUEMU_LOAD(__ldcv)
#undef CUEMU_LOAD
#define CUEMU_STORE(name) \
  template <class T>      \
  inline void name(T* p, std::common_type_t<T> v) { *p = v; }
CUEMU_STORE(__stcs)
CUEMU_STORE(__stcg)
CUEMU_STORE(__stwb)
CUEMU_STORE(__stwt)
#undef CUEMU_STORE
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline size_t __cvta_generic_to_shared(const void* p) { return cuemu::to_shared_address(p); }
inline unsigned __isShared(const void* p) {
  const char* q = static_cast<const char*>(p);
  return q >= cuemu::arena.base && q < cuemu::arena.base + cuemu::arena.count * cuemu::kSharedBytes;
}
inline void __nanosleep(unsigned) { cuemu::yield(); }
inline long long clock64() { return cuemu::S.report.switches; }
[[noreturn]] inline void __trap() { cuemu::fail("trap", "__trap() was reached"); }
