// An array of any strides becomes a packed one of a wider float type, or of complex numbers.
#include "complex.cuh"

constexpr int MOST_AXES = 8;

struct ConvertArgs {
  const void* from;
  void* to;
  i64 count, axes;
  i64 sizes[MOST_AXES], steps[MOST_AXES];
};

template <class FROM, class TO>
__global__ void __launch_bounds__(256) convert(const ConvertArgs p) {
  for (i64 index = (i64)blockIdx.x * 256 + threadIdx.x; index < p.count; index += (i64)gridDim.x * 256) {
    i64 rest = index, at = 0;
    for (int axis = (int)p.axes - 1; axis >= 0; --axis) {
      at += rest % p.sizes[axis] * p.steps[axis];
      rest /= p.sizes[axis];
    }
    ((TO*)p.to)[index] = wide<TO>(((const FROM*)p.from)[at]);
  }
}
