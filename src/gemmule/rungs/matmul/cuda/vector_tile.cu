// The register tile with 16-byte accesses to both memories, and two buffers so that loads overlap arithmetic.
// counters: load requests, thousands; FMA pipe, %; issue slots used, %
#include "ptx.cuh"
#include "tiles.cuh"

constexpr int SIDE = 16;  // threads along each side of a block
constexpr int THREADS = SIDE * SIDE;

// One operand of one tile, seen as COUNT rows of A (or columns of B) by DEPTH steps of the reduction. Pieces of
// 16 bytes run along the unit stride: along the reduction (ALONG_K) or across it.
template <class Acc, class T, int COUNT, int DEPTH, bool ALONG_K>
struct Operand {
  static constexpr int V = 16 / int(sizeof(T)), W = 16 / int(sizeof(Acc));
  static constexpr int PITCH = COUNT + W;
  static constexpr int INNER = (ALONG_K ? DEPTH : COUNT) / V;  // pieces side by side
  static constexpr int PIECES = COUNT * DEPTH / V, PARTS = (PIECES + THREADS - 1) / THREADS;
  typedef ptx::Vec<T, V> Piece;
  typedef ptx::Vec<Acc, W> Wide;

  const T* base;
  i64 start, size, k, lead;
  bool aligned;
  Piece held[PARTS];

  __device__ __forceinline__ Operand(const T* base, i64 start, i64 size, i64 k, i64 step, i64 k_step)
      : base(base), start(start), size(size), k(k), lead(ALONG_K ? step : k_step) {
    aligned = (((u64)base | (u64)lead * sizeof(T)) & 15) == 0;
  }
  // Global memory -> registers: one load where the whole piece is inside and aligned, else element by element.
  __device__ __forceinline__ void fetch(i64 first) {
    const i64 outer = ALONG_K ? size : k, inner = ALONG_K ? k : size;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const int e = part * THREADS + threadIdx.x;
      const i64 o = (ALONG_K ? start : first) + e / INNER, q = (ALONG_K ? first : start) + e % INNER * V;
      const T* from = base + o * lead + q;
      if (aligned && o < outer && q + V <= inner && e < PIECES) {
        held[part] = ptx::ld_nc((const Piece*)from);
      } else {
#pragma unroll
        for (int v = 0; v < V; ++v)
          held[part][v] = o < outer && q + v < inner && e < PIECES ? from[v] : T(0);
      }
    }
  }
  // Registers -> shared memory, widened, the reduction outermost.
  __device__ __forceinline__ void store(Acc (*panel)[PITCH]) const {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const int e = part * THREADS + threadIdx.x, o = e / INNER, q = e % INNER * V;
      if (PIECES % THREADS != 0 && e >= PIECES) continue;
      if constexpr (ALONG_K) {
#pragma unroll
        for (int v = 0; v < V; ++v) panel[q + v][o] = wide<Acc>(held[part][v]);
      } else {
#pragma unroll
        for (int v = 0; v < V; v += W) {
          Wide out;
#pragma unroll
          for (int w = 0; w < W; ++w) out[w] = wide<Acc>(held[part][v + w]);
          *(Wide*)&panel[o][q + v] = out;
        }
      }
    }
  }
};

// N values of a panel row in 16-byte reads: the threads along a side read neighbouring vectors.
template <int N, class Acc>
__device__ __forceinline__ void read(const Acc* row, int thread, Acc (&out)[N]) {
  constexpr int W = 16 / int(sizeof(Acc));
#pragma unroll
  for (int q = 0; q < N; q += W) {
    const ptx::Vec<Acc, W> v = *(const ptx::Vec<Acc, W>*)(row + SIDE * q + W * thread);
#pragma unroll
    for (int w = 0; w < W; ++w) out[q + w] = v[w];
  }
}

template <class TA, class TB, class TC, int MICRO, bool A_ALONG_K, bool B_ALONG_K>
__global__ void __launch_bounds__(THREADS, 1) vector_tile(const GemmArgs p) {
  typedef typename AccOf<TC>::type Acc;
  constexpr int COUNT = SIDE * MICRO, DEPTH = 64 / int(sizeof(Acc)), W = 16 / int(sizeof(Acc));
  constexpr int UNROLL = sizeof(Acc) == 8 ? 2 : DEPTH;  // reads that run ahead cost doubles too many registers
  typedef Operand<Acc, TA, COUNT, DEPTH, A_ALONG_K> OperandA;
  typedef Operand<Acc, TB, COUNT, DEPTH, B_ALONG_K> OperandB;
  __shared__ __align__(16) Acc as[2][DEPTH][OperandA::PITCH];
  __shared__ __align__(16) Acc bs[2][DEPTH][OperandB::PITCH];
  const Tile tile = tile_of<8>(p, COUNT, COUNT);
  OperandA a(entry<TA>(p.a, tile.batch, p.a_batch), tile.row, p.m, p.k, p.a_row, p.a_col);
  OperandB b(entry<TB>(p.b, tile.batch, p.b_batch), tile.col, p.n, p.k, p.b_col, p.b_row);
  const int ty = threadIdx.x / SIDE, tx = threadIdx.x % SIDE;
  Acc sum[MICRO][MICRO] = {};
  a.fetch(0);
  b.fetch(0);
  a.store(as[0]);
  b.store(bs[0]);
  __syncthreads();
  int now = 0;
  for (i64 first = 0; first < p.k; first += DEPTH, now ^= 1) {
    // excerpt
    const bool more = first + DEPTH < p.k;
    if (more) {  // under way while the sums below are computed
      a.fetch(first + DEPTH);
      b.fetch(first + DEPTH);
    }
#pragma unroll UNROLL
    for (int l = 0; l < DEPTH; ++l) {
      Acc column[MICRO], row[MICRO];
      read(as[now][l], ty, column);
      read(bs[now][l], tx, row);
#pragma unroll
      for (int r = 0; r < MICRO; ++r)
#pragma unroll
        for (int c = 0; c < MICRO; ++c) sum[r][c] += column[r] * row[c];
    }
    if (more) {  // the other buffer was last read before the previous barrier
      a.store(as[now ^ 1]);
      b.store(bs[now ^ 1]);
    // end of excerpt
    }
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < MICRO; ++r)
#pragma unroll
    for (int c = 0; c < MICRO; ++c)
      finish_at<TC>(p, tile.batch, tile.row + r / W * (SIDE * W) + ty * W + r % W,
                    tile.col + c / W * (SIDE * W) + tx * W + c % W, sum[r][c]);
}
