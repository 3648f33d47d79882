// What matmul rungs on wgmma share: tiles of halves in shared memory, as TMA lays them with the 128-byte swizzle,
// and their product. A stage holds DEPTH steps of the reduction. Where the reduction is an operand's unit stride
// (ALONG_K) a tile is one block of 128-byte lines, a line for each row; elsewhere it is a block of 64 lines, a
// line for each step, for every 64 rows. Either way 64 rows are BLOCK bytes, and wgmma reads both.
#pragma once
#include "ptx_wgmma.cuh"
#include "tiles.cuh"

typedef ptx::u32 u32;

constexpr int DEPTH = 64;          // steps: 128 bytes of halves, the width of the swizzle
constexpr u32 BLOCK = 64 * 128;

// How wgmma multiplies elements of types TA and TB: the type of its sums, what tells `multiply` of both, the elements
// of 128 bytes, and whether sums leave the tensor cores after each stage. Of bytes see wgmma_bytes.cuh.
template <class TA, class TB> struct Wgmma {
  typedef float Sum;
  typedef TA Both;
  enum { STEPS = DEPTH, PROMOTED = false };
};
// A sum from the 32 bits of it that lay in shared memory.
template <class Sum> __device__ __forceinline__ Sum from_bits(float bits);
template <> __device__ __forceinline__ float from_bits<float>(float bits) { return bits; }
template <> __device__ __forceinline__ int from_bits<int>(float bits) { return __float_as_int(bits); }

// A tile of ROWS rows of A, or columns of B. PARTS blocks of a cluster load a part each, for all of them.
template <int ROWS, bool ALONG_K, int PARTS = 1>
struct HalfTile {
  static_assert(ROWS % 64 == 0 || (ALONG_K && ROWS % (8 * PARTS) == 0), "whole swizzle patterns");
  static constexpr u32 BYTES = ROWS * DEPTH * 2;
  static constexpr u32 NEXT = ALONG_K ? 32 : 2048;       // bytes from 16 steps to the next 16

  // The map's box: 64 elements by ROWS / PARTS rows, or by 64 / PARTS steps.
  static __device__ __forceinline__ void load(u32 to, const ptx::TensorMap* map, u32 bar, int row, int k, int plane,
                                              int part = 0) {
    if constexpr (ALONG_K) {
      const int first = part * (ROWS / PARTS);
      copy(to + first * 128, map, bar, k, row + first, plane);
    } else {
      const int first = part * (DEPTH / PARTS);
#pragma unroll
      for (int r = 0; r < ROWS; r += 64) copy(to + r * 128 + first * 128, map, bar, row + r, k + first, plane);
    }
  }
  static __device__ __forceinline__ void copy(u32 to, const ptx::TensorMap* map, u32 bar, int x, int y, int plane) {
    if constexpr (PARTS == 1) ptx::tma_load_3d(to, map, bar, x, y, plane);
    else ptx::tma_load_3d_multicast(to, map, bar, x, y, plane, (1 << PARTS) - 1);
  }
  static __device__ __forceinline__ u64 descriptor(u32 at) {
    return ptx::wgmma_desc(at, ALONG_K ? 16 : BLOCK, 1024, ptx::Swizzle::b128);
  }
};

// d (64 x N) += the products of 16 steps, or is them where `more` is false.
template <int N, bool A_ALONG_K, bool B_ALONG_K>
__device__ __forceinline__ void multiply(float (&d)[N / 2], u64 a, u64 b, bool more, __half) {
  ptx::wgmma_f16<N, !A_ALONG_K, !B_ALONG_K>(d, a, b, more);
}
template <int N, bool A_ALONG_K, bool B_ALONG_K>
__device__ __forceinline__ void multiply(float (&d)[N / 2], u64 a, u64 b, bool more, __nv_bfloat16) {
  ptx::wgmma_bf16<N, !A_ALONG_K, !B_ALONG_K>(d, a, b, more);
}

