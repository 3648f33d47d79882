// Several columns of x by wgmma, which a first launch has put in the order that the instruction reads: bulk copies bring all.
// counters: L2 hits, %; issue slots used, %; tensor pipe, %
#include "bias.cuh"
#include "warpgroup_chunks.cuh"

constexpr int UNIT = 4;  // tiles of codes that are asked for at a time
template <int N> __device__ __forceinline__ void multiply(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool more, __half) {
  ptx::wgmma_f16_ra<N>(d, a, b, more);
}
template <int N> __device__ __forceinline__ void multiply(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool more, __nv_bfloat16) {
  ptx::wgmma_bf16_ra<N>(d, a, b, more);
}

// x in chunks of TILES tiles: panels of 64 columns in swizzled lines for each of N columns and units, then sums of x over sets.
template <class TX, int BITS, bool ZEROS, int SPLIT, int SHIFT, int TILES, int NT> struct Arranged {
  typedef Chunks<TX, TX, BITS, ZEROS, SPLIT, SHIFT, 64, TILES, NT, 1, 1> X;
  int chunks, passes;
  __device__ __forceinline__ explicit Arranged(const QuantArgs& p)
      : chunks((((int)p.n + X::COLUMNS - 1) / X::COLUMNS + TILES - 1) / TILES), passes(((int)p.columns + 8 * NT - 1) / (8 * NT)) {}
  static constexpr int BYTES = X::PANELS * X::N * 128, SUMS = X::UNITS * 8 * NT;
  __device__ __forceinline__ unsigned char* x(const QuantArgs& p, int pass, int chunk) const {
    return (unsigned char*)p.work + ((i64)pass * chunks + chunk) * BYTES;
  }
  __device__ __forceinline__ float* sums(const QuantArgs& p, int pass, int chunk) const {
    return (float*)(x(p, passes, 0)) + ((i64)pass * chunks + chunk) * SUMS;
  }
};

// A block has eight columns of a set of tiles, a warp half a panel of them, a lane what it has of a column in 16 bytes.
template <class TX, int BITS, bool ZEROS, int SPLIT, int SHIFT, int TILES, int NT>
__global__ void __launch_bounds__(128) arrange_columns(const QuantArgs p) {
  ptx::pdl_launch_dependents();
  typedef Arranged<TX, BITS, ZEROS, SPLIT, SHIFT, TILES, NT> A;
  typedef typename A::X X;
  constexpr int HALVES = X::EACH * X::COLUMNS * 2 / PANEL;
  __shared__ float parts[HALVES][8][4];
  const A a(p);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, item = blockIdx.x;
  const int k = item % NT, set = item / NT % X::SETS, of = item / NT / X::SETS, pass = of / a.chunks, chunk = of % a.chunks;
  const int column = pass * 8 * NT + 8 * k + g, columns = (int)p.columns, n = (int)p.n, half = set * HALVES + warp;
  const int j = chunk * X::LONG + half / 2 * PANEL + (BITS == 4 ? 16 * t + 8 * (half % 2) : 8 * t + 32 * (half % 2));
  const TX* const x = (const TX*)p.x + column * p.x_col;
  Words words = {};
  if (column < columns) {
    if (p.x_step == 1 && !p.perm && j + 8 <= n && ((u64)(x + j) & 15) == 0) words = *(const Words*)(x + j);
    else {
#pragma unroll 1
      for (int e = 0; e < 8; ++e) {  // from the last to the first, each a half of a word
        const TX v = j + 7 - e < n ? x[(p.perm ? (i64)p.perm[j + 7 - e] : (i64)(j + 7 - e)) * p.x_step] : TX(0.f);
#pragma unroll
        for (int w = 3; w > 0; --w) words[w] = words[w] << 16 | words[w - 1] >> 16;
        words[0] = words[0] << 16 | *(const unsigned short*)&v;
      }
    }
  }
  unsigned char* const to = a.x(p, pass, chunk) + half / 2 * (X::N * 128) + (8 * k + g) * 128 + 4 * t;
#pragma unroll
  for (int u = 0; u < SPLIT; ++u)
#pragma unroll
    for (int w = 0; w < 4; ++w)
      *(u32*)(to + u * (8 * NT * 128) + ((w + half % 2 * 4) ^ g) * 16) = SPLIT == 1 || t * SPLIT / 4 == u ? words[w] : 0u;
  if constexpr (X::SUMS) {
    float sum = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += wide<float>(((const TX*)&words)[e]);
    if (SPLIT < 4) sum += __shfl_xor_sync(~0u, sum, 1);
    if (SPLIT < 2) sum += __shfl_xor_sync(~0u, sum, 2);
    parts[warp][g][t] = sum;
    __syncthreads();
    if (warp == 0 && t % (4 / SPLIT) == 0) {
      float all = 0;
#pragma unroll
      for (int w = 0; w < HALVES; ++w) all += parts[w][g][t];
      a.sums(p, pass, chunk)[(set * SPLIT + t * SPLIT / 4) * (8 * NT) + 8 * k + g] = all;
    }
  }
}

