// Even rows: every block has an equal share of the whole matrix, wherever rows end; a second kernel adds the pieces.
// counters: load requests, thousands; occupancy, %; issue slots used, %
#include "stream.cuh"

// Where the shares lie. R rows that begin at the same place of a vector are a group, whose `width` vectors are each of
// all its rows. Groups follow each other, and block b has the vectors from b * share on, whole lines of 128 bytes.
// Both kernels have the same grid, so that both know.
template <class TA, int R, bool ALIGNED>
struct Shares {
  static constexpr int APART = ALIGNED || R == 1 ? 1 : Lanes<TA>::count;
  unsigned width, total, share;
  __device__ __forceinline__ Shares(const GemvArgs& p) {
    constexpr unsigned V = Lanes<TA>::count, LINE = 8, TOGETHER = APART * R;
    const unsigned m = (unsigned)p.m, groups = m / TOGETHER * APART + min(m % TOGETHER, (unsigned)APART);
    width = max(((unsigned)p.n / V + LINE - 1) / LINE, 1u) * LINE;
    total = groups * width;
    share = (total / LINE + gridDim.x - 1) / gridDim.x * LINE;
  }
  __device__ static __forceinline__ unsigned first_row(unsigned group) { return group / APART * (APART * R) + group % APART; }
  __device__ static __forceinline__ unsigned group_of(unsigned row) { return row / (APART * R) * APART + row % APART; }
  // Along the sequence the block or the group goes up by one, or both do: no two pieces have the same sum of them.
  template <class Acc>
  __device__ static __forceinline__ Acc* place(const GemvArgs& p, unsigned block, unsigned group) { return (Acc*)p.work + (block + group) * R; }
};

// Four blocks leave 64 registers to a thread, too few for unaligned halves by floats but on compute capability 9.0.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
#define FEWER_BLOCKS(wide) (wide)
#else
#define FEWER_BLOCKS(wide) 0
#endif
template <class TA, class TX, class TY, int R, int U, bool ALIGNED>
__global__ void __launch_bounds__(256, 4 - FEWER_BLOCKS(!ALIGNED && sizeof(TX) > sizeof(TA))) even_rows(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  typedef Shares<TA, R, ALIGNED> Of;
  constexpr int V = Lanes<TA>::count, THREADS = 256, WARPS = THREADS / 32, HELD = 16;
  __shared__ Acc part[HELD * R][WARPS];  // sums of pieces that the warps have yet to meet for
#if __CUDA_ARCH__ >= 900 || defined(CUEMU)
  ptx::pdl_launch_dependents();
#endif
  const Of of(p);
  const int m = (int)p.m, n = (int)p.n;
  const TX* x = (const TX*)p.x;
  const bool x_vector = p.x_step == 1 && (!ALIGNED || ((u64)x & 15) == 0);
  unsigned at = blockIdx.x * of.share, group = at / of.width;
  const unsigned end = min(at + of.share, of.total);
#pragma unroll 1
  for (int held = 0; at < end; ++group) {
    // excerpt
    const int begin = at - group * of.width, piece = min(of.width - begin, end - at), row0 = Of::first_row(group);
    at += piece;
    // end of excerpt
    const TA* a[R];
    Acc sum[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {  // a row past the end is the first again: no predicate
      a[r] = (const TA*)p.a + (unsigned)(row0 + r * Of::APART < m ? row0 + r * Of::APART : row0) * p.a_row;
      sum[r] = 0;
    }
    // Vector j begins `skew` elements before column j * V. Of an unaligned row two vectors at the head and one at the
    // end are left to single elements, so that no vector of x reaches beyond x: fewer elements than a warp has lanes,
    // and one load of whoever begins the row.
    const int skew = ALIGNED ? 0 : (int)((u64)a[0] & 15) / (int)sizeof(TA), from = ALIGNED ? 0 : 2;
    const int last = ALIGNED ? n / V : max(from, (int)(((unsigned)n + skew) / V) - 1), until = min(begin + piece, last);
    const int head = ALIGNED ? 0 : min(from * V - skew, n), rest = begin ? 0 : head + max(n - (last * V - skew), 0);
    const int e = threadIdx.x, column = e < head ? e : e - head + last * V - skew;
    TA single[R];
#pragma unroll
    for (int r = 0; r < R; ++r) single[r] = Once::load((const ptx::Vec<TA, 1>*)(a[r] + column), e < rest).v[0];
    const TX single_x = Again::load((const ptx::Vec<TX, 1>*)(x + column * p.x_step), e < rest).v[0];
    int j = max(begin, from) + threadIdx.x;
#pragma unroll 1
    for (; x_vector && j < until; j += U * THREADS) {
      Chunk<TA> va[U][R];
      XChunk<TX, V> vx[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const unsigned c = (unsigned)(j + u * THREADS) * V - skew;
#pragma unroll
        for (int r = 0; r < R; ++r) va[u][r] = Once::load((const Chunk<TA>*)(a[r] + c), u * THREADS < until - j);
      }
#pragma unroll
      for (int u = 0; u < U; ++u)
        vx[u] = load_x_if<Again, ALIGNED, V>(x + ((unsigned)(j + u * THREADS) * V - skew), u * THREADS < until - j);
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int r = 0; r < R; ++r) sum[r] = dot(va[u][r], vx[u], sum[r]);
    }
#pragma unroll 1
    for (; j < until; j += THREADS) {  // x is strided or unaligned
      const unsigned c = (unsigned)j * V - skew;
      const XChunk<TX, V> vx = gather_x<TX, V>(x + c * p.x_step, p.x_step);
#pragma unroll
      for (int r = 0; r < R; ++r) sum[r] = dot(Once::load((const Chunk<TA>*)(a[r] + c), true), vx, sum[r]);
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      sum[r] = warp_sum(sum[r] + wide<Acc>(single[r]) * wide<Acc>(single_x));
      if (threadIdx.x % 32 == 0) part[held * R + r][threadIdx.x / 32] = sum[r];
    }
    if (++held < HELD && at < end) continue;  // no warp waits for the others before it begins the next piece
    __syncthreads();
    for (int i = threadIdx.x; i < held * R; i += THREADS) {
      Acc total = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) total += part[i][w];
      Of::template place<Acc>(p, blockIdx.x, group + 1 - held)[i] = total;
    }
    __syncthreads();
    held = 0;
  }
}

