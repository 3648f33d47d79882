// Sums across the rows of a matrix whose rows are contiguous, streamed once: LANES threads side by side own V
// neighbouring columns each, and the other threads of the block (and other blocks) walk other rows.
#pragma once
#include "stream.cuh"

// V columns are a 16-byte vector. A unit is the threads that walk rows together: a warp, or LANES threads where they are
// more. Rows whose starts are not aligned are read by aligned vectors too: a unit walks rows so far apart that all of
// its own begin at the same place of a vector, and its sums are put in their columns afterwards. A strip is then
// narrower than what its lanes read by what may lie before its first column.
template <class TA, int THREADS_, int LANES_, bool ALIGNED> struct Strip {
  static constexpr int V = Lanes<TA>::count, THREADS = THREADS_, LANES = LANES_;
  static constexpr int columns = LANES * V - (ALIGNED ? 0 : V - 1);
  static constexpr int unit = LANES < 32 ? 32 : LANES, units = THREADS / unit;  // threads of a unit, units of a block
  static constexpr int side = unit / LANES;     // rows side by side in a unit
  static constexpr int apart = ALIGNED ? 1 : V;  // how far they lie apart
  // Where the units' sums meet in shared memory, `sharers` threads add up a column. Skewed sums are written one by one,
  // by lanes V columns apart: an unused place behind every V spares them from meeting in one bank; so does `pad` the
  // sharers, which read one column in several rows.
  static constexpr int most = THREADS / (LANES * V) < units ? THREADS / (LANES * V) : units;
  static constexpr int wanted = units / 8 < most ? units / 8 : most;
  static constexpr int sharers = wanted >= 8 ? 8 : wanted >= 4 ? 4 : wanted >= 2 ? 2 : 1;
  static constexpr int pad = sharers > 1 ? 32 / sharers : 0;
  static constexpr int width = LANES * V + (ALIGNED ? 0 : LANES) + pad;
  __device__ static __forceinline__ int place_of_column(int c) { return ALIGNED ? c : c + c / V; }
  // The columns of each of `strips` strips: all that fit, or, as 8191 x 1025 halves would leave every fifth block with
  // 29 columns of 249, equal shares.
  __device__ static __forceinline__ int share(int m, unsigned strips) { return ALIGNED ? columns : (m + strips - 1) / strips; }
};

// The rows of a thread: U of them each turn, `gap` rows apart from `first` on. Units (of all blocks that share the strip)
// whose numbers are equal modulo `apart` walk rows that begin at the same place of a vector.
template <class S, int U> struct Walk {
  static constexpr int gap = S::side * S::apart, turn = U * gap;
  int first, step;
  __device__ __forceinline__ Walk(int rank, int blocks) {
    const unsigned unit = rank * S::units + threadIdx.x / S::unit;
    first = unit / S::apart * turn + unit % S::apart + threadIdx.x % S::unit / S::LANES * S::apart;
    step = blocks * S::units / S::apart * turn;
  }
  __device__ __forceinline__ bool holds(int row) const {
    return row >= first && (row - first) % step < turn && (row - first) % gap == 0;
  }
};

// How many elements before a strip's first column the vectors of a row begin.
template <class S, class TA>
__device__ __forceinline__ int skew_of(const GemvArgs& p, const TA* a, int strip0, int row) {
  return S::apart == 1 ? 0 : (int)((u64)(a + row * p.a_col + strip0) & 15) / (int)sizeof(TA);
}

