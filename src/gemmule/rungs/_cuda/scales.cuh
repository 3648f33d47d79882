// Scales of rows of A and of columns of B, which kernels compiled with SCALES apply to sums on their way to C.
#pragma once
#include "args.cuh"

#ifdef SCALES
// Kernels take two addresses more, of float32 numbers, and how far the next row's (or column's) scale lies: 0 where one
// serves all of them.
struct ScaledGemmArgs : GemmArgs {
  const float* scale_a;
  const float* scale_b;
  i64 step_a, step_b;
};
#define GemmArgs ScaledGemmArgs

// The sums of a thread as wgmma leaves them (ptx_wgmma.cuh), from row `row` of its warp and column `col` on.
template <int N, class Sum>
__device__ __forceinline__ void scale_sums(const ScaledGemmArgs& p, i64 row, i64 col, const Sum* sum, float (&out)[N]) {
  const int lane = threadIdx.x % 32;
  float of_row[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i64 i = row + lane / 4 + 8 * half;
    of_row[half] = i < p.m ? p.scale_a[i * p.step_a] : 0.0f;
  }
#pragma unroll
  for (int d = 0; d < N; d += 4)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const i64 j = col + d * 2 + lane % 4 * 2 + i;
      const float of_col = j < p.n ? p.scale_b[j * p.step_b] : 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) out[d + 2 * half + i] = float(sum[d + 2 * half + i]) * of_row[half] * of_col;
    }
}
#endif
