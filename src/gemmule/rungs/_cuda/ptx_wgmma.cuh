// Warpgroup matrix multiply (Hopper, sm_90a), and what kernels around it need: d (64 x N, 32-bit) = a b + d, a and b
// in shared memory or a in registers.
//
// A wgmma is asynchronous: between its start and wgmma_wait nobody may touch d or write the shared operands.
// With t = threadIdx.x % 128, w = t / 32, g = t % 32 / 4, q = t % 4: d[4 j + i] is row 16 w + g + 8 (i / 2),
// column 8 j + 2 q + i % 2. N is one of 8, 16, 32, 64, 96, 128, 160, 192, 224, 256.
#pragma once
#include "ptx.cuh"

namespace ptx {

// The wgmma descriptor of a matrix in shared memory. K-major: `stride` bytes from one group of 8 rows to the next;
// `leading` bytes from one 16-byte column to the next without swizzle (ignored with one). MN-major: with a swizzle
// `leading` from one swizzle-wide group of rows to the next and `stride` from 8 k to the next 8; without, exchanged.
__device__ __forceinline__ u64 wgmma_desc(u32 addr, u32 leading, u32 stride, Swizzle swizzle) {
  return u64((addr & 0x3ffff) >> 4) | u64(leading >> 4 & 0x3fff) << 16 | u64(stride >> 4 & 0x3fff) << 32 |
         u64(int(swizzle)) << 62;
}

}  // namespace ptx

#if !defined(CUEMU) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
namespace ptx {

// ldmatrix's way back: r[j] of every lane to the rows of 8x8 matrix j, whose addresses lanes give as there.
__device__ __forceinline__ void stmatrix_x4(u32 addr, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
// The same for two matrices, whose rows lanes 0 to 15 give; and their transposes.
__device__ __forceinline__ void stmatrix_x2(u32 addr, const u32 (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1,%2};" ::"r"(addr), "r"(r[0]), "r"(r[1]) : "memory");
}
__device__ __forceinline__ void stmatrix_x2_trans(u32 addr, const u32 (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};"
               ::"r"(addr), "r"(r[0]), "r"(r[1]) : "memory");
}
// A float at a shared address; a store of two.
__device__ __forceinline__ float ld_shared(u32 addr) {
  float r;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(addr) : "memory");
  return r;
}
__device__ __forceinline__ void st_shared(u32 addr, float2 v) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(addr), "f"(v.x), "f"(v.y) : "memory");
}
// cluster_arrive that publishes nothing written: it spares the fence that a release is.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// mbar_arrive_remote for memory that only TMA and wgmma touch: it orders the thread's own accesses within its block
// alone. A release for the cluster would wait for them, 600 cycles each time on an H200.
__device__ __forceinline__ void mbar_signal_remote(u32 bar, u32 rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapa(bar, rank)) : "memory");
}
// Orders register accesses before the next wgmma; closes a group; waits until at most N groups are under way.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// The register list of d as text, and as operands with constraint c.
#define PTX_REGS_8 "%0,%1,%2,%3"
#define PTX_REGS_16 PTX_REGS_8 ",%4,%5,%6,%7"
#define PTX_REGS_32 PTX_REGS_16 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define PTX_REGS_64 PTX_REGS_32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define PTX_REGS_96 PTX_REGS_64 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define PTX_REGS_128 PTX_REGS_96 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define PTX_REGS_160 PTX_REGS_128 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define PTX_REGS_192 PTX_REGS_160 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define PTX_REGS_224 PTX_REGS_192 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define PTX_REGS_256 PTX_REGS_224 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define PTX_OUT_8_AT(c, i) "+" c(d[i]), "+" c(d[i + 1]), "+" c(d[i + 2]), "+" c(d[i + 3])
#define PTX_OUT_16_AT(c, i) PTX_OUT_8_AT(c, i), PTX_OUT_8_AT(c, i + 4)
#define PTX_OUT_32_AT(c, i) PTX_OUT_16_AT(c, i), PTX_OUT_16_AT(c, i + 8)
#define PTX_OUT_8(c) PTX_OUT_8_AT(c, 0)
#define PTX_OUT_16(c) PTX_OUT_16_AT(c, 0)
#define PTX_OUT_32(c) PTX_OUT_32_AT(c, 0)
#define PTX_OUT_64(c) PTX_OUT_32(c), PTX_OUT_32_AT(c, 16)
#define PTX_OUT_96(c) PTX_OUT_64(c), PTX_OUT_32_AT(c, 32)
#define PTX_OUT_128(c) PTX_OUT_96(c), PTX_OUT_32_AT(c, 48)
#define PTX_OUT_160(c) PTX_OUT_128(c), PTX_OUT_32_AT(c, 64)
#define PTX_OUT_192(c) PTX_OUT_160(c), PTX_OUT_32_AT(c, 80)
#define PTX_OUT_224(c) PTX_OUT_192(c), PTX_OUT_32_AT(c, 96)
#define PTX_OUT_256(c) PTX_OUT_224(c), PTX_OUT_32_AT(c, 112)

