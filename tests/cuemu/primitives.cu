// One small kernel for each primitive: the same file runs on a GPU and on the CPU, and the outputs must be equal.
// The table of inputs and expected outputs is cases.py.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx.cuh"
#include "ptx_f64.cuh"
#include "ptx_float8.cuh"
#include "ptx_peers.cuh"
#include "ptx_wgmma.cuh"

using namespace ptx;

struct alignas(64) Args {
  TensorMap map[2];
  const void* in[4];
  void* out[2];
  int n[4];
};
#define IN(T, i) static_cast<const T*>(p.in[i])
#define OUT(T, i) static_cast<T*>(p.out[i])

// ---- sm_80 ---------------------------------------------------------------------------------------------
__global__ void loads(const __grid_constant__ Args p) {
  const int t = threadIdx.x;
  const uint4* in = IN(uint4, 0) + t;
  const u64 policy = t % 2 ? policy_evict_first() : policy_evict_last();
  const uint4 v[5] = {ld_nc(in), ld_cs(in), ld_stream(in), ld_stream_256(in), ld_hint(in, policy)};
  for (int i = 0; i < 5; ++i) st_stream(OUT(uint4, 0) + i * 32 + t, v[i]);
  const uint2 two = ld_stream(IN(uint2, 0) + t);
  st_stream(OUT(uint2, 1) + t, two);
  prefetch_l2(IN(uint4, 0) + t);
  const u32 narrow = ld_nc(IN(u32, 0) + t) + 3 * ld_cs(IN(u16, 0) + t) + 5 * ld_nc(IN(u8, 0) + t);
  st_stream(OUT(u32, 1) + 64 + t, narrow);
  Vec<__half, 8> h = ld_nc(reinterpret_cast<const Vec<__half, 8>*>(p.in[0]) + t);
  OUT(u32, 1)[96 + t] = __half_as_ushort(h[t % 8]);
}

__global__ void loads_if(const __grid_constant__ Args p) {  // every size, wanted by odd threads only
  const int t = threadIdx.x;
  const bool odd = t % 2;
  st_stream(OUT(uint4, 0) + t, ld_cs_if(IN(uint4, 0) + t, odd));
  st_stream(OUT(uint4, 0) + 32 + t, ld_nc_if(IN(uint4, 0) + t, odd));
  const uint4* pinned = IN(uint4, 0) + t;
  pin(pinned);
  st_stream(OUT(uint4, 0) + 64 + t, ld_if(pinned, odd));
  st_stream(OUT(uint4, 0) + 96 + t, ld_cs_128_if(IN(uint4, 0) + t, odd));
  st_stream(OUT(uint2, 1) + t, ld_cs_if(IN(uint2, 0) + t, odd));
  const u32 narrow = ld_nc_if(IN(u32, 0) + t, odd) + 3 * ld_cs_if(IN(u16, 0) + t, odd) + 5 * ld_nc_if(IN(u8, 0) + t, odd);
  st_stream(OUT(u32, 1) + 64 + t, narrow);
}

__global__ void flags(const __grid_constant__ Args p) {   // every block adds; the last one publishes the sum
  if (threadIdx.x) return;
  u32* sum = OUT(u32, 0);
  atomicAdd(sum, IN(u32, 0)[blockIdx.x]);
  __threadfence();
  if (add_acq_rel(sum + 1, 1) == gridDim.x - 1) st_release(sum + 2, ld_acquire(sum));
}

// Words that others see whole, and a clock that does not run backwards.
__global__ void words(const __grid_constant__ Args p) {
  const int t = threadIdx.x;
  const u64 began = global_timer();
  st_relaxed_sys(OUT(u64, 0) + t, ld_relaxed_sys(IN(u64, 0) + 31 - t) + 1);
  add_relaxed(OUT(u64, 1), IN(u64, 0)[t] + (global_timer() >= began));
}

