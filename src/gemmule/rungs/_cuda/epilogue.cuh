// What follows a product before it is rounded: activation(alpha A B + beta C + bias) * gate + residual, where C, bias, gate
// and residual are of the result's type. Kernels compiled with EPILOGUE, one of the activations, do so on their sums' way
// to C; a pass over sums in memory does for the others.
#pragma once
#include "ptx_exp2.cuh"
#include "scales.cuh"

enum { PLAIN, GELU, GELU_TANH, SILU };   // relu is plain, with a floor of 0

struct Epilogue {
  const void *c, *bias, *gate, *residual;   // null where there is none
  i64 c_row, c_col, c_batch, bias_row, bias_col, gate_row, gate_col, gate_batch, residual_row, residual_col, residual_batch;
  double floor;   // to which what is less is lifted, of a plain one
};

// Digits of the results that are rounded to. Those of halves become symbols of a cubin: only where they are asked for.
template <class T> struct Digits { static constexpr int COUNT = 24; };
#if defined(EPILOGUE) || defined(EPILOGUE_PASS)
template <> struct Digits<__half> { static constexpr int COUNT = 11; };
template <> struct Digits<__nv_bfloat16> { static constexpr int COUNT = 8; };
#endif

// v Phi(v). Phi(-t) = 2^P(t), P fitted on 0 .. 14 within a relative 2^-18 (1 + t^2 / 2), of bfloat16 2^-13.6 times that;
// behind, it is 0.
template <int DIGITS> __device__ __forceinline__ float quick_gelu(float v) {
  const float t = fminf(fabsf(v), 14.0f), least = ptx::max_nan(v, 0.0f);
  if constexpr (DIGITS == 8) {
    float power = -5.038199333284865e-07f;
    power = fmaf(power, t, 2.6127734599867836e-05f);
    power = fmaf(power, t, -0.0005625883932225406f);
    power = fmaf(power, t, 0.006662573199719191f);
    power = fmaf(power, t, -0.04941832274198532f);
    power = fmaf(power, t, -0.46345362067222595f);
    power = fmaf(power, t, -1.149339199066162f);
    power = fmaf(power, t, -1.0001109838485718f);
    return fmaf(-t, ptx::exp2_ftz(power), least);
  }
  float power = -1.7058350287868507e-09f;
  power = fmaf(power, t, 1.3077121252536017e-07f);
  power = fmaf(power, t, -4.353067652118625e-06f);
  power = fmaf(power, t, 8.329638512805104e-05f);
  power = fmaf(power, t, -0.0010270418133586645f);
  power = fmaf(power, t, 0.008734067901968956f);
  power = fmaf(power, t, -0.05422407388687134f);
  power = fmaf(power, t, -0.45833149552345276f);
  power = fmaf(power, t, -1.151272177696228f);
  power = fmaf(power, t, -0.9999948740005493f);
  return fmaf(-t, ptx::exp2_ftz(power), least);
}
// v / (1 + 2^-x).
__device__ __forceinline__ float quick_logistic(float v, float x) {
  return v * ptx::reciprocal_ftz(1.0f + ptx::exp2_ftz(-x));
}

// DIGITS of the result hide what quicker forms leave out.
template <int ACTIVATION, int DIGITS> __device__ __forceinline__ float activated(float v, float floor) {
  if constexpr (ACTIVATION == PLAIN) return ptx::max_nan(v, floor);
  if constexpr (ACTIVATION == GELU && DIGITS < 24) return quick_gelu<DIGITS>(v);
  if constexpr (ACTIVATION == GELU) {
    const float t = fminf(fabsf(v), 40.0f), tail = t * (0.5f * erfcf(t * 0.70710678118654752f));
    return v < 0.0f ? -tail : v - tail;
  }
  // 2 sqrt(2 / pi) (v + 0.044715 v^3) and v, times log2(e)
  if constexpr (ACTIVATION == GELU_TANH) return quick_logistic(v, v * fmaf(v * v, 0.10294324f, 2.3022082f));
  return quick_logistic(v, v * 1.44269504f);
}
template <int ACTIVATION, int DIGITS> __device__ __forceinline__ double activated(double v, double floor) {
  if constexpr (ACTIVATION == PLAIN) return v < floor ? floor : v;
  if constexpr (ACTIVATION == GELU) {
    const double t = fmin(fabs(v), 40.0), tail = t * (0.5 * erfc(t * 0.70710678118654752440));
    return v < 0.0 ? -tail : v - tail;
  }
  if constexpr (ACTIVATION == GELU_TANH)
    return v / (1.0 + exp(-v * (v * v * 0.071354816272600248 + 1.5957691216057308)));
  return v / (1.0 + exp(-v));
}

