// What a product reads of both its operands comes together from where passes over each left it: a few short ranges.
#include "args.cuh"

constexpr int RANGES = 4;

struct GatherArgs {
  const unsigned* from[RANGES];
  unsigned* to[RANGES];
  i64 words[RANGES];
};

__global__ void __launch_bounds__(256) gather(const GatherArgs p) {
#pragma unroll
  for (int range = 0; range < RANGES; ++range)
    for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < p.words[range]; i += (i64)gridDim.x * 256)
      p.to[range][i] = p.from[range][i];
}
