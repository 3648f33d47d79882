// Bytes on tensor cores: mma.sync m16n8k32 with int32 sums, exact. The ring of stages is that of the halves;
// operands whose unit stride is not the reduction's are transposed on their way in (byte_tiles.cuh).
// excerpt transpose of bytes.cuh
// counters: bank conflicts, % of passes; tensor pipe, %
#include "byte_tiles.cuh"

constexpr int STAGES = 4;

__device__ __forceinline__ void mma(int (&d)[4], const u32 (&a)[4], const u32 (&b)[2], signed char, signed char) {
  ptx::mma_s8(d, a, b);
}
__device__ __forceinline__ void mma(int (&d)[4], const u32 (&a)[4], const u32 (&b)[2], unsigned char,
                                    unsigned char) {
  ptx::mma_u8(d, a, b);
}
__device__ __forceinline__ void mma(int (&d)[4], const u32 (&a)[4], const u32 (&b)[2], unsigned char, signed char) {
  ptx::mma_u8s8(d, a, b);
}

// Fragments of N times 16 lines and 32 steps. Of the four matrices of a load, A's fragment wants lines 0 and 8, then
// the same 16 steps on; B's, which holds two columns' worth, steps 0 and 16, then the same 8 lines on.
template <bool FOR_A, int N, class Operand>
__device__ __forceinline__ void load_fragments(u32 (&r)[N][4], const Operand& operand, int stage, int line, int step) {
  const int low = threadIdx.x / 8 % 2, high = threadIdx.x / 16 % 2;
#pragma unroll
  for (int i = 0; i < N; ++i)
    operand.load(r[i], stage, line + i * 16 + (FOR_A ? low : high) * 8, step + (FOR_A ? high : low) * 16);
}

template <class TA, class TB, class TC, int TILE, bool A_ALONG_K, bool B_ALONG_K>
__global__ void __launch_bounds__(2 * TILE, TILE == 128 ? 2 : 4) tensor_core_int8(const GemmArgs p) {
  // There is an instruction for u8 x s8 alone, so s8 x u8 computes C^T = B^T A^T: the operands change places.
  constexpr bool SWAP = TA(-1) < TA(0) && TB(-1) > TB(0);
  constexpr int THREADS = 2 * TILE, ACROSS = TILE / 32, ROWS = TILE / 32, COLS = 4;
  typedef ByteOperand<TILE, THREADS, A_ALONG_K> OperandA;
  typedef ByteOperand<TILE, THREADS, B_ALONG_K> OperandB;
  extern __shared__ __align__(128) unsigned char smem[];
  const Tile tile = tile_of<8>(p, TILE, TILE);
  OperandA a(p.a, tile.batch * p.a_batch, tile.row, p.m, p.k, p.a_row, p.a_col, smem);
  OperandB b(p.b, tile.batch * p.b_batch, tile.col, p.n, p.k, p.b_col, p.b_row, smem + STAGES * OperandA::BYTES);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = warp / ACROSS * ROWS * 16, col = warp % ACROSS * COLS * 8;
  int sum[ROWS][COLS][4] = {};
  const i64 steps = (p.k + DEPTH - 1) / DEPTH;
#pragma unroll 1
  for (int s = 0; s < STAGES - 1; ++s) {
    if (s < steps) {
      a.begin(s, (i64)s * DEPTH), b.begin(s, (i64)s * DEPTH);
      a.end(s), b.end(s);
    }
    ptx::cp_async_commit();
  }
  int now = 0, next = STAGES - 1;
  for (i64 s = 0; s < steps; ++s) {
    ptx::cp_async_wait<STAGES - 2>();
    __syncthreads();  // stage `now` is there for all, and nobody reads stage `next` any more
    const bool more = s + STAGES - 1 < steps;
    if (more) a.begin(next, (s + STAGES - 1) * DEPTH), b.begin(next, (s + STAGES - 1) * DEPTH);
    ptx::cp_async_commit();
#pragma unroll
    for (int l = 0; l < DEPTH; l += 32) {
      u32 fa[ROWS][4], fb[COLS / 2][4];
      if constexpr (SWAP) {
        load_fragments<true>(fa, b, now, row, l);
        load_fragments<false>(fb, a, now, col, l);
      } else {
        load_fragments<true>(fa, a, now, row, l);
        load_fragments<false>(fb, b, now, col, l);
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLS; ++c) {
          const u32 pair[2] = {fb[c / 2][c % 2 * 2], fb[c / 2][c % 2 * 2 + 1]};
          if constexpr (SWAP) mma(sum[r][c], fa[r], pair, TB(), TA());
          else mma(sum[r][c], fa[r], pair, TA(), TB());
        }
    }
    if (more) a.end(next), b.end(next);
    now = now + 1 == STAGES ? 0 : now + 1;
    next = next + 1 == STAGES ? 0 : next + 1;
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int c = 0; c < COLS; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at_row = row + r * 16 + lane / 4 + i / 2 * 8, at_col = col + c * 8 + lane % 4 * 2 + i % 2;
        finish_at<TC>(p, tile.batch, tile.row + (SWAP ? at_col : at_row), tile.col + (SWAP ? at_row : at_col),
                      sum[r][c][i]);
      }
}
