// A complex matrix of any strides in rows, one behind the other; so that a product of real numbers is one of complex
// ones, each row is followed by i times itself where wanted: (a + b i)(x + y i) = a (x, y) + b (-y, x).
#include "complex.cuh"

constexpr int SIDE = 32, DOWN = 8;  // of a tile; rows of it that a block's threads move at a time

struct PartsArgs {
  const void* from;
  void* to;
  i64 rows, columns, batch;
  i64 row_step, column_step, batch_step;
};

template <bool WITH_TURNED>
__global__ void __launch_bounds__(SIDE * DOWN) lay_out(const PartsArgs p) {
  __shared__ complex64 tile[SIDE][SIDE + 1];
  const i64 down = (p.rows + SIDE - 1) / SIDE, across = (p.columns + SIDE - 1) / SIDE;
  const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
  const bool along = p.column_step == 1;  // neighbouring threads read what lies side by side
  for (i64 index = blockIdx.x; index < p.batch * down * across; index += gridDim.x) {
    const i64 batch = index / (down * across), row = index / across % down * SIDE, column = index % across * SIDE;
    const complex64* from = (const complex64*)p.from + batch * p.batch_step;
#pragma unroll
    for (int part = 0; part < SIDE; part += DOWN) {
      const int i = along ? y + part : x, j = along ? x : y + part;
      if (row + i < p.rows && column + j < p.columns)
        tile[i][j] = from[(row + i) * p.row_step + (column + j) * p.column_step];
    }
    __syncthreads();
#pragma unroll
    for (int part = 0; part < SIDE; part += DOWN) {
      const int i = y + part;
      if (row + i >= p.rows || column + x >= p.columns) continue;
      const complex64 v = tile[i][x];
      complex64* to = (complex64*)p.to + (batch * p.rows + row + i) * (WITH_TURNED ? 2 : 1) * p.columns + column + x;
      *to = v;
      if (WITH_TURNED) to[p.columns] = {-v.im, v.re};
    }
    __syncthreads();
  }
}