__global__ void copies(const __grid_constant__ Args p) {
  __shared__ alignas(16) u8 s[3][32][16];
  const int t = threadIdx.x;
  for (int i = 0; i < 16; ++i) s[0][t][i] = s[1][t][i] = s[2][t][i] = 1;
  __syncwarp();
  cp_async<16>(smem_addr(s[0][t]), IN(u8, 0) + 16 * t, t % 17);
  cp_async_commit();
  cp_async<8>(smem_addr(s[1][t]), IN(u8, 0) + 8 * t);
  cp_async<4>(smem_addr(s[2][t]), IN(u8, 0) + 4 * t, t % 2 ? 4 : 0);
  cp_async_commit();
  cp_async_wait<1>();
  OUT(uint4, 0)[t] = *reinterpret_cast<uint4*>(s[0][t]);
  cp_async_wait<0>();
  OUT(uint4, 0)[32 + t] = *reinterpret_cast<uint4*>(s[1][t]);
  OUT(uint4, 0)[64 + t] = *reinterpret_cast<uint4*>(s[2][t]);
}

__global__ void named_barriers(const __grid_constant__ Args p) {   // warps 2, 3 consume what warps 0, 1 produce
  __shared__ u32 s[64];
  const int t = threadIdx.x;
  if (t < 64) {
    s[t] = IN(u32, 0)[t];
    named_arrive(3, 128);
  } else {
    named_sync(3, 128);
    OUT(u32, 0)[t - 64] = s[127 - t];
  }
}

__global__ void matrices(const __grid_constant__ Args p) {
  __shared__ alignas(16) uint4 s[32];
  const int t = threadIdx.x;
  s[t] = IN(uint4, 0)[t];
  __syncwarp();
  const u32 row = smem_addr(s + (t * 5) % 32);   // rows in another order than they lie
  u32 r[15];
  ldmatrix_x1(reinterpret_cast<u32(&)[1]>(r[0]), row);
  ldmatrix_x2(reinterpret_cast<u32(&)[2]>(r[1]), row);
  ldmatrix_x4(reinterpret_cast<u32(&)[4]>(r[3]), row);
  ldmatrix_x1_trans(reinterpret_cast<u32(&)[1]>(r[7]), row);
  ldmatrix_x2_trans(reinterpret_cast<u32(&)[2]>(r[8]), row);
  ldmatrix_x4_trans(reinterpret_cast<u32(&)[4]>(r[10]), row);
  r[14] = movmatrix_trans(r[4]);
  for (int i = 0; i < 15; ++i) OUT(u32, 0)[i * 32 + t] = r[i];
}

#if defined(CUEMU) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
__global__ void shared_floats(const __grid_constant__ Args p) {   // pairs in one order, single ones in another
  __shared__ alignas(8) float s[64];
  const int t = threadIdx.x;
  const float2 v = {IN(float, 0)[2 * t], IN(float, 0)[2 * t + 1]};
  st_shared(smem_addr(s + 2 * (t * 7 % 32)), v);
  __syncwarp();
  OUT(float, 0)[t] = ld_shared(smem_addr(s + t));
  OUT(float, 0)[32 + t] = ld_shared(smem_addr(s + 32 + t));
}

__global__ void signals(const __grid_constant__ Args p) {   // each of two blocks waits for both
  __shared__ u64 bar;
  const u32 t = threadIdx.x, done = smem_addr(&bar);
  if (t == 0) {
    mbar_init(done, 2);
    mbar_fence_init();
  }
  __syncwarp();
  cluster_sync();
  if (t < 2) mbar_signal_remote(done, t);
  mbar_wait_cluster(done, 0);
  cluster_arrive_relaxed();
  cluster_wait();
  OUT(u32, 0)[blockIdx.x * 32 + t] = t + 1;
  cluster_sync();
}

__global__ void matrices_back(const __grid_constant__ Args p) {
  __shared__ alignas(16) uint4 s[32];
  const int t = threadIdx.x;
  u32 r[4];
  for (int i = 0; i < 4; ++i) r[i] = IN(u32, 0)[i * 32 + t];
  stmatrix_x4(smem_addr(s + (t * 5) % 32), r);   // rows in another order than they lie
  __syncwarp();
  OUT(uint4, 0)[t] = s[t];
  const u32 two[2] = {r[0], r[1]};
  __syncwarp();
  stmatrix_x2(smem_addr(s + t % 16), two);
  stmatrix_x2_trans(smem_addr(s + 16 + t % 16), two);
  __syncwarp();
  OUT(uint4, 0)[32 + t] = s[t];
}
#endif

