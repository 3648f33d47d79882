// Halves on tensor cores: mma.sync m16n8k16 with float32 sums, fed by a ring of stages that cp.async fills.
// counters: warp instructions, millions; FMA pipe, %; tensor pipe, %
#include "ptx.cuh"
#include "tiles.cuh"

typedef ptx::u32 u32;

constexpr int DEPTH = 32;     // steps of the reduction in one stage
constexpr int STAGES = 4;
constexpr int V = 8;          // halves in a 16-byte chunk

__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], __half) {
  ptx::mma_f16(d, a, b);
}
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], __nv_bfloat16) {
  ptx::mma_bf16(d, a, b);
}

// One operand, seen as TILE rows of A (or columns of B) by DEPTH steps. A stage keeps the orientation of global
// memory: chunks run along the unit stride, which is the reduction's (ALONG_K) or the other; ldmatrix reads the
// first as it lies and transposes the second.
template <class T, int TILE, int THREADS, bool ALONG_K>
struct Operand {
  static constexpr int BYTES = TILE * DEPTH * int(sizeof(T));           // of a stage
  static constexpr int CHUNKS = (ALONG_K ? DEPTH : TILE) / V;           // of a line
  static constexpr int PARTS = TILE * DEPTH / V / THREADS;
  typedef ptx::Vec<T, V> Chunk;
  const T* base;
  i64 start, size, k, lead;
  unsigned char* smem;
  bool aligned;

  __device__ __forceinline__ Operand(const T* base, i64 start, i64 size, i64 k, i64 step, i64 k_step,
                                     unsigned char* smem)
      : base(base), start(start), size(size), k(k), lead(ALONG_K ? step : k_step), smem(smem) {
    aligned = (((u64)base | (u64)lead * sizeof(T)) & 15) == 0;
  }
  // Byte offset of a chunk: permuted within its line, so that the eight lines that ldmatrix reads at one chunk
  // lie in different banks. Lines of 64 bytes share 128 bytes in pairs.
  static __device__ __forceinline__ int place(int line, int chunk) {
    const int mixed = CHUNKS == 4 ? chunk ^ (line >> 1 & 3) : chunk ^ (line & 7);
    return (line * CHUNKS + mixed) * 16;
  }
  // Starts the copies of one stage. What lies outside becomes zero, on both operands, so that no Inf or NaN
  // meets a pad. Unaligned operands are copied here and now, element by element.
  __device__ __forceinline__ void copy(int stage, i64 first) const {
    const i64 outer = ALONG_K ? size : k, inner = ALONG_K ? k : size;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const int e = part * THREADS + threadIdx.x, line = e / CHUNKS, chunk = e % CHUNKS;
      const i64 o = (ALONG_K ? start : first) + line, q = (ALONG_K ? first : start) + chunk * V;
      const i64 left = o < outer ? inner - q : 0;
      const int count = left >= V ? V : left > 0 ? int(left) : 0;
      const T* from = base + (count ? o * lead + q : 0);
      unsigned char* to = smem + stage * BYTES + place(line, chunk);
      if (aligned) {
        ptx::cp_async<16>(ptx::smem_addr(to), from, count * int(sizeof(T)));
      } else {
        Chunk out;
#pragma unroll
        for (int v = 0; v < V; ++v) out[v] = v < count ? from[v] : T(0);
        *(Chunk*)to = out;
      }
    }
  }
  // Loads four 8 x 8 matrices: lane / 8 is the matrix, whose first row and step are given in units of elements.
  __device__ __forceinline__ void load(u32 (&r)[4], int stage, int row, int step) const {
    const u32 at = ptx::smem_addr(smem + stage * BYTES);
    if constexpr (ALONG_K) ptx::ldmatrix_x4(r, at + place(row + threadIdx.x % 8, step / V));
    else ptx::ldmatrix_x4_trans(r, at + place(step + threadIdx.x % 8, row / V));
  }
};

template <class TA, class TB, class TC, int TILE, bool A_ALONG_K, bool B_ALONG_K>
__global__ void __launch_bounds__(2 * TILE, TILE == 128 ? 2 : 4) tensor_core(const GemmArgs p) {
  constexpr int THREADS = 2 * TILE, DOWN = 2;             // warps along the rows
  constexpr int ACROSS = THREADS / 32 / DOWN;
  constexpr int ROWS = TILE / DOWN / 16, COLS = TILE / ACROSS / 8;  // mma tiles of a warp
  typedef Operand<TA, TILE, THREADS, A_ALONG_K> OperandA;
  typedef Operand<TB, TILE, THREADS, B_ALONG_K> OperandB;
  extern __shared__ __align__(128) unsigned char smem[];
  const Tile tile = tile_of<8>(p, TILE, TILE);
  const OperandA a(entry<TA>(p.a, tile.batch, p.a_batch), tile.row, p.m, p.k, p.a_row, p.a_col, smem);
  const OperandB b(entry<TB>(p.b, tile.batch, p.b_batch), tile.col, p.n, p.k, p.b_col, p.b_row,
                   smem + STAGES * OperandA::BYTES);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = warp / ACROSS * ROWS * 16, col = warp % ACROSS * COLS * 8;
  float sum[ROWS][COLS][4] = {};
  const i64 steps = (p.k + DEPTH - 1) / DEPTH;
#pragma unroll 1
  for (int s = 0; s < STAGES - 1; ++s) {
    if (s < steps) {
      a.copy(s, (i64)s * DEPTH);
      b.copy(s, (i64)s * DEPTH);
    }
    ptx::cp_async_commit();  // empty groups keep the count: the oldest is always the stage that comes next
  }
  int now = 0, next = STAGES - 1;
  for (i64 s = 0; s < steps; ++s) {
    ptx::cp_async_wait<STAGES - 2>();
    __syncthreads();  // stage `now` is there for all, and nobody reads stage `next` any more
    if (s + STAGES - 1 < steps) {
      a.copy(next, (s + STAGES - 1) * DEPTH);
      b.copy(next, (s + STAGES - 1) * DEPTH);
    }
    ptx::cp_async_commit();
#pragma unroll
    // excerpt
    for (int l = 0; l < DEPTH; l += 16) {
      u32 fa[ROWS][4], fb[COLS / 2][4];
#pragma unroll
      for (int r = 0; r < ROWS; ++r)  // matrices: rows 0, 8, then the same 8 steps on
        a.load(fa[r], now, row + r * 16 + lane / 8 % 2 * 8, l + lane / 16 * 8);
#pragma unroll
      for (int c = 0; c < COLS / 2; ++c)  // matrices: steps 0, 8, then the same 8 columns on
        b.load(fb[c], now, col + c * 16 + lane / 16 * 8, l + lane / 8 % 2 * 8);
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLS; ++c) {
          const u32 pair[2] = {fb[c / 2][c % 2 * 2], fb[c / 2][c % 2 * 2 + 1]};
          mma(sum[r][c], fa[r], pair, TA());
    // end of excerpt
        }
    }
    now = now + 1 == STAGES ? 0 : now + 1;
    next = next + 1 == STAGES ? 0 : next + 1;
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int c = 0; c < COLS; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        finish_at<TC>(p, tile.batch, tile.row + row + r * 16 + lane / 4 + i / 2 * 8,
                      tile.col + col + c * 8 + lane % 4 * 2 + i % 2, sum[r][c][i]);
}
