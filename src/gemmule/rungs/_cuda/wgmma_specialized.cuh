// The warps of a block divide the work of a matmul on wgmma: see wgmma_specialized.cu.
#pragma once
#include "epilogue.cuh"
#include "wgmma_tiles.cuh"

constexpr int GROUP = 8;       // tile rows (of clusters) that are walked down before the next tile column
constexpr int BUFFERS = 2;     // of a warp's sums on their way out
constexpr u32 OUT = 16 * 128;  // bytes: 16 rows of 128 bytes

// The next tile of a cluster: GROUP tile rows share columns of B in the L2, and the columns rows of A.
struct Walk {
  unsigned down, across, tiles, batches;
  __device__ __forceinline__ Walk(const GemmArgs& p, int height, int width)
      : down(unsigned((p.m + height - 1) / height)), across(unsigned((p.n + width - 1) / width)),
        tiles(down * across), batches(unsigned(p.batch)) {}
  __device__ __forceinline__ void at(unsigned index, int& batch, int& row, int& col) const {
    const unsigned of_tile = batches == 1 ? index : index % tiles, first = of_tile / (GROUP * across) * GROUP;
    const unsigned rest = of_tile - first * across, rows = down - first < GROUP ? down - first : GROUP;
    batch = batches == 1 ? 0 : int(index / tiles);
    row = int(first + rest % rows);
    col = int(rest / rows);
  }
};

// 16 rows of a warp's sums, as wide as 128 bytes of C, to shared memory: d[4 j + i] is column 8 j + ..
template <class TC> struct Staged;
template <class TC> struct StagedHalves {
  static constexpr int COLS = 64;
  static __device__ __forceinline__ u32 pair(float x, float y) {
    const TC low = narrow<TC, float>(x), high = narrow<TC, float>(y);
    return u32(reinterpret_cast<const ptx::u16&>(low)) | u32(reinterpret_cast<const ptx::u16&>(high)) << 16;
  }
  static __device__ __forceinline__ void put(u32 to, const float* d, float alpha) {
    const int lane = threadIdx.x % 32, row = lane % 16;
#pragma unroll
    for (int j = 0; j < 8; j += 2, d += 8) {
      const u32 r[4] = {pair(alpha * d[0], alpha * d[1]), pair(alpha * d[2], alpha * d[3]),
                        pair(alpha * d[4], alpha * d[5]), pair(alpha * d[6], alpha * d[7])};
      ptx::stmatrix_x4(ptx::swizzle<ptx::Swizzle::b128>(to + row * 128 + (j + lane / 16) * 16), r);
    }
  }
};
template <> struct Staged<__half> : StagedHalves<__half> {};
template <> struct Staged<__nv_bfloat16> : StagedHalves<__nv_bfloat16> {};
template <> struct Staged<float> {
  static constexpr int COLS = 32;
  static __device__ __forceinline__ void put(u32 to, const float* d, float alpha) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half, d += 2)
        ptx::st_shared(ptx::swizzle<ptx::Swizzle::b128>(to + (lane / 4 + 8 * half) * 128 + j * 32 + lane % 4 * 8),
                       make_float2(alpha * d[0], alpha * d[1]));
  }
};

// Stores 16 rows of 32 sums from shared memory to a C whose rows are neighbours.
template <class TC, class Sum>
__device__ __forceinline__ void store_across(const GemmArgs& p, u32 from, i64 batch, int top, int left, Sum alpha, Sum beta) {
  const int lane = threadIdx.x % 32, row = lane % 16;
#pragma unroll 2
  for (int col = lane / 16; col < 32; col += 2) {
    Sum v = from_bits<Sum>(ptx::ld_shared(ptx::swizzle<ptx::Swizzle::b128>(from + row * 128 + col * 4)));
#ifdef EPILOGUE
    if (top + row < p.m && left + col < p.n) v = finished<TC>(p, batch, top + row, left + col, v);
#endif
    if (top + row < p.m && left + col < p.n)
      finish_scaled<TC, Sum>((TC*)p.c + batch * p.c_batch + top + row + (left + col) * p.c_col, v, alpha, beta);
  }
}

