// A few tokens an expert on tensor cores: blocks walk over slabs of the touched experts' matrices, and fragments come
// from global memory as they lie, in either order of W.
#include "few_rows.cuh"
#include "groups.cuh"
#include "ptx.cuh"

typedef ptx::u32 u32;
typedef ptx::Vec<u32, 4> Words;   // eight halves

constexpr int WARPS = 8;

__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], __half) { ptx::mma_f16(d, a, b); }
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], __nv_bfloat16) {
  ptx::mma_bf16(d, a, b);
}

// What a warp multiplies in one turn: ROWS columns of W (the rows of an instruction) over DEPTH steps of the sum, eight
// vectors a lane, and NT times 8 tokens (its columns). Lane (g, t) gives vectors of token g over the very steps that it
// holds of W: their order within a sum is free as long as both keep to one. Where W lies along k, vectors are eight
// steps of a column, and the instructions take them as they are; elsewhere they are eight columns at a step, and two
// steps of a column are put together first.
template <class T, bool ALONG_K, int NT>
struct Turn {
  static constexpr int ROWS = ALONG_K ? 32 : 64, DEPTH = ALONG_K ? 64 : 32, FRAGMENTS = ROWS / 16, PARTS = DEPTH / 32;
  Words w[8], x[PARTS][NT];

  // w, x: at the lane's first element of the matrix and of its token; `step` from one of its vectors of W to the next.
  __device__ __forceinline__ void load(const T* w_at, const T* x_at, i64 step, i64 x_step, int first, int k, int rows,
                                       int tokens) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (ALONG_K) {
        const int r = i / 2, h = i % 2;
        w[i] = ptx::ld_cs_128_if((const Words*)(w_at + r * step + first + 32 * h),
                                 first + 32 * h + 8 * t < k && 8 * r + g < rows);
      } else {
        w[i] = ptx::ld_cs_128_if((const Words*)(w_at + (first + i) * step), first + 8 * t < k && 8 * g < rows);
      }
    }
#pragma unroll
    for (int h = 0; h < PARTS; ++h)
#pragma unroll
      for (int c = 0; c < NT; ++c)
        x[h][c] = ptx::ld_nc_if((const Words*)(x_at + 8 * c * x_step + first + 32 * h),
                                first + 32 * h + 8 * t < k && 8 * c + g < tokens);
  }

  __device__ __forceinline__ void multiply(float (&d)[FRAGMENTS][NT][4], int tiles) const {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
      for (int s = 0; s < 2 * PARTS; ++s) {
        u32 a[4];
        if constexpr (ALONG_K) {
          const Words &low = w[4 * f + s / 2], &high = w[4 * f + 2 + s / 2];
          a[0] = low[s % 2 * 2], a[1] = high[s % 2 * 2], a[2] = low[s % 2 * 2 + 1], a[3] = high[s % 2 * 2 + 1];
        } else {
          const u32 u[4] = {w[4 * s][f], w[4 * s + 1][f], w[4 * s + 2][f], w[4 * s + 3][f]};
          a[0] = __byte_perm(u[0], u[1], 0x5410), a[1] = __byte_perm(u[0], u[1], 0x7632);
          a[2] = __byte_perm(u[2], u[3], 0x5410), a[3] = __byte_perm(u[2], u[3], 0x7632);
        }
#pragma unroll
        for (int c = 0; c < NT; ++c) {
          if (c >= tiles) break;
          const Words& v = x[ALONG_K ? s / 2 : 0][c];
          const u32 b[2] = {v[s % 2 * 2], v[s % 2 * 2 + 1]};
          mma(d[f][c], a, b, T());
        }
      }
  }
  // The column of W, of the warp's, to which sum e of fragment f belongs.
  static __device__ __forceinline__ int row_of(int f, int e) {
    const int g = threadIdx.x % 32 / 4;
    return ALONG_K ? 16 * f + g + e / 2 * 8 : 8 * g + 2 * f + e / 2;
  }
};

