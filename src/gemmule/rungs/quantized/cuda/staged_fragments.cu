// Eight columns a block: x as it lies goes to shared memory, once for all rows of a block, and codes take the same way ahead.
// counters: L2 hits, %; issue slots used, %; tensor pipe, %
#include "bias.cuh"

constexpr int DEPTH = 128, ROWS = 2;  // stored columns a turn, and rows of tiles a warp

// What is on its way to the warps: DOWN x ALONG of them, of which those below each other share x. A column of x has 16
// chunks of 16 bytes, of which odd columns swap neighbours, so that 8 lanes read from all banks.
template <int BITS, int DOWN, int ALONG, int STAGES> struct Ring {
  static constexpr int TILES = DEPTH / Tile<BITS>::columns, SWAP = BITS == 4 ? 1 : 4;
  Words codes[STAGES][DOWN * ALONG][ROWS][TILES][32];
  Words x[STAGES][ALONG][8][DEPTH / 8];
  __device__ static __forceinline__ int place(int column, int chunk) { return chunk ^ (column % 2 * SWAP); }
};

// x for the stored columns `first` .. of a turn, zeros past the end. PLAIN: neighbours at 16-byte addresses.
template <bool PLAIN, class TX, class R, int THREADS>
__device__ __forceinline__ void stage_x(const QuantArgs& p, Words (&to)[8][DEPTH / 8], int thread, int first, int from_column) {
  const int n = (int)p.n, last = (int)p.columns - 1;
  if constexpr (PLAIN) {
#pragma unroll
    for (int i = thread; i < DEPTH; i += THREADS) {
      const int c = i / (DEPTH / 8), chunk = i % (DEPTH / 8), column = from_column + c, j = first + 8 * chunk;
      const int left = column <= last ? min(max(n - j, 0), 8) : 0;
      ptx::cp_async<16>(ptx::smem_addr(&to[c][R::place(c, chunk)]), left ? (const TX*)p.x + column * p.x_col + j : (const TX*)p.x, 2 * left);
    }
  } else {  // pairs, of which a warp has 64 numbers of one column; no load waits for another
    constexpr int PAIRS = DEPTH / 2, MINE = 8 * PAIRS / THREADS;
    TX x[MINE][2];
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int c = (i * THREADS + thread) / PAIRS, j = first + (i * THREADS + thread) % PAIRS * 2;
      const TX* const from = (const TX*)p.x + min(from_column + c, last) * p.x_col;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = min(j + e, n - 1);
        x[i][e] = from[(p.perm ? (i64)p.perm[at] : (i64)at) * p.x_step];
      }
    }
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int c = (i * THREADS + thread) / PAIRS, pair = (i * THREADS + thread) % PAIRS, left = from_column + c <= last ? n - first - 2 * pair : 0;
      const u32 both = *(const u32*)x[i];
      ((u32*)&to[c][R::place(c, pair / 4)])[pair % 4] = left > 1 ? both : left > 0 ? both & 0xffffu : 0;
    }
  }
}

template <bool PLAIN, class TX, class TY, class TS, int BITS, bool ZEROS, int SPLIT, int SHIFT, int DOWN, int ALONG, int STAGES>
__device__ __forceinline__ void multiply_staged(const QuantArgs& p, Ring<BITS, DOWN, ALONG, STAGES>& ring) {
  typedef Numbers<TX, BITS> N;
  typedef Ring<BITS, DOWN, ALONG, STAGES> R;
  constexpr int STEPS = Tile<BITS>::steps, V = STEPS / 2, TILES = R::TILES, HEIGHT = 16 * DOWN * ROWS;
  constexpr int EACH = SPLIT > 1 || SHIFT < 0 ? 1 : SHIFT > 2 || (1 << SHIFT) > TILES ? TILES : 1 << SHIFT, SETS = TILES / EACH * SPLIT;
  constexpr bool SUMS = N::less == 0 || ZEROS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, along = warp / DOWN;
  const int m = (int)p.m, across = ((int)p.n + Tile<BITS>::columns - 1) / Tile<BITS>::columns;
  const int turns = ((int)p.n + DEPTH - 1) / DEPTH, mine = (turns - along + ALONG - 1) / ALONG;
  const int passes = ((int)p.columns + 7) / 8;  // blocks of the same codes are neighbours, so that the memory is read once
  const int first = (blockIdx.x / passes * DOWN + warp % DOWN) * ROWS;
  const int from_column = blockIdx.x % passes * 8;
  const Words* w[ROWS];
  int row[ROWS][2];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    w[r] = (const Words*)p.codes + (i64)min(first + r, (m + 15) / 16 - 1) * across * 32 + lane;
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) row[r][hi] = min((first + r) * 16 + hi * 8 + g, m - 1);
  }
  const Groups<SHIFT> groups(p, Tile<BITS>::columns / SPLIT);
  const auto stage = [&](int i) {  // turn i of this warp, along + i * ALONG of all
    if (i < mine) {
      const int turn = along + i * ALONG, s = i % STAGES;
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int u = 0; u < TILES; ++u)
          ptx::cp_async<16>(ptx::smem_addr(&ring.codes[s][warp][r][u][lane]), w[r] + min(turn * TILES + u, across - 1) * 32);
      stage_x<PLAIN, TX, R, 32 * DOWN>(p, ring.x[s][along], warp % DOWN * 32 + lane, turn * DEPTH, from_column);
    }
    ptx::cp_async_commit();
  };
  struct Scales { TS scale[SETS][ROWS][2]; float zero[SETS][ROWS][2]; } next;
  const auto load_scales = [&](int i) {
#pragma unroll
    for (int s = 0; s < SETS; ++s) {
      const int group = groups.of((along + i * ALONG) * TILES * SPLIT + s * EACH);
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int hi = 0; hi < 2; ++hi) {
          const i64 at = scale_at(p, row[r][hi], group);
          next.scale[s][r][hi] = ((const TS*)p.scales)[at];
          if constexpr (ZEROS) next.zero[s][r][hi] = ((const float*)p.zeros)[at];
          else next.zero[s][r][hi] = 1 << (BITS - 1);
        }
    }
  };
  float total[ROWS][4] = {};
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) stage(i);
  load_scales(0);

