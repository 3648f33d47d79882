// Staged rows: a thread has a row of its own, read from shared memory, where the block brought it with its neighbours.
// excerpt stage of short_rows.cuh
// counters: sectors a load request; occupancy, %; issue slots used, %
#include "short_rows.cuh"

// Sums of R rows, 256 apart, from `rows` on, in shared or global memory: W bytes at a time, then element by element.
template <int THREADS, int W, int R, class TA, class Acc>
__device__ __forceinline__ void add_rows(const unsigned char* rows, const Tile<TA>& tile, const Acc* x, int n, Acc (&sum)[R]) {
  constexpr int E = W / sizeof(TA);
  const unsigned char* row[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    sum[r] = 0;
    row[r] = rows + min((int)threadIdx.x + r * THREADS, tile.rows - 1) * tile.pitch;  // past the end the last one again
  }
  int c = 0;
  // excerpt
#pragma unroll 2
  for (; c + E <= n; c += E) {
    Acc xc[E];
#pragma unroll
    for (int i = 0; i < E; ++i) xc[i] = x[c + i];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const auto a = *(const ptx::Vec<TA, E>*)(row[r] + c * sizeof(TA));
#pragma unroll
      for (int i = 0; i < E; ++i) sum[r] += wide<Acc>(a.v[i]) * xc[i];
    }
  }
  // end of excerpt
  for (; c < n; ++c)
#pragma unroll
    for (int r = 0; r < R; ++r) sum[r] += wide<Acc>(*(const TA*)(row[r] + c * sizeof(TA))) * x[c];
}

template <class TA, class TX, class TY, int W, int R>
__global__ void __launch_bounds__(256) staged_rows(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  constexpr int THREADS = 256, ROWS = THREADS * R;
  extern __shared__ __align__(16) unsigned char smem[];
  const int m = (int)p.m, n = (int)p.n;  // both below 2^31: a constraint of the rung
  const Place at = place_of(p.batch, blockIdx.x, (m + ROWS - 1) / ROWS);
  const int row0 = at.block * ROWS;
  const TA* a = (const TA*)p.a + at.batch * p.a_batch + row0 * p.a_row;
  const Tile<TA> tile = {a, min(ROWS, m - row0), p.a_row * (i64)sizeof(TA)};
  const unsigned bytes_of_row = n * sizeof(TA), wide_row = (bytes_of_row + 15) / 16 * 16;
  Acc* x = (Acc*)smem;
  const TX* given = (const TX*)p.x + at.batch * p.x_batch;
  for (int i = threadIdx.x; i < n; i += THREADS) x[i] = wide<Acc>(given[i * p.x_step]);
  Acc sum[R];
  if (is_dense(tile, bytes_of_row, wide_row)) {
    unsigned char* room = smem + (n * sizeof(Acc) + 15) / 16 * 16;
    add_rows<THREADS, W, R>(stage<THREADS>(room, tile, bytes_of_row), tile, x, n, sum);
  } else {  // part of a wider matrix: each row where it lies
    __syncthreads();
    add_rows<THREADS, W, R>((const unsigned char*)a, tile, x, n, sum);
  }
  TY* y = (TY*)p.y + at.batch * p.y_batch;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int row = threadIdx.x + r * THREADS;
    if (row < tile.rows) store_sum(p, y + (row0 + row) * p.y_step, sum[r]);
  }
}
