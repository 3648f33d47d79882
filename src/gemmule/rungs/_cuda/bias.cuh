// A bias that kernels of quantised products add, compiled with BIAS: a number for each row, in float32 before it rounds.
#pragma once
#include "fragments.cuh"

#ifdef BIAS
// Kernels that follow take one address more: of as many numbers as there are rows, of the result's type.
struct BiasQuantArgs : QuantArgs { const void* bias; };

template <class T>
__device__ __forceinline__ void store_quantised(const BiasQuantArgs& p, i64 row, i64 column, float sum) {
  T* out = (T*)p.y + row * p.y_step + column * p.y_col;
  const float added = wide<float>(((const T*)p.bias)[row]), scaled = fmaf((float)p.alpha, sum, added);
  *out = narrow<T, float>(p.beta == 0 ? scaled : fmaf((float)p.beta, wide<float>(*out), scaled));
}
#define QuantArgs BiasQuantArgs
#endif
