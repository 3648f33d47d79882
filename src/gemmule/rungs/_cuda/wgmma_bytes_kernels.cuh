// The kernels of matmul rungs on wgmma for 8-bit operands: their copies, and the product.
#pragma once
#include "epilogue.cuh"
#include "pack_bytes.cuh"
#include "wgmma_bytes.cuh"

// TA and TB are the types of the tile's rows and columns: where C is TURNED those of B and A.
template <class TA, class TB, class TC, int HEIGHT, int WIDTH, int STAGES, int CLUSTER, bool TURNED>
__global__ void __launch_bounds__(384, 1)
multiply_bytes(const GemmArgs p, const __grid_constant__ ptx::TensorMap map_a,
               const __grid_constant__ ptx::TensorMap map_b, const __grid_constant__ ptx::TensorMap map_c) {
  specialized<TA, TB, TC, HEIGHT, WIDTH, STAGES, CLUSTER, true, true, TURNED>(p, map_a, map_b, &map_c);
}
// The same, where TMA cannot store C: it goes there one by one.
template <class TA, class TB, class TC, int HEIGHT, int WIDTH, int STAGES, int CLUSTER, bool TURNED>
__global__ void __launch_bounds__(384, 1)
multiply_bytes_apart(const GemmArgs p, const __grid_constant__ ptx::TensorMap map_a,
                     const __grid_constant__ ptx::TensorMap map_b) {
  specialized<TA, TB, TC, HEIGHT, WIDTH, STAGES, CLUSTER, true, true, TURNED>(p, map_a, map_b, nullptr);
}
