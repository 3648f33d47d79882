// Copies of operands whose lines begin at multiples of 16 bytes, where TMA wants them.
#pragma once
#include "args.cuh"
#include "ptx.cuh"

// Lines of `inner` neighbouring elements, `outer` of them in each of `planes`, CHUNK of them in 16 bytes; returns where
// the copy ends, rounded up.
template <int CHUNK, class T>
__device__ __forceinline__ T* pack_lines(const T* from, T* to, i64 inner, i64 outer, i64 planes, i64 lead, i64 plane) {
  const i64 chunks = (inner + CHUNK - 1) / CHUNK, lines = outer * planes, all = chunks * lines;
  for (i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x; at < all; at += (i64)gridDim.x * blockDim.x) {
    const i64 line = at / chunks, first = at % chunks * CHUNK;
    const T* source = from + line / outer * plane + line % outer * lead + first;
    ptx::Vec<T, CHUNK> out;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) out[i] = first + i < inner ? source[i] : T(0);
    *(ptx::Vec<T, CHUNK>*)(to + line * chunks * CHUNK + first) = out;
  }
  return to + (all * CHUNK + 127) / 128 * 128;
}
