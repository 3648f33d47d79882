// The scheduler: thread blocks, warps and threads as fibers; barriers; errors; the watchdog.
#pragma once
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "fiber.h"

namespace cuemu {

// ---- what Python sees ------------------------------------------------------------------------
struct Late {   // bytes that the grid before this one writes
  void* to;
  const void* from;
  unsigned long long bytes;
};
struct Config {
  unsigned grid[3], block[3], cluster[3], smem, seed, cooperative, eager, late_count;
  Late late[4];
  double timeout_s;
};
struct Report {
  char kind[32];
  char text[2000];
  long long barriers, exchanges, async_copies, mma_ops, shared_ideal, shared_wavefronts, switches;
};

// ---- state -----------------------------------------------------------------------------------
inline constexpr unsigned kSharedBytes = 240u << 10;   // of one block: 227 KiB, the reserved KiB and room to align
inline constexpr unsigned kReservedBytes = 1024;
inline constexpr unsigned kMaxDynamicBytes = 227u << 10;
inline constexpr unsigned kMaxStaticBytes = 48u << 10;

// One rendezvous of the lanes of a warp that named the same mask.
struct Meet {
  unsigned mask, arrived, readers;
  const char* what;
  bool open;
  alignas(16) unsigned char value[32][48];
};
struct Warp {
  unsigned alive;
  std::vector<Meet> meets;
};
struct NamedBarrier {
  unsigned count, expected, generation;
  const char* file;
  int line, site;
};
struct Cta;
struct AsyncQueues;   // cp.async groups, bulk stores, wgmma: see async.h
struct Fiber {
  void* sp;
  uint3 tid;
  unsigned id, lane, warp;
  bool done;
  Cta* cta;
  const char *what, *file;   // what it waits for and where, for the reports
  int line;
  AsyncQueues* queues;
  unsigned cluster_generation;   // of the cluster barrier it arrived at last
  const void* mbarrier;          // it waits for, or null
};
struct Cta {
  uint3 index;
  unsigned rank, alive;      // rank in its cluster
  unsigned cluster_first;    // number of the cluster's first block in the resident group
  std::vector<Warp> warps;
  NamedBarrier bar[16];
  int votes[3];
  char* shared;              // kSharedBytes, 1024-byte aligned
};
struct ClusterBarrier { unsigned arrived, generation; };
struct SharedVar { const void* key; unsigned offset; size_t bytes; };

struct State {
  Config cfg{};
  Report report{};
  std::vector<Fiber> fibers;
  std::vector<Cta> ctas;
  std::vector<unsigned> order;
  std::vector<ClusterBarrier> cluster_bar;
  std::vector<SharedVar> static_vars;
  unsigned static_low = kSharedBytes, static_bytes = 0, dynamic_end = 0;
  Stacks stacks;
  void* main_sp = nullptr;
  Fiber* cur = nullptr;
  unsigned pos = 0, alive = 0;
  unsigned visits = 0;                  // threads of the present warp that ran since one of them got on
  bool leave = false;                   // the present warp polls: the others' turn
  unsigned long idle = 0, serial = 0;   // serial: of the resident group
  unsigned threads = 0, cluster_size = 1;
  dim3 block_dim, grid_dim, cluster_dim;
  void (*body)(void*) = nullptr;
  void* arg = nullptr;
  volatile int in_runtime = 0;
  volatile bool expired = false;
  uint64_t rng = 0;
};
extern State S;   // and every function without a body here: runtime.cpp, compiled once

// ---- errors: recorded, then back to the launcher; the fibers are abandoned ---------------------
[[noreturn]] void fail_here(const char* kind, const char* text);
[[noreturn]] __attribute__((format(printf, 2, 3))) void fail(const char* kind, const char* format, ...);
inline const char* base_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

// ---- scheduling ------------------------------------------------------------------------------
inline void progress() { S.idle = 0; }

// Round robin over the live fibers, or over the warps, each as far as it gets (seeds with bit 1 set: a warp may be far
// ahead of the others wherever no barrier holds it). Two sweeps in which nothing moved are a deadlock.
void pick_next();
inline bool warps_run_ahead() { return S.cfg.seed & 2; }
// Lets the other threads run, as a polling thread must; polling is progress (the watchdog ends it).
inline void yield() {
  progress();
  S.leave = true;
  if (S.alive > 1) pick_next();
}
// The grid that a dependent launch waits for is complete from here on.
void grid_before();
inline void wait_at(const char* what, const char* file, int line) {
  S.cur->what = what;
  S.cur->file = file;
  S.cur->line = line;
}

// ---- block barriers --------------------------------------------------------------------------
// `threads` == 0: every thread of the block that has not exited. Returns without waiting if !wait.
// `site` tells one __syncthreads() of the source from another.
void named_barrier(unsigned id, unsigned threads, bool wait, const char* file, int line, int site = -1);

// ---- warp rendezvous: shuffles, votes, __syncwarp ----------------------------------------------
// Leaves `bytes` bytes in the table of the lanes of `mask` and returns its number among those of the warp.
size_t join(unsigned mask, const void* value, size_t bytes, const char* what, const char* file, int line);
// Waits until the table is complete. The lane that is last gets it, absent lanes poisoned; the others get null.
Meet* last_of(size_t table, size_t bytes);
void close(Meet& m);

// All lanes of `mask` leave `bytes` bytes in a table. When the last is there, that lane calls finish(table), once;
// then every lane calls read(table).
template <class Finish, class Read>
void collective(unsigned mask, const void* value, size_t bytes, const char* what, const char* file, int line,
                Finish&& finish, Read&& read) {
  const size_t i = join(mask, value, bytes, what, file, line);
  if (Meet* m = last_of(i, bytes)) {
    ++S.in_runtime;   // its memory accesses are not the thread's
    finish(*m);
    --S.in_runtime;
    close(*m);
  }
  Meet& m = S.cur->cta->warps[S.cur->warp].meets[i];
  read(m);
  --m.readers;
}
template <class Read>
void exchange(unsigned mask, const void* value, size_t bytes, const char* what, const char* file, int line,
              Read&& read) {
  collective(mask, value, bytes, what, file, line, [](Meet&) {}, read);
}
// What tensor cores do: sums (rows x columns, a multiple of 8) += a (rows x depth) times b (depth x columns), each sum
// in the order of the depth.
void add_products(double* sums, const double* a, const double* b, int rows, int columns, int depth);
inline void sync_warp(unsigned mask, const char* file, int line) {
  exchange(mask, nullptr, 0, "__syncwarp()", file, line, [](const Meet&) {});
}

}  // namespace cuemu
