// Weights as floats again, of codes that are floats of 4 bits: a piece of a matrix, by rows, as dequantise.cu writes one of integers.
// Each weight is code * scale, exact in float32, of NVFP4 times the row's factor, rounded once to the type that is asked for.
#include "float4.cuh"
#include "ptx.cuh"

typedef ptx::Vec<unsigned, 4> Words;

// As in dequantise.cu; zeros are factors here, one for each row.
struct DequantArgs {
  const unsigned char* codes;
  const void* scales;
  const float* zeros;
  const int* perm;
  void* out;
  i64 m, n, row_bytes, group_size, groups, scale_row;
  i64 first_row, rows, first_column, columns, out_row;
};

// Single roundings that the compiler may not fuse.
template <class TS> __device__ __forceinline__ float weight(unsigned code, float scale, float factor) {
  const float exact = __fmul_rn(float4_value(code), scale);
  return Float4<TS>::factors ? __fmul_rn(exact, factor) : exact;
}
template <class TS> __device__ __forceinline__ float factor_of(const DequantArgs& p, i64 row) {
  return Float4<TS>::factors ? p.zeros[row] : 1.f;
}

// Several neighbouring numbers of a row of the piece, at one of its columns that is a multiple of N. WHOLE: rows begin at whole
// 16 bytes, and vectors may be written past the end of a row: nobody reads what is there.
template <bool WHOLE, class T, int N> __device__ __forceinline__ void store(const DequantArgs& p, i64 row, i64 column, const ptx::Vec<T, N>& v) {
  T* const to = (T*)p.out + (row - p.first_row) * p.out_row;
  const i64 at = column - p.first_column;
  if constexpr (WHOLE) {
    if (at < p.columns) *(ptx::Vec<T, N>*)(to + at) = v;
  } else {
#pragma unroll
    for (int e = 0; e < N; ++e)
      if (at + e < p.columns) to[p.perm ? p.perm[column + e] : at + e] = ((const T*)&v)[e];
  }
}

// A warp has a tile of 16 rows by 64 columns; lane 4 g + t the columns 16 t .. 16 t + 15 of rows g and g + 8, which lie in one group.
template <class T, class TS, bool WHOLE>
__global__ void __launch_bounds__(256) dequantise_mma16(const DequantArgs p) {
  constexpr int COLUMNS = 64, OF_LANE = 16, N = 16 / (int)sizeof(T), PARTS = OF_LANE / N;
  const unsigned across = (unsigned)((p.columns + COLUMNS - 1) / COLUMNS), all = (unsigned)((p.n + COLUMNS - 1) / COLUMNS);
  const unsigned index = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const unsigned down = index / across, right = index % across;
  if (down * 16 >= p.rows) return;
  const i64 tile_row = p.first_row / 16 + down, row = tile_row * 16 + g, last = p.m - 1, end = min(p.m, p.first_row + p.rows);
  const unsigned tile_column = (unsigned)(p.first_column / COLUMNS) + right, first = tile_column * COLUMNS + t * OF_LANE;
  const Words words = ptx::ld_stream((const Words*)p.codes + (tile_row * all + tile_column) * 32 + lane);
  const i64 group = min(first / (unsigned)p.group_size, (unsigned)p.groups - 1);
#pragma unroll
  for (int hi = 0; hi < 2; ++hi) {
    const i64 here = min(row + 8 * hi, last);
    const float scale = wide<float>(((const TS*)p.scales)[group * p.m + here]), factor = factor_of<TS>(p, here);
    ptx::Vec<T, N> v[PARTS];
#pragma unroll
    for (int c = 0; c < OF_LANE; ++c)
      v[c / N][c % N] = narrow<T>(weight<TS>(woven_code(words[c / 4] >> 16 * (c % 2) & 0xffff, hi + 2 * (c / 2 % 2)), scale, factor));
    const bool mine = row + 8 * hi < end;
    if constexpr (PARTS == 2) {  // two lanes exchange halves, so that each store fills whole sectors
      const bool odd = t % 2;
      const unsigned left = first - (odd ? OF_LANE - N : 0);
      Words& keep = *(Words*)&v[0];
      Words& other = *(Words*)&v[1];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const unsigned got = __shfl_xor_sync(~0u, odd ? keep[w] : other[w], 1);
        if (odd) keep[w] = got;
        else other[w] = got;
      }
      if (mine) {
        store<WHOLE, T, N>(p, row + 8 * hi, left, v[0]);
        store<WHOLE, T, N>(p, row + 8 * hi, left + OF_LANE, v[1]);
      }
    } else if (mine) {
#pragma unroll
      for (int e = 0; e < PARTS; ++e) store<WHOLE, T, N>(p, row + 8 * hi, first + e * N, v[e]);
    }
  }
}

// A thread has eight neighbouring columns of a row, of one group.
template <class T, class TS, bool WHOLE>
__global__ void __launch_bounds__(256) dequantise_row(const DequantArgs p) {
  constexpr int N = 16 / (int)sizeof(T), EACH = 8;
  const i64 across = (p.columns + EACH - 1) / EACH, index = (i64)blockIdx.x * 256 + threadIdx.x;
  if (index >= across * p.rows) return;
  const i64 row = p.first_row + index / across, first = p.first_column + index % across * EACH;
  const i64 group = min(first / p.group_size, p.groups - 1);
  const float scale = wide<float>(((const TS*)p.scales)[row * p.scale_row + group]), factor = factor_of<TS>(p, row);
  ptx::Vec<T, N> v[EACH / N];
#pragma unroll
  for (int c = 0; c < EACH; ++c) {
    const i64 column = min(first + c, p.n - 1);
    const unsigned code = p.codes[row * p.row_bytes + column / 2] >> 4 * (column % 2) & 15;
    v[c / N][c % N] = narrow<T>(weight<TS>(code, scale, factor));
  }
#pragma unroll
  for (int e = 0; e < EACH / N; ++e) store<WHOLE, T, N>(p, row, first + e * N, v[e]);
}
