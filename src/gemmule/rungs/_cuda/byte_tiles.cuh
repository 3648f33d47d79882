// Tiles of 8-bit operands in shared memory, always as lines along the reduction: all bytes of a register of
// mma.sync lie along it, and ldmatrix transposes pairs of bytes, not bytes.
#pragma once
#include "bytes.cuh"
#include "tiles.cuh"

constexpr int DEPTH = 64;   // steps of the reduction in one stage: two instructions

// One operand, seen as TILE rows of A (or columns of B) by DEPTH steps; a stage holds a line of DEPTH bytes a row.
template <int TILE, int THREADS, bool ALONG_K>
struct ByteOperand {
  static constexpr int BYTES = TILE * DEPTH, CHUNKS = DEPTH / 16, PARTS = TILE * CHUNKS / THREADS;
  const unsigned char* base;
  i64 start, size, k, lead;
  unsigned char* smem;
  bool aligned;
  u32 held[4][2];  // four steps of eight rows, on their way to be transposed

  __device__ __forceinline__ ByteOperand(const void* base, i64 offset, i64 start, i64 size, i64 k, i64 step, i64 k_step,
                                     unsigned char* smem)
      : base((const unsigned char*)base + offset), start(start), size(size), k(k), lead(ALONG_K ? step : k_step),
        smem(smem) {
    aligned = (((u64)this->base | (u64)lead) & (ALONG_K ? 15 : 7)) == 0;
  }
  // Chunks are permuted within their line: the eight lines that ldmatrix reads at one chunk lie in different
  // banks, and so do most of the lines that transposed words go to.
  static __device__ __forceinline__ int place(int line, int chunk) {
    return (line * CHUNKS + (chunk ^ ((line >> 1 ^ line >> 3) & 3))) * 16;
  }
  static __device__ __forceinline__ int clamped(i64 left, int most) {
    return left >= most ? most : left > 0 ? int(left) : 0;
  }
  // The thread's four steps and eight rows: a warp takes 32 steps of 32 rows, whole sectors of both.
  __device__ __forceinline__ void my_block(int& step, int& row) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    step = (warp / (TILE / 32) * 8 + lane / 4) * 4;
    row = (warp % (TILE / 32) * 4 + lane % 4) * 8;
  }
  __device__ __forceinline__ void begin(int stage, i64 first) {  // starts what stage will hold
    if constexpr (ALONG_K) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const int e = part * THREADS + threadIdx.x, line = e / CHUNKS, chunk = e % CHUNKS;
        const i64 o = start + line, q = first + chunk * 16;
        const int count = o < size ? clamped(k - q, 16) : 0;
        const unsigned char* from = base + (count ? o * lead + q : 0);
        unsigned char* to = smem + stage * BYTES + place(line, chunk);
        if (aligned) {
          ptx::cp_async<16>(ptx::smem_addr(to), from, count);
        } else {
          u32 w[4];
          load_bytes<16>(from, count, false, w);
          *(uint4*)to = make_uint4(w[0], w[1], w[2], w[3]);
        }
      }
    } else {
      int step, row;
      my_block(step, row);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const i64 o = first + step + i, q = start + row;
        const int count = o < k ? clamped(size - q, 8) : 0;
        load_bytes<8>(base + (count ? o * lead + q : 0), count, aligned, held[i]);
      }
    }
  }
  __device__ __forceinline__ void end(int stage) {  // and stores what had to wait for its transposition
    if constexpr (!ALONG_K) {
      int step, row;
      my_block(step, row);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 w[4] = {held[0][half], held[1][half], held[2][half], held[3][half]};
        transpose_bytes(w);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          *(u32*)(smem + stage * BYTES + place(row + half * 4 + j, step / 16) + step % 16) = w[j];
      }
    }
  }
  // Loads four matrices of 8 lines by 16 bytes: lane / 8 is the matrix.
  __device__ __forceinline__ void load(u32 (&r)[4], int stage, int line, int step) const {
    ptx::ldmatrix_x4(r, ptx::smem_addr(smem + stage * BYTES) + place(line + threadIdx.x % 8, step / 16));
  }
};
