// Warp intrinsics: shuffles, votes, reductions. Lanes that are absent or have exited give poison.
#pragma once
#include "sched.h"

#define CUEMU_AT const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace cuemu {

enum class Shuffle { down, up, exclusive_or, index };

template <class T>
T shuffle(Shuffle kind, unsigned mask, T v, int arg, int width, const char* file, int line) {
  static_assert(sizeof(T) <= 16, "a shuffle moves at most 16 bytes here");
  if (width < 1 || width > 32 || (width & (width - 1)))
    fail("bad_mask", "shuffle at %s:%d: width %d is not a power of two up to 32", base_name(file), line, width);
  const int lane = int(S.cur->lane), first = lane & ~(width - 1), own = lane - first;
  int from = 0;
  switch (kind) {
    case Shuffle::down: from = own + arg; break;
    case Shuffle::up: from = own - arg; break;
    case Shuffle::exclusive_or: from = lane ^ arg; break;
    case Shuffle::index: from = arg & (width - 1); break;
  }
  // Past the end of the segment a lane reads itself; xor may read any earlier segment.
  if (kind == Shuffle::exclusive_or) from = from < first + width ? from - first : own;
  else if (from < 0 || from >= width) from = own;
  T r;
  exchange(mask, &v, sizeof v, "a shuffle", file, line,
           [&](const Meet& m) { memcpy(static_cast<void*>(&r), m.value[first + from], sizeof r); });
  return r;
}
// Calls f(bits) for every lane of the mask that took part; bits is what the lane gave.
template <class F>
void over_lanes(unsigned mask, unsigned mine, const char* what, const char* file, int line, F&& f) {
  exchange(mask, &mine, sizeof mine, what, file, line, [&](const Meet& m) {
    for (int i = 0; i < 32; ++i)
      if (m.arrived >> i & 1) {
        unsigned bits;
        memcpy(&bits, m.value[i], sizeof bits);
        f(i, bits);
      }
  });
}

}  // namespace cuemu

inline void __syncwarp(unsigned mask = ~0u, CUEMU_AT) { cuemu::sync_warp(mask, file, line); }
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, CUEMU_AT) {
  return cuemu::shuffle(cuemu::Shuffle::down, mask, v, int(delta), width, file, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, CUEMU_AT) {
  return cuemu::shuffle(cuemu::Shuffle::up, mask, v, int(delta), width, file, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int lane_mask, int width = 32, CUEMU_AT) {
  return cuemu::shuffle(cuemu::Shuffle::exclusive_or, mask, v, lane_mask, width, file, line);
}
template <class T>
T __shfl_sync(unsigned mask, T v, int lane, int width = 32, CUEMU_AT) {
  return cuemu::shuffle(cuemu::Shuffle::index, mask, v, lane, width, file, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, CUEMU_AT) {
  unsigned r = 0;
  cuemu::over_lanes(mask, predicate != 0, "a vote", file, line, [&](int i, unsigned b) { r |= b << i; });
  return r;
}
inline int __any_sync(unsigned mask, int predicate, CUEMU_AT) {
  return __ballot_sync(mask, predicate, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CUEMU_AT) {
  return __ballot_sync(mask, !predicate, file, line) == 0;
}
// The lanes that have not exited: the emulator's lanes are never reconverged by chance.
inline unsigned __activemask() { return cuemu::S.cur->cta->warps[cuemu::S.cur->warp].alive; }
inline unsigned __match_any_sync(unsigned mask, unsigned v, CUEMU_AT) {
  unsigned r = 0;
  cuemu::over_lanes(mask, v, "a match", file, line, [&](int i, unsigned b) { r |= unsigned(b == v) << i; });
  return r;
}
#define CUEMU_REDUCE(name, T, start, step)                                                               \
  inline T name(unsigned mask, T v, CUEMU_AT) {                                                           \
    T r = start;                                                                                          \
    cuemu::over_lanes(mask, unsigned(v), "a reduction", file, line, [&](int, unsigned u) { T b = T(u); r = step; }); \
    return r;                                                                                             \
  }
CUEMU_REDUCE(__reduce_add_sync, unsigned, 0u, r + b)
CUEMU_REDUCE(__reduce_min_sync, unsigned, ~0u, b < r ? b : r)
CUEMU_REDUCE(__reduce_max_sync, unsigned, 0u, b > r ? b : r)
CUEMU_REDUCE(__reduce_and_sync, unsigned, ~0u, r & b)
CUEMU_REDUCE(__reduce_or_sync, unsigned, 0u, r | b)
CUEMU_REDUCE(__reduce_xor_sync, unsigned, 0u, r ^ b)
CUEMU_REDUCE(__reduce_add_sync, int, 0, int(unsigned(r) + unsigned(b)))
CUEMU_REDUCE(__reduce_min_sync, int, 2147483647, b < r ? b : r)
CUEMU_REDUCE(__reduce_max_sync, int, (-2147483647 - 1), b > r ? b : r)
#undef CUEMU_REDUCE

namespace cuemu {
// __syncthreads_count/and/or: a vote between two barriers.
inline int sync_block_vote(int predicate, const char* file, int line) {
  Cta& c = *S.cur->cta;
  c.votes[0] += predicate != 0;
  named_barrier(0, 0, true, file, line);
  const int count = c.votes[0];
  named_barrier(0, 0, true, file, line);
  c.votes[0] = 0;
  named_barrier(0, 0, true, file, line);
  return count;
}
}  // namespace cuemu
inline int __syncthreads_count(int p, CUEMU_AT) { return cuemu::sync_block_vote(p, file, line); }
inline int __syncthreads_or(int p, CUEMU_AT) { return cuemu::sync_block_vote(p, file, line) != 0; }
inline int __syncthreads_and(int p, CUEMU_AT) { return cuemu::sync_block_vote(!p, file, line) == 0; }
