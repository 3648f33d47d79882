// Codes of any width, layout, grouping and permutation, one by one: no shape is refused.
#pragma once
#include "float4.cuh"
#include "rows.cuh"

// Where code (i, j) lies. ROW: row by row, the even column of 4-bit codes in the low nibble. Else layout mma16: tiles of
// 16 rows by 256 / BITS columns; lane 4 g + t of a tile has rows g and g + 8 and a quarter t of the columns (see
// quant/layouts.py).
template <int BITS, bool ROW, bool FLOATS = false>
__device__ __forceinline__ int code_at(const QuantArgs& p, i64 i, i64 j) {
  const unsigned char* codes = (const unsigned char*)p.codes;
  if constexpr (ROW) {
    const unsigned char* row = codes + i * p.code_row_bytes;
    return BITS == 8 ? row[j] : row[j / 2] >> (4 * (j % 2)) & 15;
  }
  constexpr int COLUMNS = 256 / BITS, OF_LANE = COLUMNS / 4;
  const i64 tile = i / 16 * ((p.n + COLUMNS - 1) / COLUMNS) + j / COLUMNS;
  const int g = i % 8, hi = i / 8 % 2, column = j % COLUMNS, t = column / OF_LANE, step = column % OF_LANE / 4;
  const int half = column / 2 % 2, e = column % 2;
  const unsigned char* lane = codes + tile * 512 + (4 * g + t) * 16;
  if constexpr (FLOATS && !ROW) return woven_code(lane[4 * step + 2 * e] | lane[4 * step + 2 * e + 1] << 8, hi + 2 * half);
  return BITS == 8 ? lane[8 * step + 4 * half + 2 * e + hi] : lane[4 * step + 2 * e + half] >> 4 * hi & 15;
}

template <class Acc, class TS, int BITS, bool ROW>
__device__ __forceinline__ Acc weight_at(const QuantArgs& p, i64 i, i64 j) {
  // excerpt weight
  const i64 group = p.groups > 1 ? j / p.group_size : 0;
  const i64 at = p.scale_row == 0 ? 0 : ROW ? i * p.scale_row + group : group * p.m + i;
  if constexpr (Float4<TS>::is) {
    const Acc scale = wide<float>(((const TS*)p.scales)[at]), factor = Float4<TS>::factors ? ((const float*)p.zeros)[i] : 1.f;
    return Acc(float4_value(code_at<BITS, ROW, true>(p, i, j))) * scale * factor;
  }
  const Acc zero = p.zeros ? Acc(((const float*)p.zeros)[at]) : Acc(1 << (BITS - 1));
  return Acc(wide<float>(((const TS*)p.scales)[at])) * (Acc(code_at<BITS, ROW>(p, i, j)) - zero);
  // end of excerpt
}

// A block of 32 x 8 threads. Along rows a warp has one result and its lanes deal out the columns; transposed, lanes have
// neighbouring results and warps deal out the rows. `column` of x; `first`: the block's first result.
template <class TX, class TY, class TS, int BITS, bool ROW, bool TRANSPOSED>
__device__ __forceinline__ void multiply_any(const QuantArgs& p, i64 first, i64 column) {
  typedef typename AccOf<TY>::type Acc;
  __shared__ Acc shares[8][32];
  const int lane = threadIdx.x, warp = threadIdx.y;
  const TX* x = (const TX*)p.x + column * p.x_col;
  TY* y = (TY*)p.y + column * p.y_col;
  Acc sum = 0;
  if constexpr (TRANSPOSED) {
    const i64 j = first + lane;
    if (j < p.n)
      for (i64 i = warp; i < p.m; i += 8) sum += weight_at<Acc, TS, BITS, ROW>(p, i, j) * wide<Acc>(x[i * p.x_step]);
    shares[warp][lane] = sum;
    __syncthreads();
    if (warp || j >= p.n) return;
    for (int k = 1; k < 8; ++k) sum += shares[k][lane];
    finish(y + (p.perm ? (i64)p.perm[j] : j) * p.y_step, sum, p.alpha, p.beta);
  } else {
    const i64 i = first + warp;
    if (i >= p.m) return;
    for (i64 j = lane; j < p.n; j += 32)
      sum += weight_at<Acc, TS, BITS, ROW>(p, i, j) * wide<Acc>(x[(p.perm ? (i64)p.perm[j] : j) * p.x_step]);
    sum = group_sum(sum, 32, 0xffffffffu);
    if (lane == 0) finish(y + i * p.y_step, sum, p.alpha, p.beta);
  }
}
