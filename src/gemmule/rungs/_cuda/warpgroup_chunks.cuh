// Chunks of x and of scales in shared memory, as warpgroups multiply codes in fragment order by them: what they are made
// of, and how some warps bring them, for warpgroup_columns.cu.
#pragma once
#include "fragments.cuh"
#include "ptx_wgmma.cuh"

constexpr int BRINGERS = 4, ALL_BRINGERS = 32 * BRINGERS;  // warps that bring x and scales; the others multiply
constexpr int PANEL = 64;                                  // stored columns: the 128 bytes of a column of x that a swizzle spans

// A chunk is TILES tiles across. A stage holds it as it is multiplied by HEIGHT rows: panels of x, N = 8 NT columns for each of
// SPLIT units, zeros where a lane's columns are not the unit's; sums of x over sets of EACH tiles, which lie in one group; scales and
// zero points of each set's units as they are stored, so that bulk copies bring them and nobody waits for the memory.
template <class TX, class TS, int BITS, bool ZEROS, int SPLIT, int SHIFT, int HEIGHT, int TILES, int NT, int STAGES, int RAW> struct Chunks {
  typedef NumbersOf<TX, BITS, TS> Codes;
  static constexpr bool SUMS = Codes::less == 0 || ZEROS;
  static constexpr int N = 8 * NT * SPLIT, COLUMNS = Tile<BITS>::columns, LONG = TILES * COLUMNS, PANELS = LONG / PANEL;
  static constexpr int MOST = 2 * PANEL / COLUMNS;
  static constexpr int EACH = SHIFT < 0 || SPLIT > 1 ? 1 : SHIFT > 7 || 1 << (SHIFT & 7) > MOST ? MOST : 1 << (SHIFT & 7);
  static constexpr int SETS = TILES / EACH, UNITS = SETS * SPLIT, OF_ROW = (int)sizeof(TS) + (ZEROS ? 4 : 0);
  // What a warp turns at a time is 8 columns of the panels of a set.
  static constexpr int OF_ITEM = EACH * COLUMNS > PANEL ? 2 : 1, ITEMS = PANELS / OF_ITEM * NT, TURNS = (ITEMS + BRINGERS - 1) / BRINGERS;
  static constexpr int PAD = BITS == 4 ? 8 : 32;
  static_assert(NT <= BRINGERS, "a warp turns the same eight columns of every panel");
  unsigned char x[STAGES][PANELS][N * 128];
  float sums[STAGES][UNITS][8 * NT];
  TS scales[STAGES][UNITS][HEIGHT];
  float zeros[STAGES][ZEROS ? UNITS : 1][ZEROS ? HEIGHT : 4];
  TX raw[RAW][8 * NT][LONG + PAD];  // as it lies, 8 lanes read from all banks
  u64 full[STAGES], empty[STAGES], come[RAW];

  // Each thread makes one barrier.
  __device__ __forceinline__ void prepare(int thread, int arrivals) {
    const int s = thread % STAGES;
    if (thread < STAGES) ptx::mbar_init(ptx::smem_addr(&full[s]), BRINGERS);
    else if (thread < 2 * STAGES) ptx::mbar_init(ptx::smem_addr(&empty[s]), arrivals);
    else if (thread < 2 * STAGES + RAW) ptx::mbar_init(ptx::smem_addr(&come[thread - 2 * STAGES]), BRINGERS);
    ptx::mbar_fence_init();
  }

  // Eight of a column of x from stored column j, which lie anywhere; zeros past the end.
  static __device__ __forceinline__ Words gather(const QuantArgs& p, int column, int j) {
    ptx::Vec<TX, 8> v;
#pragma unroll
    for (int e = 0; e < 8; ++e)
      v[e] = j + e < (int)p.n ? ((const TX*)p.x)[(p.perm ? (i64)p.perm[j + e] : (i64)(j + e)) * p.x_step + column * p.x_col] : TX(0.f);
    return *(const Words*)&v;
  }

  // The scales of a stage's chunk, whose first tile is given: a lane asks for those of one unit, or, where they do not lie in whole
  // 16 bytes, threads copy one number at a time.
  __device__ __forceinline__ void bring_scales(const QuantArgs& p, const Groups<SHIFT>& groups, int at, int tile, int top) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % BRINGERS, m = (int)p.m, rows = min(HEIGHT, m - top);
    const bool whole = p.scale_row && m % (16 / (int)sizeof(TS)) == 0 && (((u64)p.scales | (ZEROS ? (u64)p.zeros : 0)) & 15) == 0;
    const auto group = [&](int unit) { return groups.of((tile + unit / SPLIT * EACH) * SPLIT + unit % SPLIT); };
    if (whole) {
      const int mine = (UNITS - warp + BRINGERS - 1) / BRINGERS, unit = lane * BRINGERS + warp;
      const u32 bar = ptx::smem_addr(&full[at]);
      if (lane == 0) ptx::mbar_expect_tx(bar, mine * rows * OF_ROW);
      __syncwarp();
      if (lane < mine) {
        const i64 from = (i64)group(unit) * m + top;
        ptx::bulk_load(ptx::smem_addr(scales[at][unit]), (const TS*)p.scales + from, rows * (int)sizeof(TS), bar);
        if constexpr (ZEROS) ptx::bulk_load(ptx::smem_addr(zeros[at][unit]), (const float*)p.zeros + from, rows * 4, bar);
      }
      return;
    }
#pragma unroll 4
    for (int i = 32 * warp + lane; i < UNITS * HEIGHT; i += ALL_BRINGERS) {
      const int unit = i / HEIGHT, row = i % HEIGHT;
      const i64 from = p.scale_row ? (i64)group(unit) * m + min(top + row, m - 1) : 0;
      scales[at][unit][row] = ((const TS*)p.scales)[from];
      if constexpr (ZEROS) zeros[at][unit][row] = ((const float*)p.zeros)[from];
    }
  }

  // What the warps do that bring: chunks of x come by bulk copies where it is PLAIN, then each lane holds words as they are operands of
  // tensor cores, and stmatrix puts those of four lanes side by side.
  template <bool PLAIN> __device__ __forceinline__ void bring(const QuantArgs& p, int top, int from_column, int begin, int chunks) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % BRINGERS, thread = 32 * warp + lane, g = lane / 4, t = lane % 4;
    const int n = (int)p.n, columns = (int)p.columns, k = warp % NT;
    const auto ask = [&](int q) {  // a share of the columns of chunk q, a lane for each
      const int from = (begin + q * TILES) * COLUMNS, length = min(n - from, LONG), c = warp * (2 * NT) + lane;
      const u32 bar = ptx::smem_addr(&come[q % RAW]);
      if (lane == 0) ptx::mbar_arrive_expect_tx(bar, min(max(columns - from_column - c, 0), 2 * NT) * length * 2);
      __syncwarp();
      if (lane < 2 * NT && from_column + c < columns)
        ptx::bulk_load(ptx::smem_addr(raw[q % RAW][c]), (const TX*)p.x + (from_column + c) * p.x_col + from, length * 2, bar);
    };
    if (PLAIN)
