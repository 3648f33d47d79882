// What every kernel is given: one struct by value, which holds sizes, strides and raw pointers.
// Strides count elements. The Python side packs the same fields in the same order
// (gemmule.backends.cuda.launch_args); tests compare the two.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef long long i64;
typedef unsigned long long u64;

// y[b][i] = alpha * sum_j a[b][i][j] * x[b][j] + beta * y[b][i],  i < m, j < n, b < batch
struct GemvArgs {
  const void* a;
  const void* x;
  void* y;
  void* work;
  i64 m, n, batch;
  i64 a_row, a_col, a_batch;
  i64 x_step, x_batch;
  i64 y_step, y_batch;
  double alpha, beta;
};

// c[b][i][j] = alpha * sum_l a[b][i][l] * b[b][l][j] + beta * c[b][i][j],  i < m, j < n, l < k
struct GemmArgs {
  const void* a;
  const void* b;
  void* c;
  void* work;
  i64 m, n, k, batch;
  i64 a_row, a_col, a_batch;
  i64 b_row, b_col, b_batch;
  i64 c_row, c_col, c_batch;
  double alpha, beta;
};

// y[i][c] = alpha * sum_j scale * (code[i][j] - zero) * x[j][c] + beta * y[i][c], c < columns.
// Groups run along the stored columns: group_size columns share a scale (and a zero), `groups`
// of them a row; scale_row is 0 when one scale serves the whole matrix.
struct QuantArgs {
  const void* codes;
  const void* scales;
  const void* zeros;
  const int* perm;
  const void* x;
  void* y;
  void* work;
  i64 m, n, columns;
  i64 code_row_bytes;
  i64 group_size, groups, scale_row;
  i64 x_step, x_col;
  i64 y_step, y_col;
  double alpha, beta;
};

// The running sum for a result of type T. 64-bit integers sum unsigned: modulo 2^64 either way,
// and overflow stays defined.
template <class T> struct AccOf { typedef float type; };
template <> struct AccOf<double> { typedef double type; };
template <> struct AccOf<int> { typedef int type; };
template <> struct AccOf<i64> { typedef u64 type; };
template <> struct AccOf<u64> { typedef u64 type; };

template <class Acc, class T> __device__ __forceinline__ Acc wide(T v) { return (Acc)v; }
template <> __device__ __forceinline__ float wide<float, __half>(__half v) { return __half2float(v); }
template <> __device__ __forceinline__ float wide<float, __nv_bfloat16>(__nv_bfloat16 v) {
  return __bfloat162float(v);
}
template <> __device__ __forceinline__ double wide<double, __half>(__half v) {
  return __half2float(v);
}
template <> __device__ __forceinline__ double wide<double, __nv_bfloat16>(__nv_bfloat16 v) {
  return __bfloat162float(v);
}

template <class T, class Acc> __device__ __forceinline__ T narrow(Acc v) { return (T)v; }
template <> __device__ __forceinline__ __half narrow<__half, float>(float v) {
  return __float2half_rn(v);
}
template <> __device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16, float>(float v) {
  return __float2bfloat16_rn(v);
}

// alpha or beta in the type of the sum; a fast kernel converts them before its loop.
template <class Acc> __device__ __forceinline__ Acc scalar(double v) { return (Acc)v; }
template <> __device__ __forceinline__ u64 scalar<u64>(double v) { return (u64)(i64)v; }

// Store one finished sum. With beta == 0 the old value is not read: it may be NaN.
template <class T, class Acc>
__device__ __forceinline__ void finish_scaled(T* out, Acc sum, Acc alpha, Acc beta) {
  Acc v = alpha * sum;
  if (beta != (Acc)0) v += beta * wide<Acc, T>(*out);
  *out = narrow<T, Acc>(v);
}
template <class T, class Acc>
__device__ __forceinline__ void finish(T* out, Acc sum, double alpha, double beta) {
  finish_scaled<T, Acc>(out, sum, scalar<Acc>(alpha), scalar<Acc>(beta));
}

// Which product of a batch a block works on, and which of its `blocks` blocks it is. A grid has
// fewer than 2^31 blocks, so 32 bits do; a 64-bit division would cost a tenth of a microsecond.
struct Place { i64 batch; unsigned block; };
__device__ __forceinline__ Place place_of(i64 batches, unsigned index, i64 blocks) {
  if (batches == 1) return {0, index};
  const unsigned count = (unsigned)blocks;
  return {(i64)(index / count), index % count};
}
