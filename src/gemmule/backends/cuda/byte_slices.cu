// Integers of 2 to 8 bytes as digits of 8 bits with a sign, low ones first, and sums of products of these as integers
// of 8 bytes again, modulo 2^64.
#include "args.cuh"

constexpr int SIDE = 32, THREADS = 256, FOURS = SIDE / 4;   // of a tile; threads; fours of digits in a row of it

struct DigitsArgs {
  const void* from;
  void* to;
  i64 rows, steps, line;   // of the matrix; bytes of a digit's line, a multiple of 16, zeros behind the steps
  i64 row_step, step_step;
};

// Row by row the lines of its digits, the lowest first, or last where REVERSED.
template <class T, int DIGITS, bool REVERSED>
__global__ void __launch_bounds__(THREADS) take_digits(const DigitsArgs p) {
  __shared__ T tile[SIDE][SIDE + 1];
  const i64 down = (p.rows + SIDE - 1) / SIDE, across = (p.line + SIDE - 1) / SIDE;
  const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE, line = threadIdx.x / FOURS, four = threadIdx.x % FOURS * 4;
  const bool along = p.step_step == 1;   // neighbouring threads read what lies side by side
  for (i64 index = blockIdx.x; index < down * across; index += gridDim.x) {
    const i64 row = index % down * SIDE, step = index / down * SIDE;
#pragma unroll
    for (int part = 0; part < SIDE; part += THREADS / SIDE) {
      const int i = along ? y + part : x, l = along ? x : y + part;
      const bool there = row + i < p.rows && step + l < p.steps;
      tile[i][l] = there ? ((const T*)p.from)[(row + i) * p.row_step + (step + l) * p.step_step] : T(0);
    }
    __syncthreads();
    if (row + line < p.rows && step + four < p.line) {
      u64 rest[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) rest[i] = (u64)(i64)tile[line][four + i];
      unsigned char* to = (unsigned char*)p.to + (row + line) * DIGITS * p.line + step + four;
#pragma unroll
      for (int digit = 0; digit < DIGITS; ++digit) {
        unsigned word = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          word |= unsigned(rest[i] & 255) << 8 * i;
          // excerpt digit
          rest[i] = (u64)((i64)(rest[i] - (u64)(i64)(signed char)(rest[i] & 255)) >> 8);
          // end of excerpt
        }
        *(unsigned*)(to + (REVERSED ? DIGITS - 1 - digit : digit) * p.line) = word;
      }
    }
    __syncthreads();
  }
}

struct SumsArgs {
  const void* sums;
  void* c;
  i64 rows, columns, lead, plane;   // of C; int32 from row to row and from plane to plane of the sums
  i64 row_step, column_step;
  u64 alpha, beta;
};

// C = alpha sum + beta C, where plane s of the sums counts 256^s. With beta == 0 the old value is not read.
template <int PLANES>
__global__ void __launch_bounds__(THREADS) add_planes(const SumsArgs p) {
  for (i64 e = (i64)blockIdx.x * THREADS + threadIdx.x; e < p.rows * p.columns; e += (i64)gridDim.x * THREADS) {
    const i64 row = e / p.columns, column = e % p.columns;
    const int* sums = (const int*)p.sums + row * p.lead + column;
    u64 total = 0;
#pragma unroll
    for (int s = 0; s < PLANES; ++s) total += (u64)(i64)sums[s * p.plane] << 8 * s;
    u64* c = (u64*)p.c + row * p.row_step + column * p.column_step;
    total *= p.alpha;
    if (p.beta != 0) total += p.beta * *c;
    *c = total;
  }
}
