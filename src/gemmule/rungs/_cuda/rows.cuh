// What rungs share that give several threads to one row: wide loads, one thread's share, sums over lanes.
#pragma once
#include "args.cuh"
#include "ptx.cuh"

// Reads N neighbouring values in loads of at most ALIGN bytes, which p must be aligned to, and widens them.
// Global memory goes by the read-only path.
template <int ALIGN, bool SHARED = false, class Acc, class T, int N>
__device__ __forceinline__ void load_values(const T* p, Acc (&out)[N]) {
  constexpr int bytes = int(sizeof(T)) * N < ALIGN ? int(sizeof(T)) * N : ALIGN;
  constexpr int each = bytes / int(sizeof(T));
  typedef ptx::Vec<T, each> Piece;
#pragma unroll
  for (int i = 0; i < N / each; ++i) {
    Piece piece;
    if constexpr (SHARED) piece = ((const Piece*)p)[i];
    else piece = ptx::ld_nc((const Piece*)p + i);
#pragma unroll
    for (int k = 0; k < each; ++k) out[i * each + k] = wide<Acc>(piece[k]);
  }
}
// The same for the vector, whose values may lie `step` elements apart.
template <int ALIGN, class Acc, class T, int N>
__device__ __forceinline__ void load_vector(const T* x, i64 step, i64 first, Acc (&out)[N]) {
  if (step == 1) {
    load_values<ALIGN>(x + first, out);
    return;
  }
#pragma unroll
  for (int k = 0; k < N; ++k) out[k] = wide<Acc>(x[(first + k) * step]);
}

// How a row is read. ALIGN is what base addresses and leading strides are multiples of: 16 bytes, which allows
// loads of `width` values, or no more than an element, which leaves single ones; x then goes one by one, too.
// `loads` of them are under way at a time, so that a thread takes VALUES values in one step.
template <class T, int ALIGN, int VALUES>
struct RowRead {
  static constexpr int most = 16 / int(sizeof(T));
  static constexpr int width = ALIGN < 16 ? 1 : VALUES < most ? VALUES : most;
  static constexpr int loads = VALUES / width < 8 ? VALUES / width : 8;
  static constexpr int most_threads = VALUES > 16 || VALUES * sizeof(T) > 32 ? 512 : 1024;  // so that registers suffice
};

// N neighbouring values as they lie in memory, still to be widened: what several loads under way need least room for.
template <int ALIGN, class T, int N>
struct Packed {
  static constexpr int bytes = int(sizeof(T)) * N < ALIGN ? int(sizeof(T)) * N : ALIGN, each = bytes / int(sizeof(T));
  ptx::Vec<T, each> part[N / each];
  __device__ __forceinline__ explicit Packed(const T* p) {
#pragma unroll
    for (int i = 0; i < N / each; ++i) part[i] = ptx::ld_nc((const ptx::Vec<T, each>*)p + i);
  }
  __device__ __forceinline__ Packed() {}
  __device__ __forceinline__ T operator[](int k) const { return part[k / each][k % each]; }
};
// A piece of the matrix, which nobody reads again: whole vectors go past the L1; single elements meet their neighbours
// there.
template <class Piece>
__device__ __forceinline__ Piece load_piece(const void* p) {
  if constexpr (sizeof(Piece) == 16) return ptx::ld_stream((const Piece*)p);
  else return ptx::ld_nc((const Piece*)p);
}

