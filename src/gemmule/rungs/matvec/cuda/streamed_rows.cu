// Streamed rows: WARPS warps share R rows, each lane keeps U x R independent 16-byte loads in flight.
#include "stream.cuh"

template <class TA, class TX, class TY, int WARPS, int GROUPS, int R, int U, bool ALIGNED>
__global__ void __launch_bounds__(32 * WARPS * GROUPS) streamed_rows(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  constexpr int V = Lanes<TA>::count, STEP = WARPS * 32;
  const int lane = threadIdx.x % 32, group = threadIdx.x / STEP, walker = threadIdx.x % STEP;
  const Place at = place_of(p.batch, blockIdx.x, (p.m + GROUPS * R - 1) / (GROUPS * R));
  const i64 first_row = (i64)at.block * (GROUPS * R), row0 = first_row + group * R;
  const TX* x = (const TX*)p.x + at.batch * p.x_batch;
  const Acc alpha = scalar<Acc>(p.alpha), beta = scalar<Acc>(p.beta);
  const bool x_vector = p.x_step == 1 && ((u64)x & 15) == 0;
  const TA* a[R];
  Acc sum[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {  // rows past the end repeat the last one: no predicate in the loop
    const i64 row = row0 + r < p.m ? row0 + r : p.m - 1;
    a[r] = (const TA*)p.a + at.batch * p.a_batch + row * p.a_row;
    sum[r] = 0;
  }
  // Unaligned rows leave their first and last vector to the loop over single elements below, so
  // that the aligned vectors around every other one lie inside the row.
  const i64 first = ALIGNED ? 0 : 1;
  const i64 last = ALIGNED ? p.n / V : (p.n / V > 1 ? p.n / V - 1 : 1);
  i64 j = first + walker;
  for (; x_vector && j + (U - 1) * STEP < last; j += U * STEP) {
    Chunk<TA> va[U][R];
    XChunk<TX, V> vx[U];
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int r = 0; r < R; ++r) va[u][r] = load_a<ALIGNED>(a[r] + (j + u * STEP) * V);
#pragma unroll
    for (int u = 0; u < U; ++u) vx[u] = load_x<TX, V>(x + (j + u * STEP) * V);
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int r = 0; r < R; ++r) sum[r] = dot(va[u][r], vx[u], sum[r]);
  }
  if (x_vector) {  // what is left of one turn: all its loads at once too
    Chunk<TA> va[U][R];
    XChunk<TX, V> vx[U];
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (j + u * STEP < last) {
#pragma unroll
        for (int r = 0; r < R; ++r) va[u][r] = load_a<ALIGNED>(a[r] + (j + u * STEP) * V);
        vx[u] = load_x<TX, V>(x + (j + u * STEP) * V);
      }
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (j + u * STEP < last)
#pragma unroll
        for (int r = 0; r < R; ++r) sum[r] = dot(va[u][r], vx[u], sum[r]);
  } else {
#pragma unroll 1
    for (; j < last; j += STEP) {
      const XChunk<TX, V> vx = gather_x<TX, V>(x + j * V * p.x_step, p.x_step);
#pragma unroll
      for (int r = 0; r < R; ++r) sum[r] = dot(load_a<ALIGNED>(a[r] + j * V), vx, sum[r]);
    }
  }
  if constexpr (!ALIGNED) {
    const i64 head = V < p.n ? V : p.n;
    for (i64 i = walker; i < head; i += STEP)
#pragma unroll
      for (int r = 0; r < R; ++r) sum[r] += wide<Acc>(a[r][i]) * wide<Acc>(x[i * p.x_step]);
  }
  for (i64 i = last * V + walker; i < p.n; i += STEP)
#pragma unroll
    for (int r = 0; r < R; ++r) sum[r] += wide<Acc>(a[r][i]) * wide<Acc>(x[i * p.x_step]);

#pragma unroll
  for (int r = 0; r < R; ++r) sum[r] = warp_sum(sum[r]);
  TY* y = (TY*)p.y + at.batch * p.y_batch;
  if constexpr (WARPS == 1) {
#pragma unroll
    for (int r = 0; r < R; ++r)
      if (lane == r && row0 + r < p.m) finish_scaled(y + (row0 + r) * p.y_step, sum[r], alpha, beta);
  } else {
    __shared__ Acc part[GROUPS * R][WARPS];
    if (lane == 0)
#pragma unroll
      for (int r = 0; r < R; ++r) part[group * R + r][walker / 32] = sum[r];
    __syncthreads();
    const i64 row = first_row + threadIdx.x;
    if (threadIdx.x >= GROUPS * R || row >= p.m) return;
    Acc total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += part[threadIdx.x][w];
    finish_scaled(y + row * p.y_step, total, alpha, beta);
  }
}
