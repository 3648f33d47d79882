// Scales of blocks of 128 steps, which join the sums of wgmma stage by stage: of each row of A or 128 of them, and of 128
// columns of B. Kernels that include this apply them where they are compiled with SCALES.
#pragma once
#include "scales.cuh"

#ifdef SCALES
// A's scales lie `step_a` apart from 2^rows_a rows to the next and `along_a` from 128 steps to the next; B's `step_b` apart
// from 128 columns to the next. Of what all share the step is 0.
struct BlockScaledGemmArgs : ScaledGemmArgs {
  i64 along_a, along_b, rows_a;
};
#undef GemmArgs
#define GemmArgs BlockScaledGemmArgs
#undef SCALES   // not of sums on their way to C
#define BLOCK_SCALES

// Of one stage of a tile, in shared memory.
template <int HEIGHT, int WIDTH> struct BlockScales {
  float of_row[HEIGHT], of_cols[WIDTH / 128];
};

// A warp's scales of the next stage, read while it is awaited.
template <int HEIGHT, int WIDTH> struct BlockScalesAhead {
  const float *rows[HEIGHT / 32], *cols;
  float of_row[HEIGHT / 32], of_cols;
  __device__ __forceinline__ BlockScalesAhead(const GemmArgs& p, i64 row, i64 col) {
    const int lane = threadIdx.x % 32;
    cols = p.scale_b + min(col / 128 + lane % (WIDTH / 128), (p.n - 1) / 128) * p.step_b;
#pragma unroll
    for (int i = 0; i < HEIGHT / 32; ++i) rows[i] = p.scale_a + (min(row + i * 32 + lane, p.m - 1) >> p.rows_a) * p.step_a;
  }
  __device__ __forceinline__ void read(const GemmArgs& p) {
#pragma unroll
    for (int i = 0; i < HEIGHT / 32; ++i) of_row[i] = *rows[i], rows[i] += p.along_a;
    of_cols = *cols, cols += p.along_b;
  }
  __device__ __forceinline__ void put(BlockScales<HEIGHT, WIDTH>& to) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < HEIGHT / 32; ++i) to.of_row[i * 32 + lane] = of_row[i];
    if (lane < WIDTH / 128) to.of_cols[lane] = of_cols;
    __syncwarp();
  }
};

// A thread's scales of a stage, in registers before any of its products begin: `own` is its warpgroup's first row.
template <int HEIGHT, int WIDTH> struct BlockFactors {
  // excerpt factors
  float of_row[HEIGHT / 128][2], of_cols[WIDTH / 128];
  __device__ __forceinline__ BlockFactors(const BlockScales<HEIGHT, WIDTH>& stage, int own) {
#pragma unroll
    for (int i = 0; i < HEIGHT / 64; ++i)
      of_row[i / 2][i % 2] = stage.of_row[own + i / 2 * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i % 2 * 8];
#pragma unroll
    for (int c = 0; c < WIDTH / 128; ++c) of_cols[c] = stage.of_cols[c];
  }
  __device__ __forceinline__ float operator()(float sum, float stage, int block, int part, int i) const {
    return sum + stage * (of_row[block][i / 2 % 2] * of_cols[part]);
  }
  // end of excerpt
};
#endif
