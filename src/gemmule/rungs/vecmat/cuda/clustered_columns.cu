// Clustered columns: as block columns, but the blocks of a cluster split the rows of a strip, and each block
// pushes its sums to the one that owns a share of the columns.
#include "cluster.cuh"
#include "column_stream.cuh"

template <class TA, class TX, class TY, int LANES, int CLUSTER, bool ALIGNED, bool BATCHED>
__global__ void __launch_bounds__(256) clustered_columns(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  typedef Strip<TA, 256, LANES, ALIGNED> S;
  typedef Cluster<CLUSTER> Meet;
  constexpr int SHARE = (S::columns + CLUSTER - 1) / CLUSTER, U = 4;
  Meet::arrive();  // waited for before the first push
  const int rank = blockIdx.x % CLUSTER, strip0 = blockIdx.x / CLUSTER * S::columns, m = (int)p.m;
  const unsigned batch = BATCHED ? blockIdx.y : 0;
  const TA* a = (const TA*)p.a + (BATCHED ? batch * p.a_batch : 0);
  const TX* x = (const TX*)p.x + (BATCHED ? batch * p.x_batch : 0);
  static_assert(ALIGNED || CLUSTER * S::depth % S::V == 0, "rows of one walker begin at the same place of a vector");
  const int j = rank * S::depth + threadIdx.x / LANES, skew = skew_of<ALIGNED, S::V>(p, a, strip0, j);
  Acc sum[S::V];
  add_rows<ALIGNED, U>(p, a, x, strip0 + (int)(threadIdx.x % LANES) * S::V - skew, j, CLUSTER * S::depth, sum);

  __shared__ alignas(16) Acc parts[S::parts][S::width];
  __shared__ Acc inbox[CLUSTER][SHARE];  // [r]: what block r found for this block's share
  collect<S, LANES>(sum, parts, skew);
  Meet::wait();
  for (int c = threadIdx.x; c < S::columns; c += 256) {
    Acc s = 0;
#pragma unroll
    for (int k = 0; k < S::parts; ++k) s += parts[k][S::place_of_column(c)];
    Meet::push(&inbox[rank][c % SHARE], s, c / SHARE);
  }
  Meet::sync();
  for (int c = threadIdx.x; c < SHARE; c += 256) {
    Acc s = 0;
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) s += inbox[r][c];
    const int row = strip0 + rank * SHARE + c;
    if (rank * SHARE + c < S::columns && row < m)
      store_sum(p, (TY*)p.y + (BATCHED ? batch * p.y_batch : 0) + row * p.y_step, s);
  }
}
