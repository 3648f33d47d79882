// Codes as they lie are the 16-row operand of mma.sync; the 8 columns of the other operand are 8 pieces of one x.
// counters: DRAM read, MB; issue slots used, %; tensor pipe, %
#include "delivery.cuh"
#include "bias.cuh"

// Store one finished sum, or send it to several GPUs.
template <class T>
__device__ __forceinline__ void deliver(const Delivery& to, const QuantArgs& p, i64 row, float sum) {
#ifdef PEERS
  to.send(p.peers, row, narrow<T, float>(sum));
#else
  store_quantised<T>(p, row, 0, sum);
#endif
}

// The operand registers that meet a tile: x at the columns `first` .. of a lane, zeros past the end and where the lane
// has no share. PLAIN: neighbours at 16-byte addresses, in whole vectors.
template <bool PLAIN, class TX, int BITS>
__device__ __forceinline__ void load_piece(const QuantArgs& p, int first, bool wanted, const PartOf& part,
                                           u32 (&b)[Tile<BITS>::of_lane / 2]) {
  constexpr int C = Tile<BITS>::of_lane, V = 16 / (int)sizeof(TX);
  ptx::Vec<TX, V> x[C / V];
  const int n = wanted ? (int)p.n : 0;
  if constexpr (PLAIN) {
#pragma unroll
    for (int i = 0; i < C / V; ++i) x[i] = ptx::ld_nc_if((const ptx::Vec<TX, V>*)((const TX*)p.x + first) + i, first + i * V < n);
  } else {
#pragma unroll
    for (int i = 0; i < C; ++i) {
      const int j = first + i;
      x[i / V][i % V] = j < n ? ((const TX*)p.x)[(p.perm ? (i64)p.perm[j] : (i64)j) * p.x_step] : TX(0.f);
    }
  }
#pragma unroll
  for (int i = 0; i < C / 2; ++i) {
    if constexpr (sizeof(TX) == 4) b[i] = part.pair(x[2 * i / V][2 * i % V], x[2 * i / V][2 * i % V + 1]);
    else b[i] = ((const u32*)&x)[i];
  }
}

// A unit is 1 / SPLIT of a tile's columns and lies in one group. The columns of an instruction stand for units: column
// q for unit q / PARTS of HELD tiles, PARTS of them for the parts of a float32. A tile's products count in its own
// columns only, so that every lane scales what it holds with one or two scales (a group is 2^SHIFT units) and
// asks for x once in HELD tiles. Rows and tiles past the end repeat the last one; there x is zero.
template <bool PLAIN, class TX, class TY, class TS, int BITS, bool ZEROS, int SPLIT, int SHIFT, int WARPS, int TILES, int ROWS>
__device__ __forceinline__ void multiply_codes(const QuantArgs& p, const Delivery& to, float (&shares)[WARPS][16 * ROWS]) {
  typedef typename OperandOf<TX>::type T;
  typedef NumbersOf<T, BITS, TS> N;
  typedef Tile<BITS> Shape;
  constexpr int PARTS = sizeof(TX) == 4 ? 4 : 1, WIDE = SPLIT * PARTS, HELD = 8 / WIDE;
  constexpr int SETS = TILES > HELD ? TILES / HELD : 1, EACH = TILES / SETS;
  constexpr bool GROUPED = SHIFT < 31;
  constexpr int OWN = SHIFT < 1 ? 2 : 1;
  static_assert(HELD > 0 && TILES == SETS * EACH, "whole sets of tiles");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int m = (int)p.m, n = (int)p.n, tiles = (n + Shape::columns - 1) / Shape::columns;
  const int first = blockIdx.x * ROWS, last = (m + 15) / 16 - 1;
  const Words* w[ROWS];
  int row[ROWS][2];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    w[r] = (const Words*)p.codes + (i64)min(first + r, last) * tiles * 32 + lane;
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) row[r][hi] = min((first + r) * 16 + hi * 8 + g, m - 1);
  }
  const bool share = t * SPLIT / 4 == g % WIDE / PARTS;
  const PartOf part(g % PARTS);
  const Groups<SHIFT> groups(p, Shape::columns / SPLIT);
  float sum[ROWS][2] = {}, scale[SETS][ROWS][2][OWN], zero[SETS][ROWS][2][OWN];
  const auto load_scales = [&](int s, int own, int group) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int hi = 0; hi < 2; ++hi) {
        const i64 at = scale_at(p, row[r][hi], group);
        scale[s][r][hi][own] = wide<float>(((const TS*)p.scales)[at]);
        if constexpr (ZEROS) zero[s][r][hi][own] = ((const float*)p.zeros)[at];
        else zero[s][r][hi][own] = 1 << (BITS - 1);
      }
  };
  if constexpr (!GROUPED) load_scales(0, 0, 0);

