// A matvec whose rows are streamed once: LANES lanes share R rows, each lane keeps U x R independent 16-byte
// loads in flight, and the blocks of a cluster share the rows of the block.
#pragma once
#include "stream.cuh"

// A block that shares its rows with no other; cluster.cuh has the blocks that do.
struct Alone {
  static constexpr int blocks = 1;
  __device__ static __forceinline__ void arrive() {}
  __device__ static __forceinline__ void wait() {}
  __device__ static __forceinline__ void sync() {}
  template <class T> __device__ static __forceinline__ void push(T*, T, unsigned) {}
};

// Sizes are below 2^31 (a constraint of the rungs), so indices are 32-bit and the way to the first load is
// short: every instruction before it costs all blocks of the first wave. A turn's loads are predicated, so
// that the last turn has all of its loads in flight at once like every other.
template <class TA, class TX, class TY, int THREADS, int LANES, int R, int U, class Meet, bool ALIGNED, bool BATCHED>
__device__ __forceinline__ void stream_rows(const GemvArgs& p) {
  typedef typename AccOf<TY>::type Acc;
  static_assert(LANES <= 32 || LANES == THREADS, "lanes of one warp, or all threads of the block");
  constexpr int CLUSTER = Meet::blocks;
  static_assert(CLUSTER == 1 || LANES == THREADS, "a cluster shares the rows of whole blocks");
  Meet::arrive();  // waited for before the first push
  constexpr int V = Lanes<TA>::count, GROUPS = THREADS / LANES, STEP = LANES * CLUSTER, WARPS = THREADS / 32;
  const int rank = blockIdx.x % CLUSTER, walker = threadIdx.x % LANES + rank * LANES;
  const int m = (int)p.m, n = (int)p.n;
  const int first_row = blockIdx.x / CLUSTER * (GROUPS * R), row0 = first_row + threadIdx.x / LANES * R;
  // Unaligned rows leave their first and last vector to the loop over single elements, so that the
  // aligned vectors around every other one lie inside the row.
  const int last = ALIGNED ? n / V : (n / V > 1 ? n / V - 1 : 1);
  for (unsigned batch = BATCHED ? blockIdx.y : 0;;) {
    const TX* x = (const TX*)p.x + (BATCHED ? batch * p.x_batch : 0);
    const TA* a[R];
    Acc sum[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {  // rows past the end repeat the last one: no predicate for them
      a[r] = (const TA*)p.a + (unsigned)min(row0 + r, m - 1) * p.a_row + (BATCHED ? batch * p.a_batch : 0);
      sum[r] = 0;
    }
    const bool x_vector = p.x_step == 1 && ((u64)x & 15) == 0;
    int j = (ALIGNED ? 0 : 1) + walker;
#pragma unroll 1
    for (; x_vector && j < last; j += U * STEP) {
      Chunk<TA> va[U][R];
      XChunk<TX, V> vx[U];
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int r = 0; r < R; ++r) va[u][r] = load_a_if<ALIGNED>(a[r] + (unsigned)(j + u * STEP) * V, u * STEP < last - j);
#pragma unroll
      for (int u = 0; u < U; ++u) vx[u] = load_x_if<TX, V>(x + (unsigned)(j + u * STEP) * V, u * STEP < last - j);
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int r = 0; r < R; ++r) sum[r] = dot(va[u][r], vx[u], sum[r]);
    }
#pragma unroll 1
    for (; j < last; j += STEP) {  // x is strided or unaligned
      const XChunk<TX, V> vx = gather_x<TX, V>(x + j * V * p.x_step, p.x_step);
#pragma unroll
      for (int r = 0; r < R; ++r) sum[r] = dot(load_a_if<ALIGNED>(a[r] + j * V, true), vx, sum[r]);
    }
    const int head = ALIGNED ? 0 : min(V, n), rest = head + max(n - last * V, 0);
#pragma unroll 1
    for (int e = walker; e < rest; e += STEP) {  // single elements: the head, then the tail
      const int i = e < head ? e : e - head + last * V;
#pragma unroll
      for (int r = 0; r < R; ++r) sum[r] += wide<Acc>(a[r][i]) * wide<Acc>(x[i * p.x_step]);
    }
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int o = (LANES < 32 ? LANES : 32) / 2; o; o >>= 1) sum[r] += __shfl_xor_sync(~0u, sum[r], o);
    TY* y = (TY*)p.y + (BATCHED ? batch * p.y_batch : 0);
    if constexpr (LANES <= 32) {
#pragma unroll
      for (int r = 0; r < R; ++r)
        if (walker == r && row0 + r < m) store_sum(p, y + (row0 + r) * p.y_step, sum[r]);
    } else {
      __shared__ Acc part[R][WARPS];
      __shared__ Acc inbox[CLUSTER][R];  // [c]: what block c of the cluster found; read by the first one
      if (threadIdx.x % 32 == 0)
#pragma unroll
        for (int r = 0; r < R; ++r) part[r][threadIdx.x / 32] = sum[r];
      __syncthreads();
      Meet::wait();
      Acc total = 0;
      if (threadIdx.x < R) {
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total += part[threadIdx.x][w];
      }
      if constexpr (CLUSTER > 1) {
        if (threadIdx.x < R) Meet::push(&inbox[rank][threadIdx.x], total, 0);
        Meet::sync();
        total = 0;
#pragma unroll
        for (int c = 0; c < CLUSTER; ++c)
          if (threadIdx.x < R) total += inbox[c][threadIdx.x];
      }
      const int row = first_row + threadIdx.x;
      if (rank == 0 && threadIdx.x < R && row < m) store_sum(p, y + row * p.y_step, total);
      if (BATCHED) __syncthreads();  // before the next product reuses part
    }
    // A cluster meets once: its grid has a row of blocks for every product.
    if (!BATCHED || CLUSTER > 1 || (batch += gridDim.y) >= p.batch) return;
  }
}
