// Kernels with a planted bug each: with Bug = 0 they reverse 64 numbers, with another Bug they must be caught.
#include <cuda_fp16.h>

#include "ptx.cuh"
#include "ptx_wgmma.cuh"

using namespace ptx;

struct Args {
  const float* in;
  float* out;
  int n;   // 64
};
#define PLANTED(name) \
  template <int Bug>  \
  __global__ void name(Args p)

PLANTED(missing_barrier) {
  __shared__ float s[64];
  const int t = threadIdx.x;
  s[t] = p.in[t];
  if constexpr (!Bug) __syncthreads();
  p.out[t] = s[63 - t];
}
PLANTED(unset_register) {   // as the sums of a loop that sets them in its first turn and takes none
  const int t = threadIdx.x;
  float v;
  if (!Bug || t != 5) v = p.in[63 - t];
  p.out[t] = v;
}
PLANTED(missing_second_barrier) {   // the next round overwrites what others have not read yet
  __shared__ float s[64];
  const int t = threadIdx.x;
  float first = 0;
  for (int k = 0; k < 2; ++k) {
    s[t] = p.in[t] + k;
    __syncthreads();
    if (k == 0) first = s[63 - t];
    if constexpr (!Bug) __syncthreads();
  }
  p.out[t] = first;
}
PLANTED(order_dependence) {   // right when threads run in order
  __shared__ float s[64];
  const int t = threadIdx.x;
  s[t] = p.in[t];
  if constexpr (!Bug) __syncthreads();
  if (t) p.out[64 - t] = s[t - 1];
  if (t == 63) p.out[0] = s[63];
}
PLANTED(divergent_barrier) {
  __shared__ float s[64];
  const int t = threadIdx.x;
  s[t] = p.in[t];
  if (Bug && t < 32) __syncthreads();
  else __syncthreads();
  p.out[t] = s[63 - t];
}
PLANTED(deadlock) {
  __shared__ float s[64];
  const int t = threadIdx.x;
  s[t] = p.in[t];
  if (Bug && t % 32 < 7) __shfl_sync(~0u, t, 0);
  __syncthreads();
  p.out[t] = s[63 - t];
}
// One thread waits for an arrival that never comes, and the others for it: 1: in the cluster, 2: in the warpgroup.
PLANTED(waited_for) {
  __shared__ u64 bar;
  const int t = threadIdx.x;
  if (t == 0) mbar_init(smem_addr(&bar), 1);
  __syncthreads();
  if (t == 0) mbar_wait(smem_addr(&bar), 0);
  else if (Bug == 1) cluster_sync();
  else wgmma_wait<0>();
}
PLANTED(divergent_warp) {
  const int t = threadIdx.x;
  float v = p.in[t];
  if (Bug && t % 2) __syncwarp();
  v = __shfl_xor_sync(~0u, v, 31);
  p.out[t ^ 32] = v;
}
PLANTED(bad_mask) {
  const int t = threadIdx.x;
  p.out[t ^ 32] = __shfl_xor_sync(Bug ? 0xffffu : ~0u, p.in[t], 31);
}
PLANTED(absent_lane) {   // half of the lanes have left
  const int t = threadIdx.x;
  const float v = p.in[t];
  if (Bug && t % 32 >= 16) {
    p.out[t ^ 32] = p.in[t ^ 31];
    return;
  }
  p.out[t ^ 32] = __shfl_xor_sync(~0u, v, 31);
}
PLANTED(misaligned) {
  const int t = threadIdx.x;
  if (t >= 32) return;
  const float2 v = reinterpret_cast<const float2*>(p.in + Bug)[t];
  p.out[63 - 2 * t] = v.x;
  p.out[62 - 2 * t] = v.y;
}
PLANTED(misaligned_primitive) {
  const int t = threadIdx.x;
  if (t >= 16) return;
  const Vec<float, 4> v = ld_stream(reinterpret_cast<const Vec<float, 4>*>(p.in + 2 * Bug) + t);
  for (int i = 0; i < 4; ++i) p.out[63 - 4 * t - i] = v[i];
}
PLANTED(uninitialised_static) {
  __shared__ float s[64];
  const int t = threadIdx.x;
  if (!Bug || t != 5) s[t] = p.in[t];
  __syncthreads();
  p.out[t] = s[63 - t];
}
PLANTED(uninitialised_dynamic) {
  extern __shared__ float s[];
  const int t = threadIdx.x;
  if (!Bug || t != 5) s[t] = p.in[t];
  __syncthreads();
  p.out[t] = s[63 - t];
}
PLANTED(dynamic_overrun) {
  extern __shared__ float s[];
  const int t = threadIdx.x;
  s[t + Bug] = p.in[t];
  __syncthreads();
  p.out[t] = s[63 - t + Bug];
}
PLANTED(static_bounds) {
  __shared__ float s[64];
  const int t = threadIdx.x;
  s[t + Bug] = p.in[t];
  __syncthreads();
  p.out[t] = s[63 - t + Bug];
}
PLANTED(null_pointer) {
  const int t = threadIdx.x;
  const float* in = Bug ? nullptr : p.in;
  p.out[63 - t] = in[t];
}
PLANTED(wild_pointer) {
  const int t = threadIdx.x;
  const float* in = Bug ? reinterpret_cast<const float*>(4096) : p.in;
  p.out[63 - t] = in[t];
}
PLANTED(division) {
  const int t = threadIdx.x;
  const int one = t % (p.n - 64 * Bug) < 64;
  p.out[63 - t] = p.in[t] * one;
}
PLANTED(spin) {
  const int t = threadIdx.x;
  const volatile int stay = Bug;
  while (stay) {
  }
  p.out[63 - t] = p.in[t];
}
PLANTED(stray_read) {   // one element past the end: seen under AddressSanitizer
  const int t = threadIdx.x;
  const float v = p.in[t + Bug];
  p.out[63 - t] = v;
}
PLANTED(missing_copy_wait) {
  __shared__ float s[64];
  const int t = threadIdx.x;
  cp_async<4>(smem_addr(s + t), p.in + t);
  cp_async_commit();
  if constexpr (!Bug) cp_async_wait<0>();
  __syncthreads();
  p.out[t] = s[63 - t];
}
PLANTED(wrong_group_count) {   // waits for all but one group, and reads the last
  __shared__ float s[2][64];
  const int t = threadIdx.x;
  for (int g = 0; g < 2; ++g) {
    cp_async<4>(smem_addr(s[g] + t), p.in + t);
    cp_async_commit();
  }
  cp_async_wait<Bug>();
  __syncthreads();
  p.out[t] = s[1][63 - t];
}

