// The primitive layer: every line of inline PTX of the project, one function per instruction.
//
// Written from the PTX ISA manual. Addresses of shared memory are 32-bit (`smem_addr`); fragments are plain
// register arrays whose element order is stated once, above each group. A primitive exists only where the
// architecture has it, so that a kernel which uses the sm_80 part compiles for every later architecture.
// ldmatrix, movmatrix, mma, wgmma, cluster_arrive, cluster_wait and reg_* take all threads of the warp together.
// On the CPU (CUEMU) the same names come from the emulator's twins.
#pragma once

namespace ptx {
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// N elements that move as one access: aligned to their size, which must be a power of two up to 16 bytes.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  static_assert(sizeof(T) * N <= 16 && ((sizeof(T) * N) & (sizeof(T) * N - 1)) == 0, "1, 2, 4, 8 or 16 bytes");
  T v[N];
  __device__ __forceinline__ T& operator[](int i) { return v[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return v[i]; }
};

// A tensor map (CUtensorMap) as it lies in the kernel's parameter: `const __grid_constant__` keeps its address.
struct alignas(64) TensorMap { u64 opaque[16]; };

// How 16-byte chunks of shared memory are permuted; the value is the layout field of a wgmma descriptor.
enum class Swizzle : int { none = 0, b128 = 1, b64 = 2, b32 = 3 };

// The place of byte `addr` under a swizzle: chunk index XOR row index, rows of 128, 64 or 32 bytes.
template <Swizzle S>
__device__ __forceinline__ u32 swizzle(u32 addr) {
  if constexpr (S == Swizzle::b128) return addr ^ ((addr >> 7 & 7) << 4);
  if constexpr (S == Swizzle::b64) return addr ^ ((addr >> 7 & 3) << 4);
  if constexpr (S == Swizzle::b32) return addr ^ ((addr >> 7 & 1) << 4);
  return addr;
}
}  // namespace ptx

#ifdef CUEMU
#include "ptx_twins.h"
#else

#define PTX_FN __device__ __forceinline__

