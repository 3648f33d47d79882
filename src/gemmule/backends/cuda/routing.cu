// What comes before and behind a grouped product whose rows nobody sorted: slots in the order of their experts, rows of
// A gathered in that order, and what becomes of the sums.
#include "few_rows.cuh"

// A slot is one of the top_k experts of a token. work: the ends of the experts, then the slots in their order, then where
// each slot went, or -1 where its index names no expert, then room for a count of each expert. Without indices rows are
// sorted already, `ends` are the caller's, and a slot is a row. Strides count elements.
struct RouteArgs {
  const void* indices;
  const void* weights;
  const void* a;
  void* out;
  int* work;
  void* rows;         // of A, gathered
  const void* sums;
  const int* ends;
  i64 slots, top_k, experts, k, columns;   // columns: of the result
  i64 a_token, a_slot, a_col, row, sum_row;
  i64 out_token, out_slot, out_col;
  __device__ __forceinline__ const int* order() const { return work + experts; }
  __device__ __forceinline__ const int* places() const { return work + experts + slots; }
};

constexpr int SORTERS = 1024, MOST_COUNTED = 8192;   // experts whose counts have room in shared memory
constexpr int COPIERS = 256;

template <class I> __device__ __forceinline__ int expert_of_slot(const RouteArgs& p, int slot) {
  const I one = ((const I*)p.indices)[slot];
  return one >= 0 && one < (I)p.experts ? (int)one : -1;
}

// One block counts the slots of each expert and gives each a place among them. Which of an expert's places a slot gets
// may differ from run to run; what is computed of it does not.
template <class I> __global__ void __launch_bounds__(SORTERS) sort_slots(const RouteArgs p) {
  __shared__ int near[MOST_COUNTED];
  const int experts = (int)p.experts, slots = (int)p.slots;
  int* const ends = p.work, *const order = ends + experts, *const places = order + slots;
  int* const counts = experts <= MOST_COUNTED ? near : places + slots;
  for (int e = threadIdx.x; e < experts; e += SORTERS) counts[e] = 0;
  __syncthreads();
  for (int s = threadIdx.x; s < slots; s += SORTERS) {
    const int expert = expert_of_slot<I>(p, s);
    if (expert >= 0) atomicAdd(counts + expert, 1);
  }
  __syncthreads();
  const int share = (experts + SORTERS - 1) / SORTERS, start = threadIdx.x * share, stop = min(start + share, experts);
  int mine = 0;
  for (int e = start; e < stop; ++e) mine += counts[e];
  int before = sum_before<SORTERS>(mine);
  for (int e = start; e < stop; ++e) {
    const int count = counts[e];
    counts[e] = before;   // of its next slot
    before += count;
    ends[e] = before;
  }
  __syncthreads();
  for (int s = threadIdx.x; s < slots; s += SORTERS) {
    const int expert = expert_of_slot<I>(p, s), place = expert < 0 ? -1 : atomicAdd(counts + expert, 1);
    places[s] = place;
    if (place >= 0) order[place] = s;
  }
}

// A block copies the row of a slot to its place. T: any type as large as A's; WIDE: all rows begin at whole 16 bytes, and
// lie along them.
template <class T, bool WIDE> __device__ __forceinline__ void copy_row(const RouteArgs& p, int slot, int place) {
  const int token = slot / (int)p.top_k;
  const T* const from = (const T*)p.a + token * p.a_token + (slot - token * (int)p.top_k) * p.a_slot;
  T* const to = (T*)p.rows + place * p.row;
  if constexpr (WIDE) {
    constexpr int V = 16 / sizeof(T);
    typedef ptx::Vec<T, V> Vector;
    for (int i = threadIdx.x * V; i < p.k; i += COPIERS * V) {
      if (i + V <= p.k) *(Vector*)(to + i) = *(const Vector*)(from + i);
      else for (int j = i; j < p.k; ++j) to[j] = from[j];
    }
  } else {
    for (i64 i = threadIdx.x; i < p.k; i += COPIERS) to[i] = from[i * p.a_col];
  }
}
template <class T, bool WIDE> __global__ void __launch_bounds__(COPIERS) gather_rows(const RouteArgs p) {
  take_turn();
  if ((int)blockIdx.x < p.ends[p.experts - 1]) copy_row<T, WIDE>(p, p.order()[blockIdx.x], blockIdx.x);
}

// Both at once for at most FEW_SLOTS slots: each block sorts all of them for itself, all in one way, and copies its rows.
template <class I, class T, bool WIDE> __global__ void __launch_bounds__(COPIERS) sort_and_gather(const RouteArgs p) {
  __shared__ int ends[FEW_EXPERTS], experts_of[FEW_SLOTS], order[FEW_SLOTS];
  const int experts = (int)p.experts, slots = (int)p.slots;
  const int place = sort_few<COPIERS>((const I*)p.indices, slots, experts, ends, order, experts_of);
  if (blockIdx.x == 0) {
    for (int e = threadIdx.x; e < experts; e += COPIERS) p.work[e] = ends[e];
    if (threadIdx.x < slots) p.work[experts + slots + threadIdx.x] = place;
  }
  const int named = experts ? ends[experts - 1] : 0;
  for (int at = blockIdx.x; at < named; at += gridDim.x) copy_row<T, WIDE>(p, order[at], at);
}

__device__ __forceinline__ float negative_exp(float v) { return expf(-v); }
__device__ __forceinline__ double negative_exp(double v) { return exp(-v); }

// A thread finishes V neighbouring columns of a token (COMBINED), or of a slot: all in one access where V is more than 1.
// GATED: sums hold gates, then as many ups.
template <class TS, class TC, class TW, bool GATED, bool COMBINED, int V>
__global__ void __launch_bounds__(256) deliver(const RouteArgs p) {
  take_turn();
  typedef typename AccOf<TC>::type Acc;
  typedef ptx::Vec<TS, V> Sums;
  const i64 chunks = (p.columns + 256 * V - 1) / (256 * V), row = blockIdx.x / chunks;
  const i64 column = (blockIdx.x % chunks * 256 + threadIdx.x) * V;
  if (column >= p.columns) return;
  if (!p.indices && row >= p.ends[p.experts - 1]) return;
  Acc total[V] = {};
  auto add = [&](i64 at, Acc weight) {
    const TS* const from = (const TS*)p.sums + at * p.sum_row + column;
    const Sums sums = *(const Sums*)from;
    Sums ups;
    if constexpr (GATED) ups = *(const Sums*)(from + p.columns);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      Acc v = wide<Acc>(sums[i]);
      if constexpr (GATED) v = v / (1 + negative_exp(v)) * wide<Acc>(ups[i]);
      total[i] += COMBINED ? weight * v : v;
    }
  };
  i64 to = row * p.out_token;
  if constexpr (COMBINED) {
    for (i64 s = row * p.top_k; s < (row + 1) * p.top_k; ++s)
      if (p.places()[s] >= 0) add(p.places()[s], wide<Acc>(((const TW*)p.weights)[s]));
  } else {
    const i64 at = p.indices ? p.places()[row] : row, token = row / p.top_k;
    to = token * p.out_token + (row - token * p.top_k) * p.out_slot;
    if (at >= 0) add(at, 1);
  }
  ptx::Vec<TC, V> results;
#pragma unroll
  for (int i = 0; i < V; ++i) results[i] = narrow<TC, Acc>(total[i]);
  *(ptx::Vec<TC, V>*)((TC*)p.out + to + column * p.out_col) = results;
}
