// A matvec whose rows are streamed once: LANES lanes share R rows, each lane keeps U x R independent 16-byte
// loads in flight, and the blocks of a cluster share the rows of the block.
#pragma once
#include "delivery.cuh"
#include "stream.cuh"

// Store one finished sum, or send it to several GPUs.
template <class T, class Acc>
__device__ __forceinline__ void deliver(const Delivery& to, const GemvArgs& p, i64 row, T* out, Acc sum) {
#ifdef PEERS
  to.send(p.peers, row, narrow<T, Acc>(sum));
#else
  store_sum(p, out, sum);
#endif
}

template <bool FIRST, class A, class B> struct Pick { typedef A type; };
template <class A, class B> struct Pick<false, A, B> { typedef B type; };

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
// that the last turn has all of its loads in flight at once like every other. Unaligned rows are read by the
// aligned vectors that lie inside them, and x is shifted to match: it comes from the caches, the row does not.
//
// EARLY: the grid may begin while the one before is still writing x. It brings its first turn into the L2, which
// is right whoever writes the matrix, and reads only after that grid's end.
template <class TA, class TX, class TY, int THREADS, int LANES, int R, int U, class Meet, bool ALIGNED, bool BATCHED, bool EARLY = false>
__device__ __forceinline__ void stream_rows(const GemvArgs& p) {
  typedef typename AccOf<TY>::type Acc;
  typedef typename Pick<EARLY, JustWritten, Again>::type OfX;
  static_assert(LANES <= 32 || LANES == THREADS, "lanes of one warp, or all threads of the block");
  constexpr int APART = ALIGNED || R == 1 ? 1 : Lanes<TA>::count;
  static_assert(ALIGNED || (LANES >= 32 && THREADS / LANES % APART == 0), "unaligned rows: whole warps, neighbours between them");
  constexpr int CLUSTER = Meet::blocks;
  static_assert(CLUSTER == 1 || LANES == THREADS, "a cluster shares the rows of whole blocks");
  const Delivery to(p);
  if (to.gathers<TY>(p)) return;
  Meet::arrive();  // waited for before the first push
  constexpr int V = Lanes<TA>::count, GROUPS = THREADS / LANES, STEP = LANES * CLUSTER, WARPS = THREADS / 32;
  const int rank = blockIdx.x % CLUSTER, walker = threadIdx.x % LANES + rank * LANES;
  const int m = (int)p.m, n = (int)p.n;
  const int first_row = blockIdx.x / CLUSTER * (GROUPS * R), group = threadIdx.x / LANES;
  const int row0 = first_row + group / APART * (APART * R) + group % APART;
  for (unsigned batch = BATCHED ? blockIdx.y : 0;;) {
    const TA* a[R];
    Acc sum[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {  // rows past the end repeat one that begins at the same place of a vector: no predicate
      const int row = row0 + r * APART < m ? row0 + r * APART : APART == 1 ? m - 1 : min(row0, m - 1);
      a[r] = (const TA*)p.a + (unsigned)row * p.a_row + (BATCHED ? batch * p.a_batch : 0);
      sum[r] = 0;
    }
    // Vector j begins `skew` elements before column j * V. Two vectors at the head of an unaligned row and one at
    // its end are left to the loop over single elements, so that no vector of x reaches beyond x.
    const int skew = ALIGNED ? 0 : (int)((u64)a[0] & 15) / (int)sizeof(TA), from = ALIGNED ? 0 : 2;
    const int last = ALIGNED ? n / V : max(from, (int)(((unsigned)n + skew) / V) - 1);
    int j = from + walker;
    if constexpr (EARLY) {
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int r = 0; r < R; ++r)
          // excerpt prefetch
          if (j + u * STEP < last) ptx::prefetch_l2(a[r] + ((unsigned)(j + u * STEP) * V - skew));
#if __CUDA_ARCH__ >= 900 || defined(CUEMU)
      ptx::pdl_wait();
      ptx::pdl_launch_dependents();
          // end of excerpt
#endif
    }
    // The row's address stands before any question about x: none of its loads waits for the answer.
#pragma unroll
    for (int r = 0; r < R; ++r) ptx::pin(a[r]);
    const TX* x = (const TX*)p.x + (BATCHED ? batch * p.x_batch : 0);
    if constexpr (EARLY) ptx::pin(x);  // no load moves before the wait
    // What no vector covers goes element by element: the head, then the tail. Most unaligned rows have both, so
    // that the first element of each lane is under way before the vectors are.
    const int head = ALIGNED ? 0 : min(from * V - skew, n), rest = head + max(n - (last * V - skew), 0);
    const auto column = [&](int e) { return e < head ? e : e - head + last * V - skew; };
    const auto single = [&](const TA* row, int e) { return Once::load((const ptx::Vec<TA, 1>*)(row + column(e)), e < rest).v[0]; };
    int e = walker;
    TA first_a[R];
    TX first_x = TX(0);
    if constexpr (!ALIGNED) {
#pragma unroll
      for (int r = 0; r < R; ++r) first_a[r] = single(a[r], e);
      first_x = OfX::load((const ptx::Vec<TX, 1>*)(x + column(e) * p.x_step), e < rest).v[0];
      e += STEP;
    }
    const bool x_vector = p.x_step == 1 && (!ALIGNED || ((u64)x & 15) == 0);
#pragma unroll 1
    for (; x_vector && j < last; j += U * STEP) {
      // excerpt turn
      Chunk<TA> va[U][R];
      XChunk<TX, V> vx[U];
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int r = 0; r < R; ++r)
          va[u][r] = Once::load((const Chunk<TA>*)(a[r] + ((unsigned)(j + u * STEP) * V - skew)), u * STEP < last - j);
#pragma unroll
      for (int u = 0; u < U; ++u)
        vx[u] = load_x_if<OfX, ALIGNED, V>(x + ((unsigned)(j + u * STEP) * V - skew), u * STEP < last - j);
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int r = 0; r < R; ++r) sum[r] = dot(va[u][r], vx[u], sum[r]);
      // end of excerpt
    }
