// Primitives for what several GPUs and the host see: as ptx.cuh, of which this is a part.
#pragma once
#include "ptx.cuh"

#ifndef CUEMU
#define PTX_FN __device__ __forceinline__
namespace ptx {
// Words that the host and other GPUs may see: relaxed, whole.
PTX_FN u64 ld_relaxed_sys(const u64* p) {
  u64 r;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(r) : "l"(p) : "memory");
  return r;
}
PTX_FN void st_relaxed_sys(u64* p, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// Add, at the scope of the device; nothing comes back.
PTX_FN void add_relaxed(u64* p, u64 v) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// Nanoseconds since some moment, the same on all multiprocessors; it may stand still for a microsecond.
PTX_FN u64 global_timer() {
  u64 r;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(r));
  return r;
}
}  // namespace ptx
#undef PTX_FN
#endif