#pragma unroll 1
      for (int q = 0; q < min(RAW, chunks); ++q) ask(q);
    const Groups<SHIFT> groups(p, COLUMNS / SPLIT);
    if (chunks > 0) bring_scales(p, groups, 0, begin, top);
    ptx::named_sync(1, blockDim.x);  // all barriers are made, and x is asked for: codes may follow
#pragma unroll 1
    for (int q = 1; q < min(STAGES, chunks); ++q) bring_scales(p, groups, q, begin + q * TILES, top);
    // Where the warp's first panel lies, and goes to; registers, not found anew in every turn.
    int own = ((8 * k + g) * (LONG + PAD) + warp / NT * OF_ITEM * PANEL + (BITS == 4 ? 16 * t : 8 * t)) * 2;
    int to_sums = warp / NT * (OF_ITEM * PANEL / COLUMNS / EACH) * (SPLIT * 8 * NT) + 8 * k + 2 * t;
    u32 to[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      to[half] = ptx::smem_addr(x) + warp / NT * OF_ITEM * (N * 128) + (8 * k + lane % 8) * 128 + ((lane / 8 ^ lane % 8) * 16 ^ half * 64);
      ptx::pin(to[half]);
    }
    ptx::pin(own), ptx::pin(to_sums);
    const int column = min(from_column + 8 * k + g, columns - 1);
