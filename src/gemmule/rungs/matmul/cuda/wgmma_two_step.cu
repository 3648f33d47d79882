// Few tiles of C and a long sum: parts of the sum are products of their own, whose results lie in the workspace, and a
// second kernel adds them in their order. Pairs of blocks load half of B each for both, as the L2 is what limits.
// counters by 512 columns: DRAM read, MB; tensor pipe, %
#include "wgmma_specialized.cuh"

constexpr int CLUSTER = 2;

// The struct of one part: C is a plane of floats, whose rows begin at multiples of 16 bytes.
template <bool TURNED>
__device__ __forceinline__ GemmArgs part_of(GemmArgs p, int parts) {
  const i64 steps = (p.k + DEPTH - 1) / DEPTH, across = TURNED ? p.m : p.n, down = TURNED ? p.n : p.m;
  const i64 pitch = (across + 3) / 4 * 4;
  p.k = (steps + parts - 1) / parts * DEPTH;
  p.c = p.work, p.c_batch = down * pitch, p.alpha = 1, p.beta = 0;
  p.c_row = TURNED ? 1 : pitch, p.c_col = TURNED ? pitch : 1;
  return p;
}

template <class TA, class TB, int HEIGHT, int WIDTH, int STAGES, bool A_ALONG_K, bool B_ALONG_K, bool TURNED>
__global__ void __launch_bounds__(384, 1)
multiply_parts(const GemmArgs p, const __grid_constant__ ptx::TensorMap map_a,
               const __grid_constant__ ptx::TensorMap map_b, const __grid_constant__ ptx::TensorMap map_c) {
  ptx::pdl_launch_dependents();
  specialized<TA, TB, float, HEIGHT, WIDTH, STAGES, CLUSTER, A_ALONG_K, B_ALONG_K, TURNED, true>(
      part_of<TURNED>(p, int(gridDim.y)), map_a, map_b, &map_c);
}

template <class TC, int PARTS, bool TURNED>
__global__ void __launch_bounds__(256) add_parts(const GemmArgs given) {
  GemmArgs from = part_of<TURNED>(given, PARTS), p = given;
  if constexpr (TURNED) from = turned(from), p = turned(p);
  const bool simple = p.beta == 0 && p.c_col == 1 && p.n % 4 == 0;
  const i64 at = (blockIdx.x * i64(256) + threadIdx.x) * 4, i = at / from.c_row, j = at % from.c_row;
  ptx::pdl_wait();
  if (i >= p.m) return;
  // excerpt
  float sum[4] = {};
#pragma unroll
  for (int r = 0; r < PARTS; ++r) {
    const float4 v = *(const float4*)((const float*)p.work + r * from.c_batch + at);
    sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
  }
  finish_four<TC>(p, simple, 0, i, j, sum);
  // end of excerpt
}
