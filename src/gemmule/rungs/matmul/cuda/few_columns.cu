// Few columns by fused multiply-adds: vectors of A and packed columns come through rings in shared memory.
// counters by columns: DRAM read, MB; warp instructions, millions; FMA pipe, %
#include "few_columns.cuh"

constexpr int LANES = 8;  // of a row

// Adds up S sums over the lanes of a row: each step hands half of them to the neighbour, so that lane t ends
// with the totals of t * S / LANES onwards, in fewer exchanges than sums.
template <int HALF, int MASK, class Acc, int S>
__device__ __forceinline__ void share_out(Acc (&sum)[S], int t) {
  const bool upper = t & MASK;
  if constexpr (HALF == 0) {
    sum[0] += __shfl_xor_sync(~0u, sum[0], MASK);
  } else {
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      const Acc mine = upper ? sum[i + HALF] : sum[i], other = upper ? sum[i] : sum[i + HALF];
      sum[i] = mine + __shfl_xor_sync(~0u, other, MASK);
    }
  }
  if constexpr (MASK > 1) share_out<HALF / 2, MASK / 2>(sum, t);
}

// Adds R vectors times N columns; column j of lane t lies at b[j * LANES].
template <int N, class Acc, class TA, class TP, int R>
__device__ __forceinline__ void add_chunk(Acc (&sum)[R * N], const Chunk<TA> (&v)[R],
                                          const XChunk<TP, 16 / sizeof(TA)>* b) {
#pragma unroll
  // excerpt
  for (int j = 0; j < N; ++j) {
    const auto vb = load_packed<TP, 16 / sizeof(TA)>((const TP*)(b + j * LANES));
#pragma unroll
    for (int r = 0; r < R; ++r) sum[r * N + j] = dot(v[r], vb, sum[r * N + j]);
  // end of excerpt
  }
}

// ACROSS warps lie side by side over the rows, the others split the sum. Sizes are below 2^31 (a constraint). DIRECT:
// columns have unit stride, are aligned and whole chunks long, so that they are copied from where they lie; what stands
// for those past the last is never stored.
template <class TA, class TB, class TC, int WARPS, int ACROSS, int R, int N, int STAGES, bool TURNED, bool DIRECT>
__global__ void __launch_bounds__(32 * WARPS, 1) few_columns(const GemmArgs args) {
  typedef typename AccOf<TC>::type Acc;
  typedef typename PackedOf<TA, TB>::type TP;
  constexpr int THREADS = 32 * WARPS, GROUPS = 32 / LANES, SPLIT = WARPS / ACROSS, S = R * N;
  constexpr int V = Lanes<TA>::count, CHUNK = LANES * V;
  constexpr int ROWS = ACROSS * R * GROUPS, PARTS = XChunk<TP, V>::parts, B_CHUNK = N * LANES * PARTS;  // in vectors
  constexpr int STAGE = THREADS * R + SPLIT * B_CHUNK;
  typedef Chunk<unsigned> Vector;
  extern __shared__ __align__(128) unsigned char smem[];
  Vector* ring = (Vector*)smem;
  const GemmArgs p = seen<TURNED>(args);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / LANES, t = lane % LANES;
  const Slab at = slab_of(p, ROWS, N);
  const int m = (int)p.m, k = (int)p.k, chunks = (k + CHUNK - 1) / CHUNK, mine = warp / ACROSS;
  const TA* base = (const TA*)p.a + at.batch * p.a_batch;
  const int end = rows_aligned(base, p.a_row) ? k / CHUNK : 0;  // chunks before it are whole and aligned
  const int row0 = at.row + warp % ACROSS * R * GROUPS + g;
  // Pointers that move from turn to turn: computed anew, they would cost a third of a turn's instructions.
  const TA* from[R];
#pragma unroll
  for (int r = 0; r < R; ++r)  // rows past the end repeat the last one: no predicate in the loop
    from[r] = base + (i64)min(row0 + r * GROUPS, m - 1) * p.a_row + mine * CHUNK + t * V;
  const i64 entry = (p.b_batch ? at.batch : 0) * ((p.n + N - 1) / N) + at.group;
  const Vector* b = (const Vector*)p.work + entry * chunks * B_CHUNK;
  // Warps that share columns copy them together, and wait for each other alone.
  constexpr int TEAM = 32 * ACROSS, EACH_COPY = (B_CHUNK + TEAM - 1) / TEAM;
  const int member = warp % ACROSS * 32 + lane, left = (int)p.n - at.group * N - member / LANES;
  const i64 apart = DIRECT ? TEAM / LANES * p.b_col / V : TEAM;   // in vectors, from one copy to the next
  const Vector* next = b + mine * B_CHUNK + member;
  if constexpr (DIRECT)
    next = (const Vector*)((const TB*)p.b + at.batch * p.b_batch + (at.group * N + member / LANES) * p.b_col +
                           mine * CHUNK + member % LANES * V);
  Acc sum[S];
#pragma unroll
  for (int i = 0; i < S; ++i) sum[i] = 0;

  const int turns = (end + SPLIT - 1) / SPLIT;
  // A lane reads back what it copied itself; the columns are for all warps that share a chunk.
  auto copy_rows = [&](int turn) {
    const unsigned to = ptx::smem_addr(ring + turn % STAGES * STAGE + threadIdx.x);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (turn * SPLIT + mine < end) ptx::cp_async<16>(to + r * THREADS * 16, from[r]);
      from[r] += SPLIT * CHUNK;
    }
  };
  auto copy_columns = [&](int turn) {
    const bool wanted = turn * SPLIT + mine < chunks && turn < turns;
    const unsigned to = ptx::smem_addr(ring + turn % STAGES * STAGE + THREADS * R + mine * B_CHUNK + member);
#pragma unroll
    for (int i = 0; i < EACH_COPY; ++i)
      if (wanted && (B_CHUNK % TEAM == 0 || member + i * TEAM < B_CHUNK) && (!DIRECT || i * TEAM / LANES < left))
        ptx::cp_async<16>(to + i * TEAM * 16, next + i * apart);
    next += SPLIT * (DIRECT ? CHUNK / V : B_CHUNK);
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) copy_rows(s);
  if constexpr (!DIRECT) wait_for_columns();
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    copy_columns(s);
    ptx::cp_async_commit();
  }
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    ptx::cp_async_wait<STAGES - 2>();
    // This turn's columns are there for all who share them, and none of these reads the stage before any more.
    if constexpr (ACROSS == 1) __syncwarp();
    else ptx::named_sync(1 + mine, TEAM);
    copy_rows(turn + STAGES - 1);
    copy_columns(turn + STAGES - 1);
    ptx::cp_async_commit();
    if (turn * SPLIT + mine >= end) continue;
    const Vector* now = ring + turn % STAGES * STAGE;
    Chunk<TA> v[R];
