// How threads run: errors, the scheduler, barriers of a block, rendezvous of a warp. Part of runtime.cpp.
#pragma once
#include <string>

#include "async.h"
#include "barrier.h"

asm(R"(.text
.globl cuemu_switch
.hidden cuemu_switch
.type cuemu_switch, @function
cuemu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuemu_switch, .-cuemu_switch
)");

namespace cuemu {

// ---- errors --------------------------------------------------------------------------------------
[[noreturn]] void fail_here(const char* kind, const char* text) {
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
[[noreturn]] __attribute__((format(printf, 2, 3))) void fail(const char* kind, const char* format, ...) {
  char text[1800];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  fail_here(kind, text);
}

// ---- scheduling ----------------------------------------------------------------------------------
[[noreturn]] static void report_deadlock() {
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

static bool of_one_warp(const Fiber& a, const Fiber& b) { return a.cta == b.cta && a.warp == b.warp; }
// The next live fiber of the present one's warp, which lies together in the order; else the first of another warp.
static unsigned next_ahead(unsigned p) {
  const unsigned n = unsigned(S.order.size());
  const Fiber& here = S.fibers[S.order[p]];
  if (!S.leave && S.visits++ < 32) {
    for (unsigned i = 1; i < 32; ++i) {
      unsigned q = p + i;
      if (q >= n || !of_one_warp(S.fibers[S.order[q]], here)) {   // round to the warp's first
        for (q = p; q && of_one_warp(S.fibers[S.order[q - 1]], here);) --q;
        for (; q < p; ++q) if (!S.fibers[S.order[q]].done) return q;
        break;
      }
      if (!S.fibers[S.order[q]].done) return q;
    }
  }
  S.visits = 0;
  S.leave = false;
  unsigned q = p;
  do { q = q + 1 == n ? 0 : q + 1; } while (q != p && (S.fibers[S.order[q]].done || of_one_warp(S.fibers[S.order[q]], here)));
  if (q == p)   // no other warp is left
    do { q = q + 1 == n ? 0 : q + 1; } while (S.fibers[S.order[q]].done);
  return q;
}
void pick_next() {
  if (S.expired) fail("timeout", "the launch took more than %.1f s of CPU time", S.cfg.timeout_s);
  if (!S.idle) S.visits = 0;
  if (++S.idle > 2ul * S.fibers.size() + 64) report_deadlock();
  const unsigned n = unsigned(S.order.size());
  unsigned p = S.pos;
  if (warps_run_ahead()) p = next_ahead(p);
  else do { p = p + 1 == n ? 0 : p + 1; } while (S.fibers[S.order[p]].done);
  S.pos = p;
  Fiber* me = S.cur;
  Fiber* next = &S.fibers[S.order[p]];
  if (next == me) return;
  S.cur = next;
  ++S.report.switches;
  cuemu_switch(&me->sp, next->sp);
}

// ---- block barriers ------------------------------------------------------------------------------
static void release(NamedBarrier& b) {
  b.count = 0;
  b.expected = 0;
  ++b.generation;
  ++S.report.barriers;
  progress();
}
void named_barrier(unsigned id, unsigned threads, bool wait, const char* file, int line, int site) {
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

// ---- warp rendezvous -----------------------------------------------------------------------------
static bool met(const Meet& m, const Warp& w) { return (m.arrived & w.alive) == (m.mask & w.alive); }

size_t join(unsigned mask, const void* value, size_t bytes, const char* what, const char* file, int line) {
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
  if (w.meets[i].what != what && strcmp(w.meets[i].what, what))
    fail("divergent_warp", "lane %u is at %s (%s:%d) while lanes 0x%08x of the same mask are at %s", lane, what,
         base_name(file), line, w.meets[i].arrived, w.meets[i].what);
  if (bytes) memcpy(w.meets[i].value[lane], value, bytes);
  w.meets[i].arrived |= 1u << lane;
  ++w.meets[i].readers;
  progress();
  wait_at(what, file, line);
  return i;
}
Meet* last_of(size_t table, size_t bytes) {
  Warp& w = S.cur->cta->warps[S.cur->warp];
  while (w.meets[table].open) {   // the table may move while other threads run
    if (!met(w.meets[table], w)) { pick_next(); continue; }
    Meet& m = w.meets[table];
    for (int l = 0; l < 32; ++l)   // absent and exited lanes give poison
      if (!(m.arrived >> l & 1)) memset(m.value[l], 0xff, bytes);
    return &m;
  }
  return nullptr;
}
void close(Meet& m) {
  m.open = false;
  ++S.report.exchanges;
  progress();
}

// ---- the life of a thread --------------------------------------------------------------------------
// Bulk stores need no wait to be complete at the end of the grid; loads that nobody awaited are dropped.
static void thread_exits(Fiber& f) {
  GroupQueue& stores = f.queues->stores;
  if (stores.open.empty() && stores.closed.empty()) return;   // as of most threads: a commit allocates
  stores.commit();
  stores.wait(0);
}
static void entry() {
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
