// Operands of measurements, made and judged where they lie: normal numbers, and plain double sums.
#include "args.cuh"

struct FillArgs {
  void* data;
  i64 count;
  u64 seed;
};

// A bijection of 64-bit integers whose outputs pass for random (Stafford's variant 13 of the
// MurmurHash3 finalizer, as in splitmix64).
__device__ __forceinline__ u64 mixed(u64 z) {
  z += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// Normal numbers by Box and Muller; doubles get a full random mantissa.
template <class T>
__global__ void __launch_bounds__(256) fill_normal(const FillArgs p) {
  const i64 step = (i64)gridDim.x * 256;
  for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < p.count; i += step) {
    const u64 bits = mixed(p.seed + (u64)i);
    const float u = ((float)(unsigned)(bits >> 40) + 0.5f) * 0x1p-24f;
    const float angle = (float)(unsigned)(bits & 0xffffff) * (0x1p-24f * 6.2831853f);
    const float normal = sqrtf(-2.0f * logf(u)) * cosf(angle);
    if constexpr (sizeof(T) == 8)
      ((T*)p.data)[i] = (double)normal * (1.0 + 0x1p-24 * ((double)(mixed(bits) >> 11) * 0x1p-53));
    else
      ((T*)p.data)[i] = narrow<T>(normal);
  }
}

// Uniform numbers in [0, 1), as far as T tells them apart.
template <class T>
__global__ void __launch_bounds__(256) fill_uniform(const FillArgs p) {
  const i64 step = (i64)gridDim.x * 256;
  for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < p.count; i += step)
    ((T*)p.data)[i] = narrow<T>((float)(unsigned)(mixed(p.seed + (u64)i) >> 40) * 0x1p-24f);
}

// y[i] and work[i]: the double sums of a x and of |a| |x| over row i, one warp a row.
template <class TA, class TX>
__global__ void __launch_bounds__(256) reference_rows(const GemvArgs p) {
  const i64 row = (i64)blockIdx.x * 8 + threadIdx.x / 32;
  if (row >= p.m) return;
  const TA* a = (const TA*)p.a + row * p.a_row;
  const TX* x = (const TX*)p.x;
  double sum = 0, size = 0;
  for (i64 j = threadIdx.x % 32; j < p.n; j += 32) {
    const double product = wide<double>(a[j * p.a_col]) * wide<double>(x[j * p.x_step]);
    sum += product;
    size += fabs(product);
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    sum += __shfl_xor_sync(~0u, sum, o);
    size += __shfl_xor_sync(~0u, size, o);
  }
  if (threadIdx.x % 32 == 0) {
    ((double*)p.y)[row] = sum;
    ((double*)p.work)[row] = size;
  }
}

// The same over a matrix whose columns are contiguous: one thread a row.
template <class TA, class TX>
__global__ void __launch_bounds__(64) reference_columns(const GemvArgs p) {
  const i64 row = (i64)blockIdx.x * 64 + threadIdx.x;
  if (row >= p.m) return;
  const TA* a = (const TA*)p.a + row * p.a_row;
  const TX* x = (const TX*)p.x;
  double sum = 0, size = 0;
#pragma unroll 8
  for (i64 j = 0; j < p.n; ++j) {
    const double product = wide<double>(a[j * p.a_col]) * wide<double>(x[j * p.x_step]);
    sum += product;
    size += fabs(product);
  }
  ((double*)p.y)[row] = sum;
  ((double*)p.work)[row] = size;
}