// The products of one stage, BLOCKS times 64 rows; d[..] of block r begins at row 64 r.
template <class T, int BLOCKS, int N, bool A_ALONG_K, bool B_ALONG_K, class Sum>
__device__ __forceinline__ void multiply_stage(Sum (&d)[BLOCKS][N / 2], u32 a, u32 b, bool more) {
  typedef HalfTile<64, A_ALONG_K> TileA;
  typedef HalfTile<N, B_ALONG_K> TileB;
  const u64 of_a = TileA::descriptor(a), of_b = TileB::descriptor(b);
  ptx::wgmma_fence();
#pragma unroll
  for (int l = 0; l < DEPTH / 16; ++l)
#pragma unroll
    for (int r = 0; r < BLOCKS; ++r)
      multiply<N, A_ALONG_K, B_ALONG_K>(d[r], of_a + ((r * BLOCK + l * TileA::NEXT) >> 4),
                                        of_b + (l * TileB::NEXT >> 4), more || l, T());
  ptx::wgmma_commit();
}

// How a stage's sum joins those before it: part `part` of block `block` of 64 rows, its register i.
struct Added {
  __device__ __forceinline__ float operator()(float sum, float stage, int block, int part, int i) const { return sum + stage; }
};

// sum += the products of one stage, which tensor cores sum among themselves, at most 128 columns at a time; calls
// `done` when they have read the stage. Two warpgroups, 1 and 2, take turns: one's sums leave while the other's products
// run, for if both began together both would wait together.
template <class T, int BLOCKS, int HALF_N, class Done, class Join>
__device__ __forceinline__ void promote_stage(float (&sum)[BLOCKS][HALF_N], u32 a, u32 b, int group, const Done& done,
                                              const Join& join) {
  constexpr int COLS = HALF_N > 64 ? HALF_N : 2 * HALF_N, PARTS = 2 * HALF_N / COLS;
  // excerpt promote
#pragma unroll
  for (int i = 0; i < BLOCKS * PARTS; ++i) {
    const int r = i / PARTS, c = i % PARTS;
    float part[1][COLS / 2];
    ptx::named_sync(group, 256);
    multiply_stage<T, 1, COLS, true, true>(part, a + r * BLOCK, b + c * COLS * 128, false);
    ptx::named_arrive(3 - group, 256);
    ptx::wgmma_wait<0>();
    if (i + 1 == BLOCKS * PARTS) done();
#pragma unroll
    for (int l = 0; l < COLS / 2; ++l) {
      float& so_far = sum[r][c * COLS / 2 + l];
      so_far = join(so_far, part[0][l], r, c, l);
    }
  }
  // end of excerpt
}

// Stores four neighbours of a row of C, in one access where the case is `simple`: beta is 0, and whole fours of
// columns lie side by side.
template <class TC>
__device__ __forceinline__ void finish_four(const GemmArgs& p, bool simple, i64 batch, i64 i, i64 j,
                                            const float (&sum)[4]) {
  if (!simple) {
#pragma unroll
    for (int l = 0; l < 4; ++l) finish_at<TC>(p, batch, i, j + l, sum[l]);
  } else if (i < p.m && j < p.n) {
    const float alpha = float(p.alpha);
    ptx::Vec<TC, 4> out;
#pragma unroll
    for (int l = 0; l < 4; ++l) out[l] = narrow<TC, float>(alpha * sum[l]);
    *(ptx::Vec<TC, 4>*)((TC*)p.c + batch * p.c_batch + i * p.c_row + j) = out;
  }
}

// The row of a warpgroup's 64, and the column, where sum d[i] of thread t belongs; d[i + 1] is its right neighbour.
__device__ __forceinline__ int sum_row(int t, int i) { return t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8; }
__device__ __forceinline__ int sum_col(int t, int i) { return i / 4 * 8 + t % 4 * 2; }