PLANTED(stage_in_use) {   // copies into what others still read: seen where copies land at once
  __shared__ float s[64];
  const int t = threadIdx.x;
  cp_async<4>(smem_addr(s + t), p.in + t);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  float v = s[63 - t];
  if constexpr (!Bug) __syncthreads();
  cp_async<4>(smem_addr(s + t), p.in, 0);
  cp_async_commit();
  if constexpr (Bug) v = s[63 - t];
  __syncthreads();
  cp_async_wait<0>();
  p.out[t] = v + s[t];
}
PLANTED(dependent) {   // Bug 1: reads what the grid before writes and waits then, 2: one thread waits for all
  const int t = threadIdx.x;
  float v = Bug == 1 ? p.in[t] : 0;
  if (Bug != 2 || t == 0) pdl_wait();
  if (Bug != 1) v = p.in[t];
  p.out[63 - t] = v;
}

// Bug 1 to 6: too many bytes announced, too few, wrong parity, one arrival too many, no initialisation, no wait.
// 7 to 9: initialised for no arrival, for more than an mbarrier counts, between two mbarriers. 10: more bytes
// announced than it counts.
PLANTED(transaction) {
  __shared__ alignas(16) float s[64];
  __shared__ u64 bar;
  const int t = threadIdx.x;
  const u32 full = smem_addr(&bar);
  if (t == 0 && Bug != 5) mbar_init(full + (Bug == 9 ? 4 : 0), Bug == 7 ? 0 : Bug == 8 ? 1 << 14 : 1);
  __syncthreads();
  if (t == 0) {
    mbar_arrive_expect_tx(full, Bug == 10 ? 1 << 20 : 256 + (Bug == 1 ? 16 : 0) - (Bug == 2 ? 16 : 0));
    if (Bug == 4) mbar_arrive(full);
    bulk_load(smem_addr(s), p.in, 256, full);
  }
  if (Bug != 6) mbar_wait(full, Bug == 3);
  p.out[t] = s[63 - t];
}
// Bug 1: counts one of three arrivals, so that the phase ends thrice and looks as if it had ended once.
PLANTED(uncounted_arrivals) {
  __shared__ u64 bar;
  const int t = threadIdx.x;
  if (t == 0) mbar_init(smem_addr(&bar), Bug ? 1 : 3);
  __syncthreads();
  if (t < 3) mbar_arrive(smem_addr(&bar));
  __syncthreads();
  mbar_wait(smem_addr(&bar), 0);
  p.out[t] = p.in[63 - t];
}
PLANTED(misaligned_bulk) {
  __shared__ alignas(16) float s[68];
  __shared__ u64 bar;
  const int t = threadIdx.x;
  if (t == 0) {
    mbar_init(smem_addr(&bar), 1);
    mbar_arrive_expect_tx(smem_addr(&bar), 256);
    bulk_load(smem_addr(s + Bug), p.in, 256, smem_addr(&bar));
  }
  __syncthreads();
  mbar_wait(smem_addr(&bar), 0);
  p.out[t] = s[63 - t];
}
PLANTED(missing_store_wait) {   // shared memory is written again while the store still reads it
  __shared__ alignas(16) float s[64];
  const int t = threadIdx.x;
  s[63 - t] = p.in[t];
  fence_async();
  __syncthreads();
  if (t) return;
  bulk_store(p.out, smem_addr(s), 256);
  bulk_commit();
  if constexpr (!Bug) bulk_wait_read<0>();
  for (int i = 0; i < 64; ++i) s[i] = -1;
}
PLANTED(missing_wgmma_wait) {
  __shared__ alignas(1024) u32 s[4096];
  const int t = threadIdx.x;
  for (int i = t; i < 4096; i += 128) s[i] = 0;
  fence_async();
  __syncthreads();
  float d[4] = {7, 7, 7, 7};
  const u64 zero = wgmma_desc(smem_addr(s), 16, 1024, Swizzle::b128);
  wgmma_fence();
  wgmma_f16<8>(d, zero, zero, false);
  wgmma_commit();
  if constexpr (!Bug) wgmma_wait<0>();
  if (t < 64) p.out[t] = p.in[63 - t] + d[t % 4];
  wgmma_wait<0>();
}
// Bug 1: a thread issues no second wgmma, 2: the second group is not waited for, 3: a thread issues nothing.
PLANTED(two_warpgroups) {
  __shared__ alignas(1024) u32 s[3072];   // 64 rows of ones, 8 columns of ones, 8 columns of twos
  const int t = threadIdx.x, group = t / 128, rank = int(cluster_rank());
  for (int i = t; i < 3072; i += 256) s[i] = i < 2304 ? 0x3c003c00u : 0x40004000u;
  fence_async();
  __syncthreads();
  float d[4] = {7, 7, 7, 7}, e[4] = {7, 7, 7, 7};
  const u64 a = wgmma_desc(smem_addr(s), 16, 1024, Swizzle::b128);
  const u64 b = wgmma_desc(smem_addr(s + 2048 + 256 * (group ^ rank)), 16, 1024, Swizzle::b128);
  wgmma_fence();
  if (Bug != 3 || t != 128) {
    wgmma_f16<8>(d, a, b, false);
    wgmma_commit();
    if (Bug != 1 || t != 255) wgmma_f16<8>(e, a, b, false);
    wgmma_commit();
  }
  wgmma_wait<1>();
  const float first = d[t % 4];
  wgmma_wait<Bug == 2>();
  const float both = first + e[t % 4];   // 16 + 16, or 32 + 32
  if (t % 128 < 16) {
    const int at = 32 * rank + 16 * group + t % 128;
    p.out[63 - at] = p.in[at] + both - 32 * (1 + (group ^ rank));
  }
  wgmma_wait<0>();
  cluster_sync();
}
PLANTED(missing_cluster_barrier) {
  __shared__ float s[32];
  const u32 t = threadIdx.x, first = blockIdx.x * 32;
  cluster_sync();
  st_cluster(mapa(smem_addr(s + 31 - t), Bug == 2 ? 2 : cluster_rank() ^ 1), p.in[first + t]);
  if constexpr (!Bug) cluster_sync();
  p.out[first + t] = s[t];
}
PLANTED(exited_block) {   // reads the memory of a block that has left
  __shared__ float s[32];
  const u32 t = threadIdx.x, rank = cluster_rank();
  s[t] = p.in[32 * rank + t];
  cluster_sync();
  if (!Bug || rank == 1) {
    for (int i = 0; i < 2 && rank; ++i) __syncthreads();
    p.out[32 * rank + t] = ld_cluster<float>(mapa(smem_addr(s + 31 - t), rank ^ 1));
  }
  if constexpr (!Bug) cluster_sync();
}
PLANTED(grid_barrier) {   // two blocks meet: right only where both are resident
  __shared__ float s[32];
  const int t = threadIdx.x, first = blockIdx.x * 32;
  s[t] = p.in[first + t];
  p.out[first + t] = s[t];
  __syncthreads();
  u32* count = reinterpret_cast<u32*>(p.out + 64);
  if (t == 0) {
    add_acq_rel(count, 1);
    while (ld_acquire(count) < 2) {
    }
  }
  __syncthreads();
  const float v = p.out[63 - first - t];
  __syncthreads();
  if (t == 0) {
    add_acq_rel(count, 1);
    while (ld_acquire(count) < 4) {
    }
  }
  __syncthreads();
  p.out[first + t] = v;
}

