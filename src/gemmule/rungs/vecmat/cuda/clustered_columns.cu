// Clustered columns: as block columns, but the blocks of a cluster split the rows of a strip, and each block
// pushes its sums to the one that owns a share of the columns.
// counters: sectors a load request; occupancy, %; warp instructions, millions
#include "cluster.cuh"
#include "column_stream.cuh"

// Sixteen sums of bytes a thread take 80 registers, all else fits 64.
template <class TA, class TX, class TY, int LANES, int CLUSTER, bool ALIGNED, bool BATCHED>
__global__ void __launch_bounds__(256, sizeof(TA) == 1 ? 3 : 4) clustered_columns(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  typedef Strip<TA, 256, LANES, ALIGNED> S;
  typedef Cluster<CLUSTER> Meet;
  constexpr int SHARE = (S::columns + CLUSTER - 1) / CLUSTER, U = 4;
  Meet::arrive();  // waited for before the first push
  const int rank = blockIdx.x % CLUSTER, m = (int)p.m;
  const int columns = S::share(m, gridDim.x / CLUSTER), strip0 = blockIdx.x / CLUSTER * columns, end = min(strip0 + columns, m);
  const unsigned batch = BATCHED ? blockIdx.y : 0;
  const TA* a = (const TA*)p.a + (BATCHED ? batch * p.a_batch : 0);
  const TX* x = (const TX*)p.x + (BATCHED ? batch * p.x_batch : 0);
  const Walk<S, U> walk(rank, CLUSTER);
  const int skew = skew_of<S>(p, a, strip0, walk.first);
  Acc sum[S::V];
  add_rows(p, a, x, strip0 + (int)(threadIdx.x % LANES) * S::V - skew, end, walk, sum);

  __shared__ alignas(16) Acc parts[S::units][S::width];
  __shared__ Acc inbox[CLUSTER][SHARE];  // [r]: what block r found for this block's share
  // excerpt
  collect<S>(sum, parts, skew);
  Meet::wait();
  add_parts<S>(parts, end - strip0, [&](int c, Acc s) { Meet::push(&inbox[rank][c % SHARE], s, c / SHARE); });
  Meet::sync();
  for (int c = threadIdx.x; c < SHARE; c += 256) {
    Acc s = 0;
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) s += inbox[r][c];
  // end of excerpt
    const int row = strip0 + rank * SHARE + c;
    if (row < end) store_sum(p, (TY*)p.y + (BATCHED ? batch * p.y_batch : 0) + row * p.y_step, s);
  }
}
