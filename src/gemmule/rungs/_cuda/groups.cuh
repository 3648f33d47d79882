// Grouped products: the rows of A are sorted by the expert whose matrix they meet, and no host has seen where each
// expert's rows end. Of dense matrices the struct is a GemmArgs: a (m, k), b (batch experts, k, n), c (m, n), and the
// ends in `work`. Of codes it is a QuantArgs: m columns of each expert lie as rows of n codes, `scale_row` counts the
// experts, x are the tokens, `columns` of them, and the ends lie in `work` too.
#pragma once
#include "args.cuh"
#include "ptx.cuh"

// Kernels may be started before the one in front has ended: they wait for it, and let the next one start.
__device__ __forceinline__ void take_turn() {
#if __CUDA_ARCH__ >= 900
  ptx::pdl_wait();
  ptx::pdl_launch_dependents();
#endif
}

// The rows of one expert.
struct Group { int begin, count; };

// Where experts' rows end. Whatever the ends say, groups lie within the rows that there are.
struct Ends {
  const int* at;
  int rows, experts;
  __device__ __forceinline__ explicit Ends(const GemmArgs& p)
      : at((const int*)p.work), rows((int)p.m), experts((int)p.batch) {}
  __device__ __forceinline__ explicit Ends(const QuantArgs& p)
      : at((const int*)p.work), rows((int)p.columns), experts((int)p.scale_row) {}
  __device__ __forceinline__ Group of(int expert) const {
    const int begin = expert ? min(max(at[expert - 1], 0), rows) : 0;
    return {begin, min(max(at[expert], begin), rows) - begin};
  }
};

// The first of `experts` whose rows end behind `row`; `experts` where none does.
__device__ __forceinline__ int expert_of(const int* ends, int experts, i64 row) {
  int low = 0, high = experts;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] > row) high = middle;
    else low = middle + 1;
  }
  return low;
}

// What the threads in front of this one have in all, each `mine`. All THREADS of a block come here.
template <int THREADS> __device__ __forceinline__ int sum_before(int mine) {
  __shared__ int totals[THREADS / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = mine;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const int below = __shfl_up_sync(~0u, before, o);
    if (lane >= o) before += below;
  }
  if (lane == 31) totals[warp] = before;
  __syncthreads();
  before -= mine;
  for (int w = 0; w < warp; ++w) before += totals[w];
  return before;
}

// Fills first[e] with the pieces of `size` rows before expert e, for e up to `experts`, and returns how many there are:
// the list of what is to be done, which each block makes for itself. All THREADS of a block come here.
template <int THREADS>
__device__ __forceinline__ int list_pieces(const Ends& ends, int size, int* first) {
  const int experts = ends.experts;
  const int share = (experts + THREADS - 1) / THREADS, start = threadIdx.x * share, stop = min(start + share, experts);
  int mine = 0;
  for (int e = start; e < stop; ++e) mine += (ends.of(e).count + size - 1) / size;
  int before = sum_before<THREADS>(mine);
  for (int e = start; e < stop; ++e) {
    first[e] = before;
    before += (ends.of(e).count + size - 1) / size;
  }
  if (threadIdx.x == THREADS - 1) first[experts] = before;
  __syncthreads();
  return first[experts];
}

// What there is to be done at a time: some tokens of one expert, and a slab of columns of its matrix.
struct Work { int expert, slab, token, tokens; };

// Finds items of a list, which come in rising order: pieces of one slab side by side, so that they share its bytes.
// Where pieces have a `unit` they are as even as multiples of it can be: none of them has to wait for a fuller one.
struct Items {
  Ends ends;
  const int* first;   // of list_pieces, pieces of `size`
  int slabs, size, expert, unit = 0;
  __device__ __forceinline__ Work at(i64 item) {
    while (item >= (i64)first[expert + 1] * slabs) ++expert;
    const int pieces = first[expert + 1] - first[expert], local = (int)(item - (i64)first[expert] * slabs);
    const Group group = ends.of(expert);
    const int each = unit ? ((group.count + pieces - 1) / pieces + unit - 1) / unit * unit : size;
    const int begin = local % pieces * each;
    return {expert, local / pieces, group.begin + begin, min(group.count - begin, each)};
  }
};