namespace ptx {

// ---- global memory: 1, 2, 4, 8 or 16 bytes; the data must not be written while the kernel runs --------------
#define PTX_LOAD(name, op)                                                                                     \
  template <class V>                                                                                           \
  PTX_FN V name(const V* p) {                                                                                  \
    V r;                                                                                                       \
    if constexpr (sizeof(V) == 16) {                                                                           \
      uint4& u = reinterpret_cast<uint4&>(r);                                                                  \
      asm(op ".v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(u.x), "=r"(u.y), "=r"(u.z), "=r"(u.w) : "l"(p));            \
    } else if constexpr (sizeof(V) == 8) {                                                                     \
      uint2& u = reinterpret_cast<uint2&>(r);                                                                  \
      asm(op ".v2.u32 {%0,%1}, [%2];" : "=r"(u.x), "=r"(u.y) : "l"(p));                                        \
    } else if constexpr (sizeof(V) == 4) {                                                                     \
      asm(op ".u32 %0, [%1];" : "=r"(reinterpret_cast<u32&>(r)) : "l"(p));                                     \
    } else if constexpr (sizeof(V) == 2) {                                                                     \
      asm(op ".u16 %0, [%1];" : "=h"(reinterpret_cast<u16&>(r)) : "l"(p));                                     \
    } else {                                                                                                   \
      static_assert(sizeof(V) == 1, "1, 2, 4, 8 or 16 bytes");                                                 \
      u16 wide;                                                                                                \
      asm(op ".u8 %0, [%1];" : "=h"(wide) : "l"(p));                                                           \
      reinterpret_cast<u8&>(r) = u8(wide);                                                                     \
    }                                                                                                          \
    return r;                                                                                                  \
  }
PTX_LOAD(ld_nc, "ld.global.nc")                                        // read-only path, cached as usual
PTX_LOAD(ld_cs, "ld.global.cs")                                        // evict first: read once
PTX_LOAD(ld_stream, "ld.global.nc.L1::no_allocate")                    // read-only path past the L1
PTX_LOAD(ld_stream_256, "ld.global.nc.L1::no_allocate.L2::256B")       // the same, L2 fetches 256 bytes
#undef PTX_LOAD

// The same loads where `wanted`, zeros elsewhere: predicated, for a branch would let the compiler wait for each load
// before it issues the next.
#define PTX_LOAD_IF(name, op)                                                                                  \
  template <class V>                                                                                           \
  PTX_FN V name(const V* p, bool wanted) {                                                                     \
    V r;                                                                                                       \
    if constexpr (sizeof(V) == 16) {                                                                           \
      uint4& u = reinterpret_cast<uint4&>(r);                                                                  \
      asm("{ .reg .pred q; setp.ne.u32 q, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0; " \
          "@q " op ".v4.u32 {%0,%1,%2,%3}, [%4]; }"                                                            \
          : "=&r"(u.x), "=&r"(u.y), "=&r"(u.z), "=&r"(u.w) : "l"(p), "r"((u32)wanted));                        \
    } else if constexpr (sizeof(V) == 8) {                                                                     \
      asm("{ .reg .pred q; setp.ne.u32 q, %2, 0; mov.u64 %0, 0; @q " op ".u64 %0, [%1]; }"                     \
          : "=&l"(reinterpret_cast<u64&>(r)) : "l"(p), "r"((u32)wanted));                                      \
    } else if constexpr (sizeof(V) == 4) {                                                                     \
      asm("{ .reg .pred q; setp.ne.u32 q, %2, 0; mov.u32 %0, 0; @q " op ".u32 %0, [%1]; }"                     \
          : "=&r"(reinterpret_cast<u32&>(r)) : "l"(p), "r"((u32)wanted));                                      \
    } else if constexpr (sizeof(V) == 2) {                                                                     \
      asm("{ .reg .pred q; setp.ne.u32 q, %2, 0; mov.u16 %0, 0; @q " op ".u16 %0, [%1]; }"                     \
          : "=&h"(reinterpret_cast<u16&>(r)) : "l"(p), "r"((u32)wanted));                                      \
    } else {                                                                                                   \
      static_assert(sizeof(V) == 1, "1, 2, 4, 8 or 16 bytes");                                                 \
      u16 wide;                                                                                                \
      asm("{ .reg .pred q; setp.ne.u32 q, %2, 0; mov.u16 %0, 0; @q " op ".u8 %0, [%1]; }"                      \
          : "=&h"(wide) : "l"(p), "r"((u32)wanted));                                                           \
      reinterpret_cast<u8&>(r) = u8(wide);                                                                     \
    }                                                                                                          \
    return r;                                                                                                  \
  }
PTX_LOAD_IF(ld_if, "ld.global")
PTX_LOAD_IF(ld_nc_if, "ld.global.nc")
PTX_LOAD_IF(ld_cs_if, "ld.global.cs")
PTX_LOAD_IF(ld_cs_128_if, "ld.global.cs.L2::128B")
#undef PTX_LOAD_IF

// L2 eviction policies for ld_hint and the TMA loads.
PTX_FN u64 policy_evict_first() {
  u64 r;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(r));
  return r;
}
PTX_FN u64 policy_evict_last() {
  u64 r;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(r));
  return r;
}

// 16-byte read-only load past the L1 under an L2 policy.
template <class V>
PTX_FN V ld_hint(const V* p, u64 policy) {
  static_assert(sizeof(V) == 16, "16 bytes");
  V r;
  uint4& u = reinterpret_cast<uint4&>(r);
  asm("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
      : "=r"(u.x), "=r"(u.y), "=r"(u.z), "=r"(u.w) : "l"(p), "l"(policy));
  return r;
}
// Store that is evicted first: 4, 8 or 16 bytes written once.
template <class V>
PTX_FN void st_stream(V* p, const V& v) {
  if constexpr (sizeof(V) == 16) {
    const uint4& u = reinterpret_cast<const uint4&>(v);
    asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(u.x), "r"(u.y), "r"(u.z), "r"(u.w)
        : "memory");
  } else if constexpr (sizeof(V) == 8) {
    const uint2& u = reinterpret_cast<const uint2&>(v);
    asm volatile("st.global.cs.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(u.x), "r"(u.y) : "memory");
  } else {
    static_assert(sizeof(V) == 4, "4, 8 or 16 bytes");
    asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(p), "r"(reinterpret_cast<const u32&>(v)) : "memory");
  }
}
// A new v for the compiler, which comes to be here: what needs it cannot be moved before this point.
template <class T>
PTX_FN void pin(T& v) {
  if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(v));
  else asm volatile("" : "+r"(v));
}
// Brings the line of p into the L2.
PTX_FN void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Flags between blocks: acquire load, release store, add with both, at the scope of the device.
PTX_FN u32 ld_acquire(const u32* p) {
  u32 r;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}