// One thread's share of the columns first .. last of a row times x: pieces of `width` columns are dealt in turn
// to `threads` threads, so that neighbours read neighbouring pieces; what is left over goes one by one.
// `first` is a multiple of the width.
template <int ALIGN, int VALUES, class Acc, class TA, class TX>
__device__ __forceinline__ Acc share_of_row(const TA* a, const TX* x, i64 x_step, i64 first, i64 last,
                                            int thread, int threads) {
  typedef RowRead<TA, ALIGN, VALUES> Read;
  constexpr int W = Read::width, L = Read::loads, align_x = ALIGN < 16 ? int(sizeof(TX)) : 16;
  typedef ptx::Vec<TA, W> Piece;
  const i64 stride = (i64)threads * W, whole = last - (last - first) % W;
  Acc sum = 0;
  i64 j = first + (i64)thread * W;
  if (x_step == 1) {  // asked once: a branch in the loop would come between its loads
    const TA* ap = a + j;  // addresses that only grow: few instructions stand before the loads
    const TX* xp = x + j;
#pragma unroll 1  // the loads of one step are enough; more would not fit the registers of full blocks
    // excerpt loads
    for (; j + (L - 1) * stride < whole; j += L * stride) {
      Piece av[L];
      Packed<align_x, TX, W> xv[L];
#pragma unroll
      for (int l = 0; l < L; ++l) av[l] = load_piece<Piece>(ap + l * stride);
#pragma unroll
      for (int l = 0; l < L; ++l) xv[l] = Packed<align_x, TX, W>(xp + l * stride);
      ap += L * stride;
      xp += L * stride;
#pragma unroll
      for (int l = 0; l < L; ++l)
#pragma unroll
        for (int k = 0; k < W; ++k) sum += wide<Acc>(av[l][k]) * wide<Acc>(xv[l][k]);
    // end of excerpt
    }
  }
#pragma unroll 1
  for (; j < whole; j += stride) {  // less than a step is left, or the values of x lie apart
    const Piece av = load_piece<Piece>(a + j);
    Acc xv[W];
    load_vector<align_x>(x, x_step, j, xv);
#pragma unroll
    for (int k = 0; k < W; ++k) sum += wide<Acc>(av[k]) * xv[k];
  }
#pragma unroll 1
  for (j = whole + thread; j < last; j += threads) sum += wide<Acc>(a[j]) * wide<Acc>(x[j * x_step]);
  return sum;
}

// The row of this thread in a grid of ceil(m / rows) blocks a product, and its product of the batch. The grid knows the
// blocks of a product, and one product needs no division at all: it would hold up every block before its first load.
struct RowPlace {
  i64 batch = 0, row;
  __device__ __forceinline__ explicit RowPlace(const GemvArgs& p) {
    unsigned block = blockIdx.x;
    if (p.batch != 1) {
      const unsigned blocks = gridDim.x / (unsigned)p.batch;
      batch = block / blocks;
      block %= blocks;
    }
    row = (i64)block * blockDim.y + threadIdx.y;
  }
};

// The lanes of this thread's group: `lanes` neighbours, a power of two up to 32. A mask of the group alone stays
// right where other groups of the warp have left, because their row does not exist.
__device__ __forceinline__ unsigned group_mask(int lanes) {
  const int lane = (threadIdx.y * blockDim.x + threadIdx.x) % 32;
  return lanes == 32 ? 0xffffffffu : ((1u << lanes) - 1) << (lane & ~(lanes - 1));
}
// The sum over a group, in every lane of it: each step adds what the partner at distance d holds.
template <class Acc>
__device__ __forceinline__ Acc group_sum(Acc v, int lanes, unsigned mask) {
  for (int d = lanes / 2; d > 0; d /= 2) v += __shfl_xor_sync(mask, v, d);
  return v;
}

// The sum over all threads of a row in blocks of (p, rows) threads, p a multiple of 32: lanes first, then one slot of
// shared memory for each (row, warp). Every thread of the block calls it; thread x = 0 of a row has the sum.
template <class Acc>
__device__ __forceinline__ Acc row_sum(Acc sum) {
  __shared__ Acc slots[32];
  const int t = threadIdx.x, warps = blockDim.x / 32;
  sum = group_sum(sum, 32, 0xffffffffu);
  if (t % 32 == 0) slots[threadIdx.y * warps + t / 32] = sum;
  __syncthreads();
  if (t >= 32) return sum;
  return group_sum(t < warps ? slots[threadIdx.y * warps + t] : Acc(0), 32, 0xffffffffu);
}
