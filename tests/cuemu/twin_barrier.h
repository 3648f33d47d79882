// Twins: clusters and mbarriers.
#pragma once

namespace ptx {

inline u32 cluster_rank() { return cuemu::S.cur->cta->rank; }
inline u32 cluster_size() { return cuemu::S.cluster_size; }
inline void cluster_arrive() {
  cuemu::ClusterBarrier& b = cuemu::cluster_barrier(*cuemu::S.cur->cta);
  cuemu::S.cur->cluster_generation = b.generation + 1;
  ++b.arrived;
  cuemu::progress();
  cuemu::check_cluster_barrier(*cuemu::S.cur->cta);
}
inline void cluster_arrive_relaxed() { cluster_arrive(); }
inline void cluster_wait(CUEMU_AT) {
  const cuemu::ClusterBarrier& b = cuemu::cluster_barrier(*cuemu::S.cur->cta);
  if (!cuemu::S.cur->cluster_generation) cuemu::fail("barrier", "cluster_wait() before cluster_arrive()");
  cuemu::wait_at("the cluster barrier", file, line);
  while (b.generation < cuemu::S.cur->cluster_generation) cuemu::pick_next();
}
inline void cluster_sync(CUEMU_AT) {
  cluster_arrive();
  cluster_wait(file, line);
}
inline u32 mapa(u32 addr, u32 rank) {
  if (rank >= cuemu::S.cluster_size) cuemu::fail("address_space", "mapa: block %u of a cluster of %u", rank,
      cuemu::S.cluster_size);
  return (addr & 0xffffff) | (rank + 1) << 24;
}
// A remote access: the block must not have exited.
inline char* remote(u32 addr, size_t bytes, const char* file, int line) {
  const u32 rank = addr >> 24;
  char* p = cuemu::from_shared_address(addr);
  if (rank && !cuemu::S.ctas[cuemu::S.cur->cta->cluster_first + rank - 1].alive)
    cuemu::fail("cluster", "%s:%d: block %u of the cluster has exited, and with it its shared memory",
                cuemu::base_name(file), line, rank - 1);
  if (reinterpret_cast<uintptr_t>(p) % bytes)
    cuemu::fail("misaligned", "%s:%d: shared address 0x%x is not a multiple of %zu", cuemu::base_name(file), line,
        addr, bytes);
  return p;
}
template <class T>
T ld_cluster(u32 addr, CUEMU_AT) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "4, 8 or 16 bytes");
  T r;
  memcpy(&r, remote(addr, sizeof r, file, line), sizeof r);
  return r;
}
template <class T>
void st_cluster(u32 addr, T v, CUEMU_AT) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "4, 8 or 16 bytes");
  memcpy(remote(addr, sizeof v, file, line), &v, sizeof v);
}

inline void mbar_init(u32 bar, u32 arrivals, CUEMU_AT) {
  char* p = cuemu::from_shared_address(bar);
  if (reinterpret_cast<uintptr_t>(p) % 8 || !arrivals || arrivals >= 1u << 14)
    cuemu::fail("mbarrier", "mbar_init at %s:%d: address 0x%x, %u arrivals", cuemu::base_name(file), line, bar,
        arrivals);
  *reinterpret_cast<cuemu::Mbarrier*>(p) = {0, arrivals, arrivals, cuemu::kMbarrierTag, 0, 0};
}
inline void mbar_fence_init() {}
inline void mbar_arrive(u32 bar, CUEMU_AT) {
  cuemu::mbarrier_arrive(cuemu::mbarrier_at(bar, "mbar_arrive", file, line), file, line);
}
inline void mbar_expect_tx(u32 bar, u32 bytes, CUEMU_AT) {
  cuemu::mbarrier_at(bar, "mbar_expect_tx", file, line).tx += int(bytes);
}
inline void mbar_arrive_expect_tx(u32 bar, u32 bytes, CUEMU_AT) {
  cuemu::Mbarrier& b = cuemu::mbarrier_at(bar, "mbar_arrive_expect_tx", file, line);
  if (bytes >= 1u << 20) cuemu::fail("mbarrier", "%s:%d: %u bytes announced, at most 2^20 - 1", cuemu::base_name(file),
      line, bytes);
  b.tx += int(bytes);
  cuemu::mbarrier_arrive(b, file, line);
}
inline void mbar_arrive_remote(u32 bar, u32 rank, CUEMU_AT) {
  const u32 there = mapa(bar, rank);
  remote(there, 8, file, line);
  cuemu::mbarrier_arrive(cuemu::mbarrier_at(there, "mbar_arrive_remote", file, line), file, line);
}
inline void mbar_signal_remote(u32 bar, u32 rank, CUEMU_AT) { mbar_arrive_remote(bar, rank, file, line); }
// Copies that report to this barrier are delivered when a thread must wait for them, and not before.
inline bool mbar_try_wait(u32 bar, u32 parity, CUEMU_AT) {
  cuemu::Mbarrier& b = cuemu::mbarrier_at(bar, "mbar_try_wait", file, line);
  if (b.phase == (parity & 1)) cuemu::deliver(&b);
  if (b.phase != (parity & 1)) return b.unseen = 0, true;
  cuemu::S.cur->mbarrier = &b;
  cuemu::wait_at("an mbarrier", file, line);
  cuemu::pick_next();
  cuemu::S.cur->mbarrier = nullptr;
  if (b.phase != (parity & 1)) return b.unseen = 0, true;
  return false;
}
inline void mbar_wait(u32 bar, u32 parity, CUEMU_AT) {
  while (!mbar_try_wait(bar, parity, file, line)) {
  }
}
inline void mbar_wait_cluster(u32 bar, u32 parity, CUEMU_AT) { mbar_wait(bar, parity, file, line); }

}  // namespace ptx
