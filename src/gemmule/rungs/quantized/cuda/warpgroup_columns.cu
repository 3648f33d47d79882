// Several columns of x, which wgmma reads from shared memory itself: each instruction multiplies 64 rows of codes by all of them.
// counters: L2 hits, %; issue slots used, %; tensor pipe, %
#include "warpgroup_chunks.cuh"

constexpr int UNIT = 4;  // tiles of codes that are asked for at a time

template <int N> __device__ __forceinline__ void multiply(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool more, __half) {
  ptx::wgmma_f16_ra<N>(d, a, b, more);
}
template <int N> __device__ __forceinline__ void multiply(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool more, __nv_bfloat16) {
  ptx::wgmma_bf16_ra<N>(d, a, b, more);
}

// DOWN x ALONG warpgroups: those below each other have other rows, those side by side take chunks by turns. The blocks of a
// cluster share the tiles across, in whole chunks, and add up at the end.
template <class TX, class TY, class TS, int BITS, bool ZEROS, int SPLIT, int SHIFT, int DOWN, int ALONG, int CLUSTER, int TILES, int SLOTS, int STAGES, int RAW, int NT>
__global__ void __launch_bounds__(128 * DOWN * ALONG + ALL_BRINGERS, 1) warpgroup_columns(const QuantArgs p) {
  typedef NumbersOf<TX, BITS, TS> Codes;
  constexpr int STEPS = Tile<BITS>::steps, HEIGHT = 64 * DOWN, WORKERS = 128 * DOWN * ALONG;
  typedef Chunks<TX, TS, BITS, ZEROS, SPLIT, SHIFT, HEIGHT, TILES, NT, STAGES, RAW> X;
  constexpr int N = X::N, EACH = X::EACH;
  static_assert(UNIT % EACH == 0 && TILES % UNIT == 0, "whole sets of tiles");
  // Copies of scales overtake each other: who waits for a stage's next phase must have seen the one before end.
  static_assert(STAGES % ALONG == 0, "a stage is always for the same warpgroups");
  extern __shared__ __align__(1024) unsigned char room[];
  X& chunks = *(X*)room;
  Words(*ring)[SLOTS][UNIT][32] = (Words(*)[SLOTS][UNIT][32])(room + (sizeof(X) + 127) / 128 * 128);
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
    chunks.prepare(threadIdx.x - WORKERS, 4 * DOWN);
    ptx::named_sync(2, ALL_BRINGERS);
    if (p.x_step == 1 && !p.perm && ((u64)p.x & 15) == 0 && (p.x_col % 8 == 0 || p.columns == 1) && p.n % 8 == 0)
      chunks.template bring<true>(p, top, from_column, begin, count);
    else
      chunks.template bring<false>(p, top, from_column, begin, count);
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
    ptx::named_sync(1, blockDim.x);  // all barriers are made, and x is asked for: it waits behind no codes
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) ask(s);

    int slot = 0, phase = 0, at = along % STAGES, parity = along / STAGES % 2;
#pragma unroll 1
    for (int i = 0; i < mine; ++i) {
      ptx::mbar_wait(ptx::smem_addr(&chunks.full[at]), parity);
      const u64 x = ptx::wgmma_desc(ptx::smem_addr(chunks.x[at]), 16, 1024, ptx::Swizzle::b128);
      const float* const sums = &chunks.sums[at][0][2 * t];
      const TS* const scales = &chunks.scales[at][0][own_row];
      const float* const zeros = &chunks.zeros[at][0][ZEROS ? own_row : 0];
#pragma unroll
      for (int s = 0; s < X::SETS; ++s) {
        if (s * EACH % UNIT == 0) {
          if (begin + (along + i * ALONG) * TILES + s * EACH >= last) break;  // nothing was asked for
          ptx::mbar_wait(bar + 8 * slot, phase);
        }
        float d[N / 2];
        u32 a[EACH][STEPS][4];
        // excerpt
#pragma unroll
        for (int u = 0; u < EACH; ++u) {
          const Words v = *(const Words*)&ring[warp][slot][s * EACH % UNIT + u][lane];
#pragma unroll
          for (int j = 0; j < STEPS; ++j) Codes::fragment(v, j, a[u][j]);
        }
#pragma unroll
        for (int j = 0; j < 4 * STEPS * EACH; ++j) ptx::pin(a[j / (4 * STEPS)][j / 4 % STEPS][j % 4]);
        ptx::wgmma_fence();
#pragma unroll
        for (int j = 0; j < STEPS * EACH; ++j) {
          const int step = s * EACH * STEPS + j;  // of a panel's four
          multiply<N>(d, a[j / STEPS][j % STEPS], x + ((step / 4 * N * 128 + step % 4 * 32) >> 4), j > 0, TX());
        }
        ptx::wgmma_commit();
        // end of excerpt
        if ((s + 1) * EACH % UNIT == 0) {
          __syncwarp();
          ask(slot);
          if (++slot == SLOTS) slot = 0, phase ^= 1;
        }
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
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int u = 0; u < SPLIT; ++u)
#pragma unroll
          for (int k = 0; k < NT; ++k)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              const float dot = d[4 * (u * NT + k) + c];
              total[k][c] = fmaf(scale[u][c / 2], X::SUMS ? fmaf(less[u][c / 2], of_x[u][k][c % 2], dot) : dot, total[k][c]);
            }
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
  for (int i = threadIdx.x; i < QUADS; i += WORKERS + ALL_BRINGERS) {
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
