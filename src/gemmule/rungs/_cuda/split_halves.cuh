// Floats as pairs of halves: x = 2^-shift (high + low / 2^11), with one shift for each row of A and column of B, so
// that the largest of the row lies in [2^14, 2^15). A pair holds an element to within 2^-22 of itself as far as 29
// bits below that. What it does not hold so is counted, for each row: see `suspect`.
//
// The workspace: pairs of A, as planes of high and low parts of each batch entry, whose lines lie along the
// reduction; pairs of B alike; then, for each row of A and column of B, maxima of its parts, elements lost, its shift.
#pragma once
#include "ptx.cuh"
#include "tiles.cuh"

constexpr int PARTS = 16, SPAN = 128;    // of the reduction, each with a maximum of its own: so many, or so long
constexpr int SIDE = 64;                 // of a tile of elements that a block splits
constexpr unsigned NONFINITE = 1u << 30; // lost: rows that hold an infinity or a NaN

// One operand as rows along the reduction: A, or B seen as columns.
struct Rows {
  const float* from;
  __half* pairs;
  unsigned *maxima, *lost;
  int* shift;
  i64 rows, planes, row_step, k_step, plane_step, first;   // first: of its rows among those of A and then B
  __device__ __forceinline__ const float* plane(i64 which) const { return from + which * plane_step; }
};

__device__ __forceinline__ i64 round_up(i64 value, i64 unit) { return (value + unit - 1) / unit * unit; }

struct Pairs {
  Rows a, b;
  i64 k, lead, span;   // halves from one line to the next; steps of a part
  int parts;
  unsigned* list;      // how many blocks of C are to be computed anew, and which
  __device__ __forceinline__ explicit Pairs(const GemmArgs& p) : k(p.k), lead(round_up(p.k, 8)) {
    span = max(round_up((k + PARTS - 1) / PARTS, 64), i64(SPAN));
    parts = int((k + span - 1) / span);
    a = {(const float*)p.a, (__half*)p.work, nullptr, nullptr, nullptr, p.m, p.a_batch ? p.batch : 1,
         p.a_row, p.a_col, p.a_batch, 0};
    b = {(const float*)p.b, a.pairs + round_up(a.rows * a.planes * 2 * lead, 128), nullptr, nullptr, nullptr, p.n,
         p.b_batch ? p.batch : 1, p.b_col, p.b_row, p.b_batch, a.rows * a.planes};
    const i64 all = b.first + b.rows * b.planes;
    a.maxima = (unsigned*)(b.pairs + round_up(b.rows * b.planes * 2 * lead, 128));
    a.lost = a.maxima + all * PARTS;
    a.shift = (int*)(a.lost + all);
    list = (unsigned*)(a.shift + all);
    b.maxima = a.maxima + b.first * PARTS, b.lost = a.lost + b.first, b.shift = a.shift + b.first;
  }
};

__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((e + 127) << 23); }   // -126 <= e <= 127

// x 2^e in two steps, for the factor alone may leave the range: right where e is in [-252, 254].
__device__ __forceinline__ float scale_by(float x, int e) {
  const int half = e >> 1;
  return x * power_of_two(half) * power_of_two(e - half);
}

// The shift that brings a maximum, given by its bits, to [2^14, 2^15).
__device__ __forceinline__ int shift_of(unsigned bits) {
  const int e = int(bits >> 23);
  return bits == 0 ? 0 : 14 - (e ? e - 127 : -118 - __clz(int(bits)));
}

