// Quantisation on the device: scales and zero points of groups, then codes in layout mma16. Every rounding is that of
// quant/rounding.py and quant/search.py, one by one, so that the codes are the host's.
#include "args.cuh"
#include "ptx.cuh"

typedef ptx::Vec<unsigned, 4> Words;
constexpr int THREADS = 256, SHRINKS = 17;

// Sizes and steps count elements. perm and importance may be null; importance has the dtype that is computed in.
struct QuantiseArgs {
  const void* w;
  const int* perm;
  const void* importance;
  void* scales;
  float* zeros;  // null: symmetric
  Words* codes;
  double* sums;  // of each block: what it found
  i64 m, n, row_step, col_step;
  i64 group_size, groups, scale_group;  // scale_group: from one group to the next; rows lie side by side, 0 where one scale serves all
  i64 bits, team, down;                 // team: threads a group; down: neighbouring threads have neighbouring rows
  double exact, zero;                   // of the whole matrix
};

template <class T> struct Compute { typedef float type; };
template <> struct Compute<double> { typedef double type; };

// Single roundings that the compiler may not fuse.
__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double times(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float over(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ double over(double a, double b) { return a / b; }
__device__ __forceinline__ float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double plus(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ float whole(float v) { return rintf(v); }
__device__ __forceinline__ double whole(double v) { return rint(v); }

// A positive number in a narrower type, rounded towards infinity: the next float has the next bit pattern.
template <class TS> struct PatternOf { typedef unsigned short type; };
template <> struct PatternOf<float> { typedef unsigned type; };
template <class TS> __device__ __forceinline__ TS rounded_up(double v) {
  float f = (float)v;
  if ((double)f < v) f = __uint_as_float(__float_as_uint(f) + 1);
  TS s = narrow<TS, float>(f);
  typename PatternOf<TS>::type pattern = *(typename PatternOf<TS>::type*)&s;
  pattern += wide<float, TS>(s) < f;
  return *(TS*)&pattern;
}

template <class T> __device__ __forceinline__ typename Compute<T>::type weight(const QuantiseArgs& p, i64 row, i64 column) {
  if (p.perm) column = p.perm[column];
  return wide<typename Compute<T>::type, T>(((const T*)p.w)[row * p.row_step + column * p.col_step]);
}
template <class C> __device__ __forceinline__ C code_of(C v, C scale, C zero, C top) {
  const C code = plus(whole(over(v, scale)), zero);
  return code < 0 ? C(0) : code > top ? top : code;
}
// importance * (w - w')^2, in steps as the host takes them.
template <class C> __device__ __forceinline__ double squared(C off, const void* importance, i64 column) {
  off = times(off, off);
  return importance ? times(off, ((const C*)importance)[column]) : off;
}
template <class C> __device__ __forceinline__ C off_of(C v, C code, C scale, C zero) {
  return plus(times(plus(code, -zero), scale), -v);
}

// The least and greatest weight, widened to include 0. A NaN or an infinity shows as a NaN.
template <class C> struct Limits {
  C low = 0, high = 0;
  __device__ __forceinline__ void take(C v) {
    if (v < low || !(v - v == 0)) low = v - v == 0 ? v : v - v;
    if (v > high) high = v;
  }
  __device__ __forceinline__ void meet(const Limits& o) {
    if (o.low < low || o.low != o.low) low = o.low;
    if (o.high > high) high = o.high;
  }
};
template <class C> __device__ __forceinline__ double exact_scale(const Limits<C>& at, int bits, bool symmetric) {
  const double low = at.low, high = at.high, half = 1 << (bits - 1);
  if (low == 0 && high == 0) return 1;
  if (!symmetric) return (high - low) / (2 * half - 1);
  return low != low ? low : fmax(high / (half - 1), low / -half);
}
__device__ __forceinline__ double shrunk(double exact, int k) { return exact * (1.0 - k / 40.0); }

// Which group, and which of its columns, this thread works on.
struct Member {
  i64 row, first, end;
  int unit, member, team;
  bool there;
  __device__ __forceinline__ explicit Member(const QuantiseArgs& p) : team((int)p.team) {
    const int units = THREADS / team, thread = threadIdx.x;
    unit = p.down ? thread % units : thread / team;
    member = p.down ? thread / units : thread % team;
    const i64 at = (i64)blockIdx.x * units + unit;
    row = p.down ? at % p.m : at / p.groups;
    const i64 group = p.down ? at / p.m : at % p.groups;
    there = row < p.m && group < p.groups;
    first = group * p.group_size;
    end = there ? min(first + p.group_size, p.n) : 0;
  }
  __device__ __forceinline__ int thread_of(const QuantiseArgs& p, int other) const {
    return p.down ? other * (THREADS / team) + unit : unit * team + other;
  }
};

// A scale and a zero point for each group; with MSE the best of ranges cut by up to two fifths.
template <class T, class TS, bool MSE>
__global__ void __launch_bounds__(THREADS) fit_groups(const QuantiseArgs p) {
  typedef typename Compute<T>::type C;
  __shared__ Limits<C> limits[THREADS];
  const Member at(p);
  Limits<C> own;
#pragma unroll 4
  for (i64 j = at.first + at.member; j < at.end; j += at.team) own.take(weight<T>(p, at.row, j));
  limits[threadIdx.x] = own;
  __syncthreads();
  Limits<C> all;
  for (int i = 0; i < at.team; ++i) all.meet(limits[at.thread_of(p, i)]);
  const bool symmetric = !p.zeros;
  const double exact = exact_scale(all, (int)p.bits, symmetric);
  const C top = (1 << p.bits) - 1;
  TS best = rounded_up<TS>(exact);
  const double below = all.low < 0 ? -(double)all.low : 0;
  const float zero = symmetric ? 1 << (p.bits - 1) : (float)rint(below / (double)wide<float, TS>(best));

  if constexpr (MSE) {
    __shared__ double errors[SHRINKS][THREADS];
    C scale[SHRINKS];
    double error[SHRINKS] = {};
#pragma unroll
    for (int k = 0; k < SHRINKS; ++k) scale[k] = wide<float, TS>(rounded_up<TS>(shrunk(exact, k)));
#pragma unroll 1
    for (i64 j = at.first + at.member; j < at.end; j += at.team) {
      const C v = weight<T>(p, at.row, j);
#pragma unroll
      for (int k = 0; k < SHRINKS; ++k)
        error[k] += squared<C>(off_of<C>(v, code_of<C>(v, scale[k], zero, top), scale[k], zero), p.importance, j);
    }
#pragma unroll
    for (int k = 0; k < SHRINKS; ++k) errors[k][threadIdx.x] = error[k];
    __syncthreads();
    if (at.member == 0) {
      double least = 0;
      for (int k = 0; k < SHRINKS; ++k) {
        double sum = 0;
        for (int i = 0; i < at.team; ++i) sum += errors[k][at.thread_of(p, i)];
        if (k && !(sum < least)) continue;
        least = sum, best = rounded_up<TS>(shrunk(exact, k));
      }
    }
  }
  if (!at.there || at.member) return;
  const i64 to = at.first / p.group_size * p.scale_group + at.row;
  ((TS*)p.scales)[to] = best;
  if (p.zeros) p.zeros[to] = zero;
}

// The whole matrix as one group: limits and errors of each block's share, which the host adds up.
template <class T>
__global__ void __launch_bounds__(THREADS) whole_limits(const QuantiseArgs p) {
  typedef typename Compute<T>::type C;
  __shared__ Limits<C> limits[THREADS];
  Limits<C> own;
  const i64 count = p.m * p.n;
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < count; i += (i64)gridDim.x * THREADS)
    own.take(p.down ? weight<T>(p, i % p.m, i / p.m) : weight<T>(p, i / p.n, i % p.n));
  limits[threadIdx.x] = own;
  __syncthreads();
  if (threadIdx.x) return;
  Limits<C> all;
  for (int i = 0; i < THREADS; ++i) all.meet(limits[i]);
  p.sums[2 * blockIdx.x] = all.low, p.sums[2 * blockIdx.x + 1] = all.high;
}
template <class T, class TS>
__global__ void __launch_bounds__(THREADS) whole_errors(const QuantiseArgs p) {
  typedef typename Compute<T>::type C;
  __shared__ double errors[SHRINKS][THREADS];
  const C top = (1 << p.bits) - 1, zero = p.zero;
  C scale[SHRINKS];
  double error[SHRINKS] = {};
#pragma unroll
  for (int k = 0; k < SHRINKS; ++k) scale[k] = wide<float, TS>(rounded_up<TS>(shrunk(p.exact, k)));
  const i64 count = p.m * p.n;
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < count; i += (i64)gridDim.x * THREADS) {
    const i64 row = p.down ? i % p.m : i / p.n, column = p.down ? i / p.m : i % p.n;
    const C v = weight<T>(p, row, column);
#pragma unroll
    for (int k = 0; k < SHRINKS; ++k)
      error[k] += squared<C>(off_of<C>(v, code_of<C>(v, scale[k], zero, top), scale[k], zero), p.importance, column);
  }
#pragma unroll
  for (int k = 0; k < SHRINKS; ++k) errors[k][threadIdx.x] = error[k];
  __syncthreads();
  if (threadIdx.x >= SHRINKS) return;
  double sum = 0;
  for (int i = 0; i < THREADS; ++i) sum += errors[threadIdx.x][i];
  p.sums[SHRINKS * blockIdx.x + threadIdx.x] = sum;
}

// Codes of given scales and zero points, 16 bytes of one lane of one tile a thread (quant/layouts.py says which codes
// these are), and of each block the sums of importance * (w - w')^2 and of importance * w^2.
template <class T, class TS, int BITS>
__global__ void __launch_bounds__(THREADS) encode(const QuantiseArgs p) {
  typedef typename Compute<T>::type C;
  constexpr int COLUMNS = 256 / BITS, OF_LANE = COLUMNS / 4;
  constexpr C TOP = (1 << BITS) - 1;
  __shared__ double sums[2][THREADS];
  double wrong = 0, norm = 0;
  const i64 across = (p.n + COLUMNS - 1) / COLUMNS, deep = (p.m + 15) / 16, lanes = deep * across * 32;
  for (i64 index = (i64)blockIdx.x * THREADS + threadIdx.x; index < lanes; index += (i64)gridDim.x * THREADS) {
    const int lane = index % 32, g = lane / 4, t = lane % 4;
    const i64 tile = index / 32, i = p.down ? tile % deep : tile / across, j = p.down ? tile / deep : tile % across;
    const i64 row = i * 16 + g, first = j * COLUMNS + t * OF_LANE;
    C v[2][OF_LANE];
#pragma unroll
    for (int hi = 0; hi < 2; ++hi)
#pragma unroll
      for (int c = 0; c < OF_LANE; ++c)
        v[hi][c] = row + 8 * hi < p.m && first + c < p.n ? weight<T>(p, row + 8 * hi, first + c) : C(0);
    i64 group = first / p.group_size, left = 0;
    C scale[2] = {1, 1}, zero[2] = {};
    Words words = {};
#pragma unroll
    for (int c = 0; c < OF_LANE; ++c) {
      if (left == 0 && first + c < p.n) {
#pragma unroll
        for (int hi = 0; hi < 2; ++hi) {
          const i64 at = p.scale_group ? group * p.scale_group + min(row + 8 * hi, p.m - 1) : 0;
          scale[hi] = wide<float, TS>(((const TS*)p.scales)[at]);
          zero[hi] = p.zeros ? p.zeros[at] : C(1 << (BITS - 1));
        }
        ++group;
        left = group * p.group_size - first - c;
      }
      --left;
#pragma unroll
      for (int hi = 0; hi < 2; ++hi) {
        if (row + 8 * hi >= p.m || first + c >= p.n) continue;
        const C w = v[hi][c], code = code_of<C>(w, scale[hi], zero[hi], TOP);
        wrong += squared<C>(off_of<C>(w, code, scale[hi], zero[hi]), p.importance, first + c);
        norm += squared<C>(w, p.importance, first + c);
        const int step = c / 4, half = c / 2 % 2, e = c % 2;
        const int word = BITS == 4 ? step : 2 * step + half, bit = BITS == 4 ? 16 * e + 8 * half + 4 * hi : 16 * e + 8 * hi;
        words[word] |= (unsigned)code << bit;
      }
    }
    p.codes[(i * across + j) * 32 + lane] = words;
  }
  sums[0][threadIdx.x] = wrong, sums[1][threadIdx.x] = norm;
  __syncthreads();
  if (threadIdx.x >= 2) return;
  double sum = 0;
  for (int i = 0; i < THREADS; ++i) sum += sums[threadIdx.x][i];
  p.sums[2 * blockIdx.x + threadIdx.x] = sum;
}

// After codes are made, which divides by scales: groups of zeros, whose scale is 1 so far, get 0, as on the host.
template <class T, class TS>
__global__ void __launch_bounds__(THREADS) flatten_zeros(const QuantiseArgs p) {
  for (i64 at = (i64)blockIdx.x * THREADS + threadIdx.x; at < p.m * p.groups; at += (i64)gridDim.x * THREADS) {
    if (wide<float, TS>(((const TS*)p.scales)[at]) != 1) continue;
    const i64 row = at % p.m, first = at / p.m * p.group_size, end = min(first + p.group_size, p.n);
    bool blank = true;
    for (i64 j = first; j < end && blank; ++j) blank = weight<T>(p, row, j) == 0;
    if (blank) ((TS*)p.scales)[at] = narrow<TS, float>(0);
  }
}
