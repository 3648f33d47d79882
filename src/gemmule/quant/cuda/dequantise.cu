// Weights as floats again: a piece of a quantised matrix, by rows, at the speed of the memory.
// Each weight is scale * (code - zero) in float32, rounded once to the type that is asked for: the host's bits.
#include "args.cuh"
#include "ptx.cuh"

typedef ptx::Vec<unsigned, 4> Words;

// Codes of an m x n matrix; the piece begins at a row and a column of whole tiles. out_row: from one row of the piece to
// the next. Where perm is given, the piece has all columns, and stored column j goes to column perm[j].
struct DequantArgs {
  const unsigned char* codes;
  const void* scales;
  const float* zeros;  // null: symmetric
  const int* perm;
  void* out;
  i64 m, n, row_bytes, group_size, groups, scale_row;
  i64 first_row, rows, first_column, columns, out_row;
};

// Single roundings that the compiler may not fuse.
template <int BITS, bool ZEROS> __device__ __forceinline__ float weight(unsigned code, float scale, float zero) {
  constexpr float magic = 8388608.f;  // 2^23: the bits below it are a whole number
  const float raised = __uint_as_float(0x4b000000u | code);
  if (!ZEROS) return __fmul_rn(scale, __fsub_rn(raised, magic + (1 << (BITS - 1))));
  return __fmul_rn(scale, __fsub_rn(__fsub_rn(raised, magic), zero));
}

// Several neighbouring numbers of a row of the piece, at one of its columns that is a multiple of N. WHOLE: rows begin at whole
// 16 bytes, and vectors may be written past the end of a row: nobody reads what is there.
template <bool WHOLE, class T, int N> __device__ __forceinline__ void store(const DequantArgs& p, i64 row, int column, const ptx::Vec<T, N>& v) {
  T* const to = (T*)p.out + (row - p.first_row) * p.out_row;
  const int at = column - (int)p.first_column;
  if constexpr (WHOLE) {
    if (at < p.columns) *(ptx::Vec<T, N>*)(to + at) = v;
  } else {
#pragma unroll
    for (int e = 0; e < N; ++e)
      if (at + e < p.columns) to[p.perm ? p.perm[column + e] : at + e] = ((const T*)&v)[e];
  }
}

// A warp has TURN tiles of 16 rows side by side (one H200, November 2026: 50 us for 8192 x 8192, two 114); lane 4 g + t a quarter t of the columns of rows g and g + 8. UNITS: these lie
// in one group.
constexpr int TURN = 1;
template <class T, class TS, int BITS, bool ZEROS, bool WHOLE, bool UNITS>
__global__ void __launch_bounds__(256) dequantise_mma16(const DequantArgs p) {
  constexpr int COLUMNS = 256 / BITS, OF_LANE = COLUMNS / 4, N = 16 / (int)sizeof(T), PARTS = OF_LANE / N;
  const unsigned across = (unsigned)((p.columns + COLUMNS - 1) / COLUMNS), all = (unsigned)((p.n + COLUMNS - 1) / COLUMNS);
  const unsigned turns = (across + TURN - 1) / TURN, index = blockIdx.x * 8 + threadIdx.x / 32;
  const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, down = index / turns, right = index % turns * TURN;
  if (down * 16 >= p.rows) return;
  const i64 tile_row = p.first_row / 16 + down;
  const unsigned tile_column = (unsigned)(p.first_column / COLUMNS) + right, here = min(across - right, (unsigned)TURN);
  const Words* const codes = (const Words*)p.codes + (tile_row * all + tile_column) * 32 + lane;
  Words words[TURN];
#pragma unroll
  for (int i = 0; i < TURN; ++i) words[i] = ptx::ld_stream(codes + min((unsigned)i, here - 1) * 32);
  const unsigned groups = (unsigned)p.groups, size = (unsigned)p.group_size;
  const i64 row = tile_row * 16 + g, last = p.m - 1, end = min(p.m, p.first_row + p.rows);
  const auto group_at = [&](unsigned column) {
    const unsigned group = size & (size - 1) ? column / size : column >> (31 - __clz((int)size));
    return p.scale_row ? min(group, groups - 1) * p.m : (i64)0;
  };
  float scale[TURN][2], zero[TURN][2] = {};
  if constexpr (UNITS) {
#pragma unroll
    for (int i = 0; i < 2 * TURN; ++i) {
      const i64 at = group_at((tile_column + i / 2) * COLUMNS + t * OF_LANE) + (p.scale_row ? min(row + 8 * (i % 2), last) : 0);
      scale[i / 2][i % 2] = wide<float>(((const TS*)p.scales)[at]);
      if constexpr (ZEROS) zero[i / 2][i % 2] = p.zeros[at];
    }
  }
#pragma unroll
  for (int i = 0; i < TURN; ++i) {
    const int first = (tile_column + i) * COLUMNS + t * OF_LANE;
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) {
      ptx::Vec<T, N> v[PARTS];
#pragma unroll
      for (int c = 0; c < OF_LANE; ++c) {
        if constexpr (!UNITS) {
          const i64 at = group_at(first + c) + (p.scale_row ? min(row + 8 * hi, last) : 0);
          scale[i][hi] = wide<float>(((const TS*)p.scales)[at]);
          if constexpr (ZEROS) zero[i][hi] = p.zeros[at];
        }
        const int word = BITS == 4 ? c / 4 : 2 * (c / 4) + c / 2 % 2;
        const int bit = BITS == 4 ? 16 * (c % 2) + 8 * (c / 2 % 2) + 4 * hi : 16 * (c % 2) + 8 * hi;
        v[c / N][c % N] = narrow<T>(weight<BITS, ZEROS>(words[i][word] >> bit & ((1 << BITS) - 1), scale[i][hi], zero[i][hi]));
      }
      const bool mine = i < here && row + 8 * hi < end;
      if constexpr (PARTS == 2) {  // two lanes exchange halves, so that each store fills whole sectors
        const bool odd = t % 2;
        const int left = first - (odd ? OF_LANE - N : 0);
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
}

// A thread has eight neighbouring columns of a row, whose groups may end anywhere.
template <class T, class TS, int BITS, bool ZEROS, bool WHOLE>
__global__ void __launch_bounds__(256) dequantise_row(const DequantArgs p) {
  constexpr int N = 16 / (int)sizeof(T), EACH = 8;
  const i64 across = (p.columns + EACH - 1) / EACH, index = (i64)blockIdx.x * 256 + threadIdx.x;
  if (index >= across * p.rows) return;
  const i64 row = p.first_row + index / across;
  const int first = (int)(p.first_column + index % across * EACH), n = (int)p.n, size = (int)p.group_size;
  const unsigned char* const codes = p.codes + row * p.row_bytes;
  ptx::Vec<T, N> v[EACH / N];
#pragma unroll
  for (int c = 0; c < EACH; ++c) {
    const int column = min(first + c, n - 1), group = min((unsigned)column / (unsigned)size, (unsigned)p.groups - 1);
    const i64 at = p.scale_row ? row * p.scale_row + group : 0;
    const unsigned code = BITS == 8 ? codes[column] : codes[column / 2] >> (4 * (column % 2)) & 15;
    const float zero = ZEROS ? p.zeros[at] : 0.f;
    v[c / N][c % N] = narrow<T>(weight<BITS, ZEROS>(code, wide<float>(((const TS*)p.scales)[at]), zero));
  }
#pragma unroll
  for (int e = 0; e < EACH / N; ++e) store<WHOLE, T, N>(p, row, first + e * N, v[e]);
}
