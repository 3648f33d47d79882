// wgmma of float8 with a in registers: for each 16 bytes of a line as mma_f16 has 8 halves, four codes a register.
#pragma once
#include "ptx_wgmma.cuh"

#if !defined(CUEMU) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
namespace ptx {
#define PTX_WGMMA_RA(name, op)                                                                                        \
  __device__ __forceinline__ void name(float (&d)[64], const u32 (&a)[4], u64 b, bool accumulate) {                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k32.f32." op " {"     \
                 PTX_REGS_128 "}, {%64,%65,%66,%67}, %68, p, 1, 1;\n}"                                                \
                 : PTX_OUT_128("f") : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));      \
  }
PTX_WGMMA_RA(wgmma_e4m3_ra, "e4m3.e4m3")
PTX_WGMMA_RA(wgmma_e5m2_ra, "e5m2.e5m2")
PTX_WGMMA_RA(wgmma_e4m3e5m2_ra, "e4m3.e5m2")
PTX_WGMMA_RA(wgmma_e5m2e4m3_ra, "e5m2.e4m3")
#undef PTX_WGMMA_RA
}  // namespace ptx
#endif
