// For products with too few tiles of C to occupy the GPU: the blocks of a cluster share a tile, and each sums a part
// of the reduction. The longer side of C goes along the 64 rows of an instruction, so that few rows or columns waste
// none. Each block sends its sums where they are stored, and what met there is added in the order of the ranks.
// counters by 64 columns: warp instructions, millions; tensor pipe, %
#include "leaving_tile.cuh"

constexpr int MOST_PARTS = 8;
constexpr u32 OWN_SLOTS = 16384;   // bytes of sums up to which they have a place of their own, beside the ring

template <class TA, class TB, class TC, int HEIGHT, int WIDTH, int DEEP, int STAGES, bool A_ALONG_K, bool B_ALONG_K,
          bool TURNED>
__global__ void __launch_bounds__(2 * HEIGHT + 32, 128 / HEIGHT)
wgmma_split(const GemmArgs given, const __grid_constant__ ptx::TensorMap map_a,
            const __grid_constant__ ptx::TensorMap map_b) {
  typedef HalfTile<HEIGHT, A_ALONG_K> TileA;
  typedef HalfTile<WIDTH, B_ALONG_K> TileB;
  constexpr u32 SLICE = TileA::BYTES + TileB::BYTES, STAGE = DEEP * SLICE, SUMS = HEIGHT * WIDTH * 4;
  constexpr int GROUPS = HEIGHT / 64, PAIRS = WIDTH / 16;   // warpgroups that multiply; pairs of fragments across
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ __align__(8) u64 bars[2 * STAGES];
  const GemmArgs p = TURNED ? turned(given) : given;
  const unsigned parts = ptx::cluster_size(), rank = ptx::cluster_rank(), index = blockIdx.x / parts;
  const unsigned down = unsigned((p.m + HEIGHT - 1) / HEIGHT), tiles = down * unsigned((p.n + WIDTH - 1) / WIDTH);
  const unsigned of_tile = index % tiles;
  const int batch = int(index / tiles), row = int(of_tile % down) * HEIGHT, col = int(of_tile / down) * WIDTH;
  const int all = int((p.k + DEEP * DEPTH - 1) / (DEEP * DEPTH)), share = (all + int(parts) - 1) / int(parts);
  // A part that is left without steps takes one past the end, of zeros.
  const int first = share * int(rank), steps = max(1, min(share, all - first));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 data = ptx::smem_addr(smem), full = ptx::smem_addr(bars), empty = full + 8 * STAGES;
  int stage = 0, parity = 0;
  auto advance = [&] {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  };
  auto load = [&](int s) {
    const u32 to = data + stage * STAGE, bar = full + stage * 8;
    ptx::mbar_arrive_expect_tx(bar, STAGE);
#pragma unroll
    for (int d = 0; d < DEEP; ++d) {
      const int k = ((first + s) * DEEP + d) * DEPTH;
      TileA::load(to + d * SLICE, &map_a, bar, row, k, p.a_batch ? batch : 0);
      TileB::load(to + d * SLICE + TileA::BYTES, &map_b, bar, col, k, p.b_batch ? batch : 0);
    }
    advance();
  };
  if (threadIdx.x == HEIGHT * 2) {
    ptx::prefetch_map(&map_a), ptx::prefetch_map(&map_b);
    for (int s = 0; s < STAGES; ++s) ptx::mbar_init(full + 8 * s, 1), ptx::mbar_init(empty + 8 * s, GROUPS);
    ptx::mbar_fence_init();
#pragma unroll 1
    for (int s = 0; s < STAGES && s < steps; ++s) load(s);
  }
  __syncthreads();
  if (parts > 1) ptx::cluster_arrive_relaxed();
  float sum[1][WIDTH / 2];
  if (warp == 4 * GROUPS) {   // its first thread loads, the others multiply
    if (lane == 0)
#pragma unroll 1
      for (int s = STAGES; s < steps; ++s) {
        ptx::mbar_wait(empty + stage * 8, parity ^ 1);
        load(s);
      }
    __syncwarp();
  } else {
    int before = 0;
    for (int s = 0; s < steps; ++s, advance()) {
      const u32 at = data + stage * STAGE;
      ptx::mbar_wait(full + stage * 8, parity);
#pragma unroll
      for (int d = 0; d < DEEP; ++d)
        multiply_stage<TA, 1, WIDTH, A_ALONG_K, B_ALONG_K>(sum, at + d * SLICE + warp / 4 * BLOCK,
                                                           at + d * SLICE + TileA::BYTES, s + d > 0);
      ptx::wgmma_wait<DEEP>();   // the stage before is read
      if (s > 0 && threadIdx.x % 128 == 0) ptx::mbar_arrive(empty + before * 8);
      before = stage;
    }
    ptx::wgmma_wait<0>();
  }
  TC* const c = (TC*)p.c + batch * p.c_batch;
  const bool stays = parts > 1 && SUMS > OWN_SLOTS;   // sums of several blocks lie where the stages were
  const Leaving<TC, HEIGHT, WIDTH> leaving{smem + (stays ? SUMS : 0), p.c_col != 1, float(p.alpha)};
  const u64 places = u64(c) | u64(leaving.down ? p.c_col : p.c_row) * 2;
  const bool whole = sizeof(TC) == 2 && p.beta == 0 && (p.c_col == 1 || p.c_row == 1) && places % 16 == 0;
  auto put = [&](int i, int j, float4 v) {
    if constexpr (sizeof(TC) == 2) if (whole) return leaving.put(i, j, v);
    leaving.keep(i, j, v);
  };
  auto fragments = [&](int i, int half) {   // 8 x 16 sums of this warp, from column 2 i
    const float* d = sum[0] + i + 2 * half;
    return make_float4(d[0], d[1], d[4], d[5]);
  };
  int top = 0, rows = HEIGHT;
  __syncthreads();
  if (parts == 1) {
    if (warp < 4 * GROUPS)
#pragma unroll
      for (int i = 0; i < WIDTH / 2; i += 8)
#pragma unroll
        for (int half = 0; half < 2; ++half) put(16 * warp + 8 * half, 2 * i, fragments(i, half));
  } else {
    // excerpt
    const u32 slots = data + (stays ? 0 : STAGES * STAGE);
    const int each = GROUPS * 8 / int(parts);        // eights of rows that a block stores
    ptx::cluster_wait();                             // all blocks of the cluster have begun
    if (stays) ptx::cluster_arrive_relaxed(), ptx::cluster_wait();   // and none still multiplies
    if (warp < 4 * GROUPS)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int eight = 2 * warp + half, slot = (int(rank) * each + eight % each) * PAIRS;
        const u32 there = ptx::mapa(slots + slot * 512 + lane * 16, eight / each);
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i += 8) ptx::st_cluster(there + i * 64, fragments(i, half));
      }
    ptx::cluster_sync();                             // what others sent is here
    rows = each * 8, top = int(rank) * rows;
#pragma unroll 1
    for (int e = warp; e < each * PAIRS; e += 4 * GROUPS + 1) {
      float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
      for (unsigned r = 0; r < MOST_PARTS; ++r)
        if (r < parts) {
          const float4 v = ((const float4*)(smem + (slots - data)))[(r * each * PAIRS + e) * 32 + lane];
          total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
        }
      put(top + e / PAIRS * 8, e % PAIRS * 16, total);
    }
    // end of excerpt
  }
  __syncthreads();
  if constexpr (sizeof(TC) == 2) if (whole) return leaving.store(p, c, row, col, top, rows);
  leaving.finish(p, batch, row, col, top, rows);
}
