// Products of doubles on tensor cores, 16 x 8 x 8: what Hopper needs for its full rate.
#pragma once
#include "ptx.cuh"

namespace ptx {
// d += a b for one warp. With g = lane / 4, t = lane % 4: a[i]: row g + 8 (i % 2), column t + 4 (i / 2); b[i]: row
// t + 4 i, column g; d[i]: row g + 8 (i / 2), column 2 t + i % 2. Before sm_90, and on the CPU, by 8 x 8 x 4.
__device__ __forceinline__ void mma_f64_k8(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
#if !defined(CUEMU) && __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#else
  double top[2] = {d[0], d[1]}, bottom[2] = {d[2], d[3]};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    mma_f64(top, a[2 * i], b[i]);
    mma_f64(bottom, a[2 * i + 1], b[i]);
  }
  d[0] = top[0], d[1] = top[1], d[2] = bottom[0], d[3] = bottom[1];
#endif
}
}  // namespace ptx
