// For products with too few tiles of C to occupy the GPU: the blocks of a cluster share a tile, and each sums a part
// of the reduction. The longer side of C goes along the 64 rows of an instruction, so that few rows or columns waste
// none. Each block sends its sums where they are stored, and what met there is added in the order of the ranks.
// counters: warp instructions, millions; tensor pipe, %
#include "wgmma_specialized.cuh"

constexpr int MOST_PARTS = 8;
constexpr u32 OWN_SLOTS = 16384;   // bytes of sums up to which they have a place of their own, beside the ring

// A tile of C in shared memory on its way out: lines of neighbours in C, in halves. Where these lie down the tile,
// warps exchange halves, so that pairs lie so too.
template <class TC, int HEIGHT, int WIDTH>
struct Leaving {
  unsigned char* at;
  bool down;   // neighbours in C are rows of the tile
  float alpha;
  __device__ __forceinline__ int pitch() const { return (down ? HEIGHT : WIDTH) + 8; }
  // 8 x 8 sums of a warp, as a fragment has them, from row i and column j of the tile.
  __device__ __forceinline__ void put(int i, int j, float2 v) const {
    u32 pair = StagedHalves<TC>::pair(alpha * v.x, alpha * v.y);
    if (down) pair = ptx::movmatrix_trans(pair);
    const int line = threadIdx.x % 32 / 4 + (down ? j : i), first = threadIdx.x % 4 * 2 + (down ? i : j);
    *(u32*)(at + (line * pitch() + first) * 2) = pair;
  }
  // Rows `top` to `top + rows` to C, whose element (0, 0) of the tile is element (row, col).
  __device__ __forceinline__ void store(const GemmArgs& p, TC* c, int row, int col, int top, int rows) const {
    const int lines = down ? WIDTH : rows, chunks = (down ? rows : WIDTH) / 8, line0 = down ? 0 : top;
    const int most = int(down ? p.n - col : p.m - row), long_as = int(down ? p.m - row : p.n - col);
    const i64 step = down ? p.c_col : p.c_row;
    c += row * p.c_row + col * p.c_col;
    for (int e = threadIdx.x; e < lines * chunks; e += blockDim.x) {
      const int line = line0 + e / chunks, first = e % chunks * 8 + (down ? top : 0);
      if (line >= most) continue;
      const ptx::Vec<TC, 8> v = *(const ptx::Vec<TC, 8>*)(at + (line * pitch() + first) * 2);
      if (first + 8 <= long_as) *(ptx::Vec<TC, 8>*)(c + line * step + first) = v;
      else
        for (int i = 0; i < 8; ++i)
          if (first + i < long_as) c[line * step + first + i] = v[i];
    }
  }
};

template <class TA, class TB, class TC, int HEIGHT, int WIDTH, int DEEP, int STAGES, bool A_ALONG_K, bool B_ALONG_K,
          bool TURNED>
