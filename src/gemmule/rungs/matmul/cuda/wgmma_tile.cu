// Halves by the matrix instruction of a warpgroup, wgmma: it reads both operands from shared memory, where TMA
// copies whole tiles that nobody computes an address for. sm_90a alone has it.
// counters: warp instructions, millions; tensor pipe, %
#include "wgmma_tiles.cuh"

constexpr int STAGES = 3;

template <class TA, class TB, class TC, int TILE, bool A_ALONG_K, bool B_ALONG_K>
__global__ void __launch_bounds__(128) wgmma_tile(const GemmArgs p, const __grid_constant__ ptx::TensorMap map_a,
                                                  const __grid_constant__ ptx::TensorMap map_b) {
  typedef HalfTile<TILE, A_ALONG_K> TileA;
  typedef HalfTile<TILE, B_ALONG_K> TileB;
  constexpr u32 STAGE = TileA::BYTES + TileB::BYTES;
  extern __shared__ __align__(1024) unsigned char smem[];   // a swizzle pattern begins at multiples of 1024
  __shared__ __align__(8) u64 full[STAGES];
  const Tile tile = tile_of<8>(p, TILE, TILE);
  const int batch = int(tile.batch), row = int(tile.row), col = int(tile.col);
  const int steps = int((p.k + DEPTH - 1) / DEPTH);
  const u32 data = ptx::smem_addr(smem), bars = ptx::smem_addr(full);
  auto load = [&](int s) {   // what lies outside a matrix arrives as zero
    const u32 to = data + s % STAGES * STAGE, bar = bars + s % STAGES * 8;
    ptx::mbar_arrive_expect_tx(bar, STAGE);
    TileA::load(to, &map_a, bar, row, s * DEPTH, p.a_batch ? batch : 0);
    TileB::load(to + TileA::BYTES, &map_b, bar, col, s * DEPTH, p.b_batch ? batch : 0);
  };
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) ptx::mbar_init(bars + s * 8, 1);
    ptx::mbar_fence_init();
    for (int s = 0; s < STAGES && s < steps; ++s) load(s);
  }
  __syncthreads();
  float sum[TILE / 64][TILE / 2];
  // excerpt
  for (int s = 0; s < steps; ++s) {
    const u32 at = data + s % STAGES * STAGE;
    ptx::mbar_wait(bars + s % STAGES * 8, s / STAGES & 1);
    multiply_stage<TA, TILE / 64, TILE, A_ALONG_K, B_ALONG_K>(sum, at, at + TileA::BYTES, s > 0);
    ptx::wgmma_wait<0>();
    __syncthreads();  // all four warps have read the stage
    if (threadIdx.x == 0 && s + STAGES < steps) load(s + STAGES);
  }
  // end of excerpt
  constexpr int LINE = TILE + 8;    // floats of a row in shared memory, where sums meet before they leave in order
  float* const out = reinterpret_cast<float*>(smem);
#pragma unroll
  for (int r = 0; r < TILE / 64; ++r)
#pragma unroll
    for (int i = 0; i < TILE / 2; i += 2)
      *reinterpret_cast<float2*>(out + (64 * r + sum_row(threadIdx.x, i)) * LINE + sum_col(threadIdx.x, i)) =
          make_float2(sum[r][i], sum[r][i + 1]);
  __syncthreads();
#pragma unroll 1
  for (int e = threadIdx.x; e < TILE * TILE; e += 128)
    finish_at<TC>(p, batch, row + e / TILE, col + e % TILE, out[e / TILE * LINE + e % TILE]);
}
