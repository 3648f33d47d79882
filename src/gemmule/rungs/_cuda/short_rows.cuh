// Stored rows of a few bytes, one a thread: too short for lanes to share, so that a block brings many of them to
// shared memory as they lie, neighbours by 16-byte copies, and its threads read them there.
#pragma once
#include "stream.cuh"

// The stored rows of a block: `rows` of them from `first` on, each `pitch` bytes after the one before.
template <class TA> struct Tile {
  const TA* first;
  int rows;
  i64 pitch;
};

// Copy a tile to shared memory, so that its first byte lands as far behind `room` as it lies behind a multiple of 16
// bytes; returns where. Only bytes of the tile are read: the first vector goes by elements where it begins before.
template <int THREADS, class TA>
__device__ __forceinline__ const unsigned char* stage(unsigned char* room, const Tile<TA>& tile, unsigned bytes_of_row) {
  const unsigned skew = (unsigned)((u64)tile.first & 15), end = skew + (tile.rows - 1) * (unsigned)tile.pitch + bytes_of_row;
  const unsigned char* base = (const unsigned char*)tile.first - skew;
  // excerpt stage
#pragma unroll 4
  for (unsigned at = threadIdx.x * 16; at < end; at += THREADS * 16) {
    if (at || !skew) ptx::cp_async<16>(ptx::smem_addr(room + at), base + at, min(16u, end - at));
    else for (unsigned i = skew; i < min(16u, end); i += sizeof(TA)) *(TA*)(room + i) = *(const TA*)(base + i);
  }
  // end of excerpt
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
  return room + skew;
}

// Whether rows lie close enough together for the room that they were given: `wide_row` bytes each.
template <class TA>
__device__ __forceinline__ bool is_dense(const Tile<TA>& tile, unsigned bytes_of_row, unsigned wide_row) {
  return tile.rows == 1 || (tile.pitch >= bytes_of_row && tile.pitch <= wide_row);
}
