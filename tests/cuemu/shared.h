// Shared memory of a block: [1 KiB reserved | dynamic -> ... <- static], poisoned at every block's start.
#pragma once
#include <initializer_list>

#include "sched.h"

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __asan_poison_memory_region(void const volatile*, size_t);
extern "C" void __asan_unpoison_memory_region(void const volatile*, size_t);
#endif

namespace cuemu {

inline constexpr unsigned char kPoison = 0xff;   // a NaN in every float format, -1 in the integers
inline constexpr unsigned kGuardBytes = 64;      // checked after the dynamic part at the block's end

struct SharedArena {
  char* base = nullptr;
  size_t count = 0;
};
inline SharedArena arena;

// The dynamic part starts no better aligned than the kernel declares (at least 16 bytes).
inline unsigned dynamic_offset(size_t align) {
  return kReservedBytes + (align >= 1024 ? 0 : unsigned(align < 16 ? 16 : align));
}
inline size_t widest(std::initializer_list<size_t> all) {
  size_t most = 1;
  for (size_t a : all) most = a > most ? a : most;
  return most;
}
inline unsigned dynamic_limit() { return kReservedBytes + 512 + S.cfg.smem + kGuardBytes; }

// extern __shared__: see source.py, which rewrites the declaration into a call of this.
inline char* dynamic_shared(size_t align) {
  char* p = S.cur->cta->shared + dynamic_offset(align);
  S.dynamic_end = dynamic_offset(align) + S.cfg.smem;
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(p, S.cfg.smem);
#endif
  return p;
}
// __shared__: one place per declaration and template instance, told apart by the address of a local static.
char* static_shared(const void* key, size_t bytes, size_t align);

// Addresses of the shared state space: the offset in one's own block, or (rank + 1) << 24 | offset after mapa.
inline unsigned to_shared_address(const void* p) {
  const char* q = static_cast<const char*>(p);
  const ptrdiff_t at = q - S.cur->cta->shared;
  if (at >= 0 && at < ptrdiff_t(kSharedBytes)) return unsigned(at);
  const ptrdiff_t all = q - arena.base;
  if (all < 0 || all >= ptrdiff_t(arena.count * kSharedBytes))
    fail("address_space", "%p is not an address of shared memory", p);
  const unsigned block = unsigned(all / kSharedBytes);
  return (S.ctas[block].rank + 1) << 24 | unsigned(all % kSharedBytes);
}
inline char* from_shared_address(unsigned a) {
  const unsigned offset = a & 0xffffff, rank = a >> 24;
  if (offset >= kSharedBytes || rank > S.cluster_size) fail("address_space", "0x%x is not in shared memory", a);
  const Cta& c = *S.cur->cta;
  return (rank ? S.ctas[c.cluster_first + rank - 1].shared : c.shared) + offset;
}

#ifdef CUEMU_BANKS
// What a warp asks of shared memory at once; counted in passes over the banks.
struct Request {
  unsigned lanes = 0, bytes = 0;
  unsigned address[32];
};
void count_request(const Request& r);
#endif

}  // namespace cuemu
