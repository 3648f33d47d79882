// Copies of 8-bit operands in lines along the reduction that begin at multiples of 16 bytes: wgmma reads bytes in no
// other order, and TMA from no other place.
#pragma once
#include "bytes.cuh"
#include "pack_lines.cuh"

constexpr int PACK_THREADS = 256, PACK_ROWS = 64, PACK_STEPS = 128;   // a block's turn

// `size` lines of `k` steps from an operand whose lines are its unit stride: `lead` bytes from a step to the next.
__device__ __forceinline__ void transpose_lines(const unsigned char* from, unsigned char* to, i64 size, i64 k,
                                                i64 planes, i64 lead, i64 plane, unsigned char* smem) {
  const i64 pitch = (k + 15) / 16 * 16, along = (k + PACK_STEPS - 1) / PACK_STEPS;
  const i64 across = (size + PACK_ROWS - 1) / PACK_ROWS, all = along * across * planes;
  const bool aligned = (((u64)from | (u64)lead | (u64)plane) & 7) == 0;
  const int t = threadIdx.x, my_step = t / 8 * 4, my_row = t % 8 * 8;
  for (i64 at = blockIdx.x; at < all; at += gridDim.x) {
    const i64 z = at / (along * across), row = at % across * PACK_ROWS, step = at / across % along * PACK_STEPS;
    const i64 rows_left = size - row - my_row;
    const int count = rows_left >= 8 ? 8 : rows_left > 0 ? int(rows_left) : 0;
    u32 held[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool inside = step + my_step + i < k && count > 0;
      load_bytes<8>(inside ? from + z * plane + (step + my_step + i) * lead + row + my_row : from, inside ? count : 0,
                    aligned, held[i]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {   // chunks of 16 bytes are permuted by rows' eights: no two in one bank
      u32 w[4] = {held[0][half], held[1][half], held[2][half], held[3][half]};
      transpose_bytes(w);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        *(u32*)(smem + (my_row + half * 4 + j) * PACK_STEPS + ((my_step / 16 ^ t % 8) * 16 + my_step % 16)) = w[j];
    }
    __syncthreads();
#pragma unroll
    for (int part = 0; part < PACK_ROWS * PACK_STEPS / 16 / PACK_THREADS; ++part) {
      const int e = part * PACK_THREADS + t, line = e / 8, chunk = e % 8;
      if (row + line < size && step + chunk * 16 < pitch)
        *(uint4*)(to + (z * size + row + line) * pitch + step + chunk * 16) =
            *(const uint4*)(smem + line * PACK_STEPS + (chunk ^ line / 8) * 16);
    }
    __syncthreads();
  }
}

enum { AS_IT_IS, LINED_UP, TRANSPOSED };   // what is done to an operand

template <int HOW>
__device__ __forceinline__ void pack_bytes_of(const void* from, void* to, i64 size, i64 k, i64 batch, i64 step, i64 k_step,
                                              i64 plane, unsigned char* smem) {
  const unsigned char* bytes = (const unsigned char*)from;
  if constexpr (HOW == LINED_UP) pack_lines<16>(bytes, (unsigned char*)to, k, size, plane ? batch : 1, step, plane);
  if constexpr (HOW == TRANSPOSED)
    transpose_lines(bytes, (unsigned char*)to, size, k, plane ? batch : 1, k_step, plane, smem);
}

// The bytes of an operand's copy, as `_packed_bytes` of wgmma_bytes.py says.
__device__ __forceinline__ i64 packed_bytes(i64 size, i64 k, i64 planes) {
  return ((k + 15) / 16 * 16 * size * planes + 255) / 256 * 256;
}

template <int A, int B>
__global__ void __launch_bounds__(PACK_THREADS) pack_bytes(const GemmArgs p) {
  __shared__ __align__(16) unsigned char smem[PACK_ROWS * PACK_STEPS];
  pack_bytes_of<A>(p.a, p.work, p.m, p.k, p.batch, p.a_row, p.a_col, p.a_batch, smem);
  unsigned char* const of_b = (unsigned char*)p.work + (A == AS_IT_IS ? 0 : packed_bytes(p.m, p.k, p.a_batch ? p.batch : 1));
  pack_bytes_of<B>(p.b, of_b, p.n, p.k, p.batch, p.b_col, p.b_row, p.b_batch, smem);
}
