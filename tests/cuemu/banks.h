// Bank conflicts, from the memory hooks that -fsanitize=thread inserts (no library is linked; the hooks are ours).
// The n-th access of each lane from one place in the code is taken as one request of the warp.
// Part of runtime.cpp.
#pragma once
#include <deque>
#include <map>

#include "shared.h"

#define CUEMU_PLAIN __attribute__((no_sanitize("thread"), used))

namespace cuemu {

struct Place {   // one instruction of one warp
  unsigned done[32] = {};      // accesses of each lane
  unsigned first = 0;          // number of the oldest open request
  std::deque<Request> open;
};
using Places = std::map<std::pair<unsigned, const void*>, Place>;
inline Places* places = nullptr;

// A pass serves 128 bytes: 32 lanes of 4 bytes, 16 of 8, 8 of 16; lanes with the same word share it.
CUEMU_PLAIN void count_request(const Request& r) {
  const unsigned group = r.bytes <= 4 ? 32 : r.bytes == 8 ? 16 : 8;
  for (unsigned first = 0; first < 32; first += group) {
    unsigned words[32][32], used[32] = {}, passes = 0;
    for (unsigned lane = first; lane < first + group; ++lane) {
      if (!(r.lanes >> lane & 1)) continue;
      for (unsigned b = 0; b < r.bytes; b += 4) {
        const unsigned word = (r.address[lane] + b) / 4, bank = word % 32;
        unsigned i = 0;
        while (i < used[bank] && words[bank][i] != word) ++i;
        if (i == used[bank]) words[bank][used[bank]++] = word;
        if (used[bank] > passes) passes = used[bank];
      }
    }
    S.report.shared_wavefronts += passes;
    S.report.shared_ideal += passes != 0;
  }
}
CUEMU_PLAIN inline void record(const void* p, unsigned bytes, const void* pc) {
  const char* q = static_cast<const char*>(p);
  if (!S.cur || S.in_runtime || q < arena.base || q >= arena.base + arena.count * kSharedBytes) return;
  ++S.in_runtime;
  if (!places) places = new Places;
  const Fiber& f = *S.cur;
  const unsigned warp = unsigned(f.cta - S.ctas.data()) * 32 + f.warp;
  Place& place = (*places)[{warp, pc}];
  const unsigned n = place.done[f.lane]++ - place.first;
  while (place.open.size() <= n) place.open.emplace_back();
  Request& r = place.open[n];
  r.lanes |= 1u << f.lane;
  r.bytes = bytes;
  r.address[f.lane] = unsigned(size_t(q - arena.base) % kSharedBytes);
  const unsigned alive = f.cta->warps[f.warp].alive;
  while (!place.open.empty() && (place.open.front().lanes & alive) == alive && alive) {
    count_request(place.open.front());
    place.open.pop_front();
    ++place.first;
  }
  --S.in_runtime;
}
// At the end of a resident group: requests in which not all lanes took part.
CUEMU_PLAIN inline void count_open_requests() {
  if (!places) return;
  for (const auto& entry : *places)
    for (const Request& r : entry.second.open)
      if (r.lanes) count_request(r);
  places->clear();
}

}  // namespace cuemu

extern "C" {
#define CUEMU_HOOK(n)                                                                                            \
  CUEMU_PLAIN inline void __tsan_read##n(void* p) { cuemu::record(p, n, __builtin_return_address(0)); }           \
  CUEMU_PLAIN inline void __tsan_write##n(void* p) { cuemu::record(p, n, __builtin_return_address(0)); }          \
  CUEMU_PLAIN inline void __tsan_unaligned_read##n(void* p) { cuemu::record(p, n, __builtin_return_address(0)); } \
  CUEMU_PLAIN inline void __tsan_unaligned_write##n(void* p) { cuemu::record(p, n, __builtin_return_address(0)); } \
  CUEMU_PLAIN inline void __tsan_volatile_read##n(void* p) { cuemu::record(p, n, __builtin_return_address(0)); }  \
  CUEMU_PLAIN inline void __tsan_volatile_write##n(void* p) { cuemu::record(p, n, __builtin_return_address(0)); }
CUEMU_HOOK(1)
CUEMU_HOOK(2)
CUEMU_HOOK(4)
CUEMU_HOOK(8)
CUEMU_HOOK(16)
#undef CUEMU_HOOK
CUEMU_PLAIN inline void __tsan_read_range(void* p, unsigned long n) {
  if (n <= 16) cuemu::record(p, unsigned(n), __builtin_return_address(0));
}
CUEMU_PLAIN inline void __tsan_write_range(void* p, unsigned long n) {
  if (n <= 16) cuemu::record(p, unsigned(n), __builtin_return_address(0));
}
CUEMU_PLAIN inline void __tsan_func_entry(void*) {}
CUEMU_PLAIN inline void __tsan_func_exit() {}
CUEMU_PLAIN inline void __tsan_init() {}
CUEMU_PLAIN inline void __tsan_vptr_update(void*, void*) {}
CUEMU_PLAIN inline void __tsan_vptr_read(void*) {}
}