// F(N, the numbers of the operands that follow the N / 2 registers of d)
#define PTX_EACH_N(F) \
  F(8, 4, 5, 6, 7, 8, 9, 10) \
  F(16, 8, 9, 10, 11, 12, 13, 14) \
  F(32, 16, 17, 18, 19, 20, 21, 22) \
  F(64, 32, 33, 34, 35, 36, 37, 38) \
  F(96, 48, 49, 50, 51, 52, 53, 54) \
  F(128, 64, 65, 66, 67, 68, 69, 70) \
  F(160, 80, 81, 82, 83, 84, 85, 86) \
  F(192, 96, 97, 98, 99, 100, 101, 102) \
  F(224, 112, 113, 114, 115, 116, 117, 118) \
  F(256, 128, 129, 130, 131, 132, 133, 134)

// Both operands by descriptor. `accumulate` false: d = a b, d need not be set before.
#define PTX_WGMMA_CASE(N_, n0, n1, n2, n3, n4, n5, n6)                                                       \
  if constexpr (N == N_)                                                                                     \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #n2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N_ PTX_OP \
                 " {" PTX_REGS_##N_ "}, %" #n0 ", %" #n1 ", p" PTX_TAIL(n3, n4) ";\n}"                        \
                 : PTX_OUT_##N_(PTX_C) : "l"(a), "l"(b), "r"(int(accumulate)) PTX_EXTRA);

// 16-bit operands: k = 16, either operand K-major (0) or MN-major (1).
#define PTX_TAIL(n3, n4) ", 1, 1, %" #n3 ", %" #n4
#define PTX_EXTRA , "n"(TransA), "n"(TransB)
#define PTX_C "f"
#define PTX_OP "k16.f32.f16.f16"
template <int N, int TransA = 0, int TransB = 0>
__device__ __forceinline__ void wgmma_f16(float (&d)[N / 2], u64 a, u64 b, bool accumulate) {
  PTX_EACH_N(PTX_WGMMA_CASE)
}
#undef PTX_OP
#define PTX_OP "k16.f32.bf16.bf16"
template <int N, int TransA = 0, int TransB = 0>
__device__ __forceinline__ void wgmma_bf16(float (&d)[N / 2], u64 a, u64 b, bool accumulate) {
  PTX_EACH_N(PTX_WGMMA_CASE)
}
#undef PTX_OP
#undef PTX_TAIL
#undef PTX_EXTRA

