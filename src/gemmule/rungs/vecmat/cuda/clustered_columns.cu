// Clustered columns: y = A^T-wise sum over rows that lie across the reduction. Each lane owns 16 bytes
// of neighbouring results; the blocks of a cluster split the reduction and add up in fixed order.
#include "stream.cuh"

template <class T> struct Words { unsigned w[sizeof(T) / 4]; };

// Read a value of shared memory in block `rank` of the cluster, at the place of `local` in this one.
template <class T>
__device__ __forceinline__ T peer_value(const T* local, unsigned rank) {
  const unsigned address = ptx::mapa(ptx::smem_addr(local), rank);
  Words<T> r;
#pragma unroll
  for (int i = 0; i < (int)(sizeof(T) / 4); ++i) r.w[i] = ptx::ld_cluster<unsigned>(address + 4 * i);
  return *(T*)&r;
}

template <class TA, class TX, class TY, int LANES, int UNROLL, int CLUSTER, bool ALIGNED>
__global__ void __launch_bounds__(256) clustered_columns(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  constexpr int U = ALIGNED ? UNROLL : 2;  // a shifted vector takes twice the registers
  constexpr int V = Lanes<TA>::count, STRIP = LANES * V, DEPTH = 32 / LANES, WALKERS = CLUSTER * 8 * DEPTH;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, lx = lane % LANES;
  const i64 strips = (p.m + STRIP - 1) / STRIP, strip = blockIdx.x / CLUSTER % strips;
  const i64 batch = blockIdx.x / CLUSTER / strips;
  const int rank = blockIdx.x % CLUSTER;
  const i64 i0 = strip * STRIP + lx * V;
  const TA* a = (const TA*)p.a + batch * p.a_batch + i0;
  const TX* x = (const TX*)p.x + batch * p.x_batch;
  Acc sum[V];
#pragma unroll
  for (int i = 0; i < V; ++i) sum[i] = 0;
  i64 j = (rank * 8 + warp) * DEPTH + lane / LANES;
  // Whole vectors whose aligned surroundings lie inside the row go fast; the row's ends one by one.
  const bool whole = ALIGNED ? i0 + V <= p.m : i0 > 0 && i0 + 2 * V <= p.m;
  if (whole) {
    for (; j + (U - 1) * WALKERS < p.n; j += U * WALKERS) {
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
    for (; j < p.n; j += WALKERS) {
      const Chunk<TA> va = load_a<ALIGNED>(a + j * p.a_col);
      const Acc vx = wide<Acc>(x[j * p.x_step]);
#pragma unroll
      for (int i = 0; i < V; ++i) sum[i] += wide<Acc>(va.v[i]) * vx;
    }
  } else {
    for (; j < p.n; j += WALKERS) {
      const Acc vx = wide<Acc>(x[j * p.x_step]);
#pragma unroll
      for (int i = 0; i < V; ++i)
        if (i0 + i < p.m) sum[i] += wide<Acc>(a[j * p.a_col + i]) * vx;
    }
  }

  __shared__ Acc part[8][STRIP];
  __shared__ Acc total[STRIP];
#pragma unroll
  for (int i = 0; i < V; ++i) {
#pragma unroll
    for (int o = LANES; o < 32; o <<= 1) sum[i] += __shfl_xor_sync(~0u, sum[i], o);
    if (lane < LANES) part[warp][lx * V + i] = sum[i];
  }
  __syncthreads();
  for (int c = threadIdx.x; c < STRIP; c += 256) {
    Acc s = 0;
#pragma unroll
    for (int w = 0; w < 8; ++w) s += part[w][c];
    total[c] = s;
  }
  if constexpr (CLUSTER > 1) ptx::cluster_sync();
  else __syncthreads();
  constexpr int SHARE = (STRIP + CLUSTER - 1) / CLUSTER;
  for (int c = rank * SHARE + threadIdx.x; c < (rank + 1) * SHARE && c < STRIP; c += 256) {
    Acc s = 0;
    if constexpr (CLUSTER > 1) {
#pragma unroll
      for (int r = 0; r < CLUSTER; ++r) s += peer_value(&total[c], r);
    } else {
      s = total[c];
    }
    const i64 row = strip * STRIP + c;
    if (row < p.m) finish((TY*)p.y + batch * p.y_batch + row * p.y_step, s, p.alpha, p.beta);
  }
  if constexpr (CLUSTER > 1) ptx::cluster_sync();  // a peer's memory must outlive the reads from it
}
