// Streamed rows: WARPS warps share R rows, each lane keeps U x R independent 16-byte loads in flight.
#include "stream.cuh"

// Sizes are below 2^31 (a constraint of the rung), so indices are 32-bit and the way to the first load
// is short: every instruction before it costs all blocks of the first wave. With 768 threads on a
// multiprocessor a thread has 80 registers: enough for its loads, few enough to keep many under way.
template <class TA, class TX, class TY, int WARPS, int GROUPS, int R, int U, bool ALIGNED, bool BATCHED>
__global__ void __launch_bounds__(32 * WARPS * GROUPS, 768 / (32 * WARPS * GROUPS)) streamed_rows(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  constexpr int V = Lanes<TA>::count, STEP = WARPS * 32;
  const int lane = threadIdx.x % 32, group = threadIdx.x / STEP, walker = threadIdx.x % STEP;
  const int m = (int)p.m, n = (int)p.n, first_row = blockIdx.x * (GROUPS * R), row0 = first_row + group * R;
  // Unaligned rows leave their first and last vector to the loops over single elements, so that the
  // aligned vectors around every other one lie inside the row.
  const int last = ALIGNED ? n / V : (n / V > 1 ? n / V - 1 : 1);
  for (unsigned batch = BATCHED ? blockIdx.y : 0;;) {
    const TX* x = (const TX*)p.x + (BATCHED ? batch * p.x_batch : 0);
    const TA* a[R];
    Acc sum[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {  // rows past the end repeat the last one: no predicate in the loop
      a[r] = (const TA*)p.a + (unsigned)min(row0 + r, m - 1) * p.a_row + (BATCHED ? batch * p.a_batch : 0);
      sum[r] = 0;
    }
    const bool x_vector = p.x_step == 1 && ((u64)x & 15) == 0;
    int j = (ALIGNED ? 0 : 1) + walker;
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
#pragma unroll 1
    for (; j < last; j += STEP) {
      const XChunk<TX, V> vx = x_vector ? load_x<TX, V>(x + j * V) : gather_x<TX, V>(x + j * V * p.x_step, p.x_step);
#pragma unroll
      for (int r = 0; r < R; ++r) sum[r] = dot(load_a<ALIGNED>(a[r] + j * V), vx, sum[r]);
    }
    const int head = ALIGNED ? 0 : min(V, n), rest = head + max(n - last * V, 0);
#pragma unroll 1
    for (int e = walker; e < rest; e += STEP) {  // single elements: the head, then the tail
      const int i = e < head ? e : e - head + last * V;
#pragma unroll
      for (int r = 0; r < R; ++r) sum[r] += wide<Acc>(a[r][i]) * wide<Acc>(x[i * p.x_step]);
    }
#pragma unroll
    for (int r = 0; r < R; ++r) sum[r] = warp_sum(sum[r]);
    TY* y = (TY*)p.y + (BATCHED ? batch * p.y_batch : 0);
    if constexpr (WARPS == 1) {
#pragma unroll
      for (int r = 0; r < R; ++r)
        if (lane == r && row0 + r < m) finish(y + (row0 + r) * p.y_step, sum[r], p.alpha, p.beta);
    } else {
      __shared__ Acc part[GROUPS * R][WARPS];
      if (lane == 0)
#pragma unroll
        for (int r = 0; r < R; ++r) part[group * R + r][walker / 32] = sum[r];
      __syncthreads();
      const int row = first_row + threadIdx.x;
      if (threadIdx.x < GROUPS * R && row < m) {
        Acc total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total += part[threadIdx.x][w];
        finish(y + row * p.y_step, total, p.alpha, p.beta);
      }
      if (BATCHED) __syncthreads();  // before the next product reuses part
    }
    if (!BATCHED || (batch += gridDim.y) >= p.batch) return;
  }
}
