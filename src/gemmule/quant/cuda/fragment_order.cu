// Between layouts row and mma16 on the device: codes, and the numbers that belong to groups.
#include "ptx.cuh"

typedef ptx::Vec<unsigned, 4> Words;
struct PackArgs {
  const unsigned char* rows;
  Words* tiles;
  long long m, n, row_bytes;
};

// The code of a column, 0 past the end; with 4 bits the even column has the low half of its byte.
template <int BITS>
__device__ __forceinline__ unsigned code_at(const PackArgs& p, long long i, long long j) {
  if (i >= p.m || j >= p.n) return 0;
  const unsigned char* row = p.rows + i * p.row_bytes;
  return BITS == 8 ? row[j] : row[j / 2] >> (4 * (j % 2)) & 15;
}

// Of 4-bit floats code r of 16 bits, with its sign apart (quant/layouts.py, woven), and the way back.
__device__ __forceinline__ unsigned woven(unsigned code, int r) { return (code >> 3) << (15 - r) | (code & 7) << (6 + 3 * r) % 12; }
__device__ __forceinline__ unsigned unwoven(unsigned bits, int r) { return (bits >> (15 - r) & 1) << 3 | (bits >> (6 + 3 * r) % 12 & 7); }

// A thread gathers the 16 bytes of one lane of one tile.
// Lane 4 g + t has rows g and g + 8 and a quarter t of the columns; where their codes go is told in quant/layouts.py.
template <int BITS, bool FLOATS = false>
__global__ void __launch_bounds__(256) pack_mma16(const PackArgs p) {
  constexpr int COLUMNS = 256 / BITS, OF_LANE = COLUMNS / 4;
  const long long index = (long long)blockIdx.x * 256 + threadIdx.x;
  const long long across = (p.n + COLUMNS - 1) / COLUMNS, tile = index / 32;
  if (tile >= (p.m + 15) / 16 * across) return;
  const int lane = index % 32, g = lane / 4, t = lane % 4;
  const long long row = tile / across * 16 + g, column = tile % across * COLUMNS + t * OF_LANE;
  Words words = {};
#pragma unroll
  for (int c = 0; c < OF_LANE; ++c)
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) {
      const int step = c / 4, half = c / 2 % 2, e = c % 2;
      const int word = BITS == 4 ? step : 2 * step + half, bit = BITS == 4 ? 16 * e + 8 * half + 4 * hi : 16 * e + 8 * hi;
      const unsigned code = code_at<BITS>(p, row + 8 * hi, column + c);
      if constexpr (FLOATS) words[word] |= woven(code, hi + 2 * half) << 16 * e;
      else words[word] |= code << bit;
    }
  p.tiles[index] = words;
}

// The way back: a thread gathers one byte of a row.
struct UnpackArgs {
  const unsigned char* tiles;
  unsigned char* rows;
  long long m, n, row_bytes;
};
template <int BITS, bool FLOATS = false>
__global__ void __launch_bounds__(256) unpack_mma16(const UnpackArgs p) {
  constexpr int COLUMNS = 256 / BITS, OF_LANE = COLUMNS / 4, EACH = 8 / BITS;
  const long long index = (long long)blockIdx.x * 256 + threadIdx.x;
  if (index >= p.m * p.row_bytes) return;
  const long long i = index / p.row_bytes, first = index % p.row_bytes * EACH;
  const long long across = (p.n + COLUMNS - 1) / COLUMNS, tile = i / 16 * across + first / COLUMNS;
  const int column = first % COLUMNS, lane = i % 8 * 4 + column / OF_LANE, hi = i / 8 % 2;
  unsigned both = 0;
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int c = column % OF_LANE + e, step = c / 4, half = c / 2 % 2;
    const int word = BITS == 4 ? step : 2 * step + half;
    const int bit = BITS == 4 ? 16 * (c % 2) + 8 * half + 4 * hi : 16 * (c % 2) + 8 * hi;
    const unsigned char* bytes = p.tiles + (tile * 32 + lane) * 16 + 4 * word + (FLOATS ? bit / 16 * 2 : bit / 8);
    if constexpr (FLOATS) {
      both |= unwoven(bytes[0] | bytes[1] << 8, hi + 2 * half) << BITS * e;
      continue;
    }
    both |= (unsigned)(*bytes >> bit % 8 & ((1 << BITS) - 1)) << (BITS * e);  // past the end the tile holds zeros
  }
  p.rows[index] = both;
}

// A matrix of numbers of sizeof(T) bytes, transposed.
struct TurnArgs {
  const void* from;
  void* to;
  long long rows, columns;
};
template <class T>
__global__ void __launch_bounds__(256) turn(const TurnArgs p) {
  const long long index = (long long)blockIdx.x * 256 + threadIdx.x;
  if (index < p.rows * p.columns) ((T*)p.to)[index] = ((const T*)p.from)[index % p.rows * p.columns + index / p.rows];
}
