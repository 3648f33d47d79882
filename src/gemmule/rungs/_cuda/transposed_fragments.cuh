// The transposed product over codes in fragment order: tiles walk down the rows, and sums stay in registers.
//
// Seen by columns the rows are the sum's direction, and their scales belong to x. Each lane of a row of tiles scales x
// by the scales of a unit of columns (1 / SPLIT of a tile, in one group) and cuts the float32 products into three
// bfloat16: the columns of an instruction are 2 units by 4 parts, of which one is nothing. `movmatrix` turns a word of
// codes before they are taken apart; a register then holds neighbouring rows, as an operand of columns wants them.
#pragma once
#include "fragments.cuh"

struct OneBlock {
  static constexpr int blocks = 1;
  __device__ static __forceinline__ void arrive() {}
  __device__ static __forceinline__ void wait() {}
  __device__ static __forceinline__ void sync() {}
  template <class T> __device__ static __forceinline__ void push(T*, T, unsigned) {}
};

// Which of the blocks that share the columns this is, for blocks that meet so.
template <class Meet> struct BlockOf {
  __device__ static __forceinline__ unsigned at(const QuantArgs&) { return blockIdx.x; }
};

// Words of a tile, turned: lane 4 g + t has rows 2 t, 2 t + 1 (and 8 more) of the columns C (g / 2) + g % 2 + 4 j + 2 p.
__device__ __forceinline__ Words turned(const Words& w) {
  Words r;
#pragma unroll
  for (int i = 0; i < 4; ++i) r[i] = ptx::movmatrix_trans(w[i]);
  return r;
}

// Numbers that belong to the rows 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of a row of tiles, at `from` + row * step. Where x has
// ended, zeros; scales go on with the last ones. PAIRS: neighbours, at addresses that allow loads of two, no odd end.
template <bool PAIRS, bool OF_X, class T>
__device__ __forceinline__ void load_rows(const T* from, i64 step, int row, int m, ptx::Vec<T, 2> (&out)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int i = row + 8 * h;
    if constexpr (PAIRS && OF_X) out[h] = ptx::ld_nc_if((const ptx::Vec<T, 2>*)(from + i), i < m);
    else if constexpr (PAIRS) out[h] = ptx::ld_nc((const ptx::Vec<T, 2>*)(from + min(i, m - 2)));
    else
#pragma unroll
      for (int e = 0; e < 2; ++e) out[h][e] = OF_X && i + e >= m ? T(0.f) : from[min(i + e, m - 1) * step];
  }
}

// What rows have beside the scales of NVFP4.
template <class TS, int ROWS, bool FACTORS = Float4<TS>::factors> struct RowFactors {};
template <class TS, int ROWS> struct RowFactors<TS, ROWS, true> { ptx::Vec<float, 2> factor[ROWS][2]; };

// What a warp loads for ROWS rows of TILES tiles: codes, x, scales and zero points.
template <class TX, class TS, bool ZEROS, int SETS, int TILES, int ROWS> struct Turn : RowFactors<TS, ROWS> {
  Words codes[ROWS][TILES];
  ptx::Vec<TX, 2> x[ROWS][2];
  ptx::Vec<TS, 2> scale[ROWS][SETS][2];
  ptx::Vec<float, 2> zero[ZEROS ? ROWS : 1][SETS][2];
  template <bool PAIRS>
  __device__ __forceinline__ void load(const QuantArgs& p, const Words* const (&from)[TILES], const i64 (&group)[SETS],
                                       int first, int down, int across, int t) {
    const i64 step = p.scale_row ? 1 : 0;  // 0: one scale for all
    const int m = (int)p.m;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int u = 0; u < TILES; ++u) codes[r][u] = ptx::ld_stream(from[u] + (i64)min(first + r, down - 1) * across * 32);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int row = 16 * (first + r) + 2 * t;
      load_rows<PAIRS, true>((const TX*)p.x, p.x_step, row, m, x[r]);
      if constexpr (Float4<TS>::factors) load_rows<PAIRS, false>((const float*)p.zeros, 1, row, m, this->factor[r]);
#pragma unroll
      for (int s = 0; s < SETS; ++s) {
        load_rows<PAIRS, false>((const TS*)p.scales + group[s], step, row, m, scale[r][s]);
        if constexpr (ZEROS) load_rows<PAIRS, false>((const float*)p.zeros + group[s], step, row, m, zero[r][s]);
      }
    }
  }
};

