// The way of a tile's sums to C where TMA does not store them: through shared memory, in few instructions. Each is
// fetched but once, so that unrolled cases cost more time than a detour.
#pragma once
#include "wgmma_specialized.cuh"

__device__ constexpr int log2_of(int n) { return n == 1 ? 0 : 1 + log2_of(n / 2); }

// A tile of C in shared memory on its way out. In halves it lies in lines of neighbours in C, so down the tile where
// C does (`down`); else in lines of floats across the tile.
template <class TC, int HEIGHT, int WIDTH>
struct Leaving {
  static constexpr int PITCH = WIDTH + 8;   // of floats
  unsigned char* at;
  bool down;
  float alpha;
  __device__ __forceinline__ int pitch() const { return (down ? HEIGHT : WIDTH) + 8; }
  // 8 x 16 sums of a warp from row i and column j of the tile, two fragments of 8 x 8 side by side.
  __device__ __forceinline__ void put(int i, int j, float4 v) const {
    const int lane = threadIdx.x % 32;
    const u32 pairs[2] = {StagedHalves<TC>::pair(alpha * v.x, alpha * v.y),
                          StagedHalves<TC>::pair(alpha * v.z, alpha * v.w)};
    if (down) ptx::stmatrix_x2_trans(ptx::smem_addr(at) + ((j + lane % 16) * pitch() + i) * 2, pairs);
    else ptx::stmatrix_x2(ptx::smem_addr(at) + ((i + lane % 8) * pitch() + j + lane / 8 % 2 * 8) * 2, pairs);
  }
  __device__ __forceinline__ void keep(int i, int j, float4 v) const {
    float* to = (float*)at + (i + threadIdx.x % 32 / 4) * PITCH + j + threadIdx.x % 4 * 2;
    *(float2*)to = make_float2(v.x, v.y);
    *(float2*)(to + 8) = make_float2(v.z, v.w);
  }
  // Rows `top` to `top + rows` to C, whose element (row, col) is the tile's (0, 0): of halves in pieces of 16 bytes.
  __device__ __forceinline__ void store(const GemmArgs& p, TC* c, int row, int col, int top, int rows) const {
    const int bits = down ? log2_of(HEIGHT / 8) : log2_of(WIDTH / 8), lines = down ? WIDTH : rows;
    const int most = int(down ? p.n - col : p.m - row), long_as = int(down ? p.m - row : p.n - col);
    const i64 step = down ? p.c_col : p.c_row;
    c += row * p.c_row + col * p.c_col;
    for (int e = threadIdx.x; e < lines << bits; e += 2 * HEIGHT + 32) {
      const int piece = e & ((1 << bits) - 1), line = (e >> bits) + (down ? 0 : top);
      const int first = piece * 8 + (down ? top : 0);
      if (line >= most || (down && piece * 8 >= rows)) continue;
      const ptx::Vec<TC, 8> v = *(const ptx::Vec<TC, 8>*)(at + (line * pitch() + first) * 2);
      if (first + 8 <= long_as) *(ptx::Vec<TC, 8>*)(c + line * step + first) = v;
      else
#pragma unroll 1
        for (int i = 0; i < 8; ++i)
          if (first + i < long_as) c[line * step + first + i] = v[i];
    }
  }
  // Each sum is a Sum in the bits of a float.
  template <class Sum = float>
  __device__ __forceinline__ void finish(const GemmArgs& p, int batch, int row, int col, int top, int rows) const {
    const int along = down ? rows : WIDTH;   // neighbours in C to neighbouring threads
#pragma unroll 1
    for (int e = threadIdx.x; e < rows * WIDTH; e += 2 * HEIGHT + 32) {
      const int line = e / along, place = e % along, i = top + (down ? place : line), j = down ? line : place;
#ifdef EPILOGUE
      finish_element<TC>(p, batch, row + i, col + j, from_bits<Sum>(((const float*)at)[i * PITCH + j]));
#else
      finish_at<TC>(p, batch, row + i, col + j, from_bits<Sum>(((const float*)at)[i * PITCH + j]));
#endif
    }
  }
};