__global__ void __launch_bounds__(2 * HEIGHT + 32, 128 / HEIGHT)
wgmma_split(const GemmArgs given, const __grid_constant__ ptx::TensorMap map_a,
            const __grid_constant__ ptx::TensorMap map_b) {
  typedef HalfTile<HEIGHT, A_ALONG_K> TileA;
  typedef HalfTile<WIDTH, B_ALONG_K> TileB;
  constexpr u32 SLICE = TileA::BYTES + TileB::BYTES, STAGE = DEEP * SLICE, SUMS = HEIGHT * WIDTH * 4;
  constexpr int GROUPS = HEIGHT / 64, ACROSS = WIDTH / 8;   // warpgroups that multiply; fragments across the tile
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ __align__(8) u64 bars[2 * STAGES];
  const GemmArgs p = TURNED ? turned(given) : given;
  const unsigned parts = ptx::cluster_size(), rank = ptx::cluster_rank(), index = blockIdx.x / parts;
  const unsigned down = unsigned((p.m + HEIGHT - 1) / HEIGHT), tiles = down * unsigned((p.n + WIDTH - 1) / WIDTH);
  const unsigned of_tile = index % tiles;
  const int batch = int(index / tiles), row = int(of_tile % down) * HEIGHT, col = int(of_tile / down) * WIDTH;
  const int all = int((p.k + DEEP * DEPTH - 1) / (DEEP * DEPTH)), share = (all + int(parts) - 1) / int(parts);
  const int first = share * int(rank), steps = all - first < share ? all - first : share;   // may be none
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 data = ptx::smem_addr(smem), full = ptx::smem_addr(bars), empty = full + 8 * STAGES;
  auto load = [&](int s) {
    const u32 to = data + s % STAGES * STAGE, bar = full + s % STAGES * 8;
    ptx::mbar_arrive_expect_tx(bar, STAGE);
#pragma unroll
    for (int d = 0; d < DEEP; ++d) {
      const int k = ((first + s) * DEEP + d) * DEPTH;
      TileA::load(to + d * SLICE, &map_a, bar, row, k, p.a_batch ? batch : 0);
      TileB::load(to + d * SLICE + TileA::BYTES, &map_b, bar, col, k, p.b_batch ? batch : 0);
    }
  };
  if (threadIdx.x == HEIGHT * 2) {
    for (int s = 0; s < STAGES; ++s) ptx::mbar_init(full + 8 * s, 1), ptx::mbar_init(empty + 8 * s, GROUPS);
    ptx::mbar_fence_init();
    for (int s = 0; s < STAGES && s < steps; ++s) load(s);
  }
  __syncthreads();
  if (parts > 1) ptx::cluster_arrive();
  float sum[1][WIDTH / 2];
  if (warp == 4 * GROUPS) {   // its first thread loads, the others multiply
    if (lane == 0)
      for (int s = STAGES; s < steps; ++s) {
        ptx::mbar_wait(empty + s % STAGES * 8, (s / STAGES & 1) ^ 1);
        load(s);
      }
    __syncwarp();
  } else {
    for (int s = 0; s < steps; ++s) {
      ptx::mbar_wait(full + s % STAGES * 8, s / STAGES & 1);
#pragma unroll
      for (int d = 0; d < DEEP; ++d) {
        const u32 at = data + s % STAGES * STAGE + d * SLICE;
        multiply_stage<TA, 1, WIDTH, A_ALONG_K, B_ALONG_K>(sum, at + warp / 4 * BLOCK, at + TileA::BYTES, s + d > 0);
      }
      ptx::wgmma_wait<DEEP>();   // the stage before is read
      if (s > 0 && threadIdx.x % 128 == 0) ptx::mbar_arrive(empty + (s - 1) % STAGES * 8);
    }
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int i = 0; steps <= 0 && i < WIDTH / 2; ++i) sum[0][i] = 0;
  }
  TC* const c = (TC*)p.c + batch * p.c_batch;
  const bool stays = parts > 1 && SUMS > OWN_SLOTS;   // sums of several blocks lie where the stages were
  const Leaving<TC, HEIGHT, WIDTH> leaving{smem + (stays ? SUMS : 0), p.c_col != 1, float(p.alpha)};
  const u64 places = u64(c) | u64(leaving.down ? p.c_col : p.c_row) * 2;
  const bool whole = sizeof(TC) == 2 && p.beta == 0 && (p.c_col == 1 || p.c_row == 1) && places % 16 == 0;
  auto put = [&](int i, int j, float2 v) {
    if constexpr (sizeof(TC) == 2) if (whole) return leaving.put(i, j, v);
    finish_at<TC>(p, batch, row + i + lane / 4, col + j + lane % 4 * 2, v.x);
    finish_at<TC>(p, batch, row + i + lane / 4, col + j + lane % 4 * 2 + 1, v.y);
  };
  int top = 0, rows = HEIGHT;
  __syncthreads();
  if (parts == 1) {
    if (warp < 4 * GROUPS)
#pragma unroll
      for (int i = 0; i < WIDTH / 2; i += 2)
        put(16 * warp + i / 2 % 2 * 8, i / 4 * 8, make_float2(sum[0][i], sum[0][i + 1]));
  } else {
    // excerpt
    const u32 slots = data + (stays ? 0 : STAGES * STAGE);
    ptx::cluster_wait();                             // all blocks of the cluster have begun
    if (stays) ptx::cluster_sync();                  // and none still multiplies
    const int each = GROUPS * 8 / int(parts);        // eights of rows that a block stores
    if (warp < 4 * GROUPS)
#pragma unroll
      for (int i = 0; i < WIDTH / 2; i += 2) {
        const int eight = 2 * warp + i / 2 % 2, there = eight / each;
        const u32 slot = slots + ((rank * each + eight % each) * ACROSS + i / 4) * 256 + lane * 8;
        ptx::st_cluster(ptx::mapa(slot, there), make_float2(sum[0][i], sum[0][i + 1]));
      }
    ptx::cluster_sync();                             // what others sent is here
    rows = each * 8, top = int(rank) * rows;
    for (int e = warp; e < each * ACROSS; e += 4 * GROUPS + 1) {
      float2 total = make_float2(0, 0);
#pragma unroll
      for (unsigned r = 0; r < MOST_PARTS; ++r)
        if (r < parts) {
          const float2 v = ((const float2*)(smem + (slots - data)))[(r * each * ACROSS + e) * 32 + lane];
          total.x += v.x, total.y += v.y;
        }
      put(top + e / ACROSS * 8, e % ACROSS * 8, total);
    }
    // end of excerpt
  }
  __syncthreads();
  if constexpr (sizeof(TC) == 2) if (whole) leaving.store(p, c, row, col, top, rows);
}
