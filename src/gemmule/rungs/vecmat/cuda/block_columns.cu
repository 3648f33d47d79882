// Block columns: a block owns a strip of columns, its threads walk the rows, and their sums meet in shared memory.
#include "column_stream.cuh"

// With 768 threads on a multiprocessor a thread has 80 registers: 8 vectors under way, the sums, the addresses.
template <class TA, class TX, class TY, int THREADS, int LANES, int U, bool ALIGNED, bool BATCHED>
__global__ void __launch_bounds__(THREADS, 768 / THREADS) block_columns(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  typedef Strip<TA, THREADS, LANES, ALIGNED> S;
  const int strip0 = blockIdx.x * S::columns, m = (int)p.m;
  const unsigned batch = BATCHED ? blockIdx.y : 0;
  const TA* a = (const TA*)p.a + (BATCHED ? batch * p.a_batch : 0);
  const TX* x = (const TX*)p.x + (BATCHED ? batch * p.x_batch : 0);
  TY* y = (TY*)p.y + (BATCHED ? batch * p.y_batch : 0);
  static_assert(ALIGNED || S::depth % S::V == 0, "rows of one walker begin at the same place of a vector");
  const int j = threadIdx.x / LANES, skew = skew_of<ALIGNED, S::V>(p, a, strip0, j);
  Acc sum[S::V];
  add_rows<ALIGNED, U>(p, a, x, strip0 + (int)(threadIdx.x % LANES) * S::V - skew, j, S::depth, sum);

  __shared__ alignas(16) Acc parts[S::parts][S::width];
  collect<S, LANES>(sum, parts, skew);
  for (int c = threadIdx.x; c < S::columns && strip0 + c < m; c += THREADS) {
    Acc s = 0;
#pragma unroll
    for (int k = 0; k < S::parts; ++k) s += parts[k][S::place_of_column(c)];
    store_sum(p, y + (strip0 + c) * p.y_step, s);
  }
}
