// Sums across the rows of a matrix whose rows are contiguous, streamed once: LANES threads side by side own V
// neighbouring columns each, and the other threads of the block (and other blocks) walk other rows.
#pragma once
#include "stream.cuh"

// V columns are a 16-byte vector. Unaligned, vectors are shifted from the two around them, which pays for elements of
// 1 and 2 bytes; wider ones go one by one, still coalesced.
template <class TA, int THREADS, int LANES, bool ALIGNED> struct Strip {
  static constexpr int V = ALIGNED || sizeof(TA) <= 2 ? Lanes<TA>::count : 1;
  static constexpr int columns = LANES * V, depth = THREADS / LANES;       // a block's columns, rows at a time
  static constexpr int parts = LANES < 32 ? THREADS / 32 : depth;          // sums of a column that meet in shared memory
};

// Add rows j, j + walkers, ... to the sums of the V columns from i0 on, with U loads in flight. A turn's loads are
// predicated, so that the last turn has all of its loads in flight at once like every other.
template <bool ALIGNED, int U, int V, class TA, class TX, class Acc>
__device__ __forceinline__ void add_rows(const GemvArgs& p, const TA* a, const TX* x, int i0, int j, int walkers, Acc (&sum)[V]) {
  const int m = (int)p.m, n = (int)p.n;  // both below 2^31: a constraint of the rungs
#pragma unroll
  for (int i = 0; i < V; ++i) sum[i] = 0;
  if (i0 >= m) return;
  // Near their end the vectors of a row reach into the next row, which does no harm; behind the last row there may
  // be nothing, so that it goes element by element.
  constexpr int REACH = ALIGNED || V == 1 ? V : 2 * V;
  const int rows = i0 + REACH <= m ? n : p.a_col >= REACH ? n - 1 : 0;
  const i64 a_step = walkers * p.a_col, x_step = walkers * p.x_step;
  const TA* row = a + j * p.a_col + i0;
  const TX* xj = x + j * p.x_step;
#pragma unroll 1
  for (int left = rows - j; left > 0; left -= U * walkers, row += U * a_step, xj += U * x_step) {
    ptx::Vec<TA, V> va[U];
    TX vx[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if constexpr (V == 1) va[u] = ptx::ld_cs_if((const ptx::Vec<TA, 1>*)(row + u * a_step), u * walkers < left);
      else va[u] = load_a_if<ALIGNED>(row + u * a_step, u * walkers < left);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) vx[u] = ptx::ld_nc_if(xj + u * x_step, u * walkers < left);
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int i = 0; i < V; ++i) sum[i] += wide<Acc>(va[u].v[i]) * wide<Acc>(vx[u]);
  }
  if (rows == n) return;
  if (rows > 0) j = j < n && (n - 1 - j) % walkers == 0 ? n - 1 : n;  // is the last row ours?
#pragma unroll 1
  for (; j < n; j += walkers)
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (i0 + i < m) sum[i] += wide<Acc>(a[j * p.a_col + i0 + i]) * wide<Acc>(x[j * p.x_step]);
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
