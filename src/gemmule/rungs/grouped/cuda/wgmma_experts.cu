// Tiles of grouped halves on wgmma: 128 columns of an expert's matrix meet up to 256 of its tokens. One thread asks TMA
// for tiles of both, two warpgroups multiply them, and each block walks over many tiles of many experts.
// excerpt stages of wgmma_experts.cu
#include "expert_tiles.cuh"
#include "groups.cuh"
#include "wgmma_tiles.cuh"

constexpr int HEIGHT = 128, THREADS = 384;

// The sums over all steps of a warpgroup's 64 columns and N tokens: the least multiple of UNIT that holds `tokens`.
template <class TB, int WIDTH, int STAGES, bool ALONG_K, int UNIT, int N = UNIT>
__device__ __forceinline__ void products(float (&sum)[WIDTH / 2], Ring& ring, int tokens, int steps, u32 own) {
  static_assert(is_width(N), "a width that wgmma is written out for");
  if constexpr (N < WIDTH)
    if (tokens > N) return products<TB, WIDTH, STAGES, ALONG_K, UNIT, N + UNIT>(sum, ring, tokens, steps, own);
  constexpr u32 BYTES_W = HalfTile<HEIGHT, ALONG_K>::BYTES, STAGE = BYTES_W + HalfTile<WIDTH, true>::BYTES;
  float(&d)[1][N / 2] = (float(&)[1][N / 2])sum;
  auto release = [&](int which) {
    if (threadIdx.x % 128 == 0) ptx::mbar_arrive(ring.empty + 8 * which);
  };
  int before = 0;
  // excerpt stages
  for (int s = 0; s < steps; ++s, ring.advance<STAGES>()) {
    const u32 at = ring.data + ring.stage * STAGE;
    ring.wait_full();
    multiply_stage<TB, 1, N, ALONG_K, true>(d, at + own * 128, at + BYTES_W, s > 0);
    ptx::wgmma_wait<1>();   // the stage before is read: it may be loaded again while this one is multiplied
    if (s > 0) release(before);
    before = ring.stage;
  }
  ptx::wgmma_wait<0>();
  release(before);
  // end of excerpt
}

template <class TA, class TB, class TC, int WIDTH, int STAGES, bool ALONG_K>
__global__ void __launch_bounds__(THREADS, 1)
wgmma_experts(const GemmArgs p, const __grid_constant__ ptx::TensorMap map_a,
              const __grid_constant__ ptx::TensorMap map_b) {
  take_turn();
  typedef HalfTile<HEIGHT, ALONG_K> TileW;
  constexpr int BOX = WIDTH < 64 ? WIDTH : 64, UNIT = WIDTH < 32 ? WIDTH : 32;   // tokens of a copy, of an instruction
  constexpr u32 STAGE = TileW::BYTES + HalfTile<WIDTH, true>::BYTES;
  extern __shared__ __align__(1024) unsigned char smem[];   // the stages, then the list
  __shared__ __align__(8) u64 bars[2 * STAGES];
  int* const first = (int*)(smem + STAGES * STAGE);
  const int steps = (int)((p.k + DEPTH - 1) / DEPTH), group = threadIdx.x / 128;
  const int slabs = (int)((p.n + HEIGHT - 1) / HEIGHT);
  Ring ring = make_ring<STAGES>(ptx::smem_addr(smem), bars, 1, 2);
  const i64 items = (i64)list_pieces<THREADS>(Ends(p), WIDTH, first) * slabs;   // the barriers are seen behind it
  Items walk{Ends(p), first, slabs, WIDTH, 0, UNIT};
  if (group == 0) {
    ptx::reg_dealloc<40>();
    if (threadIdx.x == 0) {
      for (i64 item = blockIdx.x; item < items; item += gridDim.x) {
        const Work at = walk.at(item);
        const int boxes = (at.tokens + BOX - 1) / BOX;
        for (int s = 0; s < steps; ++s, ring.advance<STAGES>()) {
          const u32 to = ring.data + ring.stage * STAGE, bar = ring.full + 8 * ring.stage;
          ring.wait_empty();
          ptx::mbar_arrive_expect_tx(bar, TileW::BYTES + boxes * (BOX * 128));
          TileW::load(to, &map_b, bar, at.slab * HEIGHT, s * DEPTH, at.expert);
          for (int b = 0; b < boxes; ++b)
            ptx::tma_load_3d(to + TileW::BYTES + b * (BOX * 128), &map_a, bar, s * DEPTH, at.token + b * BOX, 0);
        }
      }
    }
  } else {
    ptx::reg_alloc<232>();
    const int own = (group - 1) * 64, warp = threadIdx.x % 128 / 32;
    for (i64 item = blockIdx.x; item < items; item += gridDim.x) {
      const Work at = walk.at(item);
      float sum[WIDTH / 2];
      products<TB, WIDTH, STAGES, ALONG_K, UNIT>(sum, ring, at.tokens, steps, own);
      const Results<TC> to{(TC*)p.c + at.token * p.c_row, p.c_row, p.c_col, (int)p.n, (float)p.alpha, (float)p.beta};
      store_tokens<TC, WIDTH>(to, at.tokens, at.slab * HEIGHT + own + 16 * warp, sum);
    }
  }
}
