// Clustered columns: sums across the rows of a matrix whose rows are contiguous. A lane owns 16 bytes of
// neighbouring columns; the warps of a block and the blocks of a cluster split the rows, and each block
// pushes its sums to the one that owns a share of the columns.
#include "stream.cuh"

// Store a value into shared memory of block `rank` of the cluster, at the place of `local` here.
template <class T>
__device__ __forceinline__ void push(T* local, T value, unsigned rank) {
  const unsigned address = ptx::mapa(ptx::smem_addr(local), rank);
  const unsigned* words = (const unsigned*)&value;
#pragma unroll
  for (int i = 0; i < (int)(sizeof(T) / 4); ++i) ptx::st_cluster<unsigned>(address + 4 * i, words[i]);
}

template <class TA, class TX, class TY, int LANES, int UNROLL, int CLUSTER, bool ALIGNED, bool BATCHED>
__global__ void __launch_bounds__(256) clustered_columns(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  constexpr int V = Lanes<TA>::count;
  // A shifted vector takes twice the registers; 64 elements under way are what they have room for.
  constexpr int U = !ALIGNED ? 2 : UNROLL * V <= 64 ? UNROLL : 64 / V;
  constexpr int STRIP = LANES * V, DEPTH = 32 / LANES;
  constexpr int WALKERS = CLUSTER * 8 * DEPTH, SHARE = (STRIP + CLUSTER - 1) / CLUSTER;
  if constexpr (CLUSTER > 1) ptx::cluster_arrive();  // waited for before the first push
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = blockIdx.x % CLUSTER;
  const int m = (int)p.m, n = (int)p.n;  // both below 2^31: a constraint of the rung
  const unsigned batch = BATCHED ? blockIdx.y : 0;
  const int strip0 = blockIdx.x / CLUSTER * STRIP;
  const int column = lane % LANES * V;
  const int i0 = strip0 + column;
  const TA* a = (const TA*)p.a + (BATCHED ? batch * p.a_batch : 0) + i0;
  const TX* x = (const TX*)p.x + (BATCHED ? batch * p.x_batch : 0);
  Acc sum[V];
#pragma unroll
  for (int i = 0; i < V; ++i) sum[i] = 0;
  int j = (rank * 8 + warp) * DEPTH + lane / LANES;
  // Whole vectors whose aligned surroundings lie inside the row go fast; the row's ends one by one.
  const bool whole = ALIGNED ? i0 + V <= m : i0 > 0 && i0 + 2 * V <= m;
  if (whole) {
    for (; j + (U - 1) * WALKERS < n; j += U * WALKERS) {
      Chunk<TA> va[U];
      TX vx[U];
#pragma unroll
      for (int u = 0; u < U; ++u) va[u] = load_a<ALIGNED>(a + (j + u * WALKERS) * p.a_col);
#pragma unroll
      for (int u = 0; u < U; ++u) vx[u] = x[(j + u * WALKERS) * p.x_step];
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i] += wide<Acc>(va[u].v[i]) * wide<Acc>(vx[u]);
    }
    Chunk<TA> va[U];  // what is left of one turn: all its loads at once too
    TX vx[U];
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (j + u * WALKERS < n) {
        va[u] = load_a<ALIGNED>(a + (j + u * WALKERS) * p.a_col);
        vx[u] = x[(j + u * WALKERS) * p.x_step];
      }
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (j + u * WALKERS < n)
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i] += wide<Acc>(va[u].v[i]) * wide<Acc>(vx[u]);
  } else {
#pragma unroll 1
    for (; j < n; j += WALKERS) {
      const Acc vx = wide<Acc>(x[j * p.x_step]);
#pragma unroll
      for (int i = 0; i < V; ++i)
        if (i0 + i < m) sum[i] += wide<Acc>(a[j * p.a_col + i]) * vx;
    }
  }

  __shared__ Acc part[8][STRIP];
  __shared__ Acc inbox[CLUSTER][SHARE];  // [r]: what block r found for this block's share
#pragma unroll
  for (int i = 0; i < V; ++i) {
#pragma unroll
    for (int o = LANES; o < 32; o <<= 1) sum[i] += __shfl_xor_sync(~0u, sum[i], o);
    if (lane < LANES) part[warp][column + i] = sum[i];
  }
  __syncthreads();
  if constexpr (CLUSTER > 1) ptx::cluster_wait();  // every block of the cluster has begun
  for (int c = threadIdx.x; c < STRIP; c += 256) {
    Acc s = 0;
#pragma unroll
    for (int w = 0; w < 8; ++w) s += part[w][c];
    if constexpr (CLUSTER > 1) push(&inbox[rank][c % SHARE], s, c / SHARE);
    else inbox[0][c] = s;
  }
  if constexpr (CLUSTER > 1) ptx::cluster_sync();
  else __syncthreads();
  for (int c = threadIdx.x; c < SHARE; c += 256) {
    Acc s = 0;
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) s += inbox[r][c];
    const int row = strip0 + rank * SHARE + c;
    if (rank * SHARE + c < STRIP && row < m)
      finish((TY*)p.y + (BATCHED ? batch * p.y_batch : 0) + row * p.y_step, s, p.alpha, p.beta);
  }
}