// Add the thread's rows to the sums of the V columns from i0 on, with U loads in flight. A turn's loads are predicated,
// so that the last turn has all of its loads in flight at once like every other; x goes first, or it would wait in
// line behind the matrix. Columns before the first one are summed too, and thrown away; columns from `end` on belong to
// another strip.
template <class S, int U, int V, class TA, class TX, class Acc>
__device__ __forceinline__ void add_rows(const GemvArgs& p, const TA* a, const TX* x, int i0, int end, Walk<S, U> walk, Acc (&sum)[V]) {
  constexpr bool ALIGNED = S::apart == 1;
  typedef typename OnceFor<ALIGNED && S::LANES < 8>::type Once;
  const int m = (int)p.m, n = (int)p.n;  // both below 2^31: a constraint of the rungs
#pragma unroll
  for (int i = 0; i < V; ++i) sum[i] = 0;
  if (i0 >= end) return;
  // Near their end the vectors of a row reach into the next row, which does no harm; behind the last row there may
  // be nothing, so that it goes element by element.
  const bool whole = i0 + V <= m, reach = p.a_col >= V;
  const int rows = whole ? n : reach ? n - 1 : 0;
  // Where rows are unaligned the last row's elements are under way before everything else (16 bytes would
  // take too many registers).
  constexpr bool AHEAD = !ALIGNED && V <= 8;
  const bool ends = !whole && reach && walk.holds(n - 1);
  ptx::Vec<TA, 1> end_a[V];
  TX end_x = TX(0);
  if constexpr (AHEAD) {
    const TA* last = a + (n - 1) * p.a_col + i0;
#pragma unroll
    for (int i = 0; i < V; ++i) end_a[i] = Once::load((const ptx::Vec<TA, 1>*)(last + i), ends && i0 + i >= 0 && i0 + i < m);
    end_x = Again::load((const ptx::Vec<TX, 1>*)(x + (n - 1) * p.x_step), ends).v[0];
  }
  const i64 a_step = walk.step * p.a_col, x_step = walk.step * p.x_step, a_gap = walk.gap * p.a_col, x_gap = walk.gap * p.x_step;
  const TA* row = a + walk.first * p.a_col + i0;
  const TX* xj = x + walk.first * p.x_step;
#pragma unroll 1
  for (int left = rows - walk.first; left > 0; left -= walk.step, row += a_step, xj += x_step) {
    // excerpt turn
    Chunk<TA> va[U];
    ptx::Vec<TX, 1> vx[U];
#pragma unroll
    for (int u = 0; u < U; ++u) vx[u] = Again::load((const ptx::Vec<TX, 1>*)(xj + u * x_gap), u * walk.gap < left);
#pragma unroll
    for (int u = 0; u < U; ++u) va[u] = Once::load((const Chunk<TA>*)(row + u * a_gap), u * walk.gap < left);
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int i = 0; i < V; ++i) sum[i] += wide<Acc>(va[u].v[i]) * wide<Acc>(vx[u].v[0]);
    // end of excerpt
  }
  if constexpr (AHEAD) {
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] += wide<Acc>(end_a[i].v[0]) * wide<Acc>(end_x);
  }
  if (whole || (AHEAD && reach)) return;
  const auto one_by_one = [&](int j) {
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (i0 + i >= 0 && i0 + i < m) sum[i] += wide<Acc>(a[j * p.a_col + i0 + i]) * wide<Acc>(x[j * p.x_step]);
  };
  if (ends) one_by_one(n - 1);
#pragma unroll 1
  for (int j = walk.first; !reach && j < n; j += walk.step)
    for (int t = j; t < n && t < j + walk.turn; t += walk.gap) one_by_one(t);
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

// Bring the block's sums of each column together: parts[k][S::place_of_column(c)], for k < S::units, is then complete.
template <class S, int V, class Acc>
__device__ __forceinline__ void collect(Acc (&sum)[V], Acc (*parts)[S::width], int skew) {
  constexpr int SIDE = S::side, LEFT = V > SIDE ? V / SIDE : 1;
  const int first = fold<16, S::LANES, V>(sum), c0 = threadIdx.x % S::LANES * V + first - skew;
  // Of the lanes that end with the same column the first one writes.
  constexpr unsigned SAME = (unsigned)(SIDE > V ? SIDE / V - 1 : 0) * S::LANES;
  if (!(threadIdx.x & SAME))
#pragma unroll
    for (int i = 0; i < LEFT; ++i)
      if (S::apart == 1 || (c0 + i >= 0 && c0 + i < S::columns)) parts[threadIdx.x / S::unit][S::place_of_column(c0 + i)] = sum[i];
  __syncthreads();
}

// Add up the first `count` columns of a block and give each total to `take(column, total)`.
template <class S, class Acc, class Take>
__device__ __forceinline__ void add_parts(const Acc (*parts)[S::width], int count, Take take) {
#pragma unroll 1
  for (int at = threadIdx.x; at / 32 * 32 < count * S::sharers; at += S::THREADS) {
    const int c = at / S::sharers;
    Acc s = 0;
    if (c < count)
#pragma unroll
      for (int k = 0; k < S::units / S::sharers; ++k) s += parts[k * S::sharers + at % S::sharers][S::place_of_column(c)];
#pragma unroll
    for (int o = S::sharers / 2; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    if (at % S::sharers == 0 && c < count) take(c, s);
  }
}