// A block has ACROSS x DOWN warps: neighbours stand side by side, so that they share what the memory brings of scales,
// and rows of warps take turns. The blocks of a cluster (Meet) share the rows, and each adds up a share of the columns. AHEAD: 1 where
// a warp loads its next turn before it multiplies this one, for twice the registers and half the warps.
template <int WIDTH, int DOWN, int CLUSTER> struct Shares {
  float of_warps[DOWN][WIDTH];
  float of_blocks[CLUSTER][WIDTH / CLUSTER];
};
template <bool PAIRS, class TX, class TY, class TS, int BITS, bool ZEROS, int SPLIT, int SHIFT, int ACROSS, int DOWN,
          int TILES, int ROWS, int AHEAD, class Meet, int WIDTH>
__device__ __forceinline__ void sum_columns(const QuantArgs& p, Shares<WIDTH, DOWN, Meet::blocks>& shares) {
  typedef __nv_bfloat16 T;
  typedef NumbersOf<T, BITS, TS> N;
  typedef Tile<BITS> Shape;
  constexpr int SETS = TILES * SPLIT > 2 ? TILES * SPLIT / 2 : 1, OF_TILE = SPLIT == 4 ? 2 : 1, CLUSTER = Meet::blocks;
  constexpr int THREADS = 32 * ACROSS * DOWN;
  Meet::arrive();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int rank = BlockOf<Meet>::at(p) % CLUSTER, strip = BlockOf<Meet>::at(p) / CLUSTER;
  const int m = (int)p.m, n = (int)p.n, across = (n + Shape::columns - 1) / Shape::columns, down = (m + 15) / 16;
  const int c = (strip * ACROSS + warp % ACROSS) * TILES;
  const Words* w[TILES];
#pragma unroll
  for (int u = 0; u < TILES; ++u) w[u] = (const Words*)p.codes + min(c + u, across - 1) * 32 + lane;
  const Groups<SHIFT> groups(p, Shape::columns / SPLIT);
  i64 at[SETS];
#pragma unroll
  for (int s = 0; s < SETS; ++s) at[s] = scale_at(p, 0, groups.of(c * SPLIT + 2 * s + g / 4));
  const PartOf part(g % 4);
  float sum[TILES][Shape::steps][OF_TILE][4] = {}, less[SETS] = {};

  Turn<TX, TS, ZEROS, SETS, TILES, ROWS> turns[1 + AHEAD];
  const int begin = (rank * DOWN + warp / ACROSS) * ROWS, stride = CLUSTER * DOWN * ROWS;
  if (AHEAD && begin < down) turns[0].template load<PAIRS>(p, w, at, begin, down, across, t);
#pragma unroll 1
  for (int i = begin; i < down; i += (1 + AHEAD) * stride) {
#pragma unroll
    for (int side = 0; side <= AHEAD; ++side) {
      const int next = i + (side + AHEAD) * stride;
      if (next < down) turns[(side + 1) % (1 + AHEAD)].template load<PAIRS>(p, w, at, next, down, across, t);
      if (side && i + stride >= down) break;
      const auto& turn = turns[side];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        u32 b[SETS][2];
#pragma unroll
        for (int s = 0; s < SETS; ++s)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float scaled[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              if constexpr (Float4<TS>::factors)
                scaled[e] = wide<float>(turn.x[r][h][e]) * turn.factor[r][h][e] * wide<float>(turn.scale[r][s][h][e]);
              else scaled[e] = wide<float>(turn.x[r][h][e]) * wide<float>(turn.scale[r][s][h][e]);
              if constexpr (ZEROS) less[s] = fmaf(scaled[e], turn.zero[r][s][h][e] - N::less, less[s]);
            }
            b[s][h] = part.pair(scaled[0], scaled[1]);
          }
#pragma unroll
        for (int u = 0; u < TILES; ++u) {
          // excerpt turned
          const Words codes = turned(turn.codes[r][u]);
#pragma unroll
          for (int j = 0; j < Shape::steps; ++j) {
            u32 f[4];
            N::fragment(codes, j, f);
            const u32 a[4] = {f[0], f[2], f[1], f[3]};  // columns come first now
          // end of excerpt
#pragma unroll
            for (int o = 0; o < OF_TILE; ++o) multiply(sum[u][j][o], a, b[u * SPLIT / 2 + o], T());
          }
        }
      }
    }
  }

  // Row g of a step's sums belongs to unit `of` of its tile; the parts of the unit lie in lanes 2 of, 2 of + 1 (mod 4).
