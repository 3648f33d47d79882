// Asynchronous work of a thread: it takes effect as late as the programming model allows.
// cp.async copies at wait_group, bulk stores at their wait, TMA loads when somebody waits on their mbarrier,
// wgmma at its wait_group: a kernel that forgets to wait reads poison or old data.
#pragma once
#include <deque>
#include <functional>

#include "sched.h"

namespace cuemu {

using Work = std::function<void()>;
using Group = std::vector<Work>;

// Operations are collected into an open group, closed by commit, and done by wait_group.
struct GroupQueue {
  Group open;
  std::deque<Group> closed;
  void commit() {
    ++S.in_runtime;
    closed.push_back(std::move(open));
    open.clear();
    --S.in_runtime;
  }
  void add(Work work) {
    ++S.in_runtime;
    open.push_back(std::move(work));
    --S.in_runtime;
  }
  // Completes the oldest groups until at most `left` remain.
  void wait(size_t left) {
    while (closed.size() > left) {
      Group group = std::move(closed.front());
      closed.pop_front();
      for (Work& work : group) work();
    }
  }
};
struct AsyncQueues {
  GroupQueue copies, stores, mma;
};
inline std::vector<AsyncQueues> queues;

// A TMA load on its way to a block's shared memory; `bar` is the mbarrier it reports to.
struct InFlight { void* bar; Work deliver; };
inline std::deque<InFlight> in_flight;

inline void deliver(void* bar) {
  for (size_t i = 0; i < in_flight.size();) {
    if (in_flight[i].bar != bar) { ++i; continue; }
    Work work = std::move(in_flight[i].deliver);
    in_flight.erase(in_flight.begin() + long(i));
    work();
    progress();
  }
}
inline void start_async(size_t fibers) {
  queues.clear();
  queues.resize(fibers);
  in_flight.clear();
  for (size_t i = 0; i < fibers; ++i) S.fibers[i].queues = &queues[i];
}
inline void end_async() {
  in_flight.clear();
  queues.clear();
}
// Bulk stores need no wait to be complete at the end of the grid; loads that nobody awaited are dropped.
inline void thread_exits(Fiber& f) {
  f.queues->stores.commit();
  f.queues->stores.wait(0);
}

}  // namespace cuemu
