// Tiles of grouped halves on wgmma: 128 columns of an expert's matrix meet up to 256 of its tokens. One thread asks TMA
// for tiles of both, two warpgroups multiply them, and each block walks over many tiles of many experts.
// excerpt stages of wgmma_experts.cu
#include "groups.cuh"
#include "wgmma_tiles.cuh"

constexpr int HEIGHT = 128, THREADS = 384;

template <class TC> __device__ __forceinline__ u32 pair_of(float x, float y) {
  const TC low = narrow<TC, float>(x), high = narrow<TC, float>(y);
  return u32(reinterpret_cast<const ptx::u16&>(low)) | u32(reinterpret_cast<const ptx::u16&>(high)) << 16;
}

// A warp's sums of 16 columns from `column` on and WIDTH tokens: d[4 j + i] as sum_row and sum_col have it. Halves that
// lie side by side in C change places within the warp first.
template <class TC, int WIDTH>
__device__ __forceinline__ void store(const GemmArgs& p, const Work& at, int column, const float (&d)[WIDTH / 2]) {
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const float alpha = (float)p.alpha, beta = (float)p.beta;
  TC* const c = (TC*)p.c + at.token * p.c_row;
  bool pairs = false;
  if constexpr (sizeof(TC) == 2) pairs = p.beta == 0.0 && p.c_col == 1 && p.n % 2 == 0;
#pragma unroll
  for (int j = 0; j < WIDTH / 8; ++j) {
    if (8 * j >= at.tokens) break;
    if (pairs) {
      if constexpr (sizeof(TC) == 2)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const u32 v = ptx::movmatrix_trans(pair_of<TC>(alpha * d[4 * j + 2 * h], alpha * d[4 * j + 2 * h + 1]));
          const int n = column + 8 * h + 2 * q;
          if (8 * j + g < at.tokens && n < p.n) *(u32*)(c + (8 * j + g) * p.c_row + n) = v;
        }
      continue;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 8 * j + 2 * q + i % 2, n = column + g + i / 2 * 8;
      if (token < at.tokens && n < p.n)
        finish_scaled<TC, float>(c + token * p.c_row + n * p.c_col, d[4 * j + i], alpha, beta);
    }
  }
}

template <class TA, class TB, class TC, int WIDTH, int STAGES, bool ALONG_K>
__global__ void __launch_bounds__(THREADS, 1)
wgmma_experts(const GemmArgs p, const __grid_constant__ ptx::TensorMap map_a,
              const __grid_constant__ ptx::TensorMap map_b) {
  typedef HalfTile<HEIGHT, ALONG_K> TileW;
  typedef HalfTile<WIDTH, true> TileX;
  constexpr u32 STAGE = TileW::BYTES + TileX::BYTES;
  extern __shared__ __align__(1024) unsigned char smem[];   // the stages, then the list
  __shared__ __align__(8) u64 bars[2 * STAGES];
  int* const first = (int*)(smem + STAGES * STAGE);
  const int steps = (int)((p.k + DEPTH - 1) / DEPTH), group = threadIdx.x / 128;
  const int slabs = (int)((p.n + HEIGHT - 1) / HEIGHT);
  const u32 data = ptx::smem_addr(smem), full = ptx::smem_addr(bars), empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      ptx::mbar_init(full + 8 * s, 1);
      ptx::mbar_init(empty + 8 * s, 2);
    }
    ptx::mbar_fence_init();
  }
  const i64 items = (i64)list_pieces<THREADS>(Ends(p), WIDTH, first) * slabs;   // the barriers are seen behind it
  Items walk{Ends(p), first, slabs, WIDTH, 0};
  int stage = 0, parity = 0;
  auto advance = [&] {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  };
  if (group == 0) {
    ptx::reg_dealloc<40>();
    if (threadIdx.x == 0) {
      for (i64 item = blockIdx.x; item < items; item += gridDim.x) {
        const Work at = walk.at(item);
        for (int s = 0; s < steps; ++s, advance()) {
          const u32 to = data + stage * STAGE, bar = full + 8 * stage;
          ptx::mbar_wait(empty + 8 * stage, parity ^ 1);
          ptx::mbar_arrive_expect_tx(bar, STAGE);
          TileW::load(to, &map_b, bar, at.slab * HEIGHT, s * DEPTH, at.expert);
          TileX::load(to + TileW::BYTES, &map_a, bar, at.token, s * DEPTH, 0);
        }
      }
    }
  } else {
    ptx::reg_alloc<232>();
    const int own = (group - 1) * 64, t = threadIdx.x % 128;
    auto release = [&](int which) {
      if (t == 0) ptx::mbar_arrive(empty + 8 * which);
    };
    for (i64 item = blockIdx.x; item < items; item += gridDim.x) {
      float sum[1][WIDTH / 2];
      int before = 0;
      // excerpt stages
      for (int s = 0; s < steps; ++s, advance()) {
        const u32 at = data + stage * STAGE;
        ptx::mbar_wait(full + 8 * stage, parity);
        multiply_stage<TB, 1, WIDTH, ALONG_K, true>(sum, at + own * 128, at + TileW::BYTES, s > 0);
        ptx::wgmma_wait<1>();   // the stage before is read: it may be loaded again while this one is multiplied
        if (s > 0) release(before);
        before = stage;
      }
      ptx::wgmma_wait<0>();
      release(before);
      // end of excerpt
      const Work at = walk.at(item);
      store<TC, WIDTH>(p, at, at.slab * HEIGHT + own + t / 32 * 16, sum[0]);
    }
  }
}