// The floats in which the warps' sums meet: of WARPS / WIDE parts, TOKENS tokens, a slab and what keeps banks apart.
template <bool ALONG_K, int NT, int WIDE> __device__ constexpr int pitch() {
  return (ALONG_K ? 32 : 64) * WIDE + (ALONG_K ? 4 : 1);
}
template <bool ALONG_K, int NT, int WIDE> __device__ constexpr int sums() {
  return WARPS / WIDE * (8 * NT) * pitch<ALONG_K, NT, WIDE>();
}

// Where the row of a token lies, one of those that an item begins with; a lane without a token reads nothing.
struct InOrder {
  __device__ __forceinline__ int x(int first, int lane, int) const { return first + lane; }
  __device__ __forceinline__ int y(int place) const { return place; }
};
struct Apart {
  Found found;
  __device__ __forceinline__ int x(int first, int lane, int tokens) const { return found.x(first + min(lane, tokens - 1)); }
  __device__ __forceinline__ int y(int place) const { return found.y(place); }
};

// WIDE warps stand side by side in a slab, WARPS / WIDE share the sum. The next item's first vectors are under way
// while the sums of this one meet in shared memory. GATED: the columns are gates, then as many ups, and a slab has as many
// of each, whose silu(gate) * up is the result. part: those sums, then the list. row_of: where a token's row lies in A and
// in C.
template <class TB, class TC, bool ALONG_K, int NT, int WIDE, bool GATED, class Rows>
__device__ __forceinline__ void stream_experts(const GemmArgs& p, const Ends& ends, float* part, const Rows& row_of) {
  typedef Turn<TB, ALONG_K, NT> Mine;
  constexpr int COLUMNS = GATED ? 2 : 1, ACROSS = WIDE / COLUMNS, SLAB = Mine::ROWS * ACROSS;   // of the result
  constexpr int PARTS = WARPS / WIDE, TOKENS = 8 * NT, PITCH = pitch<ALONG_K, NT, WIDE>();
  int* const first = (int*)(part + sums<ALONG_K, NT, WIDE>());
  const int k = (int)p.k, n = (int)p.n / COLUMNS, slabs = (n + SLAB - 1) / SLAB;
  const i64 items = (i64)list_pieces<32 * WARPS>(ends, TOKENS, first) * slabs;
  const int begin = (int)(items * blockIdx.x / gridDim.x), end = (int)(items * (blockIdx.x + 1) / gridDim.x);
  if (begin == end) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int across = warp % ACROSS * Mine::ROWS, ups = warp % WIDE / ACROSS * n, down = warp / WIDE * Mine::DEPTH;
  const int turns = (k + PARTS * Mine::DEPTH - 1) / (PARTS * Mine::DEPTH);
  Items walk{ends, first, slabs, TOKENS, expert_of(first + 1, ends.experts, begin / slabs)};
  Mine held;
  const TB *w, *x;
  Work at;
  auto go_to = [&](int item) {
    at = walk.at(item);
    const i64 column = (i64)at.slab * SLAB + ups + across + (ALONG_K ? g : 8 * g);
    w = (const TB*)p.b + at.expert * p.b_batch + column * p.b_col + 8 * t * p.b_row;
    x = (const TB*)p.a + row_of.x(at.token, g, at.tokens) * p.a_row + 8 * t;
  };
  auto load = [&](int turn) {
    held.load(w, x, ALONG_K ? 8 * p.b_col : p.b_row, p.a_row, turn * PARTS * Mine::DEPTH + down, k,
              n - at.slab * SLAB - across, at.tokens);
  };
  go_to(begin);
  if (turns) load(0);
  for (int item = begin; item < end; ++item) {
    const Work now = at;
    float sum[Mine::FRAGMENTS][NT][4] = {};
    const int tiles = (now.tokens + 7) / 8;
    for (int turn = 0; turn < turns; ++turn) {
      held.multiply(sum, tiles);
      if (turn + 1 < turns) load(turn + 1);
    }
    if (item + 1 < end) {
      go_to(item + 1);
      if (turns) load(0);
    }
    float* const mine = part + (warp / WIDE) * TOKENS * PITCH + warp % WIDE * Mine::ROWS;
#pragma unroll
    for (int f = 0; f < Mine::FRAGMENTS; ++f)
#pragma unroll
      for (int c = 0; c < NT; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) mine[(8 * c + 2 * t + e % 2) * PITCH + Mine::row_of(f, e)] = sum[f][c][e];
    __syncthreads();
    const float alpha = (float)p.alpha, beta = (float)p.beta;
    for (int e = threadIdx.x; e < SLAB * now.tokens; e += 32 * WARPS) {
      const int token = e / SLAB, row = e % SLAB, column = now.slab * SLAB + row;
      float total[COLUMNS] = {};
#pragma unroll
      for (int i = 0; i < PARTS * COLUMNS; ++i) total[i % COLUMNS] += part[(i / COLUMNS * TOKENS + token) * PITCH + i % COLUMNS * SLAB + row];
      if constexpr (GATED) total[0] = total[0] / (1 + expf(-total[0])) * total[1];
      if (column < n)
        finish_scaled<TC, float>((TC*)p.c + row_of.y(now.token + token) * p.c_row + column * p.c_col, total[0], alpha, beta);
    }
    __syncthreads();
  }
}

