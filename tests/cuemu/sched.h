// The scheduler: thread blocks, warps and threads as fibers; barriers; errors; the watchdog.
#pragma once
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "fiber.h"

namespace cuemu {

// ---- what Python sees ------------------------------------------------------------------------
struct Config {
  unsigned grid[3], block[3], cluster[3], smem, seed, cooperative;
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
  unsigned long idle = 0, serial = 0;   // serial: of the resident group
  unsigned threads = 0, cluster_size = 1;
  dim3 block_dim, grid_dim, cluster_dim;
  void (*body)(void*) = nullptr;
  void* arg = nullptr;
  volatile int in_runtime = 0;
  volatile bool expired = false;
  uint64_t rng = 0;
};
inline State S;

// ---- errors: recorded, then back to the launcher; the fibers are abandoned ---------------------
[[noreturn]] inline void fail_here(const char* kind, const char* text) {
  snprintf(S.report.kind, sizeof S.report.kind, "%s", kind);
  const Fiber* f = S.cur;
  if (f) {
    const uint3 b = f->cta->index;
    snprintf(S.report.text, sizeof S.report.text, "block (%u,%u,%u) thread (%u,%u,%u): %s", b.x, b.y, b.z,
             f->tid.x, f->tid.y, f->tid.z, text);
  } else {
    snprintf(S.report.text, sizeof S.report.text, "%s", text);
  }
  void* dead;
  cuemu_switch(&dead, S.main_sp);
  __builtin_unreachable();
}
[[noreturn]] __attribute__((format(printf, 2, 3))) inline void fail(const char* kind, const char* format, ...) {
  char text[1800];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  fail_here(kind, text);
}
inline const char* base_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

// ---- scheduling ------------------------------------------------------------------------------
inline unsigned next_random() {
  S.rng = S.rng * 6364136223846793005ull + 1442695040888963407ull;
  return unsigned(S.rng >> 33);
}
inline void progress() { S.idle = 0; }

const char* mbarrier_state(const void* bar, char* text, size_t size);   // barrier.h; null: not stuck by bytes

[[noreturn]] inline void report_deadlock() {
  for (const Fiber& f : S.fibers) {
    char state[200];
    if (!f.done && f.mbarrier && mbarrier_state(f.mbarrier, state, sizeof state))
      fail("mbarrier", "waited for at %s:%d: %s", base_name(f.file), f.line, state);
  }
  struct Group { const char *what, *file; int line; unsigned n; };
  std::vector<Group> groups;
  for (const Fiber& f : S.fibers) {
    if (f.done) continue;
    bool found = false;
    for (Group& g : groups)
      if (!strcmp(g.what, f.what) && g.line == f.line) { ++g.n; found = true; break; }
    if (!found) groups.push_back({f.what, f.file, f.line, 1});
  }
  std::string text = "no thread can go on:";
  for (const Group& g : groups) {
    char one[160];
    snprintf(one, sizeof one, " %u at %s (%s:%d);", g.n, g.what, base_name(g.file), g.line);
    text += one;
  }
  char tail[80];
  snprintf(tail, sizeof tail, " %u of %zu threads have exited", unsigned(S.fibers.size()) - S.alive, S.fibers.size());
  fail("deadlock", "%s", (text + tail).c_str());
}

// Round robin over the live fibers; two sweeps in which nothing moved are a deadlock.
inline void pick_next() {
  if (S.expired) fail("timeout", "the launch took more than %.1f s of CPU time", S.cfg.timeout_s);
  if (++S.idle > 2ul * S.fibers.size() + 64) report_deadlock();
  const unsigned n = unsigned(S.order.size());
  unsigned p = S.pos;
  do { p = p + 1 == n ? 0 : p + 1; } while (S.fibers[S.order[p]].done);
  S.pos = p;
  Fiber* me = S.cur;
  Fiber* next = &S.fibers[S.order[p]];
  if (next == me) return;
  S.cur = next;
  ++S.report.switches;
  cuemu_switch(&me->sp, next->sp);
}
// Lets the other threads run, as a polling thread must; polling is progress (the watchdog ends it).
inline void yield() {
  progress();
  if (S.alive > 1) pick_next();
}
inline void wait_at(const char* what, const char* file, int line) {
  S.cur->what = what;
  S.cur->file = file;
  S.cur->line = line;
}

// ---- block barriers --------------------------------------------------------------------------
inline void release(NamedBarrier& b) {
  b.count = 0;
  b.expected = 0;
  ++b.generation;
  ++S.report.barriers;
  progress();
}
// `threads` == 0: every thread of the block that has not exited. Returns without waiting if !wait.
// `site` tells one __syncthreads() of the source from another.
inline void named_barrier(unsigned id, unsigned threads, bool wait, const char* file, int line, int site = -1) {
  if (id > 15) fail("barrier", "barrier %u: a block has the barriers 0 to 15", id);
  if (threads % 32) fail("barrier", "barrier %u: %u threads is not a multiple of 32", id, threads);
  Cta& c = *S.cur->cta;
  NamedBarrier& b = c.bar[id];
  if (b.count && (b.expected != threads))
    fail("barrier", "barrier %u: %u threads expected here, %u expected by those that wait", id, threads, b.expected);
  if (b.count && !threads && b.site != site)
    fail("divergent_barrier", "__syncthreads() at %s:%d, but %u threads of the block wait in the one at %s:%d",
         base_name(file), line, b.count, base_name(b.file), b.line);
  b.expected = threads;
  b.file = file;
  b.line = line;
  b.site = site;
  const unsigned generation = b.generation;
  if (++b.count == (threads ? threads : c.alive)) return release(b);
  progress();
  if (!wait) return;
  wait_at(threads ? "a named barrier" : "__syncthreads()", file, line);
  while (b.generation == generation) pick_next();
}

// ---- warp rendezvous: shuffles, votes, __syncwarp ----------------------------------------------
inline bool met(const Meet& m, const Warp& w) { return (m.arrived & w.alive) == (m.mask & w.alive); }

// All lanes of `mask` leave `bytes` bytes in a table. When the last is there, that lane calls finish(table), once;
// then every lane calls read(table).
template <class Finish, class Read>
void collective(unsigned mask, const void* value, size_t bytes, const char* what, const char* file, int line,
                Finish&& finish, Read&& read) {
  Warp& w = S.cur->cta->warps[S.cur->warp];
  const unsigned lane = S.cur->lane;
  if (!(mask >> lane & 1)) fail("bad_mask", "%s at %s:%d: lane %u is not in its own mask 0x%08x", what,
                                base_name(file), line, lane, mask);
  size_t i = 0;
  while (i < w.meets.size() && !(w.meets[i].open && w.meets[i].mask == mask)) ++i;
  if (i == w.meets.size()) {
    for (i = 0; i < w.meets.size() && (w.meets[i].open || w.meets[i].readers);) ++i;
    if (i == w.meets.size()) w.meets.emplace_back();
    Meet& fresh = w.meets[i];
    fresh.mask = mask;
    fresh.arrived = fresh.readers = 0;
    fresh.what = what;
    fresh.open = true;
  }
  if (strcmp(w.meets[i].what, what))
    fail("divergent_warp", "lane %u is at %s (%s:%d) while lanes 0x%08x of the same mask are at %s", lane, what,
         base_name(file), line, w.meets[i].arrived, w.meets[i].what);
  if (bytes) memcpy(w.meets[i].value[lane], value, bytes);
  w.meets[i].arrived |= 1u << lane;
  ++w.meets[i].readers;
  progress();
  wait_at(what, file, line);
  while (w.meets[i].open) {
    if (met(w.meets[i], w)) {
      for (int l = 0; l < 32; ++l)   // absent and exited lanes give poison
        if (!(w.meets[i].arrived >> l & 1)) memset(w.meets[i].value[l], 0xff, bytes);
      ++S.in_runtime;   // its memory accesses are not the thread's
      finish(w.meets[i]);
      --S.in_runtime;
      w.meets[i].open = false;
      ++S.report.exchanges;
      progress();
    } else {
      pick_next();
    }
  }
  read(w.meets[i]);
  --w.meets[i].readers;
}
template <class Read>
void exchange(unsigned mask, const void* value, size_t bytes, const char* what, const char* file, int line,
              Read&& read) {
  collective(mask, value, bytes, what, file, line, [](Meet&) {}, read);
}
inline void sync_warp(unsigned mask, const char* file, int line) {
  exchange(mask, nullptr, 0, "__syncwarp()", file, line, [](const Meet&) {});
}

// ---- the life of a thread --------------------------------------------------------------------
void thread_exits(Fiber& f);               // async.h: outstanding copies of the thread
void check_cluster_barrier(const Cta& c);   // barrier.h: an exit may complete it

inline void entry() {
  S.body(S.arg);
  Fiber& me = *S.cur;
  thread_exits(me);
  me.done = true;
  Cta& c = *me.cta;
  c.warps[me.warp].alive &= ~(1u << me.lane);
  --c.alive;
  progress();
  NamedBarrier& b = c.bar[0];
  if (b.count && !b.expected && b.count == c.alive) release(b);
  --S.alive;
  check_cluster_barrier(c);
  void* dead;
  if (S.alive == 0) cuemu_switch(&dead, S.main_sp);
  pick_next();
  __builtin_unreachable();
}

}  // namespace cuemu
