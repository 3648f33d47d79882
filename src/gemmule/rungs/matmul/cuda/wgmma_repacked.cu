// Operands that TMA cannot read, because their rows begin at any multiple of two bytes, are copied into the workspace
// with rows that begin at multiples of 16. Then tiles are multiplied as in wgmma_specialized; sums are stored one by one.
// counters: DRAM read, MB; tensor pipe, %
#include "pack_lines.cuh"
#include "wgmma_specialized.cuh"

constexpr int CHUNK = 8;   // halves of 16 bytes

template <class T, bool A_ALONG_K, bool B_ALONG_K>
__global__ void __launch_bounds__(256) pack_operands(const GemmArgs p) {
  T* const b = A_ALONG_K
      ? pack_lines<CHUNK>((const T*)p.a, (T*)p.work, p.k, p.m, p.a_batch ? p.batch : 1, p.a_row, p.a_batch)
      : pack_lines<CHUNK>((const T*)p.a, (T*)p.work, p.m, p.k, p.a_batch ? p.batch : 1, p.a_col, p.a_batch);
  if constexpr (B_ALONG_K) pack_lines<CHUNK>((const T*)p.b, b, p.k, p.n, p.b_batch ? p.batch : 1, p.b_col, p.b_batch);
  else pack_lines<CHUNK>((const T*)p.b, b, p.n, p.k, p.b_batch ? p.batch : 1, p.b_row, p.b_batch);
}

template <class TA, class TB, class TC, int HEIGHT, int WIDTH, int STAGES, bool A_ALONG_K, bool B_ALONG_K>
__global__ void __launch_bounds__(384, 1)
wgmma_repacked(const GemmArgs p, const __grid_constant__ ptx::TensorMap map_a,
               const __grid_constant__ ptx::TensorMap map_b) {
  specialized<TA, TB, TC, HEIGHT, WIDTH, STAGES, 1, A_ALONG_K, B_ALONG_K, false>(p, map_a, map_b, nullptr);
}