// Block by block of 32 rows and one part of the reduction; lanes go along the unit stride.
__device__ __forceinline__ void maxima_of(const Rows& x, const Pairs& p, unsigned (&met)[8][32]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned groups = unsigned((x.rows + 31) / 32), units = groups * unsigned(x.planes) * p.parts;
  for (unsigned unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const unsigned part = unit % p.parts, plane = unit / p.parts / groups;
    const i64 row = unit / p.parts % groups * 32, first = part * p.span, last = min(first + p.span, p.k);
    const float* const from = x.plane(plane);
    if (x.row_step == 1 && x.k_step != 1) {
      unsigned most = 0;
      if (row + lane < x.rows) {
#pragma unroll 8
        for (i64 l = first + warp; l < last; l += 8)
          most = max(most, __float_as_uint(from[row + lane + l * x.k_step]) & 0x7fffffffu);
      }
      met[warp][lane] = most;
    } else {
      for (int r = warp; r < 32; r += 8) {
        unsigned most = 0;
        if (row + r < x.rows) {
#pragma unroll 8
          for (i64 l = first + lane; l < last; l += 32)
            most = max(most, __float_as_uint(from[(row + r) * x.row_step + l * x.k_step]) & 0x7fffffffu);
        }
#pragma unroll
        for (int step = 16; step; step /= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
        if (lane < 8) met[lane][r] = most;
      }
    }
    __syncthreads();
    if (threadIdx.x < 32 && row + lane < x.rows) {
      unsigned most = 0;
#pragma unroll
      for (int w = 0; w < 8; ++w) most = max(most, met[w][lane]);
      const i64 at = plane * x.rows + row + lane;
      x.maxima[at * PARTS + part] = most;
      if (part == 0) x.lost[at] = 0;
    }
    __syncthreads();
  }
}

// A pair; returns whether it is not as near to x as the result's bound takes for granted.
__device__ __forceinline__ bool split_one(float x, int shift, __half& high, __half& low) {
  const float v = scale_by(x, shift);
  high = __float2half_rn(v);
  const float rest = (v - __half2float(high)) * 2048.0f;   // exact
  low = __float2half_rn(rest);
  const float error = fabsf(rest - __half2float(low)), size = fabsf(v);
  return error > size * 0x1p-11f || fabsf(rest) > size || (v == 0.0f && x != 0.0f);
}

// Block by block of SIDE rows by SIDE steps, through shared memory where the rows do not lie along the reduction.
__device__ __forceinline__ void split_tiles(const Rows& x, const Pairs& p, float (&tile)[SIDE][SIDE + 1],
                                            int (&shifts)[SIDE]) {
  const bool across = x.row_step == 1 && x.k_step != 1;
  const unsigned groups = unsigned((x.rows + SIDE - 1) / SIDE), steps = unsigned((p.k + SIDE - 1) / SIDE);
  const unsigned units = groups * steps * unsigned(x.planes);
  for (unsigned unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const i64 first = i64(unit % steps) * SIDE, row = i64(unit / steps % groups) * SIDE;
    const unsigned plane = unit / steps / groups;
    const float* const from = x.plane(plane);
    // Of neighbours a thread has one, and of the other axis every fourth.
    constexpr int EACH = SIDE * SIDE / 256;
    const int near = threadIdx.x % SIDE, far = threadIdx.x / SIDE;
    const i64 fixed = across ? row + near : first + near, moving = (across ? first : row) + far;
    const i64 fixed_end = across ? x.rows : p.k, left = (across ? p.k : x.rows) - moving;
    const i64 fixed_step = across ? x.row_step : x.k_step, moving_step = across ? x.k_step : x.row_step;
    const float* at = from + fixed * fixed_step + moving * moving_step;
    const int count = fixed >= fixed_end || left <= 0 ? 0 : left < SIDE ? int(left) : SIDE;
    float held[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i, at += 4 * moving_step) held[i] = 4 * i < count ? *at : 0.0f;
    if (threadIdx.x < SIDE && row + threadIdx.x < x.rows) {
      const i64 line = plane * x.rows + row + threadIdx.x;
      unsigned most = 0;
      for (int part = 0; part < p.parts; ++part) most = max(most, x.maxima[line * PARTS + part]);
      const bool finite = most < 0x7f800000u;
      shifts[threadIdx.x] = finite ? shift_of(most) : int(NONFINITE);
      if (first == 0) x.shift[line] = finite ? shift_of(most) : 0;
      if (first == 0 && !finite) x.lost[line] = NONFINITE;
    }
    float* const to = across ? &tile[near][far] : &tile[far][near];
    const int step = across ? 4 : 4 * (SIDE + 1);
#pragma unroll
    for (int i = 0; i < EACH; ++i) to[i * step] = held[i];
    __syncthreads();
#pragma unroll 1
    for (int piece = threadIdx.x; piece < SIDE * SIDE / 8; piece += 256) {
      const int r = piece / 8, l = piece % 8 * 8;
      if (row + r >= x.rows || first + l >= p.lead) continue;
      ptx::Vec<__half, 8> high, low;
      const int shift = shifts[r];
      unsigned lost = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (shift == int(NONFINITE)) high[i] = low[i] = __float2half_rn(0.0f);
        else lost += split_one(tile[r][l + i], shift, high[i], low[i]);
      }
      __half* const pair = x.pairs + ((plane * 2 * x.rows) + row + r) * p.lead + first + l;
      *(ptx::Vec<__half, 8>*)pair = high;
      *(ptx::Vec<__half, 8>*)(pair + x.rows * p.lead) = low;
      if (lost) atomicAdd(x.lost + plane * x.rows + row + r, lost);
    }
    __syncthreads();
  }
}

// Whether a sum (of scaled operands) may be off by more than 2^-22 of the sizes of its terms, `lost` elements of its
// row and column not being held: each of them changes it by less than 2^-20, and it is no larger than those sizes.
__device__ __forceinline__ bool suspect(float sum, float lost) { return fabsf(sum) < 4.0f * lost; }