#define MMA_KERNEL(name, D)                                              \
  __global__ void k_##name(const __grid_constant__ Args p) {             \
    const int t = threadIdx.x;                                           \
    u32 a[4], b[2];                                                      \
    D d[4];                                                              \
    for (int i = 0; i < 4; ++i) a[i] = IN(u32, 0)[4 * t + i];            \
    for (int i = 0; i < 2; ++i) b[i] = IN(u32, 1)[2 * t + i];            \
    for (int i = 0; i < 4; ++i) d[i] = IN(D, 2)[4 * t + i];              \
    name(d, a, b);                                                       \
    for (int i = 0; i < 4; ++i) OUT(D, 0)[4 * t + i] = d[i];             \
  }
MMA_KERNEL(mma_f16, float)
MMA_KERNEL(mma_bf16, float)
MMA_KERNEL(mma_tf32, float)
MMA_KERNEL(mma_s8, int)
MMA_KERNEL(mma_u8, int)
MMA_KERNEL(mma_u8s8, int)
#if defined(CUEMU) || __CUDA_ARCH__ >= 890
MMA_KERNEL(mma_e4m3, float)
#endif

__global__ void k_mma_f64(const __grid_constant__ Args p) {
  const int t = threadIdx.x;
  double d[2] = {IN(double, 2)[2 * t], IN(double, 2)[2 * t + 1]};
  mma_f64(d, IN(double, 0)[t], IN(double, 1)[t]);
  OUT(double, 0)[2 * t] = d[0];
  OUT(double, 0)[2 * t + 1] = d[1];
}

__global__ void k_mma_f64_k8(const __grid_constant__ Args p) {
  const int t = threadIdx.x;
  double a[4], b[2], d[4];
  for (int i = 0; i < 4; ++i) a[i] = IN(double, 0)[4 * t + i], d[i] = IN(double, 2)[4 * t + i];
  for (int i = 0; i < 2; ++i) b[i] = IN(double, 1)[2 * t + i];
  mma_f64_k8(d, a, b);
  for (int i = 0; i < 4; ++i) OUT(double, 0)[4 * t + i] = d[i];
}

__global__ void arithmetic(const __grid_constant__ Args p) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  const u32 a = IN(u32, 0)[3 * t], b = IN(u32, 0)[3 * t + 1], c = IN(u32, 0)[3 * t + 2];
  u32* o = OUT(u32, 0) + 12 * t;
  o[0] = lop3<0xea>(a, b, c);
  o[1] = lop3<0x96>(a, b, c);
  o[2] = lop3<0x1b>(a, b, c);
  o[3] = u32(dp4a(int(a), int(b), int(c)));
  o[4] = dp4a_u8(a, b, c);
  o[5] = u32(dp4a_u8s8(a, int(b), int(c)));
  o[6] = __byte_perm(a, b, c & 0x7777);
  o[7] = to_tf32(IN(float, 1)[t]);
  o[8] = sub_f16x2(IN(u32, 2)[t], IN(u32, 3)[t]);
  o[9] = fma_f16x2(IN(u32, 2)[t], IN(u32, 3)[t], IN(u32, 2)[t]);
  o[10] = __funnelshift_r(a, b, c & 31);
  o[11] = u32(__popc(a) + 100 * __clz(int(b)) + 10000 * __ffs(int(c)));
}

__global__ void conversions(const __grid_constant__ Args p) {
  const int t = threadIdx.x;
  const u32 q = IN(u32, 0)[t];
  u32 four[4], two[2];
  u32* o = OUT(u32, 0) + 12 * t;
  u4x8_to_f16(q, four);
  for (int i = 0; i < 4; ++i) o[i] = four[i];
  u4x8_to_bf16(q, four);
  for (int i = 0; i < 4; ++i) o[4 + i] = four[i];
  u8x4_to_f16(q, two);
  for (int i = 0; i < 2; ++i) o[8 + i] = two[i];
  s8x4_to_f16(q, two);
  for (int i = 0; i < 2; ++i) o[10 + i] = two[i];
}