#pragma unroll 1
    for (; j < last; j += STEP) {  // x is strided or unaligned
      const unsigned at = (unsigned)j * V - skew;
      const XChunk<TX, V> vx = gather_x<TX, V>(x + at * p.x_step, p.x_step);
#pragma unroll
      for (int r = 0; r < R; ++r) sum[r] = dot(Once::load((const Chunk<TA>*)(a[r] + at), true), vx, sum[r]);
    }
    if constexpr (!ALIGNED) {
#pragma unroll
      for (int r = 0; r < R; ++r) sum[r] += wide<Acc>(first_a[r]) * wide<Acc>(first_x);
    }
#pragma unroll 1
    for (; e < rest; e += STEP) {
#pragma unroll
      for (int r = 0; r < R; ++r) sum[r] += wide<Acc>(single(a[r], e)) * wide<Acc>(x[column(e) * p.x_step]);
    }
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int o = (LANES < 32 ? LANES : 32) / 2; o; o >>= 1) sum[r] += __shfl_xor_sync(~0u, sum[r], o);
    TY* y = (TY*)p.y + (BATCHED ? batch * p.y_batch : 0);
    if constexpr (LANES <= 32) {
#pragma unroll
      for (int r = 0; r < R; ++r)
        if (walker == r && row0 + r * APART < m) deliver(to, p, row0 + r * APART, y + (row0 + r * APART) * p.y_step, sum[r]);
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
        // excerpt meeting
        if (threadIdx.x < R) Meet::push(&inbox[rank][threadIdx.x], total, 0);
        Meet::sync();
        total = 0;
#pragma unroll
        for (int c = 0; c < CLUSTER; ++c)
          if (threadIdx.x < R) total += inbox[c][threadIdx.x];
        // end of excerpt
      }
      const int row = first_row + threadIdx.x;
      if (rank == 0 && threadIdx.x < R && row < m) deliver(to, p, row, y + row * p.y_step, total);
      if (BATCHED) __syncthreads();  // before the next product reuses part
    }
    // A cluster meets once: its grid has a row of blocks for every product.
    if (!BATCHED || CLUSTER > 1 || (batch += gridDim.y) >= p.batch) return;
  }
}
