// Each of 16 x 16 threads computes MICRO x MICRO elements of C in registers, from panels in shared memory.
// counters: shared-memory passes, millions; FMA pipe, %
#include "complex.cuh"
#include "float8.cuh"
#include "tiles.cuh"

constexpr int SIDE = 16;              // threads along each side of a block
constexpr int THREADS = SIDE * SIDE;
constexpr int DEPTH = 8;              // of a panel, along the reduction

// Stages DEPTH steps of the reduction for `count` rows of A (or columns of B): panel[l][i] is element
// (start + i, first + l) of a view with `size` rows, zero outside. Neighbouring threads follow the unit stride;
// values are widened once, here, instead of at each of their uses.
template <class Acc, class T, int COUNT, int PITCH>
__device__ __forceinline__ void stage(Acc (&panel)[DEPTH][PITCH], const T* v, i64 start, i64 first, i64 size, i64 k,
                                      i64 step, i64 k_step) {
  const bool along_k = k_step == 1;
#pragma unroll
  for (int part = 0; part < COUNT * DEPTH / THREADS; ++part) {
    const int e = part * THREADS + threadIdx.x;
    const int l = along_k ? e % DEPTH : e / COUNT, i = along_k ? e / DEPTH : e % COUNT;
    panel[l][i] = wide<Acc>(element_or_zero(v, start + i, first + l, size, k, step, k_step));
  }
}

template <class TA, class TB, class TC, int MICRO>
__global__ void __launch_bounds__(THREADS, 1) register_tile(const GemmArgs p) {
  typedef typename AccOf<TC>::type Acc;
  constexpr int COUNT = SIDE * MICRO;
  constexpr int PITCH = COUNT + 16 / int(sizeof(Acc));  // rows 16 bytes apart in banks: stores along k spread
  __shared__ Acc as[DEPTH][PITCH], bs[DEPTH][PITCH];
  const Tile tile = tile_of<8>(p, COUNT, COUNT);
  const TA* a = entry<TA>(p.a, tile.batch, p.a_batch);
  const TB* b = entry<TB>(p.b, tile.batch, p.b_batch);
  const int ty = threadIdx.x / SIDE, tx = threadIdx.x % SIDE;
  Acc sum[MICRO][MICRO] = {};
  for (i64 first = 0; first < p.k; first += DEPTH) {
    stage<Acc, TA, COUNT>(as, a, tile.row, first, p.m, p.k, p.a_row, p.a_col);
    stage<Acc, TB, COUNT>(bs, b, tile.col, first, p.n, p.k, p.b_col, p.b_row);
    __syncthreads();
#pragma unroll
    // excerpt
    for (int l = 0; l < DEPTH; ++l) {
      Acc column[MICRO], row[MICRO];
#pragma unroll
      for (int r = 0; r < MICRO; ++r) {
        column[r] = as[l][ty + SIDE * r];
        row[r] = bs[l][tx + SIDE * r];
      }
#pragma unroll
      for (int r = 0; r < MICRO; ++r)
#pragma unroll
        for (int c = 0; c < MICRO; ++c) sum[r][c] += column[r] * row[c];
    // end of excerpt
    }
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < MICRO; ++r)
#pragma unroll
    for (int c = 0; c < MICRO; ++c)
      finish_at<TC>(p, tile.batch, tile.row + ty + SIDE * r, tile.col + tx + SIDE * c, sum[r][c]);
}