__global__ void float8(const __grid_constant__ Args p) {
  const u32 q = IN(u32, 0)[threadIdx.x];
  u32* o = OUT(u32, 0) + 4 * threadIdx.x;
  u32 two[2];
  e4m3x4_to_f16(q, two);
  for (int i = 0; i < 2; ++i) o[i] = two[i];
  e5m2x4_to_f16(q, two);
  for (int i = 0; i < 2; ++i) o[2 + i] = two[i];
}

__global__ void warp_intrinsics(const __grid_constant__ Args p) {
  const int t = threadIdx.x;
  const u32 v = IN(u32, 0)[t];
  u32* o = OUT(u32, 0) + 12 * t;
  o[0] = __shfl_sync(~0u, v, t * 7, 16);
  o[1] = __shfl_up_sync(~0u, v, 3, 8);
  o[2] = __shfl_down_sync(~0u, v, 5, 16);
  o[3] = __shfl_xor_sync(~0u, v, 9, 16);
  o[4] = __shfl_xor_sync(~0u, v, 17);
  o[5] = __ballot_sync(~0u, v & 1);
  o[6] = u32(__any_sync(~0u, v == 7) + 2 * __all_sync(~0u, v != 7));
  o[7] = __match_any_sync(~0u, v & 3);
  o[8] = __reduce_add_sync(~0u, v);
  o[9] = u32(__reduce_min_sync(~0u, int(v)));
  o[10] = __reduce_max_sync(~0u, v) ^ __reduce_xor_sync(~0u, v);
  o[11] = t < 16 ? __shfl_down_sync(0xffffu, v, 8, 16) : 0;
}

// ---- sm_90 ---------------------------------------------------------------------------------------------
#if defined(CUEMU) || __CUDA_ARCH__ >= 900
// Each block writes into the next and reads from the one before.
__global__ void clusters(const __grid_constant__ Args p) {
  __shared__ alignas(16) u32 s[64], wide[32], pairs[32];
  const u32 t = threadIdx.x, rank = cluster_rank(), size = cluster_size();
  pdl_wait();
  s[32 + t] = IN(u32, 0)[blockIdx.x * 32 + t];
  cluster_sync();
  const u32 next = (rank + 1) % size, last = (rank + size - 1) % size, own = rank;
  st_cluster(mapa(smem_addr(s + t), next), IN(u32, 0)[blockIdx.x * 32 + t]);
  const u32 v = ld_cluster<u32>(mapa(smem_addr(s + 32 + t), last));
  if (t < 8) st_cluster(mapa(smem_addr(wide + 4 * t), own), ld_cluster<uint4>(mapa(smem_addr(s + 32 + 4 * t), last)));
  if (t < 16) st_cluster(mapa(smem_addr(pairs + 2 * t), own), ld_cluster<uint2>(mapa(smem_addr(s + 32 + 2 * t), last)));
  __syncwarp();
  cluster_sync();
  OUT(u32, 0)[blockIdx.x * 32 + t] = v == wide[t] && v == pairs[t] ? v ^ (rank << 24) : 0;
  OUT(u32, 1)[blockIdx.x * 32 + t] = s[t];
  pdl_launch_dependents();
}

__global__ void bulk(const __grid_constant__ Args p) {
  extern __shared__ __align__(128) u8 s[];
  __shared__ u64 bar[2];
  const u32 t = threadIdx.x, full = smem_addr(bar), empty = smem_addr(bar + 1), bytes = p.n[0], rounds = p.n[1];
  if (t == 0) {
    mbar_init(full, 1);
    mbar_init(empty, 32);
    mbar_fence_init();
  }
  __syncwarp();
  for (u32 k = 0; k < rounds; ++k) {
    if (t == 0) {
      mbar_wait(empty, k % 2 ^ 1);
      mbar_expect_tx(full, bytes);
      mbar_arrive_expect_tx(full, bytes);
      bulk_load(smem_addr(s), IN(u8, 0) + k * bytes, bytes, full);
      bulk_load_hint(smem_addr(s) + bytes, IN(u8, 1) + k * bytes, bytes, full, policy_evict_first());
    }
    __syncwarp();
    mbar_wait(full, k % 2);
    for (u32 i = t; i < 2 * bytes; i += 32) OUT(u8, 0)[k * 2 * bytes + i] = s[i] + u8(k);
    mbar_arrive(empty);
  }
  __syncwarp();
  for (u32 i = t; i < bytes; i += 32) s[i] = u8(i * 3);
  fence_async();
  __syncwarp();
  if (t == 0) {
    bulk_store(OUT(u8, 1), smem_addr(s), bytes);
    bulk_commit();
    bulk_wait<0>();
  }
}