#pragma unroll 1
    for (int q = 0; q < chunks; ++q) {
      const int at = q % STAGES, slot = q % RAW, from = (begin + q * TILES) * COLUMNS;
      if (q >= STAGES) {
        ptx::mbar_wait(ptx::smem_addr(&empty[at]), q / STAGES % 2 ^ 1);
        bring_scales(p, groups, at, begin + q * TILES, top);
      }
      if (PLAIN) ptx::mbar_wait(ptx::smem_addr(&come[slot]), q / RAW % 2);
      if (PLAIN && from + LONG > n) {
        const int there = (n - from) / 8, gone = LONG / 8 - there;
        for (int i = thread; i < 8 * NT * gone; i += ALL_BRINGERS) *(Words*)&raw[slot][i / gone][(there + i % gone) * 8] = {};
        ptx::named_sync(2, ALL_BRINGERS);
      }
      constexpr int UNROLLED = PLAIN ? 16 : 1;
#pragma unroll UNROLLED
      for (int e = 0; e < TURNS; ++e) {
        float sum[SPLIT][4] = {};
        if (ITEMS % BRINGERS == 0 || e * BRINGERS + warp < ITEMS)
#pragma unroll UNROLLED
          for (int i = 0; i < 2 * OF_ITEM; ++i) {
            const int panel = e * (BRINGERS / NT) * OF_ITEM + i / 2, half = i % 2, tiles = BITS == 4 ? i / 2 + 1 : i + 1;
            const int first = panel * PANEL + (BITS == 4 ? 8 * half : 32 * half);
            Words words;
            if constexpr (PLAIN) words = *(const Words*)((const char*)raw[slot] + own + first * 2);
            else words = gather(p, column, from + first + warp / NT * OF_ITEM * PANEL + (BITS == 4 ? 16 * t : 8 * t));
#pragma unroll
            for (int u = 0; u < SPLIT; ++u) {
              u32 r[4];
#pragma unroll
              for (int w = 0; w < 4; ++w) r[w] = SPLIT == 1 || t * SPLIT / 4 == u ? words[w] : 0u;
              ptx::stmatrix_x4(to[half] + at * (PANELS * N * 128) + panel * (N * 128) + u * (8 * NT * 128), r);
              if constexpr (SUMS) {
                const u32 ones[4] = {Codes::ones, Codes::ones, Codes::ones, Codes::ones};
                ::multiply(sum[u], ones, {r[0], r[1]}, TX()), ::multiply(sum[u], ones, {r[2], r[3]}, TX());
                if (tiles % EACH == 0 && (BITS == 8 || half == 1)) {
                  const int set = (panel * PANEL / COLUMNS + (BITS == 4 ? 1 : half + 1)) / EACH - 1;
                  if (g == 0) *(ptx::Vec<float, 2>*)&(&sums[at][0][0])[to_sums + (set * SPLIT + u) * (8 * NT)] = {{sum[u][0], sum[u][1]}};
#pragma unroll
                  for (int c = 0; c < 4; ++c) sum[u][c] = 0;
                }
              }
            }
          }
      }
      ptx::fence_async();
      if (PLAIN) ptx::named_sync(2, ALL_BRINGERS);  // the chunk as it lies has been read
      else __syncwarp();
      if (lane == 0) ptx::mbar_arrive(ptx::smem_addr(&full[at]));
      if (PLAIN && q + RAW < chunks) ask(q + RAW);
    }
  }
};
