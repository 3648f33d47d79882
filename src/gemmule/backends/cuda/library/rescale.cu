// What a library's product leaves alone: result = alpha result + beta old, of a result with any strides. The old
// values lie packed, and are not looked at where beta is 0.
#include "complex.cuh"

constexpr int MOST_AXES = 8;

struct RescaleArgs {
  const void* old;
  void* result;
  i64 count, axes;
  i64 sizes[MOST_AXES], steps[MOST_AXES];
  double alpha[2], beta[2];
};

template <class T> __device__ __forceinline__ T scale_of(const double (&parts)[2]) { return T(parts[0]); }
template <> __device__ __forceinline__ complex64 scale_of(const double (&parts)[2]) { return {float(parts[0]), float(parts[1])}; }
template <> __device__ __forceinline__ complex128 scale_of(const double (&parts)[2]) { return {parts[0], parts[1]}; }

template <class T>
__global__ void __launch_bounds__(256) rescale(const RescaleArgs p) {
  const T alpha = scale_of<T>(p.alpha), beta = scale_of<T>(p.beta);
  for (i64 index = (i64)blockIdx.x * 256 + threadIdx.x; index < p.count; index += (i64)gridDim.x * 256) {
    i64 rest = index, at = 0;
    for (int axis = (int)p.axes - 1; axis >= 0; --axis) {
      at += rest % p.sizes[axis] * p.steps[axis];
      rest /= p.sizes[axis];
    }
    T* const result = (T*)p.result + at;
    T value = alpha * *result;
    if (beta != T(0)) value += beta * ((const T*)p.old)[index];
    *result = value;
  }
}
