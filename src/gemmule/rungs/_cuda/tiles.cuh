// What matmul rungs share: which tile of C a block computes, and guarded loads of single elements.
#pragma once
#include "args.cuh"

// The first row and column of a block's tile of C, and its place in the batch.
struct Tile {
  i64 batch, row, col;
};

// Blocks are numbered along grid x alone: y and z end at 65,535. GROUP tile rows are walked down before the
// next tile column, so that the blocks that run together share rows of A and columns of B in the L2; with
// GROUP 1 they follow the rows of C.
template <int GROUP = 1>
__device__ __forceinline__ Tile tile_of(const GemmArgs& p, int height, int width) {
  const i64 down = (p.m + height - 1) / height, across = (p.n + width - 1) / width;
  const i64 batch = blockIdx.x / (down * across), index = blockIdx.x % (down * across);
  const i64 first = index / (GROUP * across) * GROUP, rest = index - first * across;
  const i64 rows = down - first < GROUP ? down - first : GROUP;
  return {batch, (first + rest % rows) * height, rest / rows * width};
}

// The operands of one batch entry.
template <class T>
__device__ __forceinline__ const T* entry(const void* base, i64 batch, i64 step) {
  return (const T*)base + batch * step;
}

// Element (i, j) of a matrix of `rows` x `cols`, zero outside. Row and column are tested apart: a linear
// index inside the array may belong to the next row, whose Inf or NaN a zero on the other side would not stop.
template <class T>
__device__ __forceinline__ T element_or_zero(const T* a, i64 i, i64 j, i64 rows, i64 cols, i64 row_step,
                                             i64 col_step) {
  return i < rows && j < cols ? a[i * row_step + j * col_step] : T(0);
}

// Store element (i, j) of C, if C has one.
template <class T, class Acc>
__device__ __forceinline__ void finish_at(const GemmArgs& p, i64 batch, i64 i, i64 j, Acc sum) {
  if (i < p.m && j < p.n) finish((T*)p.c + batch * p.c_batch + i * p.c_row + j * p.c_col, sum, p.alpha, p.beta);
}