#pragma unroll 1
  for (int i = 0; i < mine; ++i) {
    ptx::cp_async_wait<STAGES - 2>();
    if constexpr (DOWN == 1) __syncwarp();
    else ptx::named_sync(1 + along, 32 * DOWN);  // what all brought is here, and all are done with the stage before
    stage(i + STAGES - 1);
    const Scales now = next;
    load_scales(i + 1);
    const int at = i % STAGES;
#pragma unroll
    for (int s = 0; s < SETS; s += SPLIT) {
      Words b[SPLIT][EACH][V];  // of each part of a tile, zeros in the lanes that have another
      float of_x[SPLIT][4] = {};  // sums of x, in every row alike
#pragma unroll
      for (int u = 0; u < EACH; ++u)
#pragma unroll
        for (int e = 0; e < V; ++e) {
          const Words w = ring.x[at][along][g][R::place(g, (s / SPLIT * EACH + u) * Tile<BITS>::columns / 8 + t * V + e)];
#pragma unroll
          for (int part = 0; part < SPLIT; ++part)
#pragma unroll
            for (int i = 0; i < 4; ++i) b[part][u][e][i] = t * SPLIT / 4 == part ? w[i] : 0;
        }
      if constexpr (SUMS) {
        const u32 ones[4] = {N::ones, N::ones, N::ones, N::ones};
#pragma unroll
        for (int part = 0; part < SPLIT; ++part)
#pragma unroll
          for (int u = 0; u < EACH; ++u)
#pragma unroll
            for (int j = 0; j < STEPS; ++j) multiply(of_x[part], ones, {b[part][u][j / 2][2 * j % 4], b[part][u][j / 2][2 * j % 4 + 1]}, TX());
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        float d[SPLIT][4] = {};
#pragma unroll
        for (int u = 0; u < EACH; ++u) {
          // excerpt
          const Words v = ring.codes[at][warp][r][s / SPLIT * EACH + u][lane];
#pragma unroll
          for (int j = 0; j < STEPS; ++j) {
            u32 a[4];
            N::fragment(v, j, a);
#pragma unroll
            for (int part = 0; part < SPLIT; ++part) multiply(d[part], a, {b[part][u][j / 2][2 * j % 4], b[part][u][j / 2][2 * j % 4 + 1]}, TX());
          }
          // end of excerpt
        }
#pragma unroll
        for (int part = 0; part < SPLIT; ++part)
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const float dot = fmaf(d[part][c], N::lift(c / 2), (N::less - now.zero[s + part][r][c / 2]) * of_x[part][c]);
            total[r][c] = fmaf(wide<float>(now.scale[s + part][r][c / 2]), dot, total[r][c]);
          }
      }
    }
  }

  ptx::cp_async_wait<0>();
  __syncthreads();
  typedef float Shares[HEIGHT][8];
  Shares* shares = (Shares*)&ring;
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) {
      const ptx::Vec<float, 2> pair = {{total[r][2 * hi], total[r][2 * hi + 1]}};
      *(ptx::Vec<float, 2>*)&shares[along][(warp % DOWN * ROWS + r) * 16 + hi * 8 + g][2 * t] = pair;
    }
  __syncthreads();
  for (int i = threadIdx.x; i < HEIGHT * 8; i += 32 * DOWN * ALONG) {
    const bool rows_first = p.y_step == 1;
    const int r = rows_first ? i % HEIGHT : i / 8, c = rows_first ? i / HEIGHT : i % 8;
    float sum = 0;
#pragma unroll
    for (int a = 0; a < ALONG; ++a) sum += shares[a][r][c];
    const int to = blockIdx.x / passes * HEIGHT + r;
    if (to < m && from_column + c < (int)p.columns) store_quantised<TY>(p, to, from_column + c, sum);
  }
}

template <class TX, class TY, class TS, int BITS, bool ZEROS, int SPLIT, int SHIFT, int DOWN, int ALONG, int STAGES>
__global__ void __launch_bounds__(32 * DOWN * ALONG, 16 / (DOWN * ALONG)) staged_fragments(const QuantArgs p) {
  static_assert(SPLIT < 4 && sizeof(TX) == 2, "groups of half a tile at least, x in 16 bits");
  extern __shared__ __align__(128) unsigned char room[];
  auto& ring = *(Ring<BITS, DOWN, ALONG, STAGES>*)room;
  if (p.x_step == 1 && !p.perm && ((u64)p.x & 15) == 0 && (p.x_col % 8 == 0 || p.columns == 1))
    multiply_staged<true, TX, TY, TS, BITS, ZEROS, SPLIT, SHIFT, DOWN, ALONG, STAGES>(p, ring);
  else
    multiply_staged<false, TX, TY, TS, BITS, ZEROS, SPLIT, SHIFT, DOWN, ALONG, STAGES>(p, ring);
}