// C seen as its transpose, which is B^T A^T: the maps come in that order.
__device__ __forceinline__ GemmArgs turned(GemmArgs p) {
  GemmArgs q = p;
  q.m = p.n, q.n = p.m, q.c_row = p.c_col, q.c_col = p.c_row, q.a_batch = p.b_batch, q.b_batch = p.a_batch;
#ifdef SCALES
  q.scale_a = p.scale_b, q.scale_b = p.scale_a, q.step_a = p.step_b, q.step_b = p.step_a;
#endif
#ifdef EPILOGUE
  turn(q.e);
#endif
  return q;
}

// PARTS: block row y of the grid takes the y-th part of the sum, p.k steps long, and stores it as plane y of C.
template <class TA, class TB, class TC, int HEIGHT, int WIDTH, int STAGES, int CLUSTER, bool A_ALONG_K, bool B_ALONG_K,
          bool TURNED, bool PARTS = false>
__device__ __forceinline__ void specialized(const GemmArgs& given, const ptx::TensorMap& map_a,
                                            const ptx::TensorMap& map_b, const ptx::TensorMap* map_c) {
  typedef HalfTile<HEIGHT, A_ALONG_K> TileA;
  typedef HalfTile<WIDTH, B_ALONG_K, CLUSTER> TileB;
  typedef Wgmma<TA, TB> Elements;
  typedef typename Elements::Sum Sum;
#ifdef SCALES
  typedef float Leaving;   // a sum on its way to C
#else
  typedef Sum Leaving;
#endif
  constexpr u32 STAGE = TileA::BYTES + TileB::BYTES;
  constexpr int BLOCKS = HEIGHT / 128;   // of 64 rows, of each warpgroup that multiplies
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ __align__(8) u64 bars[2 * STAGES];
#ifdef BLOCK_SCALES
  static_assert(!TURNED, "rows of A have scales of their own, columns of B have not");
  __shared__ BlockScales<HEIGHT, WIDTH> scales[STAGES];
  constexpr int LOADERS = 2;
#else
  constexpr int LOADERS = 1;
#endif
  const GemmArgs p = TURNED ? turned(given) : given;
  const int steps = int((p.k + Elements::STEPS - 1) / Elements::STEPS), group = threadIdx.x / 128;
  const int rank = CLUSTER == 1 ? 0 : int(ptx::cluster_rank());
  const u32 data = ptx::smem_addr(smem), full = ptx::smem_addr(bars), empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      ptx::mbar_init(full + 8 * s, LOADERS);
      ptx::mbar_init(empty + 8 * s, 2 * CLUSTER);
    }
    ptx::mbar_fence_init();
  }
  if constexpr (CLUSTER > 1) ptx::cluster_sync();
  else __syncthreads();
  const Walk walk(p, HEIGHT * CLUSTER, WIDTH);
  const unsigned first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER, last = walk.tiles * walk.batches;
  int stage = 0, parity = 0, batch, row, col;
  auto advance = [&] {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  };
  if (group == 0) {
    ptx::reg_dealloc<40>();
    if (threadIdx.x == 0) {
      for (unsigned index = first; index < last; index += stride) {
        walk.at(index, batch, row, col);
        row = (row * CLUSTER + rank) * HEIGHT, col *= WIDTH;
        const int plane_a = p.a_batch ? batch : 0, plane_b = p.b_batch ? batch : 0;
        for (int s = 0; s < steps; ++s, advance()) {
          const u32 to = data + stage * STAGE, bar = full + 8 * stage;
          ptx::mbar_wait_cluster(empty + 8 * stage, parity ^ 1);
          ptx::mbar_arrive_expect_tx(bar, STAGE);
          const int k = (PARTS ? int(blockIdx.y) * steps + s : s) * Elements::STEPS;
          TileA::load(to, &map_a, bar, row, k, plane_a);
          TileB::load(to + TileA::BYTES, &map_b, bar, col, k, plane_b, rank);
        }
      }
    }
#ifdef BLOCK_SCALES
    if (threadIdx.x / 32 == 1) {   // the second warp brings the scales: they are there when the stage is free
      for (unsigned index = first; index < last; index += stride) {
        walk.at(index, batch, row, col);
        BlockScalesAhead<HEIGHT, WIDTH> ahead(p, (row * CLUSTER + rank) * HEIGHT, col * WIDTH);
        for (int s = 0; s < steps; ++s, advance()) {
          ahead.read(p);
          ptx::mbar_wait_cluster(empty + 8 * stage, parity ^ 1);
          ahead.put(scales[stage]);
          if (threadIdx.x == 32) ptx::mbar_arrive(full + 8 * stage);
        }
      }
    }
#endif
  } else {
    ptx::reg_alloc<232>();
    const int own = (group - 1) * BLOCKS * 64, t = threadIdx.x % 128;
    const u32 out = data + STAGES * STAGE + (threadIdx.x / 32 - 4) * BUFFERS * OUT;
#ifdef EPILOGUE
    const Leaving alpha = 1, beta = 0;   // the sums come with them
    const bool whole = map_c && p.n % (16 / sizeof(TC)) == 0 && lie_in_pairs(p, sizeof(TC));
#else
    const Leaving alpha = Leaving(p.alpha), beta = Leaving(p.beta);
    const bool whole = map_c && p.beta == 0 && p.n % (16 / sizeof(TC)) == 0;   // else TMA would not do
#endif
    int buffer = 0;
    auto release = [&](int which) {   // one thread tells each block of the cluster
      if (CLUSTER == 1 && t == 0) ptx::mbar_arrive(empty + 8 * which);
      if (CLUSTER > 1 && t < CLUSTER) ptx::mbar_signal_remote(empty + 8 * which, t);
    };
    if (Elements::PROMOTED && group == 2) ptx::named_arrive(1, 256);   // the first turn is the other's
    for (unsigned index = first; index < last; index += stride) {
      Sum sum[BLOCKS][WIDTH / 2];
      int before = 0;
#ifdef EPILOGUE
      walk.at(index, batch, row, col);
      const BiasAhead<TC, WIDTH> bias(p, whole, i64(col) * WIDTH);
#endif
      if constexpr (Elements::PROMOTED) {
#pragma unroll
        for (int i = 0; i < BLOCKS * WIDTH / 2; ++i) sum[i / (WIDTH / 2)][i % (WIDTH / 2)] = 0;
        for (int s = 0; s < steps; ++s, advance()) {
          const u32 at = data + stage * STAGE;
          ptx::mbar_wait(full + 8 * stage, parity);
#ifdef BLOCK_SCALES
          const BlockFactors<HEIGHT, WIDTH> join(scales[stage], own);
#else
          const Added join;
#endif
          promote_stage<typename Elements::Both>(sum, at + own * 128, at + TileA::BYTES, group, [&] { release(stage); }, join);
        }
      } else {
      // excerpt stages
      for (int s = 0; s < steps; ++s, advance()) {
        const u32 at = data + stage * STAGE;
        ptx::mbar_wait(full + 8 * stage, parity);
        multiply_stage<typename Elements::Both, BLOCKS, WIDTH, A_ALONG_K, B_ALONG_K>(
            sum, at + own * 128, at + TileA::BYTES, s > 0);
        ptx::wgmma_wait<1>();   // the stage before is read: it may be loaded again while this one is multiplied
        if (s > 0) release(before);
        before = stage;
      }
      ptx::wgmma_wait<0>();
      release(before);
      // end of excerpt
      }
      walk.at(index, batch, row, col);
      row = (row * CLUSTER + rank) * HEIGHT + own, col *= WIDTH;
      if constexpr (PARTS) batch = int(blockIdx.y);
#pragma unroll
      for (int r = 0; r < BLOCKS; ++r) {
        if (!whole) {
#pragma unroll
          for (int c = 0; c < WIDTH; c += Staged<Leaving>::COLS) {
            if (c == 0 && t % 32 == 0) ptx::bulk_wait_read<0>();
            __syncwarp();
#ifdef SCALES
            const int top = row + 64 * r + t / 32 * 16, at = col + c + t % 32;
            float scaled[Staged<float>::COLS / 2];
            scale_sums(p, top, col + c, sum[r] + c / 2, scaled);
            Staged<float>::put(out, scaled, 1.0f);
            __syncwarp();
#else
            Staged<Sum>::put(out, sum[r] + c / 2, Sum(1));
            __syncwarp();
            const int top = row + 64 * r + t / 32 * 16, at = col + c + t % 32;
#endif
            if constexpr (Elements::STEPS != DEPTH) {
              if (p.c_row == 1) {   // C's rows are neighbours, as where a narrow tile is turned
                store_across<TC, Leaving>(p, out, batch, top, col + c, alpha, beta);
                continue;
              }
            }
            TC* to = (TC*)p.c + batch * p.c_batch + top * p.c_row + at * p.c_col;
#pragma unroll 2
            for (int i = 0; i < 16; ++i, to += p.c_row) {
              Leaving v = from_bits<Leaving>(ptx::ld_shared(ptx::swizzle<ptx::Swizzle::b128>(out + i * 128 + t % 32 * 4)));
#ifdef EPILOGUE
              if (top + i < p.m && at < p.n) v = finished<TC>(p, batch, top + i, at, v);
#endif
              if (top + i < p.m && at < p.n) finish_scaled<TC, Leaving>(to, v, alpha, beta);
            }
          }
          continue;
        }
#pragma unroll
        for (int c = 0; c < WIDTH; c += Staged<TC>::COLS, buffer ^= 1) {   // each warp stores its 16 rows by TMA
          if (t % 32 == 0) ptx::bulk_wait_read<BUFFERS - 1>();
          __syncwarp();
#ifdef SCALES
          float scaled[Staged<TC>::COLS / 2];
          scale_sums(p, row + 64 * r + t / 32 * 16, col + c, sum[r] + c / 2, scaled);
#elif defined(EPILOGUE)
          const float* const scaled = sum[r] + c / 2;
#endif
#ifdef EPILOGUE
          float finished[Staged<TC>::COLS / 2];
          finish_sums<TC>(p, batch, row + 64 * r + t / 32 * 16, col + c, bias.pair[c / 64], scaled, finished);
          Staged<TC>::put(out + buffer * OUT, finished, 1.0f);
#elif defined(SCALES)
          Staged<TC>::put(out + buffer * OUT, scaled, alpha);
#elif defined(RESIDUES)
          Staged<TC>::put(out + buffer * OUT, sum[r] + c / 2, batch);
#else
          Staged<TC>::put(out + buffer * OUT, sum[r] + c / 2, alpha);
#endif
          ptx::fence_async();
          __syncwarp();
          if (t % 32 == 0 && row < p.m && col + c < p.n)
            ptx::tma_store_3d(map_c, out + buffer * OUT, col + c, row + 64 * r + t / 32 * 16, batch);
          if (t % 32 == 0) ptx::bulk_commit();
        }
      }
    }
    if (Elements::PROMOTED && group == 1) ptx::named_sync(1, 256);   // nobody's turn is left over
    if (t % 32 == 0) ptx::bulk_wait<0>();
  }
  if constexpr (CLUSTER > 1) ptx::cluster_sync();   // nobody leaves while the others may still write to it
}