__global__ void multicast(const __grid_constant__ Args p) {   // each of two blocks sends a half to both
  extern __shared__ __align__(1024) u8 s[];
  __shared__ u64 bar[2];
  const u32 t = threadIdx.x, rank = cluster_rank(), full = smem_addr(bar), done = smem_addr(bar + 1), bytes = p.n[0];
  if (t == 0) {
    mbar_init(full, 1);
    mbar_init(done, 2);
    mbar_fence_init();
  }
  __syncwarp();
  cluster_sync();
  if (t == 0) {
    mbar_arrive_expect_tx(full, 2 * bytes + 4 * 1024);
    bulk_load_multicast(smem_addr(s) + 4096 + rank * bytes, IN(u8, 0) + rank * bytes, bytes, full, 3);
    tma_load_2d_multicast(smem_addr(s) + rank * 1024, &p.map[0], full, 0, int(rank) * 8, 3);
    tma_load_3d_multicast(smem_addr(s) + 2048 + rank * 1024, &p.map[1], full, 0, 0, int(rank), 3);
  }
  mbar_wait_cluster(full, 0);
  for (u32 i = t; i < 4096 + 2 * bytes; i += 32) OUT(u8, 0)[blockIdx.x * (4096 + 2 * bytes) + i] = s[i];
  __syncwarp();
  if (t < 2) mbar_arrive_remote(done, t);
  mbar_wait_cluster(done, 0);
  __syncwarp();
  cluster_sync();
}

template <int RANK>
__global__ void tensor(const __grid_constant__ Args p) {   // a box from map 0, dumped as it lies, and stored by map 1:
                                                           // where it lay, or at 0 where it began before the tensor
  extern __shared__ __align__(1024) u8 s[];
  __shared__ u64 bar;
  const u32 t = threadIdx.x, full = smem_addr(&bar), bytes = p.n[0];
  if (t == 0) {
    prefetch_map(&p.map[0]);
    mbar_init(full, 1);
    mbar_fence_init();
    mbar_arrive_expect_tx(full, bytes);
    if (RANK == 2 && p.n[1] > 0) tma_load_2d(smem_addr(s), &p.map[0], full, p.n[1], p.n[2]);
    else if (RANK == 2) tma_load_2d_hint(smem_addr(s), &p.map[0], full, p.n[1], p.n[2], policy_evict_last());
    else tma_load_3d(smem_addr(s), &p.map[0], full, p.n[1], p.n[2], p.n[3]);
  }
  __syncwarp();
  mbar_wait(full, 0);
  for (u32 i = t; i < bytes; i += 32) OUT(u8, 0)[i] = s[i];
  __syncwarp();
  if (t == 0) {
    const int c0 = max(p.n[1], 0), c1 = max(p.n[2], 0);
    if constexpr (RANK == 2) tma_store_2d(&p.map[1], smem_addr(s), c0, c1);
    else tma_store_3d(&p.map[1], smem_addr(s), c0, c1, max(p.n[3], 0));
    bulk_commit();
    bulk_wait_read<0>();
  }
}
#endif

// ---- sm_90a --------------------------------------------------------------------------------------------
#if defined(CUEMU) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
enum { kF16, kBf16, kTf32, kE4m3, kE5m2, kE4m3E5m2, kE5m2E4m3, kF16Ra, kBf16Ra, kS8, kU8, kS8U8, kU8S8 };
template <bool INTEGER>
struct Sum { using type = float; };
template <>
struct Sum<true> { using type = int; };