// The sum of one element on its way to a result of type T.
template <class T, int ACTIVATION, class Acc>
__device__ __forceinline__ Acc finished(const Epilogue& e, Acc alpha, Acc beta, i64 batch, i64 i, i64 j, Acc sum) {
  const auto at = [&](const void* first, i64 row, i64 col, i64 step) {
    return wide<Acc, T>(((const T*)first)[batch * step + i * row + j * col]);
  };
  Acc v = alpha * sum;
  if (e.c) v += beta * at(e.c, e.c_row, e.c_col, e.c_batch);
  if (e.bias) v += at(e.bias, e.bias_row, e.bias_col, 0);
  v = activated<ACTIVATION, Digits<T>::COUNT>(v, Acc(e.floor));
  if (e.gate) v = v * at(e.gate, e.gate_row, e.gate_col, e.gate_batch);
  if (e.residual) v += at(e.residual, e.residual_row, e.residual_col, e.residual_batch);
  return v;
}

#ifdef EPILOGUE
struct FinishedGemmArgs : GemmArgs { Epilogue e; };
#undef GemmArgs
#define GemmArgs FinishedGemmArgs

// Whether operands lie so that a thread reads two neighbours of a row at once; a bias may have a number for each row.
__device__ __forceinline__ bool lie_in_pairs(const GemmArgs& p, u64 size) {
  const Epilogue& e = p.e;
  const auto pairs = [&](const void* at, i64 row, i64 col, i64 batch) {
    return !at || (col == 1 && ((u64)at | u64(row | batch) * size) % (2 * size) == 0);
  };
  return pairs(e.c, e.c_row, e.c_col, e.c_batch) && pairs(e.gate, e.gate_row, e.gate_col, e.gate_batch) &&
         pairs(e.residual, e.residual_row, e.residual_col, e.residual_batch) &&
         (e.bias_col == 0 || pairs(e.bias, e.bias_row, e.bias_col, 0));
}

// Two neighbours, of halves that lie in a register.
template <class TC> __device__ __forceinline__ float2 both(ptx::u32 pair) {
  const ptx::Vec<TC, 2> x = reinterpret_cast<const ptx::Vec<TC, 2>&>(pair);
  return make_float2(wide<float, TC>(x[0]), wide<float, TC>(x[1]));
}
template <> __device__ __forceinline__ float2 both<__nv_bfloat16>(ptx::u32 pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// A bias of columns on its way to a warp's sums of WIDTH columns: a lane asks for two of each 64 before these are summed.
template <class TC, int WIDTH> struct BiasAhead {
  ptx::u32 pair[WIDTH / 64];
  __device__ __forceinline__ BiasAhead(const GemmArgs& p, bool whole, i64 col) {
#pragma unroll
    for (int c = 0; c < WIDTH; c += 64) {
      const i64 j = col + c + threadIdx.x % 32 * 2;
      pair[c / 64] = whole && p.e.bias && p.e.bias_col && j < p.n ? *(const ptx::u32*)((const TC*)p.e.bias + j) : 0;
    }
  }
};

// Calls take(d, x) with what lies in pairs beside a thread's sums as wgmma leaves them (ptx_wgmma.cuh), d of N, from row
// `row` of its warp and column `col` on: x belongs to sums d and d + 1.
template <class TC, int N, class Take>
__device__ __forceinline__ void each_beside(const GemmArgs& p, const TC* at, i64 step, i64 row, i64 col, const Take& take) {
  const i64 i = row + threadIdx.x % 32 / 4, j = col + threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const TC* const from = at + (i + 8 * half) * step + j;
    const int most = i + 8 * half < p.m ? int(p.n - j) : 0;   // columns from j on
#pragma unroll
    for (int d = 0; d < N; d += 4) take(d + 2 * half, both<TC>(2 * d < most ? *(const ptx::u32*)(from + 2 * d) : 0));
  }
}

