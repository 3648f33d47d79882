// Sums across the rows of a matrix whose rows are contiguous, streamed once: LANES threads side by side own V
// neighbouring columns each, and the other threads of the block (and other blocks) walk other rows.
#pragma once
#include "stream.cuh"

// Unaligned rows go one element a load: still coalesced, and every row has its own alignment.
template <class TA, int THREADS, int LANES, bool ALIGNED> struct Strip {
  static constexpr int V = ALIGNED ? Lanes<TA>::count : 1;
  static constexpr int columns = LANES * V, depth = THREADS / LANES;       // a block's columns, rows at a time
  static constexpr int parts = LANES < 32 ? THREADS / 32 : depth;          // sums of a column that meet in shared memory
};

// Add rows j, j + walkers, ... to the sums of the columns from i0 on. A turn's loads are predicated, so that the
// last turn has all of its loads in flight at once like every other.
template <int V, int U, class TA, class TX, class Acc>
__device__ __forceinline__ void add_rows(const GemvArgs& p, const TA* a, const TX* x, int i0, int j, int walkers, Acc (&sum)[V]) {
  typedef ptx::Vec<TA, V> Load;
  const int m = (int)p.m, n = (int)p.n;  // both below 2^31: a constraint of the rungs
#pragma unroll
  for (int i = 0; i < V; ++i) sum[i] = 0;
  a += j * p.a_col + i0;
  x += j * p.x_step;
  const i64 a_step = walkers * p.a_col, x_step = walkers * p.x_step;
  if (i0 + V <= m) {
#pragma unroll 1
    for (int left = n - j; left > 0; left -= U * walkers, a += U * a_step, x += U * x_step) {
      Load va[U];
      TX vx[U];
#pragma unroll
      for (int u = 0; u < U; ++u) va[u] = ptx::ld_cs_if((const Load*)(a + u * a_step), u * walkers < left);
#pragma unroll
      for (int u = 0; u < U; ++u) vx[u] = ptx::ld_nc_if(x + u * x_step, u * walkers < left);
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i] += wide<Acc>(va[u].v[i]) * wide<Acc>(vx[u]);
    }
  } else {  // the last columns of rows that are no whole number of vectors
#pragma unroll 1
    for (; j < n; j += walkers, a += a_step, x += x_step)
#pragma unroll
      for (int i = 0; i < V; ++i)
        if (i0 + i < m) sum[i] += wide<Acc>(a[i]) * wide<Acc>(*x);
  }
}

// Bring the block's sums of each column together: parts[k][c], for k < Strip::parts, is then complete.
template <int LANES, int V, int COLUMNS, class Acc>
__device__ __forceinline__ void collect(Acc (&sum)[V], Acc (*parts)[COLUMNS]) {
  if constexpr (LANES < 32) {
#pragma unroll
    for (int i = 0; i < V; ++i)
#pragma unroll
      for (int o = LANES; o < 32; o <<= 1) sum[i] += __shfl_xor_sync(~0u, sum[i], o);
  }
  const int slot = LANES < 32 ? threadIdx.x / 32 : threadIdx.x / LANES;
  if (LANES >= 32 || threadIdx.x % 32 < LANES)
#pragma unroll
    for (int i = 0; i < V; ++i) parts[slot][threadIdx.x % LANES * V + i] = sum[i];
  __syncthreads();
}
