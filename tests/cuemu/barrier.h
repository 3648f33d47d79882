// State of cluster barriers and mbarriers, and what completes them.
#pragma once
#include "shared.h"

namespace cuemu {

// ---- the cluster barrier: every thread of the cluster that has not exited ------------------------------------
inline ClusterBarrier& cluster_barrier(const Cta& c) { return S.cluster_bar[c.cluster_first / S.cluster_size]; }
inline unsigned cluster_alive(const Cta& c) {
  unsigned n = 0;
  for (unsigned i = 0; i < S.cluster_size; ++i) n += S.ctas[c.cluster_first + i].alive;
  return n;
}
inline void check_cluster_barrier(const Cta& c) {
  ClusterBarrier& b = cluster_barrier(c);
  if (!b.arrived || b.arrived != cluster_alive(c)) return;
  b.arrived = 0;
  ++b.generation;
  ++S.report.barriers;
  progress();
}

// ---- mbarrier: its eight bytes as the emulator lays them out ---------------------------------------------------
struct Mbarrier {
  unsigned phase : 1, count : 14, pending : 14, tag : 3;   // tag tells an initialised one from poison
  int tx : 24;                                             // bytes announced and not yet delivered
  unsigned unseen : 1;                                     // a phase ended, and nobody has waited for it so far
};
static_assert(sizeof(Mbarrier) == 8, "as a device has it");
inline constexpr unsigned kMbarrierTag = 5;

inline Mbarrier& mbarrier_at(unsigned addr, const char* what, const char* file, int line) {
  char* p = from_shared_address(addr);
  Mbarrier& b = *reinterpret_cast<Mbarrier*>(p);
  if (reinterpret_cast<uintptr_t>(p) % 8)
    fail("mbarrier", "%s at %s:%d: address 0x%x is not a multiple of 8", what, base_name(file), line, addr);
  if (b.tag != kMbarrierTag)
    fail("mbarrier", "%s at %s:%d: the mbarrier at 0x%x was not initialised", what, base_name(file), line, addr);
  return b;
}
// Who waits for a phase by its parity cannot tell it from the next but one: an end that nobody saw before the next one
// means more arrivals than were counted on.
inline void check_phase(Mbarrier& b) {
  if (b.pending || b.tx) return;
  if (b.unseen) fail("mbarrier", "a phase of %u arrivals ended, and nobody had waited for the one before", b.count);
  b.unseen = 1;
  b.phase ^= 1;
  b.pending = b.count;
  progress();
}
inline void mbarrier_arrive(Mbarrier& b, const char* file, int line) {
  if (!b.pending)
    fail("mbarrier", "arrival at %s:%d: all %u arrivals of the phase were in already", base_name(file), line, b.count);
  --b.pending;
  progress();
  check_phase(b);
}
inline void mbarrier_deliver(Mbarrier& b, unsigned bytes) {
  b.tx -= int(bytes);
  check_phase(b);
}
inline const char* mbarrier_state(const void* bar, char* text, size_t size) {
  const Mbarrier& b = *static_cast<const Mbarrier*>(bar);
  if (b.pending || !b.tx) return nullptr;
  snprintf(text, size, "all threads have arrived, but %d bytes %s", b.tx > 0 ? b.tx : -b.tx,
           b.tx > 0 ? "that were announced never came" : "more came than were announced");
  return text;
}

}  // namespace cuemu
