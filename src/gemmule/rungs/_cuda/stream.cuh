// Streaming a matrix once: 16-byte vectors of any alignment, and their dot product with x.
#pragma once
#include "args.cuh"
#include "ptx.cuh"

// One 16-byte vector of a matrix, and the V elements of x that meet it (16 or 32 bytes).
template <class T> struct Lanes { static constexpr int count = 16 / sizeof(T); };
template <class T> using Chunk = ptx::Vec<T, 16 / sizeof(T)>;

template <class TX, int V> struct XChunk {
  static constexpr int parts = V * sizeof(TX) / 16;
  Chunk<TX> part[parts];
  __device__ __forceinline__ TX operator[](int i) const {
    return part[i / Lanes<TX>::count].v[i % Lanes<TX>::count];
  }
};

// How vectors are loaded, where wanted: the matrix is read once, x again and again. A kernel that starts before
// the one that writes x has ended must not read x through the read-only path.
struct Once {
  template <class C> __device__ static __forceinline__ C load(const C* p, bool wanted) { return ptx::ld_cs_if(p, wanted); }
};
// Pieces of less than a line, whose neighbours other blocks read at the same time: the L2 fetches the line.
struct OnceNarrow {
  template <class C> __device__ static __forceinline__ C load(const C* p, bool wanted) { return ptx::ld_cs_128_if(p, wanted); }
};
template <bool NARROW> struct OnceFor { typedef Once type; };
template <> struct OnceFor<true> { typedef OnceNarrow type; };
struct Again {
  template <class C> __device__ static __forceinline__ C load(const C* p, bool wanted) { return ptx::ld_nc_if(p, wanted); }
};
struct JustWritten {
  template <class C> __device__ static __forceinline__ C load(const C* p, bool wanted) { return ptx::ld_if(p, wanted); }
};

// 16 bytes from an address of any alignment: the two aligned vectors around it, shifted into one.
// The address is the same modulo 16 over a warp, so the branches are uniform. Both vectors must lie
// in memory that may be read.
template <class How = Once, class T>
__device__ __forceinline__ Chunk<T> load_shifted_if(const T* p, bool wanted) {
  const u64 address = (u64)p;
  const Chunk<unsigned>* base = (const Chunk<unsigned>*)(address & ~(u64)15);
  const Chunk<unsigned> lo = How::load(base, wanted);
  const Chunk<unsigned> hi = How::load(base + ((address & 15) != 0), wanted);
  unsigned w[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) { w[i] = lo.v[i]; w[i + 4] = hi.v[i]; }
  const unsigned bits = (unsigned)(address & 3) * 8;
  if (address & 8) {
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = w[i + 2];
  }
  if (address & 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = w[i + 1];
  }
  Chunk<unsigned> r;
#pragma unroll
  for (int i = 0; i < 4; ++i) r.v[i] = __funnelshift_r(w[i], w[i + 1], bits);
  return *(Chunk<T>*)&r;
}

// V elements of x, neighbours from an address that is aligned where so said, or `step` apart; where wanted, else zeros.
template <class How, bool ALIGNED, int V, class TX>
__device__ __forceinline__ XChunk<TX, V> load_x_if(const TX* x, bool wanted) {
  XChunk<TX, V> c;
#pragma unroll
  for (int i = 0; i < c.parts; ++i) {
    if constexpr (ALIGNED) c.part[i] = How::load((const Chunk<TX>*)x + i, wanted);
    else c.part[i] = load_shifted_if<How>(x + i * Lanes<TX>::count, wanted);
  }
  return c;
}
template <class TX, int V>
__device__ __forceinline__ XChunk<TX, V> gather_x(const TX* x, i64 step) {
  XChunk<TX, V> c;
#pragma unroll
  for (int i = 0; i < V; ++i) c.part[i / Lanes<TX>::count].v[i % Lanes<TX>::count] = x[i * step];
  return c;
}

// sum + a . x over one vector; bytes go four at a time through dp4a.
template <class Acc, class TA, class TX>
__device__ __forceinline__ Acc dot(const Chunk<TA>& a, const XChunk<TX, 16 / sizeof(TA)>& x, Acc sum) {
  if constexpr (sizeof(TA) == 1 && sizeof(TX) == 1) {
    constexpr bool sa = (TA)-1 < (TA)0, sx = (TX)-1 < (TX)0;
    int part = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned u = ((const unsigned*)&a)[i], v = ((const unsigned*)&x)[i];
      if constexpr (sa && sx) part = ptx::dp4a((int)u, (int)v, part);
      else if constexpr (!sa && !sx) part = (int)ptx::dp4a_u8(u, v, (unsigned)part);
      else if constexpr (sa) part = ptx::dp4a_u8s8(v, (int)u, part);
      else part = ptx::dp4a_u8s8(u, (int)v, part);
    }
    return sum + (Acc)part;
  } else {
#pragma unroll
    for (int i = 0; i < 16 / (int)sizeof(TA); ++i) sum += wide<Acc>(a.v[i]) * wide<Acc>(x[i]);
    return sum;
  }
}

// Store one finished sum. Nearly always alpha is 1 and beta 0, and then the conversions of both to the type of the
// sum, 20 ns that every block would wait for at its end, are left out.
template <class T, class Acc>
__device__ __forceinline__ void store_sum(const GemvArgs& p, T* out, Acc sum) {
  if (__double_as_longlong(p.alpha) == 0x3ff0000000000000ll && __double_as_longlong(p.beta) == 0) *out = narrow<T, Acc>(sum);
  else finish(out, sum, p.alpha, p.beta);
}

template <class Acc>
__device__ __forceinline__ Acc warp_sum(Acc v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
