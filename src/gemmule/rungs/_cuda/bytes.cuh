// Bytes on their way through registers: loaded as words, and transposed four by four.
#pragma once
#include "args.cuh"
#include "ptx.cuh"

typedef ptx::u32 u32;

// Byte i of word j <- byte j of word i.
__device__ __forceinline__ void transpose_bytes(u32 (&w)[4]) {
  // excerpt transpose
  const u32 low0 = __byte_perm(w[0], w[1], 0x5140), low1 = __byte_perm(w[2], w[3], 0x5140);
  const u32 high0 = __byte_perm(w[0], w[1], 0x7362), high1 = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(low0, low1, 0x5410);
  w[1] = __byte_perm(low0, low1, 0x7632);
  w[2] = __byte_perm(high0, high1, 0x5410);
  w[3] = __byte_perm(high0, high1, 0x7632);
  // end of excerpt
}

// N neighbouring bytes as words: one load where all are inside and aligned, else one by one, zero outside.
template <int N>
__device__ __forceinline__ void load_bytes(const unsigned char* from, int count, bool aligned, u32 (&w)[N / 4]) {
  typedef ptx::Vec<u32, N / 4> Words;
  Words v = {};
  if (aligned && count >= N) {
    v = ptx::ld_nc((const Words*)from);
  } else {
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
#pragma unroll 1  // the way of edges and of unaligned operands: short code before speed
      for (int j = 0; j < 4; ++j)
        if (4 * i + j < count) v[i] |= (u32)from[4 * i + j] << (8 * j);
  }
#pragma unroll
  for (int i = 0; i < N / 4; ++i) w[i] = v[i];
}
