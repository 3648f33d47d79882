// Few rows that nobody sorted: each block of a grouped product puts them in the order of their experts for itself.
#pragma once
#include "groups.cuh"

// Few slots, each of which names an expert or, with an index that is none, nothing, in the order of their experts, all in
// one way: ends[e] is where expert e's end, order[i] the slot of place i, experts_of[s] the expert of slot s or -1.
// Returns the place of this thread's slot, or -1. All THREADS of a block come here, at least as many as slots.
constexpr int FEW_SLOTS = 256, FEW_EXPERTS = 4096;
template <int THREADS, class I>
__device__ __forceinline__ int sort_few(const I* indices, int slots, int experts, int* ends, int* order, int* experts_of) {
  static_assert(THREADS >= FEW_SLOTS, "a slot a thread");
  const int mine = threadIdx.x;
  for (int e = mine; e < experts; e += THREADS) ends[e] = 0;
  __syncthreads();
  const I one = mine < slots ? indices[mine] : -1;
  const int expert = one >= 0 && one < (I)experts ? (int)one : -1;
  if (mine < FEW_SLOTS) experts_of[mine] = expert;
  if (expert >= 0) atomicAdd(ends + expert, 1);
  __syncthreads();
  const int share = (experts + THREADS - 1) / THREADS, start = mine * share, stop = min(start + share, experts);
  int held = 0;
  for (int e = start; e < stop; ++e) held += ends[e];
  int before = sum_before<THREADS>(held);
  for (int e = start; e < stop; ++e) ends[e] = before += ends[e];
  __syncthreads();
  int place = -1;
  if (expert >= 0) {
    place = expert ? ends[expert - 1] : 0;
    for (int s = 0; s < mine; ++s) place += experts_of[s] == expert;
    order[place] = mine;
  }
  __syncthreads();
  return place;
}

// Of codes, how few slots find their rows: `work` of the QuantArgs has their indices, `columns` counts them, and slot s
// reads row s / top_k of x and writes row s of y. places: what is to be done with row s, s, or -1 for
// nothing; or null.
struct RoutedArgs {
  QuantArgs q;
  i64 top_k;
  int* places;
};

// Where the row of a place in the order of experts lies in x and in y.
struct Sorted {
  __device__ __forceinline__ int x(int place) const { return place; }
  __device__ __forceinline__ int y(int place) const { return place; }
};
struct Found {
  const int* order;
  int top_k;
  __device__ __forceinline__ int x(int place) const { return order[place] / top_k; }
  __device__ __forceinline__ int y(int place) const { return order[place]; }
};