// A warp for every row; EACH: how many of its pieces a lane asks for at a time.
template <class TA, class TY, int R, bool ALIGNED, int EACH>
__global__ void __launch_bounds__(256) add_pieces(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  typedef Shares<TA, R, ALIGNED> Of;
  const unsigned lane = threadIdx.x % 32, m = (unsigned)p.m;
  unsigned row = blockIdx.x + threadIdx.x / 32 * gridDim.x;
  if (row >= m) return;
  const Of of(p);
  unsigned group = Of::group_of(row), first = group * of.width / of.share, last = ((group + 1) * of.width - 1) / of.share;
  ptx::pin(first), ptx::pin(last);  // found while the other kernel still runs
#if __CUDA_ARCH__ >= 900 || defined(CUEMU)
  ptx::pdl_wait();  // launched early: the sums of the pieces are there only now
#endif
#pragma unroll 1
  for (;;) {
    const unsigned pieces = last - first + 1;
    const Acc* work = Of::template place<Acc>(p, first, group) + row / Of::APART % R;
    Acc total = 0;
#pragma unroll 1
    for (unsigned i = lane; i < pieces; i += 32 * EACH) {
      Acc v[EACH];
#pragma unroll
      for (int e = 0; e < EACH; ++e) v[e] = e * 32 < pieces - i ? work[(i + e * 32) * R] : 0;
#pragma unroll
      for (int e = 0; e < EACH; ++e) total += v[e];
    }
    total = warp_sum(total);
    if (lane == 0) store_sum(p, (TY*)p.y + row * p.y_step, total);
    if ((row += 8 * gridDim.x) >= m) return;
    group = Of::group_of(row), first = group * of.width / of.share, last = ((group + 1) * of.width - 1) / of.share;
  }
}
