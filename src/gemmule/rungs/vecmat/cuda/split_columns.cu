// Split columns: as block columns, but the rows of a strip are split over many blocks, which write partial
// sums to the workspace; a second kernel adds them in fixed order.
// counters: sectors a load request; occupancy, %; warp instructions, millions
#include "column_stream.cuh"
#include "complex.cuh"
#include "float8.cuh"

template <class TA, class TX, class TY, int LANES, int U, bool ALIGNED, bool BATCHED>
__global__ void __launch_bounds__(256, 3) split_columns(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  typedef Strip<TA, 256, LANES, ALIGNED> S;
#if __CUDA_ARCH__ >= 900 || defined(CUEMU)
  ptx::pdl_launch_dependents();
#endif
  const int m = (int)p.m, rank = blockIdx.y, splits = gridDim.y;
  const int columns = S::share(m, gridDim.x), strip0 = blockIdx.x * columns, end = min(strip0 + columns, m);
  const unsigned batch = BATCHED ? blockIdx.z : 0;
  const TA* a = (const TA*)p.a + (BATCHED ? batch * p.a_batch : 0);
  const TX* x = (const TX*)p.x + (BATCHED ? batch * p.x_batch : 0);
  const Walk<S, U> walk(rank, splits);
  const int skew = skew_of<S>(p, a, strip0, walk.first);
  Acc sum[S::V];
  add_rows(p, a, x, strip0 + (int)(threadIdx.x % LANES) * S::V - skew, end, walk, sum);

  __shared__ alignas(16) Acc parts[S::units][S::width];
  // excerpt
  collect<S>(sum, parts, skew);
  Acc* work = (Acc*)p.work + ((i64)batch * splits + rank) * m + strip0;
  add_parts<S>(parts, end - strip0, [&](int c, Acc s) { work[c] = s; });
  // end of excerpt
}

// One thread per result would leave the chip idle: 8 threads share the splits of each.
template <class TY, int SPLITS>
__global__ void __launch_bounds__(256) add_splits(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  constexpr int PARTS = SPLITS < 8 ? SPLITS : 8, EACH = (SPLITS + PARTS - 1) / PARTS, ROWS = 32;
#if __CUDA_ARCH__ >= 900 || defined(CUEMU)
  ptx::pdl_wait();  // launched early: the partial sums are there only now
#endif
  __shared__ Acc part[PARTS][ROWS];
  const Place at = place_of(p.batch, blockIdx.x, (p.m + ROWS - 1) / ROWS);
  const int c = threadIdx.x % ROWS, s = threadIdx.x / ROWS;
  const i64 row = (i64)at.block * ROWS + c;
  if (s < PARTS && row < p.m) {
    const Acc* work = (const Acc*)p.work + at.batch * SPLITS * p.m + row;
    Acc v[EACH], total = 0;
#pragma unroll
    for (int e = 0; e < EACH; ++e) v[e] = s * EACH + e < SPLITS ? work[(s * EACH + e) * p.m] : 0;
#pragma unroll
    for (int e = 0; e < EACH; ++e) total += v[e];
    part[s][c] = total;
  }
  __syncthreads();
  if (s > 0 || row >= p.m) return;
  Acc total = 0;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) total += part[i][c];
  store_sum(p, (TY*)p.y + at.batch * p.y_batch + row * p.y_step, total);
}
