// Staged columns: a thread takes a stored row of a few columns from shared memory, where the block brought it with its
// neighbours, and keeps the sums of all columns; blocks share the rows, and a second kernel adds their sums up.
// excerpt stage of short_rows.cuh
// counters: sectors a load request; occupancy, %; issue slots used, %
#include "short_rows.cuh"

// Add one stored row times x to the sums of its m columns: W bytes at a time where as many belong to it.
template <int W, int COLUMNS, class TA, class Acc>
__device__ __forceinline__ void add_row(const unsigned char* row, Acc x, int m, Acc (&sum)[COLUMNS]) {
  constexpr int E = W / sizeof(TA) < COLUMNS ? W / sizeof(TA) : COLUMNS;
  // excerpt
#pragma unroll
  for (int c = 0; c < COLUMNS; c += E) {
    if (c + E <= m) {
      const auto a = *(const ptx::Vec<TA, E>*)(row + c * sizeof(TA));
#pragma unroll
      for (int i = 0; i < E; ++i) sum[c + i] += wide<Acc>(a.v[i]) * x;
    } else {
#pragma unroll
      for (int i = 0; i < E; ++i)
        if (c + i < m) sum[c + i] += wide<Acc>(*(const TA*)(row + (c + i) * sizeof(TA))) * x;
    }
  }
  // end of excerpt
}

template <class TA, class TX, class TY, int W, int COLUMNS, int R, int SPLITS>
__global__ void __launch_bounds__(256) staged_columns(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  constexpr int THREADS = 256, ROWS = THREADS * R, WARPS = THREADS / 32;
#if __CUDA_ARCH__ >= 900 || defined(CUEMU)
  ptx::pdl_launch_dependents();
#endif
  extern __shared__ __align__(16) unsigned char smem[];
  const int m = (int)p.m, n = (int)p.n;  // both below 2^31: a constraint of the rung
  const Place at = place_of(p.batch, blockIdx.x, SPLITS);
  const unsigned bytes_of_row = m * sizeof(TA), wide_row = (bytes_of_row + 15) / 16 * 16;
  Acc sum[COLUMNS];
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) sum[c] = 0;
  for (i64 row0 = (i64)at.block * ROWS; row0 < n; row0 += (i64)SPLITS * ROWS) {
    const TA* a = (const TA*)p.a + at.batch * p.a_batch + row0 * p.a_col;
    const Tile<TA> tile = {a, (int)min((i64)ROWS, n - row0), p.a_col * (i64)sizeof(TA)};
    const TX* given = (const TX*)p.x + at.batch * p.x_batch + row0 * p.x_step;
    TX x[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row = threadIdx.x + r * THREADS;
      x[r] = Again::load((const ptx::Vec<TX, 1>*)(given + row * p.x_step), row < tile.rows).v[0];
    }
    const bool dense = is_dense(tile, bytes_of_row, wide_row);
    const unsigned char* rows = dense ? stage<THREADS>(smem, tile, bytes_of_row) : (const unsigned char*)a;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row = threadIdx.x + r * THREADS;
      if (row < tile.rows) add_row<W, COLUMNS, TA>(rows + row * tile.pitch, wide<Acc>(x[r]), m, sum);
    }
    if (dense) __syncthreads();  // before the next tile takes the room
  }
  __shared__ Acc part[WARPS][COLUMNS];
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    const Acc total = warp_sum(sum[c]);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32][c] = total;
  }
  __syncthreads();
  if ((int)threadIdx.x < m) {
    Acc total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += part[w][threadIdx.x];
    ((Acc*)p.work)[(at.batch * m + threadIdx.x) * SPLITS + at.block] = total;
  }
}

// A block for every result: its threads add up what the blocks before found, in a fixed order.
template <class TY, int SPLITS>
__global__ void __launch_bounds__(64) add_staged(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  constexpr int EACH = SPLITS / 64;
#if __CUDA_ARCH__ >= 900 || defined(CUEMU)
  ptx::pdl_wait();  // launched early: the partial sums are there only now
#endif
  const Place at = place_of(p.batch, blockIdx.x, p.m);
  const Acc* work = (const Acc*)p.work + (at.batch * p.m + at.block) * SPLITS;
  Acc v[EACH], total = 0;
#pragma unroll
  for (int e = 0; e < EACH; ++e) v[e] = work[e * 64 + threadIdx.x];
#pragma unroll
  for (int e = 0; e < EACH; ++e) total += v[e];
  total = warp_sum(total);
  __shared__ Acc half;
  if (threadIdx.x == 32) half = total;
  __syncthreads();
  if (threadIdx.x == 0) store_sum(p, (TY*)p.y + at.batch * p.y_batch + at.block * p.y_step, total + half);
}