#pragma unroll 1
  for (int c = warp * TILES; c < tiles; c += WARPS * TILES) {
    Words v[ROWS][TILES];
    u32 b[SETS][2 * Shape::steps];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int u = 0; u < TILES; ++u) v[r][u] = ptx::ld_stream(w[r] + min(c + u, tiles - 1) * 32);
#pragma unroll
    for (int s = 0; s < SETS; ++s) {
      const int piece = (c + s * EACH + g / WIDE % EACH) * Shape::columns + t * Shape::of_lane;
      load_piece<PLAIN, TX, BITS>(p, piece, share, part, b[s]);
      if constexpr (GROUPED)
#pragma unroll
        for (int own = 0; own < OWN; ++own) {
          const int q = 2 * t + own;
          load_scales(s, own, groups.of((c + s * EACH + q / WIDE) * SPLIT + q % WIDE / PARTS));
        }
    }
#pragma unroll
    for (int s = 0; s < SETS; ++s) {
      float sums[4] = {};  // of x over each column's unit: columns 2 t and 2 t + 1
      if constexpr (N::less == 0 || ZEROS) {
        const u32 ones[4] = {N::ones, N::ones, N::ones, N::ones};
#pragma unroll
        for (int j = 0; j < Shape::steps; ++j) multiply(sums, ones, {b[s][2 * j], b[s][2 * j + 1]}, T());
      }
#pragma unroll
      for (int u = 0; u < EACH; ++u)
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          float d[4] = {};
#pragma unroll
          // excerpt
          for (int j = 0; j < Shape::steps; ++j) {
            u32 a[4];
            N::fragment(v[r][s * EACH + u], j, a);
            multiply(d, a, {b[s][2 * j], b[s][2 * j + 1]}, T());
          // end of excerpt
          }
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if ((2 * t + e) / WIDE == u)
#pragma unroll
              for (int hi = 0; hi < 2; ++hi) {
                const int of = GROUPED ? s : 0, own = OWN == 2 && GROUPED ? e : 0;
                const float dot = fmaf(d[2 * hi + e], N::lift(hi), (N::less - zero[of][r][hi][own]) * sums[e]);
                sum[r][hi] = fmaf(scale[of][r][hi][own], dot, sum[r][hi]);
              }
        }
    }
  }

#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) {
      float v = sum[r][hi];
      v += __shfl_xor_sync(~0u, v, 1);
      v += __shfl_xor_sync(~0u, v, 2);
      if (t == 0) shares[warp][r * 16 + hi * 8 + g] = v;
    }
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * ROWS; i += 32 * WARPS) {
    float total = 0;
#pragma unroll
    for (int k = 0; k < WARPS; ++k) total += shares[k][i];
    if (first * 16 + i < m) deliver<TY>(to, p, first * 16 + i, by_factor<TS>(p, first * 16 + i, total));
  }
}

template <class TX, class TY, class TS, int BITS, bool ZEROS, int SPLIT, int SHIFT, int WARPS, int TILES, int ROWS>
__global__ void __launch_bounds__(32 * WARPS, 16 / WARPS) fragment_codes(const QuantArgs p) {
  __shared__ float shares[WARPS][16 * ROWS];
  const Delivery to(p);
  if (to.gathers<TY>(p)) return;
  if (p.x_step == 1 && !p.perm && p.n * sizeof(TX) % 16 == 0 && ((u64)p.x & 15) == 0)
    multiply_codes<true, TX, TY, TS, BITS, ZEROS, SPLIT, SHIFT, WARPS, TILES, ROWS>(p, to, shares);
  else
    multiply_codes<false, TX, TY, TS, BITS, ZEROS, SPLIT, SHIFT, WARPS, TILES, ROWS>(p, to, shares);
}