// A thread's sums from row `row` of its warp and column `col` on, on their way to C, of operands in pairs; bias: of
// these columns, as `BiasAhead` has it.
template <class TC, int N>
__device__ __forceinline__ void finish_sums(const GemmArgs& p, i64 batch, i64 row, i64 col, ptx::u32 bias, const float* sum, float (&out)[N]) {
  const Epilogue& e = p.e;
  const float alpha = float(p.alpha), beta = float(p.beta), floor = float(e.floor);
#pragma unroll
  for (int d = 0; d < N; d += 4) {
    const float2 of_col = both<TC>(__shfl_sync(~0u, bias, d + threadIdx.x % 4));
#pragma unroll
    for (int o = d; o < d + 4; o += 2) out[o] = fmaf(alpha, sum[o], of_col.x), out[o + 1] = fmaf(alpha, sum[o + 1], of_col.y);
  }
  if (e.bias && !e.bias_col) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i64 i = row + threadIdx.x % 32 / 4 + 8 * half;
      const float x = i < p.m ? wide<float, TC>(((const TC*)e.bias)[i * e.bias_row]) : 0.0f;
#pragma unroll
      for (int d = 0; d < N; d += 4) out[d + 2 * half] += x, out[d + 2 * half + 1] += x;
    }
  }
  if (e.c)
    each_beside<TC, N>(p, (const TC*)e.c + batch * e.c_batch, e.c_row, row, col,
                       [&](int d, float2 x) { out[d] = fmaf(beta, x.x, out[d]), out[d + 1] = fmaf(beta, x.y, out[d + 1]); });
#pragma unroll
  for (int d = 0; d < N; ++d) out[d] = activated<EPILOGUE, Digits<TC>::COUNT>(out[d], floor);
  if (e.gate)
    each_beside<TC, N>(p, (const TC*)e.gate + batch * e.gate_batch, e.gate_row, row, col,
                       [&](int d, float2 x) { out[d] *= x.x, out[d + 1] *= x.y; });
  if (e.residual)
    each_beside<TC, N>(p, (const TC*)e.residual + batch * e.residual_batch, e.residual_row, row, col,
                       [&](int d, float2 x) { out[d] += x.x, out[d + 1] += x.y; });
}

// The sum of element (i, j), which C has, on its way there.
template <class TC> __device__ __forceinline__ float finished(const GemmArgs& p, i64 batch, i64 i, i64 j, float sum) {
  return finished<TC, EPILOGUE>(p.e, float(p.alpha), float(p.beta), batch, i, j, sum);
}

// The same, and there.
template <class TC> __device__ __forceinline__ void finish_element(const GemmArgs& p, i64 batch, i64 i, i64 j, float sum) {
  if (i < p.m && j < p.n)
    ((TC*)p.c)[batch * p.c_batch + i * p.c_row + j * p.c_col] = narrow<TC, float>(finished<TC>(p, batch, i, j, sum));
}

// The epilogue of a product that is seen as its transpose.
__device__ __forceinline__ void turn(Epilogue& e) {
  const Epilogue given = e;
  e.c_row = given.c_col, e.c_col = given.c_row, e.bias_row = given.bias_col, e.bias_col = given.bias_row;
  e.gate_row = given.gate_col, e.gate_col = given.gate_row;
  e.residual_row = given.residual_col, e.residual_col = given.residual_row;
}
#endif