PTX_FN void st_release(u32* p, u32 v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
PTX_FN u32 add_acq_rel(u32* p, u32 v) {
  u32 r;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(r) : "l"(p), "r"(v) : "memory");
  return r;
}

// ---- shared memory and barriers ------------------------------------------------------------------------
// The 32-bit address of a generic pointer to shared memory.
PTX_FN u32 smem_addr(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// Barrier `id` (1..15) among `threads` threads of the block, a multiple of 32: wait, or arrive only.
PTX_FN void named_sync(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
PTX_FN void named_arrive(u32 id, u32 threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Asynchronous copy of B = 4, 8 or 16 bytes to shared memory; only `valid` bytes are read, the rest become zero.
template <int B>
PTX_FN void cp_async(u32 dst, const void* src, u32 valid = B) {
  static_assert(B == 4 || B == 8 || B == 16, "4, 8 or 16 bytes");
  if constexpr (B == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid)
      : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst), "l"(src), "n"(B), "r"(valid)
      : "memory");
}
// Closes the thread's open group of copies; waits until at most N groups are under way.
PTX_FN void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
PTX_FN void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// 8x8 matrices of 16-bit elements: lane i gives the address of row i % 8 of matrix i / 8 (16-byte aligned);
// r[j] of lane i holds elements 2 (i % 4), +1 of row i / 4 of matrix j; `_trans` gives the transposed matrix.
#define PTX_LDMATRIX(suffix, op)                                                                               \
  PTX_FN void ldmatrix_x1##suffix(u32 (&r)[1], u32 addr) {                                                     \
    asm volatile("ldmatrix.sync.aligned.m8n8.x1" op ".shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(addr) : "memory"); \
  }                                                                                                            \
  PTX_FN void ldmatrix_x2##suffix(u32 (&r)[2], u32 addr) {                                                     \
    asm volatile("ldmatrix.sync.aligned.m8n8.x2" op ".shared.b16 {%0,%1}, [%2];"                               \
                 : "=r"(r[0]), "=r"(r[1]) : "r"(addr) : "memory");                                             \
  }                                                                                                            \
  PTX_FN void ldmatrix_x4##suffix(u32 (&r)[4], u32 addr) {                                                     \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" op ".shared.b16 {%0,%1,%2,%3}, [%4];"                         \
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");                     \
  }
PTX_LDMATRIX(, "")
PTX_LDMATRIX(_trans, ".trans")
#undef PTX_LDMATRIX
// The transpose of one such matrix, from registers to registers: lane i gives elements 2 (i % 4), +1 of row i / 4.
PTX_FN u32 movmatrix_trans(u32 v) {
  u32 r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}

// ---- mma.sync: d += a b for one warp, d 16x8 in f32 or s32 ---------------------------------------------------
// With g = lane / 4, t = lane % 4 and E elements in a register: a[i]: row g + 8 (i % 2), columns E t + 4 E (i / 2) ..;
// b[i]: rows E t + 4 E i .. of column g; d[i]: row g + 8 (i / 2), column 2 t + i % 2.
#define PTX_MMA(name, D, c, op)                                                                                \
  PTX_FN void name(D (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {                                          \
    asm(op " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                            \
        : "+" c(d[0]), "+" c(d[1]), "+" c(d[2]), "+" c(d[3])                                                   \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                   \
  }
PTX_MMA(mma_f16, float, "f", "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")      // k = 16
PTX_MMA(mma_bf16, float, "f", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")   // k = 16
PTX_MMA(mma_tf32, float, "f", "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32")    // k = 8, see to_tf32
PTX_MMA(mma_s8, int, "r", "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32")           // k = 32
PTX_MMA(mma_u8, int, "r", "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32")           // k = 32
PTX_MMA(mma_u8s8, int, "r", "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32")         // k = 32, a u8, b s8
#if __CUDA_ARCH__ >= 890
PTX_MMA(mma_e4m3, float, "f", "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32")   // k = 32
#endif
#undef PTX_MMA
// Float64, 8x8x4: a: row g, column t; b: row t, column g; d[i]: row g, column 2 t + i.
PTX_FN void mma_f64(double (&d)[2], double a, double b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};" : "+d"(d[0]), "+d"(d[1])
      : "d"(a), "d"(b));
}
// The nearest tf32 number, ties away from zero, in the bits of a float.
PTX_FN u32 to_tf32(float v) { u32 r; asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(v)); return r; }

// ---- arithmetic on packed registers -------------------------------------------------------------------------
// Any three-input bitwise function; bit i of LUT is its value where (a, b, c) are the bits of i, a the highest.
template <int LUT>
PTX_FN u32 lop3(u32 a, u32 b, u32 c) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(r) : "r"(a), "r"(b), "r"(c), "n"(LUT));
  return r;
}
PTX_FN u32 sub_f16x2(u32 a, u32 b) { u32 r; asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
PTX_FN u32 fma_f16x2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
PTX_FN u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// c + the dot product of four bytes: signed, unsigned, and unsigned a with signed b.
PTX_FN int dp4a(int a, int b, int c) {
  int r;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
PTX_FN u32 dp4a_u8(u32 a, u32 b, u32 c) {
  u32 r;
  asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
PTX_FN int dp4a_u8s8(u32 a, int b, int c) {
  int r;
  asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

#if __CUDA_ARCH__ >= 900
// ---- programmatic dependent launch -----------------------------------------------------------------------
// Waits for the grids before this one; lets the next grid start.
PTX_FN void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
PTX_FN void pdl_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- clusters ----------------------------------------------------------------------------------------
PTX_FN u32 cluster_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
PTX_FN u32 cluster_size() { u32 r; asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(r)); return r; }
// All threads of the cluster arrive (release), then wait (acquire).
PTX_FN void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
PTX_FN void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
PTX_FN void cluster_sync() { cluster_arrive(); cluster_wait(); }
// The address in block `rank` of what lies at `addr` in this block.
PTX_FN u32 mapa(u32 addr, u32 rank) {
  u32 r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(addr), "r"(rank));
  return r;
}
// Loads and stores of 4, 8 or 16 bytes at an address of mapa.
template <class T>
PTX_FN T ld_cluster(u32 addr) {
  T r;
  if constexpr (sizeof(T) == 16) {
    uint4& u = reinterpret_cast<uint4&>(r);
    asm volatile("ld.shared::cluster.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(u.x), "=r"(u.y), "=r"(u.z), "=r"(u.w) : "r"(addr) : "memory");
  } else if constexpr (sizeof(T) == 8) {
    uint2& u = reinterpret_cast<uint2&>(r);
    asm volatile("ld.shared::cluster.v2.u32 {%0,%1}, [%2];" : "=r"(u.x), "=r"(u.y) : "r"(addr) : "memory");
  } else {
    static_assert(sizeof(T) == 4, "4, 8 or 16 bytes");
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(reinterpret_cast<u32&>(r)) : "r"(addr) : "memory");
  }
  return r;
}
template <class T>
PTX_FN void st_cluster(u32 addr, T v) {
  if constexpr (sizeof(T) == 16) {
    const uint4& u = reinterpret_cast<const uint4&>(v);
    asm volatile("st.shared::cluster.v4.u32 [%0], {%1,%2,%3,%4};"
                 ::"r"(addr), "r"(u.x), "r"(u.y), "r"(u.z), "r"(u.w) : "memory");
  } else if constexpr (sizeof(T) == 8) {
    const uint2& u = reinterpret_cast<const uint2&>(v);
    asm volatile("st.shared::cluster.v2.u32 [%0], {%1,%2};" ::"r"(addr), "r"(u.x), "r"(u.y) : "memory");
  } else {
    static_assert(sizeof(T) == 4, "4, 8 or 16 bytes");
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(addr), "r"(reinterpret_cast<u32&>(v)) : "memory");
  }
}

// ---- mbarrier: 8 bytes of shared memory; a phase ends when all arrivals and all announced bytes are in -----------
PTX_FN void mbar_init(u32 bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the other blocks and to the asynchronous proxy.
PTX_FN void mbar_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
PTX_FN void mbar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
// Announces bytes for the phase; announces them and arrives.
PTX_FN void mbar_expect_tx(u32 bar, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
PTX_FN void mbar_arrive_expect_tx(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Arrives at the barrier that lies at the same place in block `rank`.
PTX_FN void mbar_arrive_remote(u32 bar, u32 rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(mapa(bar, rank)) : "memory");
}
// Whether the phase of this parity has ended; may wait a moment.
PTX_FN bool mbar_try_wait(u32 bar, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  return done != 0;
}
PTX_FN void mbar_wait(u32 bar, u32 parity) { while (!mbar_try_wait(bar, parity)) {} }
// The same, acquiring what blocks of the cluster released by mbar_arrive_remote.
PTX_FN void mbar_wait_cluster(u32 bar, u32 parity) {
  u32 done = 0;
  while (!done)
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(bar), "r"(parity) : "memory");
}

// ---- TMA: copies by the asynchronous proxy; sizes and addresses are multiples of 16 bytes ------------------------
// Orders this thread's writes to shared memory before what the asynchronous proxy reads there.
PTX_FN void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
PTX_FN void prefetch_map(const TensorMap* m) { asm volatile("prefetch.tensormap [%0];" ::"l"(m) : "memory"); }
#define PTX_BULK_LOAD "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
#define PTX_TENSOR_LOAD(d) "cp.async.bulk.tensor." d ".shared::cluster.global.mbarrier::complete_tx::bytes"
// `bytes` contiguous bytes to this block, or to the same place in every block of `mask`.
PTX_FN void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
  asm volatile(PTX_BULK_LOAD " [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src), "r"(bytes), "r"(bar) : "memory");
}
PTX_FN void bulk_load_hint(u32 dst, const void* src, u32 bytes, u32 bar, u64 policy) {
  asm volatile(PTX_BULK_LOAD ".L2::cache_hint [%0], [%1], %2, [%3], %4;"
      ::"r"(dst), "l"(src), "r"(bytes), "r"(bar), "l"(policy) : "memory");
}
PTX_FN void bulk_load_multicast(u32 dst, const void* src, u32 bytes, u32 bar, u16 mask) {
  asm volatile(PTX_BULK_LOAD ".multicast::cluster [%0], [%1], %2, [%3], %4;"
      ::"r"(dst), "l"(src), "r"(bytes), "r"(bar), "h"(mask) : "memory");
}
// A box of a tensor map at element coordinates, c0 along the contiguous dimension; outside the tensor it is zero.
// c0 times the element size must be a multiple of 16 bytes, whatever the box and the swizzle; any coordinate may be
// negative. The device answers another c0 with an illegal instruction (seen on an H200, loads and stores alike).
PTX_FN void tma_load_2d(u32 dst, const TensorMap* m, u32 bar, int c0, int c1) {
  asm volatile(PTX_TENSOR_LOAD("2d") " [%0], [%1, {%3,%4}], [%2];" ::"r"(dst), "l"(m), "r"(bar), "r"(c0), "r"(c1)
      : "memory");
}
PTX_FN void tma_load_2d_hint(u32 dst, const TensorMap* m, u32 bar, int c0, int c1, u64 policy) {
  asm volatile(PTX_TENSOR_LOAD("2d") ".L2::cache_hint [%0], [%1, {%3,%4}], [%2], %5;"
               ::"r"(dst), "l"(m), "r"(bar), "r"(c0), "r"(c1), "l"(policy) : "memory");
}
PTX_FN void tma_load_2d_multicast(u32 dst, const TensorMap* m, u32 bar, int c0, int c1, u16 mask) {
  asm volatile(PTX_TENSOR_LOAD("2d") ".multicast::cluster [%0], [%1, {%3,%4}], [%2], %5;"
               ::"r"(dst), "l"(m), "r"(bar), "r"(c0), "r"(c1), "h"(mask) : "memory");
}
PTX_FN void tma_load_3d(u32 dst, const TensorMap* m, u32 bar, int c0, int c1, int c2) {
  asm volatile(PTX_TENSOR_LOAD("3d") " [%0], [%1, {%3,%4,%5}], [%2];"
      ::"r"(dst), "l"(m), "r"(bar), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
PTX_FN void tma_load_3d_multicast(u32 dst, const TensorMap* m, u32 bar, int c0, int c1, int c2, u16 mask) {
  asm volatile(PTX_TENSOR_LOAD("3d") ".multicast::cluster [%0], [%1, {%3,%4,%5}], [%2], %6;"
               ::"r"(dst), "l"(m), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "h"(mask) : "memory");
}
#undef PTX_BULK_LOAD
#undef PTX_TENSOR_LOAD
// Stores of this thread, in groups. Past the end of the tensor nothing is written; a negative coordinate, unlike in
// a load, is an illegal instruction (seen on an H200), and so is a c0 that is no multiple of 16 bytes.
PTX_FN void bulk_store(void* dst, u32 src, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes)
      : "memory");
}
PTX_FN void tma_store_2d(const TensorMap* m, u32 src, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2,%3}], [%1];"
      ::"l"(m), "r"(src), "r"(c0), "r"(c1) : "memory");
}
PTX_FN void tma_store_3d(const TensorMap* m, u32 src, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2,%3,%4}], [%1];"
               ::"l"(m), "r"(src), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
