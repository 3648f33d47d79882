// Block columns: a block owns a strip of columns, its threads walk the rows, and their sums meet in shared memory.
// excerpt turn of column_stream.cuh
// counters: sectors a load request; occupancy, %; warp instructions, millions
#include "column_stream.cuh"

// With 768 threads on a multiprocessor a thread has 80 registers: 8 vectors under way, the sums, the addresses; with
// 1024, 64 registers and 4 vectors.
template <class TA, class TX, class TY, int THREADS, int LANES, int U, bool ALIGNED, bool BATCHED>
__global__ void __launch_bounds__(THREADS, U == 4 ? 1024 / THREADS : 768 / THREADS) block_columns(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  typedef Strip<TA, THREADS, LANES, ALIGNED> S;
  const int m = (int)p.m, columns = S::share(m, gridDim.x), strip0 = blockIdx.x * columns, end = min(strip0 + columns, m);
  const unsigned batch = BATCHED ? blockIdx.y : 0;
  const TA* a = (const TA*)p.a + (BATCHED ? batch * p.a_batch : 0);
  const TX* x = (const TX*)p.x + (BATCHED ? batch * p.x_batch : 0);
  TY* y = (TY*)p.y + (BATCHED ? batch * p.y_batch : 0);
  const Walk<S, U> walk(0, 1);
  const int skew = skew_of<S>(p, a, strip0, walk.first);
  Acc sum[S::V];
  add_rows(p, a, x, strip0 + (int)(threadIdx.x % LANES) * S::V - skew, end, walk, sum);

  __shared__ alignas(16) Acc parts[S::units][S::width];
  collect<S>(sum, parts, skew);
  add_parts<S>(parts, end - strip0, [&](int c, Acc s) { store_sum(p, y + (strip0 + c) * p.y_step, s); });
}
