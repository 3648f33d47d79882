// From rows of codes to layout mma16 on the device: a thread gathers the 16 bytes of one lane of one tile.
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

// Lane 4 g + t has rows g and g + 8 and a quarter t of the columns; where their codes go is told in quant/layouts.py.
template <int BITS>
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
      words[word] |= code_at<BITS>(p, row + 8 * hi, column + c) << bit;
    }
  p.tiles[index] = words;
}