PTX_FN void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most N groups still read shared memory; until at most N groups are not yet written.
template <int N>
PTX_FN void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }
template <int N>
PTX_FN void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }
#endif  // sm_90

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
// Registers of the threads of this warpgroup, a multiple of 8 from 24 to 256: get more, give some back. The kernel
// needs __launch_bounds__ with its block size, which fixes how many it starts with.
template <int N>
PTX_FN void reg_alloc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N>
PTX_FN void reg_dealloc() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
#endif

}  // namespace ptx
#undef PTX_FN
#endif  // CUEMU

namespace ptx {

// ---- integers to halves without a conversion instruction ------------------------------------------------------
// An integer placed in the low mantissa bits of 1024.0 (f16, step 1) or 128.0 (bf16, step 1) is that number plus it.

// Eight unsigned 4-bit numbers -> f16 pairs: out[i] = (nibble i, nibble i + 4).
__device__ __forceinline__ void u4x8_to_f16(u32 q, u32 (&out)[4]) {
  constexpr int kAndOr = (0xf0 & 0xcc) | 0xaa;
  constexpr u32 kBias = 0x64006400, kSixteenth = 0x2c002c00, kMinus64 = 0xd400d400;
  const u32 top = q >> 8;
  out[0] = sub_f16x2(lop3<kAndOr>(q, 0x000f000f, kBias), kBias);
  out[1] = fma_f16x2(lop3<kAndOr>(q, 0x00f000f0, kBias), kSixteenth, kMinus64);
  out[2] = sub_f16x2(lop3<kAndOr>(top, 0x000f000f, kBias), kBias);
  out[3] = fma_f16x2(lop3<kAndOr>(top, 0x00f000f0, kBias), kSixteenth, kMinus64);
}
// Eight unsigned 4-bit numbers -> bf16 pairs: out[i] = (nibble i, nibble i + 4).
__device__ __forceinline__ void u4x8_to_bf16(u32 q, u32 (&out)[4]) {
  constexpr int kAndOr = (0xf0 & 0xcc) | 0xaa;
  constexpr u32 kBias = 0x43004300, kOne = 0x3f803f80, kMinus128 = 0xc300c300;
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = fma_bf16x2(lop3<kAndOr>(q >> (4 * i), 0x000f000f, kBias), kOne, kMinus128);
}
// Four unsigned bytes -> f16 pairs in order.
__device__ __forceinline__ void u8x4_to_f16(u32 q, u32 (&out)[2]) {
  constexpr u32 kBias = 0x64006400;
  out[0] = sub_f16x2(__byte_perm(q, kBias, 0x5150), kBias);
  out[1] = sub_f16x2(__byte_perm(q, kBias, 0x5352), kBias);
}
// Four signed bytes -> f16 pairs in order: the sign bit flipped is the number plus 128.
__device__ __forceinline__ void s8x4_to_f16(u32 q, u32 (&out)[2]) {
  constexpr u32 kBias = 0x64006400, kBias128 = 0x64806480;
  q ^= 0x80808080;
  out[0] = sub_f16x2(__byte_perm(q, kBias, 0x5150), kBias128);
  out[1] = sub_f16x2(__byte_perm(q, kBias, 0x5352), kBias128);
}

}  // namespace ptx