template <class TA, class TB, class TC, bool ALONG_K, int NT, int WIDE>
__global__ void __launch_bounds__(32 * WARPS, NT > 2 ? 1 : 2) streamed_experts(const GemmArgs p) {
  take_turn();
  extern __shared__ __align__(16) float part[];
  stream_experts<TB, TC, ALONG_K, NT, WIDE, false>(p, Ends(p), part, InOrder());
}

// Through the gate: the result has half as many columns.
template <class TA, class TB, class TC, bool ALONG_K, int NT, int WIDE>
__global__ void __launch_bounds__(32 * WARPS, NT > 2 ? 1 : 2) gated_experts(const GemmArgs p) {
  take_turn();
  extern __shared__ __align__(16) float part[];
  stream_experts<TB, TC, ALONG_K, NT, WIDE, true>(p, Ends(p), part, InOrder());
}

// Of few rows that nobody sorted, as `routed_codes`: `work` has the indices, `m` counts the slots.
struct FewExperts {
  GemmArgs g;
  i64 top_k;
  int* places;
};

template <class TA, class TB, class TC, bool ALONG_K, int NT, int WIDE, bool GATED, class I>
__global__ void __launch_bounds__(32 * WARPS, 2) routed_experts(const FewExperts p) {
  static_assert(NT == 1, "more tokens of a piece lie apart");
  take_turn();
  extern __shared__ __align__(16) float part[];
  const int experts = (int)p.g.batch, slots = (int)p.g.m;
  int* const order = (int*)(part + sums<ALONG_K, NT, WIDE>()) + experts + 1, *const ends = order + 2 * FEW_SLOTS;
  const int place = sort_few<32 * WARPS>((const I*)p.g.work, slots, experts, ends, order, order + FEW_SLOTS), slot = threadIdx.x;
  if (p.places && blockIdx.x == 0 && slot < slots) p.places[slot] = place < 0 ? -1 : slot;
  for (int s = blockIdx.x; s < slots; s += gridDim.x)   // what names no expert is nothing
    if (order[FEW_SLOTS + s] < 0)
      for (int j = threadIdx.x; j < (int)p.g.n / (GATED ? 2 : 1); j += 32 * WARPS)
        ((TC*)p.g.c)[s * p.g.c_row + j * p.g.c_col] = narrow<TC, float>(0.f);
  Ends of(p.g);   // rows and experts; the ends are those that were sorted here
  of.at = ends;
  stream_experts<TB, TC, ALONG_K, NT, WIDE, GATED>(p.g, of, part, Apart{{order, (int)p.top_k}});
}
