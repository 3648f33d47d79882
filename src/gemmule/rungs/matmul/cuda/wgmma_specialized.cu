// The warps divide the work: one thread of a block asks TMA for tiles, two warpgroups multiply them, and each block
// walks over many tiles of C, so that the loads of the next begin while the last one's sums are stored. Two blocks
// of a cluster take tiles one below the other and load half of B each, for both.
// excerpt stages of wgmma_specialized.cuh
// counters: warp instructions, millions; tensor pipe, %
#include "wgmma_specialized.cuh"

template <class TA, class TB, class TC, int HEIGHT, int WIDTH, int STAGES, int CLUSTER, bool A_ALONG_K, bool B_ALONG_K,
          bool TURNED>
__global__ void __launch_bounds__(384, 1)
wgmma_specialized(const GemmArgs p, const __grid_constant__ ptx::TensorMap map_a,
                  const __grid_constant__ ptx::TensorMap map_b, const __grid_constant__ ptx::TensorMap map_c) {
  specialized<TA, TB, TC, HEIGHT, WIDTH, STAGES, CLUSTER, A_ALONG_K, B_ALONG_K, TURNED>(p, map_a, map_b, &map_c);
}
