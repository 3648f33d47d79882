// What follows a product whose kernels leave it alone: a pass over its sums, which may lie where the result will.
#define EPILOGUE_PASS
#include "complex.cuh"
#include "epilogue.cuh"

struct PassArgs {
  const void* sums;
  void* out;
  i64 m, n, batch;
  i64 sums_row, sums_col, sums_batch;
  i64 out_row, out_col, out_batch;
  double alpha[2], beta[2];   // the second part of complex ones
  Epilogue e;
};

template <class T> __device__ __forceinline__ T scale_of(const double (&parts)[2]) { return T(parts[0]); }
template <> __device__ __forceinline__ complex64 scale_of(const double (&parts)[2]) { return {float(parts[0]), float(parts[1])}; }
template <> __device__ __forceinline__ complex128 scale_of(const double (&parts)[2]) { return {parts[0], parts[1]}; }
template <int ACTIVATION, int DIGITS, class F> __device__ __forceinline__ Complex<F> activated(Complex<F> v, Complex<F>) { return v; }

constexpr int V = 4;   // neighbours of a row that a thread takes

// VECTORS: rows of sums and of the result are vectors of 16 bytes of sums, whole and aligned.
template <class Sum, class T, int ACTIVATION, bool VECTORS>
__global__ void __launch_bounds__(256) finish_product(const PassArgs p) {
  const Sum alpha = scale_of<Sum>(p.alpha), beta = scale_of<Sum>(p.beta);
  const i64 across = (p.n + V - 1) / V, pieces = across * p.m * p.batch;
  for (i64 index = (i64)blockIdx.x * 256 + threadIdx.x; index < pieces; index += (i64)gridDim.x * 256) {
    i64 i, j, batch;
    if (pieces < 1ll << 31) {   // a division of 64 bits takes as long as the rest
      const unsigned line = unsigned(index) / unsigned(across);
      j = unsigned(index) - line * unsigned(across), batch = line / unsigned(p.m), i = line - unsigned(batch) * unsigned(p.m);
    } else {
      const i64 line = index / across;
      j = index - line * across, batch = line / p.m, i = line - batch * p.m;
    }
    j *= V;
    const Sum* const from = (const Sum*)p.sums + batch * p.sums_batch + i * p.sums_row + j * p.sums_col;
    T* const to = (T*)p.out + batch * p.out_batch + i * p.out_row + j * p.out_col;
    if constexpr (VECTORS) {
      const ptx::Vec<Sum, V> sums = *(const ptx::Vec<Sum, V>*)from;
      ptx::Vec<T, V> out;
#pragma unroll
      for (int l = 0; l < V; ++l)
        out[l] = narrow<T, Sum>(finished<T, ACTIVATION>(p.e, alpha, beta, batch, i, j + l, sums[l]));
      *(ptx::Vec<T, V>*)to = out;
    } else {
      for (int l = 0; l < V && j + l < p.n; ++l)
        to[l * p.out_col] = narrow<T, Sum>(finished<T, ACTIVATION>(p.e, alpha, beta, batch, i, j + l, from[l * p.sums_col]));
    }
  }
}
