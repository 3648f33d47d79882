// What a device can do at most: reading, copying, multiply-adds, tensor cores. The results are not
// used; each kernel ends in a store that never happens, so that the compiler keeps the work.
#include <cuda_bf16.h>

#include "ptx.cuh"
#include "ptx_wgmma.cuh"

// a: what is read; b: what is written; count: 16-byte vectors of a, or steps of a loop.
struct CeilingArgs {
  const void* a;
  void* b;
  long long count;
};
typedef long long i64;
typedef ptx::Vec<unsigned, 4> Vector;

// Each thread follows STREAMS streams through the array and has UNROLL loads of each under way.
template <int STREAMS, int UNROLL>
__global__ void __launch_bounds__(256) read_streams(const CeilingArgs p) {
  const i64 length = p.count / STREAMS, step = (i64)gridDim.x * 256 * UNROLL;
  const Vector* a = (const Vector*)p.a;
  unsigned seen = 0;
  for (i64 i = (i64)blockIdx.x * 256 * UNROLL + threadIdx.x; i < length; i += step) {
    Vector v[STREAMS][UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
#pragma unroll
      for (int s = 0; s < STREAMS; ++s) v[s][u] = ptx::ld_cs(a + s * length + i + u * 256);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
#pragma unroll
      for (int s = 0; s < STREAMS; ++s) seen ^= v[s][u][0] ^ v[s][u][1] ^ v[s][u][2] ^ v[s][u][3];
  }
  if (seen == 0x9e3779b9 && p.count < 0) *(unsigned*)p.b = seen;
}

template <int UNROLL>
__global__ void __launch_bounds__(256) copy_vectors(const CeilingArgs p) {
  const i64 step = (i64)gridDim.x * 256 * UNROLL;
  const Vector* a = (const Vector*)p.a;
  Vector* b = (Vector*)p.b;
  for (i64 i = (i64)blockIdx.x * 256 * UNROLL + threadIdx.x; i < p.count; i += step) {
    Vector v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) v[u] = ptx::ld_cs(a + i + u * 256);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) ptx::st_stream(b + i + u * 256, v[u]);
  }
}

// CHAINS independent sums a thread: 2 CHAINS operations a step.
template <class T, int CHAINS>
__global__ void __launch_bounds__(256) multiply_add(const CeilingArgs p) {
  T sum[CHAINS];
  const T v = ((const T*)p.a)[threadIdx.x], y = ((const T*)p.a)[threadIdx.x + 256];
  const T x = v / (1 + fabs(v));  // below one, or the sums would end as infinities
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) sum[c] = x + (T)c;
#pragma unroll 8
  for (int i = 0; i < (int)p.count; ++i)
#pragma unroll
    for (int c = 0; c < CHAINS; ++c) sum[c] = fma(sum[c], x, y);
  T total = 0;
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) total += sum[c];
  if (p.count < 0) ((T*)p.b)[threadIdx.x] = total;
}

// CHAINS independent 16 x 8 sums a warp over k = 16: 4096 CHAINS operations a step.
template <int CHAINS>
__global__ void __launch_bounds__(256) tensor_warp(const CeilingArgs p) {
  const unsigned* data = (const unsigned*)p.a;
  unsigned a[CHAINS][4], b[CHAINS][2];
  float sum[CHAINS][4] = {};
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[c][i] = data[(c * 6 + i) * 256 + threadIdx.x];
#pragma unroll
    for (int i = 0; i < 2; ++i) b[c][i] = data[(c * 6 + 4 + i) * 256 + threadIdx.x];
  }
  for (int i = 0; i < (int)p.count; ++i)
#pragma unroll
    for (int c = 0; c < CHAINS; ++c) ptx::mma_bf16(sum[c], a[c], b[c]);
  float total = 0;
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) total += sum[c][0] + sum[c][1] + sum[c][2] + sum[c][3];
  if (p.count < 0) ((float*)p.b)[threadIdx.x] = total;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Two warpgroups, each a 64 x 256 sum, over STAGES tiles of 64 in k that lie in shared memory:
// 2 * 128 * 256 * 64 * STAGES operations a step.
template <int STAGES>
__global__ void __launch_bounds__(256) tensor_warpgroup(const CeilingArgs p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  constexpr int kTileA = 64 * 128, kTileB = 256 * 128, kStage = 2 * kTileA + kTileB;
  for (int i = threadIdx.x; i < STAGES * kStage / 16; i += 256)
    ((Vector*)smem)[i] = ((const Vector*)p.a)[i];
  ptx::fence_async();
  __syncthreads();
  const unsigned base = ptx::smem_addr(smem), half = threadIdx.x / 128;
  float sum[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) sum[i] = 0;
  for (int i = 0; i < (int)p.count; ++i) {
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
      const unsigned at = base + s * kStage;
      const auto a = ptx::wgmma_desc(at + half * kTileA, 16, 1024, ptx::Swizzle::b128);
      const auto b = ptx::wgmma_desc(at + 2 * kTileA, 16, 1024, ptx::Swizzle::b128);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) ptx::wgmma_bf16<256>(sum, a + 2 * k, b + 2 * k, true);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
    }
  }
  ptx::wgmma_wait<0>();
  float total = 0;
#pragma unroll
  for (int i = 0; i < 128; ++i) total += sum[i];
  if (p.count < 0) ((float*)p.b)[threadIdx.x] = total;
}
#endif