#pragma unroll
    for (int r = 0; r < R; ++r) v[r] = ((const Chunk<TA>*)now)[r * THREADS + threadIdx.x];
    add_chunk<N, Acc, TA, TP>(sum, v, (const XChunk<TP, V>*)(now + THREADS * R + mine * B_CHUNK) + t);
  }
#pragma unroll 1
  for (int c = DIRECT ? chunks : end + mine; c < chunks; c += SPLIT) {  // the last, partial one; all of unaligned rows
    Chunk<TA> v[R];
#pragma unroll
    for (int r = 0; r < R; ++r)
      v[r] = load_guarded(base + (i64)min(row0 + r * GROUPS, m - 1) * p.a_row, c * CHUNK + t * V, k);
    add_chunk<N, Acc, TA, TP>(sum, v, (const XChunk<TP, V>*)(b + (i64)c * B_CHUNK) + t);
  }

  constexpr int LEFT = S < LANES ? 1 : S / LANES, EACH = S < LANES ? LANES / S : 1;  // sums a lane has, lanes a sum has
  share_out<S / 2, LANES / 2>(sum, t);
  __syncthreads();  // nobody reads the rings any more
  Acc* part = (Acc*)smem;  // [warp][g][S]
#pragma unroll
  for (int i = 0; i < LEFT; ++i)
    if (t % EACH == 0) part[(warp * GROUPS + g) * S + t / EACH * LEFT + i] = sum[i];
  __syncthreads();
  for (int e = threadIdx.x; e < ROWS * N; e += THREADS) {
    const int row = TURNED ? e % ROWS : e / N, column = TURNED ? e / ROWS : e % N;
    const int across = row / (R * GROUPS), r = row / GROUPS % R;
    Acc total = 0;
#pragma unroll
    for (int w = 0; w < SPLIT; ++w) total += part[((w * ACROSS + across) * GROUPS + row % GROUPS) * S + r * N + column];
    finish_at<TC>(p, at.batch, (i64)at.row + row, (i64)at.group * N + column, total);
  }
}
