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

inline bool reserve_shared(size_t blocks) {
  if (blocks > arena.count) {
    free(arena.base);
    arena.base = static_cast<char*>(aligned_alloc(1024, blocks * kSharedBytes));
    arena.count = arena.base ? blocks : 0;
  }
  for (size_t i = 0; i < blocks && arena.base; ++i) S.ctas[i].shared = arena.base + i * kSharedBytes;
  return arena.base != nullptr;
}
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

inline void poison_shared(Cta& c) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(c.shared, kSharedBytes);
#endif
  memset(c.shared, kPoison, dynamic_limit());
  memset(c.shared + S.static_low, kPoison, kSharedBytes - S.static_low);
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(c.shared, S.static_low);
  for (const SharedVar& v : S.static_vars) __asan_unpoison_memory_region(c.shared + v.offset, v.bytes);
#endif
}
// A write past the end of the dynamic part shows here even without AddressSanitizer.
inline void check_shared_end(const Cta& c) {
#if !defined(__SANITIZE_ADDRESS__)
  for (unsigned i = S.dynamic_end; i && i < dynamic_limit(); ++i)
    if (static_cast<unsigned char>(c.shared[i]) != kPoison) {
      snprintf(S.report.kind, sizeof S.report.kind, "shared_overrun");
      snprintf(S.report.text, sizeof S.report.text, "block (%u,%u,%u) wrote past its %u bytes of dynamic shared memory",
               c.index.x, c.index.y, c.index.z, S.cfg.smem);
      return;
    }
#else
  (void)c;
#endif
}

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
inline char* static_shared(const void* key, size_t bytes, size_t align) {
  Cta& c = *S.cur->cta;
  for (const SharedVar& v : S.static_vars)
    if (v.key == key) return c.shared + v.offset;
  const size_t gap = align < 16 ? 16 : align;
  const long long at = (static_cast<long long>(S.static_low) - static_cast<long long>(bytes)) & ~(long long)(gap - 1);
  S.static_bytes += unsigned(bytes);
  if (S.static_bytes > kMaxStaticBytes) fail("launch", "more than 48 KiB of static __shared__ memory");
  if (S.static_bytes + S.cfg.smem > kMaxDynamicBytes)
    fail("launch", "static and dynamic shared memory together exceed 227 KiB");
  ++S.in_runtime;
  S.static_vars.push_back({key, unsigned(at), bytes});
  --S.in_runtime;
  S.static_low = unsigned(at);
  for (Cta& each : S.ctas) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(each.shared + at, bytes);
#endif
    memset(each.shared + at, kPoison, bytes);
  }
  return c.shared + at;
}

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

}  // namespace cuemu
