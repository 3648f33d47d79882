// A row of quantised weights, w = scale * (code - zero), in layout `row`: 8-bit codes one a byte, 4-bit codes two a
// byte with the even column in the low nibble.
#pragma once
#include "rows.cuh"

template <class TS, int BITS>
struct CodeRow {
  const unsigned char* codes;
  const TS* scales;
  const float* zeros;  // null: every zero point is the middle code
  i64 n, group_size;
  bool grouped;
  __device__ __forceinline__ CodeRow(const QuantArgs& p, i64 row)
      : codes((const unsigned char*)p.codes + row * p.code_row_bytes),
        scales((const TS*)p.scales + row * p.scale_row),
        zeros(p.zeros ? (const float*)p.zeros + row * p.scale_row : nullptr),
        n(p.n), group_size(p.group_size), grouped(p.groups > 1) {}
  __device__ __forceinline__ i64 group(i64 column) const { return grouped ? column / group_size : 0; }
  __device__ __forceinline__ float scale(i64 group) const { return wide<float>(scales[group]); }
  __device__ __forceinline__ float zero(i64 group) const { return zeros ? zeros[group] : float(1 << (BITS - 1)); }
  __device__ __forceinline__ int code(i64 column) const {
    if constexpr (BITS == 8) return codes[column];
    else return codes[column / 2] >> (4 * (column % 2)) & 15;
  }
};

// Code k of a piece of bytes.
template <int BITS, int BYTES>
// excerpt nibble
__device__ __forceinline__ int code_of(const ptx::Vec<unsigned char, BYTES>& piece, int k) {
  if constexpr (BITS == 8) return piece[k];
  else return piece[k / 2] >> (4 * (k % 2)) & 15;
// end of excerpt
}
// Codes of one load: VALUES where rows begin at multiples of 16 bytes or of the load, else those of one byte.
template <int BITS, int ALIGN, int VALUES>
struct CodeRead {
  static constexpr int width = ALIGN < 16 ? 8 / BITS : VALUES, bytes = width * BITS / 8;
  static constexpr int most_threads = VALUES > 16 ? 512 : 1024;  // so that registers suffice
  typedef ptx::Vec<unsigned char, bytes> Piece;
};

// One thread's share of a row of codes times x: pieces of `width` codes, each within one group (group sizes are
// multiples of the width), are dealt in turn to `threads` threads. The zero point is subtracted in float32.
template <int BITS, int ALIGN, int VALUES, class TS, class TX>
__device__ __forceinline__ float share_of_codes(const CodeRow<TS, BITS>& row, const TX* x, i64 x_step, int thread,
                                                int threads) {
  typedef CodeRead<BITS, ALIGN, VALUES> Read;
  constexpr int W = Read::width, align_x = ALIGN < 16 ? int(sizeof(TX)) : 16;
  const i64 whole = row.n - row.n % W, stride = (i64)threads * W;
  float sum = 0, xv[W];
#pragma unroll 1
  for (i64 j = (i64)thread * W; j < whole; j += stride) {
    // excerpt piece
    const typename Read::Piece piece = ptx::ld_nc((const typename Read::Piece*)(row.codes + j * BITS / 8));
    load_vector<align_x>(x, x_step, j, xv);
    const i64 group = row.group(j);
    const float zero = row.zero(group);
    float part = 0;
#pragma unroll
    for (int k = 0; k < W; ++k) part += (float(code_of<BITS>(piece, k)) - zero) * xv[k];
    sum += row.scale(group) * part;
    // end of excerpt
  }
  for (i64 j = whole + thread; j < row.n; j += threads) {
    const i64 group = row.group(j);
    sum += row.scale(group) * ((float(row.code(j)) - row.zero(group)) * wide<float>(x[j * x_step]));
  }
  return sum;
}

// A table of products: entry [j][c] is the weight of code c times x[j], with one scale and zero for the matrix.
template <class TX, class TS, int BITS>
__device__ __forceinline__ void fill_table(const QuantArgs& p) {
  // excerpt table
  const i64 entry = (i64)blockIdx.x * blockDim.x + threadIdx.x, j = entry >> BITS;
  if (j >= p.n) return;
  const CodeRow<TS, BITS> row(p, 0);
  const float weight = row.scale(0) * (float(int(entry & ((1 << BITS) - 1))) - row.zero(0));
  ((float*)p.work)[entry] = weight * wide<float>(((const TX*)p.x)[j * p.x_step]);
  // end of excerpt
}
// One thread's share of a row, looked up: no product is left.
template <int BITS, int ALIGN, int VALUES, class TS>
__device__ __forceinline__ float share_of_table(const CodeRow<TS, BITS>& row, const float* table, int thread,
                                                int threads) {
  typedef CodeRead<BITS, ALIGN, VALUES> Read;
  constexpr int W = Read::width;
  const i64 whole = row.n - row.n % W, stride = (i64)threads * W;
  float sum = 0;
#pragma unroll 1
  for (i64 j = (i64)thread * W; j < whole; j += stride) {
    // excerpt look_up
    const typename Read::Piece piece = ptx::ld_nc((const typename Read::Piece*)(row.codes + j * BITS / 8));
#pragma unroll
    for (int k = 0; k < W; ++k) sum += table[((j + k) << BITS) + code_of<BITS>(piece, k)];
    // end of excerpt
  }
  for (i64 j = whole + thread; j < row.n; j += threads) sum += table[(j << BITS) + row.code(j)];
  return sum;
}