// in[0], in[1]: a and b as they lie in shared memory; n: bytes of a, steps, descriptor advance of a and of b.
template <int KIND, int N, int LAYOUT, int LEAD_A, int STRIDE_A, int LEAD_B, int STRIDE_B, int TRANS_A, int TRANS_B>
__global__ void __launch_bounds__(128) warpgroup(const __grid_constant__ Args p) {
  extern __shared__ __align__(1024) u8 s[];
  using D = typename Sum<(KIND >= kS8)>::type;
  const int t = threadIdx.x, bytes = p.n[0];
  for (int i = t; i < bytes / 4; i += 128) reinterpret_cast<u32*>(s)[i] = IN(u32, 0)[i];
  const u32 b_at = (bytes + 1023) / 1024 * 1024;
  for (int i = t; i < (p.n[1] >> 8) / 4; i += 128) reinterpret_cast<u32*>(s + b_at)[i] = IN(u32, 1)[i];
  fence_async();
  __syncthreads();
  const u64 a = wgmma_desc(smem_addr(s), LEAD_A, STRIDE_A, Swizzle(LAYOUT));
  const u64 b = wgmma_desc(smem_addr(s) + b_at, LEAD_B, STRIDE_B, Swizzle(LAYOUT));
  D d[N / 2];
  for (int i = 0; i < N / 2; ++i) d[i] = D(77);   // must not count: the first step does not accumulate
  wgmma_fence();
#pragma unroll 1
  for (int k = 0; k < (p.n[1] & 255); ++k) {
    const u64 ak = a + u64(k * p.n[2]), bk = b + u64(k * p.n[3]);
    u32 r[4];
    if constexpr (KIND == kF16Ra || KIND == kBf16Ra)
      for (int i = 0; i < 4; ++i) r[i] = IN(u32, 0)[(k * 128 + t) * 4 + i];
    wgmma_fence();
    if constexpr (KIND == kF16) wgmma_f16<N, TRANS_A, TRANS_B>(d, ak, bk, k > 0);
    if constexpr (KIND == kBf16) wgmma_bf16<N, TRANS_A, TRANS_B>(d, ak, bk, k > 0);
    if constexpr (KIND == kTf32) wgmma_tf32<N>(d, ak, bk, k > 0);
    if constexpr (KIND == kE4m3) wgmma_e4m3<N>(d, ak, bk, k > 0);
    if constexpr (KIND == kE5m2) wgmma_e5m2<N>(d, ak, bk, k > 0);
    if constexpr (KIND == kE4m3E5m2) wgmma_e4m3e5m2<N>(d, ak, bk, k > 0);
    if constexpr (KIND == kE5m2E4m3) wgmma_e5m2e4m3<N>(d, ak, bk, k > 0);
    if constexpr (KIND == kS8U8) wgmma_s8u8<N>(d, ak, bk, k > 0);
    if constexpr (KIND == kU8S8) wgmma_u8s8<N>(d, ak, bk, k > 0);
    if constexpr (KIND == kS8) wgmma_s8<N>(d, ak, bk, k > 0);
    if constexpr (KIND == kU8) wgmma_u8<N>(d, ak, bk, k > 0);
    if constexpr (KIND == kF16Ra) wgmma_f16_ra<N, TRANS_B>(d, r, bk, k > 0);
    if constexpr (KIND == kBf16Ra) wgmma_bf16_ra<N, TRANS_B>(d, r, bk, k > 0);
    wgmma_commit();
    wgmma_wait<0>();
  }
  for (int i = 0; i < N / 2; ++i) OUT(D, 0)[t * (N / 2) + i] = d[i];
}

// One warpgroup gives registers to two others: 168 at the start, 40 + 2 x 232 after.
__global__ void __launch_bounds__(384, 1) registers(const __grid_constant__ Args p) {
  if (threadIdx.x < 128) {
    reg_dealloc<40>();
    OUT(u32, 0)[threadIdx.x] = IN(u32, 0)[threadIdx.x] + 1;
  } else {
    reg_alloc<232>();
    OUT(u32, 0)[threadIdx.x] = IN(u32, 0)[threadIdx.x] + 2;
  }
}
#endif
