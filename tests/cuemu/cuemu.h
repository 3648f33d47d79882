// CUDA C++ on the CPU, for tests: one fiber per CUDA thread, blocks (or clusters) one after another.
// Included in front of an unmodified .cu file by build.py. Nothing here models time or caches.
#pragma once
#define CUEMU 1
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <vector_types.h>
#include <vector_functions.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "sched.h"
#include "async.h"
#include "shared.h"
#include "barrier.h"
#include "launch.h"
#include "warp.h"
#include "atomics.h"
#include "intrinsics.h"

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __cluster_dims__
#undef __align__
#undef __managed__
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))

#define threadIdx (cuemu::S.cur->tid)
#define blockIdx (cuemu::S.cur->cta->index)
#define blockDim (cuemu::S.block_dim)
#define gridDim (cuemu::S.grid_dim)
#define warpSize 32
#define __syncthreads() cuemu::named_barrier(0, 0, true, __FILE__, __LINE__, __COUNTER__)
