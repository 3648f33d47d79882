// Twins: loads, stores, flags, cp.async, dependent launch.
#pragma once

namespace ptx {

inline void check_aligned(const void* p, size_t n, const char* what, const char* file, int line) {
  if (reinterpret_cast<uintptr_t>(p) % n)
    cuemu::fail("misaligned", "%s at %s:%d: address %p is not a multiple of %zu", what, cuemu::base_name(file), line,
        p, n);
}

#define CUEMU_LOAD(name)                                  \
  template <class V>                                      \
  V name(const V* p, CUEMU_AT) {                          \
    check_aligned(p, sizeof(V), #name, file, line);       \
    return *p;                                            \
  }
CUEMU_LOAD(ld_nc)
CUEMU_LOAD(ld_cs)
CUEMU_LOAD(ld_stream)
CUEMU_LOAD(ld_stream_256)
#undef CUEMU_LOAD
#define CUEMU_LOAD_IF(name)                               \
  template <class V>                                      \
  V name(const V* p, bool wanted, CUEMU_AT) {             \
    if (!wanted) return V{};                              \
    check_aligned(p, sizeof(V), #name, file, line);       \
    return *p;                                            \
  }
CUEMU_LOAD_IF(ld_if)
CUEMU_LOAD_IF(ld_nc_if)
CUEMU_LOAD_IF(ld_cs_if)
CUEMU_LOAD_IF(ld_cs_128_if)
#undef CUEMU_LOAD_IF
inline u64 policy_evict_first() { return 0x12f0000000000000ull; }
inline u64 policy_evict_last() { return 0x14f0000000000000ull; }
template <class V>
V ld_hint(const V* p, u64, CUEMU_AT) {
  static_assert(sizeof(V) == 16, "16 bytes");
  check_aligned(p, 16, "ld_hint", file, line);
  return *p;
}
template <class V>
void st_stream(V* p, const V& v, CUEMU_AT) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16, "4, 8 or 16 bytes");
  check_aligned(p, sizeof(V), "st_stream", file, line);
  *p = v;
}
inline void prefetch_l2(const void*) {}

inline u32 ld_acquire(const u32* p) {
  cuemu::poll_point();
  return *const_cast<const volatile u32*>(p);
}
inline void st_release(u32* p, u32 v) { *const_cast<volatile u32*>(p) = v; }
inline u32 add_acq_rel(u32* p, u32 v) { return atomicAdd(p, v); }

inline u64 ld_relaxed_sys(const u64* p, CUEMU_AT) {
  check_aligned(p, 8, "ld_relaxed_sys", file, line);
  cuemu::poll_point();
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline void st_relaxed_sys(u64* p, u64 v, CUEMU_AT) {
  check_aligned(p, 8, "st_relaxed_sys", file, line);
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
inline void add_relaxed(u64* p, u64 v) { __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline u64 global_timer() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return u64(now.tv_sec) * 1000000000u + u64(now.tv_nsec);
}

inline u32 smem_addr(const void* p) { return cuemu::to_shared_address(p); }

inline float ld_shared(u32 addr, CUEMU_AT) {
  const char* p = cuemu::from_shared_address(addr);
  check_aligned(p, 4, "ld_shared", file, line);
  float v;
  memcpy(&v, p, 4);
  return v;
}
inline void st_shared(u32 addr, float2 v, CUEMU_AT) {
  char* p = cuemu::from_shared_address(addr);
  check_aligned(p, 8, "st_shared", file, line);
  memcpy(p, &v, 8);
}

inline void named_sync(u32 id, u32 threads, CUEMU_AT) { cuemu::named_barrier(id, threads, true, file, line); }
inline void named_arrive(u32 id, u32 threads, CUEMU_AT) { cuemu::named_barrier(id, threads, false, file, line); }

// The copy happens at wait_group, from what the source holds then; in an eager launch here and now, so that one
// into memory which others still read is seen.
template <int B>
void cp_async(u32 dst, const void* src, u32 valid = B, CUEMU_AT) {
  static_assert(B == 4 || B == 8 || B == 16, "4, 8 or 16 bytes");
  char* to = cuemu::from_shared_address(dst);
  check_aligned(to, B, "cp_async to shared memory", file, line);
  if (valid) check_aligned(src, B, "cp_async from global memory", file, line);
  if (valid > B) cuemu::fail("cp_async", "%s:%d: %u valid bytes of %d", cuemu::base_name(file), line, valid, B);
  ++cuemu::S.report.async_copies;
  const auto copy = [=] {
    if (valid) memcpy(to, src, valid);
    memset(to + valid, 0, B - valid);
  };
  if (cuemu::S.cfg.eager) copy();
  else cuemu::S.cur->queues->copies.add(copy);
}
inline void cp_async_commit() { cuemu::S.cur->queues->copies.commit(); }
template <int N>
void cp_async_wait() { cuemu::S.cur->queues->copies.wait(N); }

template <class T>
void pin(T&) {}

// What the grid before this one writes appears when the first thread has waited for it and all others have run
// as far as they go without: they have read what was there before.
inline void pdl_wait() { cuemu::grid_before(); }
inline void pdl_launch_dependents() {}
template <int N>
void reg_alloc() { static_assert(N >= 24 && N <= 256 && N % 8 == 0, "a multiple of 8 from 24 to 256"); }
template <int N>
void reg_dealloc() { static_assert(N >= 24 && N <= 256 && N % 8 == 0, "a multiple of 8 from 24 to 256"); }

}  // namespace ptx