// Other operands: K-major only. tf32 has k = 8, e4m3 and e5m2 k = 32.
#define PTX_TAIL(n3, n4) ", 1, 1"
#define PTX_EXTRA
#define PTX_OP "k8.f32.tf32.tf32"
template <int N>
__device__ __forceinline__ void wgmma_tf32(float (&d)[N / 2], u64 a, u64 b, bool accumulate) {
  PTX_EACH_N(PTX_WGMMA_CASE)
}
#undef PTX_OP
#define PTX_OP "k32.f32.e4m3.e4m3"
template <int N>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[N / 2], u64 a, u64 b, bool accumulate) {
  PTX_EACH_N(PTX_WGMMA_CASE)
}
#undef PTX_OP
#define PTX_OP "k32.f32.e5m2.e5m2"
template <int N>
__device__ __forceinline__ void wgmma_e5m2(float (&d)[N / 2], u64 a, u64 b, bool accumulate) {
  PTX_EACH_N(PTX_WGMMA_CASE)
}
#undef PTX_OP
#define PTX_OP "k32.f32.e4m3.e5m2"
template <int N>
__device__ __forceinline__ void wgmma_e4m3e5m2(float (&d)[N / 2], u64 a, u64 b, bool accumulate) {
  PTX_EACH_N(PTX_WGMMA_CASE)
}
#undef PTX_OP
#define PTX_OP "k32.f32.e5m2.e4m3"
template <int N>
__device__ __forceinline__ void wgmma_e5m2e4m3(float (&d)[N / 2], u64 a, u64 b, bool accumulate) {
  PTX_EACH_N(PTX_WGMMA_CASE)
}
#undef PTX_OP
#undef PTX_TAIL
#undef PTX_C
// 8-bit integers, k = 32; sums are exact modulo 2^32.
#define PTX_TAIL(n3, n4) ""
#define PTX_C "r"
#define PTX_OP "k32.s32.s8.s8"
template <int N>
__device__ __forceinline__ void wgmma_s8(int (&d)[N / 2], u64 a, u64 b, bool accumulate) { PTX_EACH_N(PTX_WGMMA_CASE) }
#undef PTX_OP
#define PTX_OP "k32.s32.u8.u8"
template <int N>
__device__ __forceinline__ void wgmma_u8(int (&d)[N / 2], u64 a, u64 b, bool accumulate) { PTX_EACH_N(PTX_WGMMA_CASE) }
#undef PTX_OP
#define PTX_OP "k32.s32.s8.u8"
template <int N>
__device__ __forceinline__ void wgmma_s8u8(int (&d)[N / 2], u64 a, u64 b, bool accumulate) {
  PTX_EACH_N(PTX_WGMMA_CASE)
}
#undef PTX_OP
#define PTX_OP "k32.s32.u8.s8"
template <int N>
__device__ __forceinline__ void wgmma_u8s8(int (&d)[N / 2], u64 a, u64 b, bool accumulate) {
  PTX_EACH_N(PTX_WGMMA_CASE)
}
#undef PTX_OP
#undef PTX_TAIL
#undef PTX_C
#undef PTX_EXTRA
#undef PTX_WGMMA_CASE

// a in registers, laid out as for mma_f16 within the warp's 16 rows; b by descriptor.
#define PTX_WGMMA_CASE(N_, n0, n1, n2, n3, n4, n5, n6)                                                       \
  if constexpr (N == N_)                                                                                     \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #n5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N_ PTX_OP \
                 " {" PTX_REGS_##N_ "}, {%" #n0 ",%" #n1 ",%" #n2 ",%" #n3 "}, %" #n4 ", p, 1, 1, %" #n6 ";\n}" \
                 : PTX_OUT_##N_("f")                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(TransB));
#define PTX_OP "k16.f32.f16.f16"
template <int N, int TransB = 0>
__device__ __forceinline__ void wgmma_f16_ra(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool accumulate) {
  PTX_EACH_N(PTX_WGMMA_CASE)
}
#undef PTX_OP
#define PTX_OP "k16.f32.bf16.bf16"
template <int N, int TransB = 0>
__device__ __forceinline__ void wgmma_bf16_ra(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool accumulate) {
  PTX_EACH_N(PTX_WGMMA_CASE)
}
#undef PTX_OP
#undef PTX_WGMMA_CASE
#undef PTX_EACH_N

}  // namespace ptx
#endif