// ---- without a bug: what the tests count -----------------------------------------------------------------
__global__ void atomics(Args p) {   // 64 threads add 1 to numbers of several types; a lock guards the last
  double* d = reinterpret_cast<double*>(p.out + 2);
  atomicAdd(p.out, 1.0f);
  atomicAdd(reinterpret_cast<__half2*>(p.out + 1), __floats2half2_rn(1.0f, 2.0f));
  atomicAdd(d, 0.5);
  atomicMax(reinterpret_cast<int*>(p.out + 4), int(threadIdx.x * 37 % 64));
  int* lock = reinterpret_cast<int*>(p.out + 5);
  bool done = false;
  while (!done) {
    if (atomicCAS(lock, 0, 1) == 0) {
      const float v = p.out[6];
      __nanosleep(10);
      p.out[6] = v + 1;
      atomicExch(lock, 0);
      done = true;
    }
  }
}
// The order in which blocks run.
__global__ void block_order(Args p) {
  unsigned* count = reinterpret_cast<unsigned*>(p.out + 63);
  p.out[atomicAdd(count, 1u)] = blockIdx.x;
}
// Shared loads at stride n words by one warp.
__global__ void strided(Args p) {
  __shared__ float s[32 * 33];
  s[threadIdx.x] = 1;
  __syncthreads();
  p.out[threadIdx.x] = s[threadIdx.x * p.n % (32 * 33)];
}
// 16-byte loads: lane i reads element i * n.
__global__ void strided_wide(Args p) {
  __shared__ float4 s[256];
  p.out[threadIdx.x] = 0;
  const float4 v = s[threadIdx.x * p.n % 256];
  p.out[threadIdx.x] = v.x + v.w;
}
// A swizzled and a plain tile for ldmatrix, rows of 128 bytes.
__global__ void matrix_rows(Args p) {
  __shared__ alignas(1024) u8 s[4096];
  u32 r[4], at = threadIdx.x % 32 * 128;
  if (p.n) at = swizzle<Swizzle::b128>(at);
  ldmatrix_x4(r, smem_addr(s) + at);
  p.out[threadIdx.x] = __uint_as_float(r[0]);
}