// A chunk in shared memory, as bulk copies bring it.
template <class X, class TS, bool ZEROS, int HEIGHT, int NT, int STAGES> struct Arrived {
  unsigned char x[STAGES][X::PANELS][X::N * 128];
  float sums[STAGES][X::UNITS][8 * NT];
  TS scales[STAGES][X::UNITS][HEIGHT];
  float zeros[STAGES][ZEROS ? X::UNITS : 1][ZEROS ? HEIGHT : 4];
  u64 full[STAGES], empty[STAGES];
};

// DOWN x ALONG warpgroups: those below each other have other rows, those side by side take chunks by turns. The blocks of a
// cluster share the tiles across, in whole chunks, and add up at the end.
template <class TX, class TY, class TS, int BITS, bool ZEROS, int SPLIT, int SHIFT, int DOWN, int ALONG, int CLUSTER, int TILES, int SLOTS, int STAGES, int NT>
__global__ void __launch_bounds__(128 * DOWN * ALONG + 32, 1) arranged_columns(const QuantArgs p) {
  typedef NumbersOf<TX, BITS, TS> Codes;
  constexpr int STEPS = Tile<BITS>::steps, HEIGHT = 64 * DOWN, WORKERS = 128 * DOWN * ALONG;
  typedef Chunks<TX, TS, BITS, ZEROS, SPLIT, SHIFT, HEIGHT, TILES, NT, STAGES, 1> X;
  typedef Arrived<X, TS, ZEROS, HEIGHT, NT, STAGES> Room;
  constexpr int N = X::N, EACH = X::EACH, AHEAD = EACH > 1;
  static_assert(UNIT % EACH == 0 && TILES % UNIT == 0, "whole sets of tiles");
  // Copies of scales overtake each other: who waits for a stage's next phase must have seen the one before end.
  static_assert(STAGES % ALONG == 0, "a stage is always for the same warpgroups");
  extern __shared__ __align__(1024) unsigned char room[];
  Room& chunks = *(Room*)room;
  Words(*ring)[SLOTS][UNIT][32] = (Words(*)[SLOTS][UNIT][32])(room + (sizeof(Room) + 127) / 128 * 128);
  constexpr int MINE = HEIGHT / CLUSTER, APART = MINE + 4;  // four lanes that hold a row write to different banks
  float* const shares = (float*)(ring + WORKERS / 32);      // shares[rank][along][column][row], of this block's rows
  u64* bars = (u64*)(shares + CLUSTER * ALONG * 8 * NT * APART);
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), g = lane / 4, t = lane % 4, group = warp / 4, along = group / DOWN;
  const int m = (int)p.m, across = ((int)p.n + X::COLUMNS - 1) / X::COLUMNS, all = (across + TILES - 1) / TILES;
  const int rank = blockIdx.x % CLUSTER, place = blockIdx.x / CLUSTER, share = (all + CLUSTER - 1) / CLUSTER;
  const int begin = rank * share * TILES, count = min(max(all - rank * share, 0), share);
  const int passes = ((int)p.columns + 8 * NT - 1) / (8 * NT), from_column = place % passes * 8 * NT, top = place / passes * HEIGHT;

  if constexpr (CLUSTER > 1) ptx::cluster_arrive_relaxed();
  float total[NT][4] = {};
  if (group == WORKERS / 128) {
    if (lane < STAGES) ptx::mbar_init(ptx::smem_addr(&chunks.full[lane]), 1), ptx::mbar_init(ptx::smem_addr(&chunks.empty[lane]), 4 * DOWN);
    ptx::mbar_fence_init();
    ptx::named_sync(1, blockDim.x);  // all barriers are made
    const Arranged<TX, BITS, ZEROS, SPLIT, SHIFT, TILES, NT> arranged(p);
    const Groups<SHIFT> groups(p, X::COLUMNS / SPLIT);
    const int rows = min(HEIGHT, m - top);
    const bool whole = p.scale_row && m % (16 / (int)sizeof(TS)) == 0 && (((u64)p.scales | (ZEROS ? (u64)p.zeros : 0)) & 15) == 0;
    const auto scales = [&](int q) {
      const int at = q % STAGES, tile = begin + q * TILES;
      const auto from = [&](int unit) { return (i64)groups.of((tile + unit / SPLIT * X::EACH) * SPLIT + unit % SPLIT) * m; };
      if (whole) {
        const u32 bar = ptx::smem_addr(&chunks.full[at]);
        if (lane == 0) ptx::mbar_expect_tx(bar, X::UNITS * rows * X::OF_ROW);
        __syncwarp();
        for (int unit = lane; unit < X::UNITS; unit += 32) {
          ptx::bulk_load(ptx::smem_addr(chunks.scales[at][unit]), (const TS*)p.scales + from(unit) + top, rows * (int)sizeof(TS), bar);
          if constexpr (ZEROS) ptx::bulk_load(ptx::smem_addr(chunks.zeros[at][unit]), (const float*)p.zeros + from(unit) + top, rows * 4, bar);
        }
        return;
      }
#pragma unroll 4
      for (int i = lane; i < X::UNITS * HEIGHT; i += 32) {
        const int unit = i / HEIGHT, row = i % HEIGHT;
        const i64 of = p.scale_row ? from(unit) + min(top + row, m - 1) : 0;
        chunks.scales[at][unit][row] = ((const TS*)p.scales)[of];
        if constexpr (ZEROS) chunks.zeros[at][unit][row] = ((const float*)p.zeros)[of];
      }
      __syncwarp();
    };
    for (int q = 0; q < min(STAGES, count); ++q) scales(q);
    ptx::pdl_wait();  // x lies in order
#pragma unroll 1
    for (int q = 0; q < count; ++q) {
      const int at = q % STAGES;
      const u32 bar = ptx::smem_addr(&chunks.full[at]);
      if (q >= STAGES) {
        ptx::mbar_wait(ptx::smem_addr(&chunks.empty[at]), q / STAGES % 2 ^ 1);
        scales(q);
      }
      constexpr int PARTS = 4, PART = (int)sizeof(chunks.x[0]) / PARTS;
      const int chunk = begin / TILES + q, pass = from_column / (8 * NT);
      if (lane == 0) ptx::mbar_arrive_expect_tx(bar, (int)sizeof(chunks.x[0]) + (X::SUMS ? (int)sizeof(chunks.sums[0]) : 0));
      __syncwarp();
      if (lane < PARTS) ptx::bulk_load(ptx::smem_addr(chunks.x[at]) + lane * PART, arranged.x(p, pass, chunk) + lane * PART, PART, bar);
      if (X::SUMS && lane == PARTS) ptx::bulk_load(ptx::smem_addr(chunks.sums[at]), arranged.sums(p, pass, chunk), sizeof(chunks.sums[0]), bar);
    }
  } else {
    const int tile_row = min(top / 16 + group % DOWN * 4 + warp % 4, (m + 15) / 16 - 1), own_row = (group % DOWN * 4 + warp % 4) * 16 + g;
    const int mine = (count - along + ALONG - 1) / ALONG, last = min(begin + count * TILES, across);
    const Words* const w = (const Words*)p.codes + (i64)tile_row * across * 32;
    const u32 bar = ptx::smem_addr(bars + warp * SLOTS), own_ring = ptx::smem_addr(&ring[warp][0][0][lane]);
    int wanted = begin + along * TILES, in_chunk = 0;
    const auto ask = [&](int slot) {  // the next of the warp's codes, by one lane
      const int tiles = min(last - wanted, UNIT);
      if (lane == 0 && tiles > 0) {
        ptx::mbar_arrive_expect_tx(bar + 8 * slot, tiles * 512);
        ptx::bulk_load(own_ring + slot * (UNIT * 512), w + wanted * 32, tiles * 512, bar + 8 * slot);
      }
      in_chunk += UNIT, wanted += UNIT;
      if (in_chunk == TILES) in_chunk = 0, wanted += (ALONG - 1) * TILES;
    };
    if (lane == 0) {
#pragma unroll
      for (int s = 0; s < SLOTS; ++s) ptx::mbar_init(bar + 8 * s, 1);
      ptx::mbar_fence_init();
    }
    __syncwarp();
    ptx::named_sync(1, blockDim.x);  // all barriers are made
    ask(0);
    // Copies begin in the order that they are asked for: the first x waits behind a part of the codes only.
    if (mine > 0) ptx::mbar_wait(ptx::smem_addr(&chunks.full[along % STAGES]), along / STAGES % 2);
#pragma unroll
    for (int s = 1; s < SLOTS; ++s) ask(s);

    int slot = 0, phase = 0, at = along % STAGES, parity = along / STAGES % 2;
#pragma unroll 1
    for (int i = 0; i < mine; ++i) {
      ptx::mbar_wait(ptx::smem_addr(&chunks.full[at]), parity);
      const u64 x = ptx::wgmma_desc(ptx::smem_addr(chunks.x[at]), 16, 1024, ptx::Swizzle::b128);
      const float* const sums = &chunks.sums[at][0][2 * t];
      const TS* const scales = &chunks.scales[at][0][own_row];
      const float* const zeros = &chunks.zeros[at][0][ZEROS ? own_row : 0];
      float d[2][N / 2];  // of the set that is multiplied, and of the one before it, which is scaled meanwhile
      const auto scale_set = [&](int s) {
        ptx::Vec<float, 2> of_x[SPLIT][NT] = {};
        float scale[SPLIT][2], less[SPLIT][2];  // what a code's zero takes from a product
#pragma unroll
        for (int u = 0; u < SPLIT; ++u) {
          if constexpr (X::SUMS)
#pragma unroll
            for (int k = 0; k < NT; ++k) of_x[u][k] = *(const ptx::Vec<float, 2>*)(sums + (s * SPLIT + u) * (8 * NT) + 8 * k);
#pragma unroll
          for (int hi = 0; hi < 2; ++hi) {
            const int of = (s * SPLIT + u) * HEIGHT + 8 * hi;
            scale[u][hi] = wide<float>(scales[of]);
            less[u][hi] = (Codes::less - (ZEROS ? zeros[of] : 1 << (BITS - 1))) * (1 / Codes::lift(hi));
          }
        }
#pragma unroll
        for (int j = 0; j < N / 2; ++j) ptx::pin((u32&)d[s % 2][j]);
#pragma unroll
        for (int u = 0; u < SPLIT; ++u)
#pragma unroll
          for (int k = 0; k < NT; ++k)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              const float dot = d[s % 2][4 * (u * NT + k) + c];
              total[k][c] = fmaf(scale[u][c / 2], X::SUMS ? fmaf(less[u][c / 2], of_x[u][k][c % 2], dot) : dot, total[k][c]);
            }
      };
      u32 a[2][STEPS][4];
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const int s = tile / EACH;
        // Past the end nothing was asked for: codes of before, which are finite, meet zeros.
        if (tile % UNIT == 0 && begin + (along + i * ALONG) * TILES + tile < last) ptx::mbar_wait(bar + 8 * slot, phase);
        const Words v = *(const Words*)&ring[warp][slot][tile % UNIT][lane];
        // excerpt
#pragma unroll
        for (int j = 0; j < STEPS; ++j) Codes::fragment(v, j, a[tile % 2][j]);
#pragma unroll
        for (int j = 0; j < 4 * STEPS; ++j) ptx::pin(a[tile % 2][j / 4][j % 4]);
        ptx::wgmma_fence();
#pragma unroll
        for (int j = 0; j < STEPS; ++j) {
          const int step = tile * STEPS + j;  // of a panel's four
          multiply<N>(d[s % 2], a[tile % 2][j], x + ((step / 4 * N * 128 + step % 4 * 32) >> 4), tile % EACH + j > 0, TX());
        }
        ptx::wgmma_commit();
        // end of excerpt
        if ((tile + 1) % UNIT == 0) {
          __syncwarp();
          ask(slot);
          if (++slot == SLOTS) slot = 0, phase ^= 1;
        }
        ptx::wgmma_wait<AHEAD>();  // the tile before is multiplied
        if (!AHEAD && (tile + 1) % EACH == 0) scale_set(s);
        if (AHEAD && tile % EACH == 0 && tile > 0) scale_set(s - 1);
      }
      if (AHEAD) {
        ptx::wgmma_wait<0>();
        scale_set(X::SETS - 1);
      }
      __syncwarp();
      if (lane == 0) ptx::mbar_arrive(ptx::smem_addr(&chunks.empty[at]));
      at += ALONG;
      if (at >= STAGES) at -= STAGES, parity ^= 1;
    }
  }

  // Each block of the cluster adds up a share of the rows, whole warps'; what the others have of them is sent to it.
  if constexpr (CLUSTER > 1) ptx::cluster_wait();  // all of them have begun
  if (threadIdx.x < WORKERS) {
    const int row = (group % DOWN * 4 + warp % 4) * 16, owner = row / MINE;
    float* const to = shares + ((rank * ALONG + along) * 8 * NT + 2 * t) * APART + row % MINE + g;
    const u32 there = CLUSTER > 1 ? ptx::mapa(ptx::smem_addr(to), owner) : 0;
#pragma unroll
    for (int k = 0; k < NT; ++k)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int at = (8 * k + c % 2) * APART + c / 2 * 8;
        const float v = total[k][c] * Codes::lift(c / 2);
        if (CLUSTER == 1 || owner == rank) to[at] = v;
        else ptx::st_cluster<float>(there + 4 * at, v);
      }
  }
  if constexpr (CLUSTER > 1) ptx::cluster_sync();
  else __syncthreads();
  constexpr int QUADS = MINE / 4 * 8 * NT;  // of rows
#pragma unroll 1
  for (int i = threadIdx.x; i < QUADS; i += WORKERS + 32) {
    const int c = i / (MINE / 4), at = i % (MINE / 4) * 4, to = top + rank * MINE + at;
    if (from_column + c >= (int)p.columns) break;
    ptx::Vec<float, 4> sum = {};
#pragma unroll
    for (int from = 0; from < CLUSTER * ALONG; ++from) {
      const ptx::Vec<float, 4> part = *(const ptx::Vec<float, 4>*)&shares[(from * 8 * NT + c) * APART + at];
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] += part[e];
    }
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (to + e < m) store_quantised<TY>(p, to + e, from_column + c, by_factor<TS>(p, to + e, sum[e]));
  }
}