#pragma unroll
  for (int s = 0; s < SETS; ++s) {
    less[s] += __shfl_xor_sync(~0u, less[s], 1);
    less[s] += __shfl_xor_sync(~0u, less[s], 2);
  }
#pragma unroll
  for (int u = 0; u < TILES; ++u)
#pragma unroll
    for (int o = 0; o < OF_TILE; ++o) {
      const int of = SPLIT == 1 ? u % 2 : g / 2 * SPLIT / 4, slot = of % 2;
      const float correction = __shfl_sync(~0u, less[u * SPLIT / 2 + o], 16 * slot);
#pragma unroll
      for (int j = 0; j < Shape::steps; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float total = sum[u][j][o][2 * h] + sum[u][j][o][2 * h + 1];
          total += __shfl_xor_sync(~0u, total, 1);
          const int column = Shape::of_lane * (g / 2) + g % 2 + 4 * j + 2 * h;
          if (t == 2 * slot && of / 2 == o * (SPLIT == 4))
            shares.of_warps[warp / ACROSS][(warp % ACROSS * TILES + u) * Shape::columns + column] = fmaf(total, N::lift(0), -correction);
        }
    }
  __syncthreads();
  Meet::wait();
  constexpr int MINE = WIDTH / CLUSTER;
#pragma unroll 1
  for (int i = threadIdx.x; i < WIDTH; i += THREADS) {
    // excerpt meeting
    float total = 0;
#pragma unroll
    for (int d = 0; d < DOWN; ++d) total += shares.of_warps[d][i];
    if constexpr (CLUSTER == 1) shares.of_blocks[0][i] = total;
    else Meet::push(&shares.of_blocks[rank][i % MINE], total, i / MINE);
    // end of excerpt
  }
  if constexpr (CLUSTER > 1) Meet::sync();
#pragma unroll 1
  for (int i = threadIdx.x; i < MINE; i += THREADS) {  // with one block a thread reads what it wrote itself
    float total = 0;
#pragma unroll
    for (int k = 0; k < CLUSTER; ++k) total += shares.of_blocks[k][i];
    const int column = strip * WIDTH + rank * MINE + i;
    if (column < n) store_quantised<TY>(p, p.perm ? p.perm[column] : column, 0, total);
  }
}

template <class TX, class TY, class TS, int BITS, bool ZEROS, int SPLIT, int SHIFT, int ACROSS, int DOWN, int TILES,
          int ROWS, int AHEAD, class Meet>
__device__ __forceinline__ void multiply_transposed(const QuantArgs& p) {
  constexpr int WIDTH = ACROSS * TILES * Tile<BITS>::columns;
  __shared__ Shares<WIDTH, DOWN, Meet::blocks> shares;
  if (p.m % 2 == 0 && p.scale_row && p.x_step == 1 && ((u64)p.x & (2 * sizeof(TX) - 1)) == 0)
    sum_columns<true, TX, TY, TS, BITS, ZEROS, SPLIT, SHIFT, ACROSS, DOWN, TILES, ROWS, AHEAD, Meet, WIDTH>(p, shares);
  else
    sum_columns<false, TX, TY, TS, BITS, ZEROS, SPLIT, SHIFT, ACROSS, DOWN, TILES, ROWS, AHEAD, Meet, WIDTH>(p, shares);
}
