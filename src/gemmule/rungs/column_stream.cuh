// Sums across the rows of a matrix whose rows are contiguous, streamed once: LANES threads side by side own V
// neighbouring columns each, and the other threads of the block (and other blocks) walk other rows.
#pragma once
#include "stream.cuh"

// V columns are a 16-byte vector. Rows whose starts are not aligned are read by aligned vectors too: a walker steps over
// so many rows that all of its own begin at the same place of a vector, and its sums are put in their columns
// afterwards. A strip is then narrower than what its lanes read by what may lie before its first column.
template <class TA, int THREADS, int LANES, bool ALIGNED> struct Strip {
  static_assert(ALIGNED || LANES == 32, "unaligned rows: a warp a row");
  static constexpr int V = Lanes<TA>::count;
  static constexpr int columns = LANES * V - (ALIGNED ? 0 : V - 1), depth = THREADS / LANES;  // columns, rows at a time
  static constexpr int parts = LANES < 32 ? THREADS / 32 : depth;  // sums of a column that meet in shared memory
  static constexpr int width = columns + (ALIGNED ? 0 : columns / V);  // and what they take there: see place_of_column

  // Skewed sums are written one by one, by lanes V columns apart: an unused place behind every V spares them from
  // meeting in one bank.
  __device__ static __forceinline__ int place_of_column(int c) { return ALIGNED ? c : c + c / V; }
};

// Where a thread's V columns begin: strip0 + lane * V, less what lies between a vector's begin and the strip's.
template <bool ALIGNED, int V, class TA>
__device__ __forceinline__ int skew_of(const GemvArgs& p, const TA* a, int strip0, int j) {
  return ALIGNED ? 0 : (int)((u64)(a + j * p.a_col + strip0) & 15) / (int)sizeof(TA);
}

// Add rows j, j + walkers, ... to the sums of the V columns from i0 on, with U loads in flight. A turn's loads are
// predicated, so that the last turn has all of its loads in flight at once like every other. Columns before the first
// one are summed too, and thrown away.
template <bool ALIGNED, int U, int V, class TA, class TX, class Acc>
__device__ __forceinline__ void add_rows(const GemvArgs& p, const TA* a, const TX* x, int i0, int j, int walkers, Acc (&sum)[V]) {
  const int m = (int)p.m, n = (int)p.n;  // both below 2^31: a constraint of the rungs
#pragma unroll
  for (int i = 0; i < V; ++i) sum[i] = 0;
  if (i0 >= m) return;
  // Near their end the vectors of a row reach into the next row, which does no harm; behind the last row there may
  // be nothing, so that it goes element by element.
  const int rows = i0 + V <= m ? n : p.a_col >= V ? n - 1 : 0;
  // Is the last row ours? Where rows are unaligned its elements are under way before everything else (16 bytes would
  // take too many registers).
  constexpr bool AHEAD = !ALIGNED && V <= 8;
  const bool ends = rows > 0 && rows < n && j < n && (n - 1 - j) % walkers == 0;
  ptx::Vec<TA, 1> end_a[V];
  TX end_x = TX(0);
  if constexpr (AHEAD) {
    const TA* end = a + (n - 1) * p.a_col + i0;
#pragma unroll
    for (int i = 0; i < V; ++i) end_a[i] = Once::load((const ptx::Vec<TA, 1>*)(end + i), ends && i0 + i >= 0 && i0 + i < m);
    end_x = Again::load((const ptx::Vec<TX, 1>*)(x + (n - 1) * p.x_step), ends).v[0];
  }
  const i64 a_step = walkers * p.a_col, x_step = walkers * p.x_step;
  const TA* row = a + j * p.a_col + i0;
  const TX* xj = x + j * p.x_step;
#pragma unroll 1
  for (int left = rows - j; left > 0; left -= U * walkers, row += U * a_step, xj += U * x_step) {
    Chunk<TA> va[U];
    ptx::Vec<TX, 1> vx[U];
#pragma unroll
    for (int u = 0; u < U; ++u) va[u] = Once::load((const Chunk<TA>*)(row + u * a_step), u * walkers < left);
#pragma unroll
    for (int u = 0; u < U; ++u) vx[u] = Again::load((const ptx::Vec<TX, 1>*)(xj + u * x_step), u * walkers < left);
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int i = 0; i < V; ++i) sum[i] += wide<Acc>(va[u].v[i]) * wide<Acc>(vx[u].v[0]);
  }
  if constexpr (AHEAD) {
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] += wide<Acc>(end_a[i].v[0]) * wide<Acc>(end_x);
    if (rows > 0) return;
  }
  if (rows == n) return;
  if (rows > 0) j = ends ? n - 1 : n;
#pragma unroll 1
  for (; j < n; j += walkers)
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (i0 + i >= 0 && i0 + i < m) sum[i] += wide<Acc>(a[j * p.a_col + i0 + i]) * wide<Acc>(x[j * p.x_step]);
}

// Add up what lanes O apart hold for the same COUNT columns: each passes on one half of them and keeps the other, as
// long as there is more than one. Returns the first of the columns that stay with this lane.
template <int O, int LANES, int COUNT, int V, class Acc>
__device__ __forceinline__ int fold(Acc (&sum)[V]) {
  if constexpr (O < LANES) {
    return 0;
  } else if constexpr (COUNT > 1) {
    const bool upper = threadIdx.x & O;
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
      const Acc given = upper ? sum[i] : sum[i + COUNT / 2], kept = upper ? sum[i + COUNT / 2] : sum[i];
      sum[i] = kept + __shfl_xor_sync(~0u, given, O);
    }
    return (upper ? COUNT / 2 : 0) + fold<O / 2, LANES, COUNT / 2>(sum);
  } else {
    sum[0] += __shfl_xor_sync(~0u, sum[0], O);
    return fold<O / 2, LANES, 1>(sum);
  }
}

// Bring the block's sums of each column together: parts[k][S::place_of_column(c)], for k < S::parts, is then complete.
template <class S, int LANES, int V, class Acc>
__device__ __forceinline__ void collect(Acc (&sum)[V], Acc (*parts)[S::width], int skew) {
  if constexpr (LANES < 32) {
    constexpr int SHARERS = 32 / LANES, LEFT = V > SHARERS ? V / SHARERS : 1;
    const int first = fold<16, LANES, V>(sum);
    // Of the lanes that end with the same column the first one writes.
    constexpr unsigned SAME = (unsigned)(SHARERS > V ? SHARERS / V - 1 : 0) * LANES;
    if (!(threadIdx.x & SAME))
#pragma unroll
      for (int i = 0; i < LEFT; ++i) parts[threadIdx.x / 32][threadIdx.x % LANES * V + first + i] = sum[i];
  } else {
    const int c = threadIdx.x % LANES * V - skew;
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (c + i >= 0 && c + i < S::columns) parts[threadIdx.x / LANES][S::place_of_column(c + i)] = sum[i];
  }
  __syncthreads();
}
