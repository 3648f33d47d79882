// Products of a matrix with few columns: the matrix is streamed once, and the columns are laid out
// beforehand as its lanes read them.
#pragma once
#include "stream.cuh"
#include "tiles.cuh"

// The product as the kernels see it: the streamed matrix is `a`. TURNED: C^T = B^T A^T, so that the rows of
// X W^T, few of them, are the columns.
template <bool TURNED>
__device__ __forceinline__ GemmArgs seen(const GemmArgs& p) {
  if constexpr (!TURNED) return p;
  else return {p.b, p.a, p.c, p.work, p.n, p.m, p.k, p.batch, p.b_col, p.b_row, p.b_batch,
               p.a_col, p.a_row, p.a_batch, p.c_col, p.c_row, p.c_batch, p.alpha, p.beta};
}

// Columns are packed in their own type, or in the matrix's where that is wider.
template <class TA, class TB, bool WIDER = (sizeof(TA) > sizeof(TB))> struct PackedOf { typedef TB type; };
template <class TA, class TB> struct PackedOf<TA, TB, true> { typedef TA type; };

// The block's place: rows of the matrix first in `row`, columns in `group`, and the entry of the batch.
struct Slab { i64 batch; int row, group; };
__device__ __forceinline__ Slab slab_of(const GemmArgs& p, int rows, int columns) {
  const unsigned groups = (unsigned)((p.n + columns - 1) / columns), slabs = (unsigned)((p.m + rows - 1) / rows);
  const Place at = place_of(p.batch, blockIdx.x, (i64)slabs * groups);
  return {at.batch, (int)(at.block / groups) * rows, (int)(at.block % groups)};
}

// Waits for the packed columns; a kernel loads what it can of the matrix before.
__device__ __forceinline__ void wait_for_columns() {
#if __CUDA_ARCH__ >= 900 || defined(CUEMU)
  ptx::pdl_wait();
#endif
}

// Vectors of U chunks of R rows from chunk c on. Chunks from `end` on repeat the one before it: a predicate would have
// the compiler wait between the loads.
template <int CHUNK, class T, int U, int R>
__device__ __forceinline__ void load_rows(Chunk<T> (&v)[U][R], const T* const (&rows)[R], int c, int end) {
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int r = 0; r < R; ++r) v[u][r] = ptx::ld_stream((const Chunk<T>*)(rows[r] + min(c + u, end - 1) * CHUNK));
}

// V packed elements. A plain load: read-only ones may be moved above the wait.
template <class TP, int V>
__device__ __forceinline__ XChunk<TP, V> load_packed(const TP* b) {
  XChunk<TP, V> c;
#pragma unroll
  for (int i = 0; i < c.parts; ++i) ((uint4*)&c)[i] = ((const uint4*)b)[i];
  return c;
}

// One vector of a row at element `at`, at any alignment, zero from element k on.
template <class T>
__device__ __forceinline__ Chunk<T> load_guarded(const T* row, int at, int k) {
  constexpr int V = Lanes<T>::count;
  if (at >= V && at + 2 * V <= k) return load_shifted_if(row + at, true);  // its neighbours lie in the row
  Chunk<T> c;
#pragma unroll
  for (int v = 0; v < V; ++v) c[v] = at + v < k ? row[at + v] : T(0);
  return c;
}

template <class T>
__device__ __forceinline__ bool rows_aligned(const T* base, i64 step) {
  return (((u64)base | (u64)step * sizeof(T)) & 15) == 0;
}

// packed[batch][group][chunk][column][lane][v] = element chunk * LANES * V + lane * V + v of the column, zero past
// the end: what LANES lanes read of one column in a step lies side by side.
template <class TP, class TB, int V, int LANES, int N, bool TURNED>
__global__ void __launch_bounds__(256) pack_columns(const GemmArgs args) {
#if __CUDA_ARCH__ >= 900 || defined(CUEMU)
  ptx::pdl_launch_dependents();
#endif
  const GemmArgs p = seen<TURNED>(args);
  const unsigned chunks = (unsigned)((p.k + LANES * V - 1) / (LANES * V)), groups = (unsigned)((p.n + N - 1) / N);
  const unsigned index = blockIdx.x * 256 + threadIdx.x;  // below 2^32: a constraint of the rungs
  const unsigned lane = index % LANES, column = index / LANES % N, rest = index / LANES / N;
  const unsigned chunk = rest % chunks, group = rest / chunks % groups, batch = rest / chunks / groups;
  if (batch >= (p.b_batch ? p.batch : 1)) return;
  const i64 first = ((i64)chunk * LANES + lane) * V, j = (i64)group * N + column;
  const TB* b = (const TB*)p.b + (i64)batch * p.b_batch;
  XChunk<TP, V> out;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const TB value = element_or_zero(b, first + v, j, p.k, p.n, p.b_row, p.b_col);
    if constexpr (sizeof(TP) == sizeof(TB)) out.part[v / Lanes<TP>::count].v[v % Lanes<TP>::count] = value;
    else out.part[v / Lanes<TP>::count].v[v % Lanes<TP>::count] = wide<TP>(value);
  }
#pragma unroll
  for (int i = 0; i < out.parts; ++i) ((Chunk<TP>*)p.work)[(u64)index * out.parts + i] = out.part[i];
}
