// What the tiles of grouped products share that wgmma multiplies: a thread's place in the ring of stages, and how sums of
// 64 columns of a matrix by many tokens leave their registers.
#pragma once
#include "ptx_wgmma.cuh"
#include "tiles.cuh"

typedef ptx::u32 u32;

// Whether the instruction for so many tokens is written out: without it nothing would be multiplied.
__device__ constexpr bool is_width(int n) { return n == 8 || n == 16 || (n > 0 && n % 32 == 0 && n <= 256); }

// Where a thread stands in a ring of stages, whose barriers lie at `full` and `empty`.
struct Ring {
  u32 data, full, empty;
  int stage = 0, parity = 0;
  template <int STAGES> __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ void wait_full() const { ptx::mbar_wait(full + 8 * stage, parity); }
  __device__ __forceinline__ void wait_empty() const { ptx::mbar_wait(empty + 8 * stage, parity ^ 1); }
};

// A thread of the block makes the barriers of a ring: so many arrivals fill a stage, so many empty it.
template <int STAGES> __device__ __forceinline__ Ring make_ring(u32 data, u64 (&bars)[2 * STAGES], int fill, int drain) {
  const Ring ring{data, ptx::smem_addr(bars), ptx::smem_addr(bars + STAGES)};
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      ptx::mbar_init(ring.full + 8 * s, fill);
      ptx::mbar_init(ring.empty + 8 * s, drain);
    }
    ptx::mbar_fence_init();
  }
  return ring;
}

template <class TC> __device__ __forceinline__ u32 pair_of(float x, float y) {
  const TC low = narrow<TC, float>(x), high = narrow<TC, float>(y);
  return u32(reinterpret_cast<const ptx::u16&>(low)) | u32(reinterpret_cast<const ptx::u16&>(high)) << 16;
}

// Where results go: from `c` on, tokens `row` apart and the `n` columns of a matrix `col`.
template <class TC> struct Results {
  TC* c;
  i64 row, col;
  int n;
  float alpha, beta;
};

// A warp's sums of 16 columns from `column` on and WIDTH tokens: d[4 j + i] as sum_row and sum_col have it. Halves that
// lie side by side in C change places within the warp first.
template <class TC, int WIDTH>
__device__ __forceinline__ void store_tokens(const Results<TC>& to, int tokens, int column, const float (&d)[WIDTH / 2]) {
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  bool pairs = false;
  if constexpr (sizeof(TC) == 2) pairs = to.beta == 0.f && to.col == 1 && to.n % 2 == 0;
#pragma unroll
  for (int j = 0; j < WIDTH / 8; ++j) {
    if (8 * j >= tokens) break;
    if (pairs) {
      if constexpr (sizeof(TC) == 2)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const u32 v = ptx::movmatrix_trans(pair_of<TC>(to.alpha * d[4 * j + 2 * h], to.alpha * d[4 * j + 2 * h + 1]));
          const int n = column + 8 * h + 2 * q;
          if (8 * j + g < tokens && n < to.n) *(u32*)(to.c + (8 * j + g) * to.row + n) = v;
        }
      continue;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 8 * j + 2 * q + i % 2, n = column + g + i / 2 * 8;
      if (token < tokens && n < to.n) finish_scaled<TC, float>(to.c + token * to.row + n * to.col, d[4 * j + i], to.alpha, to.beta);
    }
  }
}
