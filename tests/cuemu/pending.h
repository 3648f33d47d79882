// The asynchronous work that waits to take effect (async.h). Part of runtime.cpp.
#pragma once
#include <algorithm>
#include <deque>

#include "async.h"

namespace cuemu {

void GroupQueue::commit() {
  ++S.in_runtime;
  closed.push_back(std::move(open));
  open.clear();
  --S.in_runtime;
}
void GroupQueue::add(Work work) {
  ++S.in_runtime;
  open.push_back(std::move(work));
  --S.in_runtime;
}
void GroupQueue::wait(size_t left) {
  while (closed.size() > left) {
    Group group = std::move(closed.front());
    closed.pop_front();
    for (Work& work : group) work();
  }
}

static std::vector<AsyncQueues> queues;

// A TMA load on its way to a block's shared memory; `bar` is the mbarrier it reports to.
struct InFlight { void* bar; Work deliver; };
static std::deque<InFlight> in_flight;

void send_later(void* bar, Work work) {
  ++S.in_runtime;
  in_flight.push_back({bar, std::move(work)});
  --S.in_runtime;
}
void grid_before() {
  if (!S.cfg.late_count) return;
  yield();
  for (unsigned i = 0; i < S.cfg.late_count; ++i) memcpy(S.cfg.late[i].to, S.cfg.late[i].from, S.cfg.late[i].bytes);
  S.cfg.late_count = 0;
}
void deliver(void* bar) {
  for (size_t i = 0; i < in_flight.size();) {
    if (in_flight[i].bar != bar) { ++i; continue; }
    Work work = std::move(in_flight[i].deliver);
    in_flight.erase(in_flight.begin() + long(i));
    work();
    progress();
  }
}
static void end_async() {   // most threads leave nothing behind
  in_flight.clear();
  for (AsyncQueues& q : queues)
    for (GroupQueue* one : {&q.copies, &q.stores, &q.mma}) {
      if (!one->open.empty()) one->open.clear();
      if (!one->closed.empty()) one->closed.clear();
    }
}
static void start_async(size_t fibers) {
  end_async();   // a launch that failed may have left work
  queues.resize(fibers);
  for (size_t i = 0; i < fibers; ++i) S.fibers[i].queues = &queues[i];
}

// ---- wgmma: done for the whole warpgroup when the last of its threads waits ------------------------
struct Warpgroup {
  std::vector<std::vector<WgmmaPart>> open[128];   // per thread: the groups under way, the last one open
  unsigned arrived = 0, generation = 0;
};
static std::vector<Warpgroup> warpgroups;
static unsigned long warpgroups_serial = 0;   // the resident group they belong to

static Warpgroup& my_warpgroup() {
  const size_t per_block = (S.threads + 127) / 128;
  if (warpgroups_serial != S.serial) {
    ++S.in_runtime;
    warpgroups.assign(S.ctas.size() * per_block, Warpgroup{});
    warpgroups_serial = S.serial;
    --S.in_runtime;
  }
  return warpgroups[size_t(S.cur->cta - S.ctas.data()) * per_block + S.cur->id / 128];
}
static std::vector<std::vector<WgmmaPart>>& my_groups() { return my_warpgroup().open[S.cur->id % 128]; }

void wgmma_issue(const WgmmaPart& part) {
  ++S.in_runtime;
  auto& groups = my_groups();
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back(part);
  --S.in_runtime;
}
// The oldest groups of all 128 threads, until `left` closed ones remain.
static void wgmma_complete(Warpgroup& w, size_t left) {
  const auto alike = [](const auto& one, const auto& other) { return one.size() == other.size(); };
  const auto differ = [&](const auto& one, const auto& other) {
    return !std::equal(one.begin(), one.end(), other.begin(), other.end(), alike);
  };
  if (std::adjacent_find(std::begin(w.open), std::end(w.open), differ) != std::end(w.open))
    fail("wgmma", "the threads of a warpgroup have issued different numbers of wgmma");
  std::vector<WgmmaPart> parts(128);
  while (w.open->size() > left + 1) {
    for (size_t op = 0; op < w.open->front().size(); ++op) {
      for (size_t t = 0; t < 128; ++t) parts[t] = w.open[t].front()[op];
      parts.front().run(parts);
    }
    for (auto& groups : w.open) groups.erase(groups.begin());
  }
}
void wgmma_close_group() {
  auto& groups = my_groups();
  ++S.in_runtime;
  if (groups.empty()) groups.emplace_back();
  groups.emplace_back();
  --S.in_runtime;
}
void wgmma_wait_group(size_t left, const char* file, int line) {
  if (S.cur->id / 128 * 128 + 128 > S.threads) fail("wgmma", "%s:%d: a warpgroup has 128 threads", base_name(file),
      line);
  Warpgroup& w = my_warpgroup();
  const unsigned generation = w.generation;
  wait_at("wgmma_wait", file, line);
  progress();
  if (++w.arrived == 128) {
    ++S.in_runtime;
    wgmma_complete(w, left);
    --S.in_runtime;
    w.arrived = 0;
    ++w.generation;
    return;
  }
  while (w.generation == generation) pick_next();
}

}  // namespace cuemu
