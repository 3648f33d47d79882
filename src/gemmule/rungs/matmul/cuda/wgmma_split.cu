// For products with too few tiles of C to occupy the GPU: the blocks of a cluster share a tile, and each sums a part
// of the reduction. They read each other's sums from shared memory, always in the order of their ranks, and each
// stores a part of the tile's rows.
// counters: warp instructions, millions; tensor pipe, %
#include "wgmma_tiles.cuh"

constexpr int MOST_PARTS = 8;
constexpr int QUADS = 4;   // fours of sums that a thread has under way

template <class TA, class TB, class TC, int HEIGHT, int WIDTH, int STAGES, bool A_ALONG_K, bool B_ALONG_K>
__global__ void __launch_bounds__(128) wgmma_split(const GemmArgs p, const __grid_constant__ ptx::TensorMap map_a,
                                                   const __grid_constant__ ptx::TensorMap map_b) {
  typedef HalfTile<HEIGHT, A_ALONG_K> TileA;
  typedef HalfTile<WIDTH, B_ALONG_K> TileB;
  constexpr u32 STAGE = TileA::BYTES + TileB::BYTES;
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ __align__(8) u64 full[STAGES];
  const unsigned parts = ptx::cluster_size(), rank = ptx::cluster_rank(), index = blockIdx.x / parts;
  const unsigned down = unsigned((p.m + HEIGHT - 1) / HEIGHT), tiles = down * unsigned((p.n + WIDTH - 1) / WIDTH);
  const int batch = int(index / tiles), row = int(index % tiles % down) * HEIGHT, col = int(index % tiles / down) * WIDTH;
  const int all = int((p.k + DEPTH - 1) / DEPTH), share = (all + int(parts) - 1) / int(parts);
  const int first = share * int(rank), steps = all - first < share ? all - first : share;   // may be none
  const u32 data = ptx::smem_addr(smem), bars = ptx::smem_addr(full);
  auto load = [&](int s) {
    const u32 to = data + s % STAGES * STAGE, bar = bars + s % STAGES * 8;
    ptx::mbar_arrive_expect_tx(bar, STAGE);
    TileA::load(to, &map_a, bar, row, (first + s) * DEPTH, p.a_batch ? batch : 0);
    TileB::load(to + TileA::BYTES, &map_b, bar, col, (first + s) * DEPTH, p.b_batch ? batch : 0);
  };
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) ptx::mbar_init(bars + s * 8, 1);
    ptx::mbar_fence_init();
    for (int s = 0; s < STAGES && s < steps; ++s) load(s);
  }
  __syncthreads();
  float sum[HEIGHT / 64][WIDTH / 2] = {};
  for (int s = 0; s < steps; ++s) {
    const u32 at = data + s % STAGES * STAGE;
    ptx::mbar_wait(bars + s % STAGES * 8, s / STAGES & 1);
    multiply_stage<TA, HEIGHT / 64, WIDTH, A_ALONG_K, B_ALONG_K>(sum, at, at + TileA::BYTES, true);
    ptx::wgmma_wait<1>();
    __syncthreads();   // the stage before is read by all warps, while they multiply this one
    if (threadIdx.x == 0 && s > 0 && s - 1 + STAGES < steps) load(s - 1 + STAGES);
  }
  ptx::wgmma_wait<0>();
  __syncthreads();
  constexpr int LINE = WIDTH + 8;   // floats of a row of sums
#pragma unroll
  for (int r = 0; r < HEIGHT / 64; ++r)
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i += 2)
      ptx::st_shared(data + 4 * ((64 * r + sum_row(threadIdx.x, i)) * LINE + sum_col(threadIdx.x, i)),
                     make_float2(sum[r][i], sum[r][i + 1]));
  // excerpt
  ptx::cluster_sync();
  const int rows = HEIGHT / int(parts), top = rows * int(rank);
  const bool simple = p.beta == 0 && p.c_col == 1 && p.n % 4 == 0;
#pragma unroll 1
  for (int e = threadIdx.x * 4; e < rows * WIDTH; e += QUADS * 128 * 4) {   // QUADS times four columns of a row
    float total[QUADS][4] = {};
#pragma unroll
    for (int r = 0; r < MOST_PARTS; ++r) {
      if (r >= parts) break;
      const u32 there = ptx::mapa(data, r);
#pragma unroll
      for (int q = 0; q < QUADS; ++q) {
        const int at = e + q * 512;
        if (at >= rows * WIDTH) break;
        const float4 part = ptx::ld_cluster<float4>(there + 4 * ((top + at / WIDTH) * LINE + at % WIDTH));
        total[q][0] += part.x, total[q][1] += part.y, total[q][2] += part.z, total[q][3] += part.w;
      }
    }
#pragma unroll
    for (int q = 0; q < QUADS; ++q)
      if (e + q * 512 < rows * WIDTH)
        finish_four<TC>(p, simple, batch, row + top + (e + q * 512) / WIDTH, col + e % WIDTH, total[q]);
  }
  ptx::cluster_sync();   // nobody leaves while the others read its sums
  // end of excerpt
}
