// Asynchronous work of a thread: it takes effect as late as the programming model allows.
// cp.async copies at wait_group, bulk stores at their wait, TMA loads when somebody waits on their mbarrier,
// wgmma at its wait_group: a kernel that forgets to wait reads poison or old data.
#pragma once
#include <list>
#include <utility>

#include "sched.h"

namespace cuemu {

// Something to be done once, later. Every build reads this header, and would for 0.03 s <functional>.
class Work {
 public:
  template <class F>
  Work(F f) : what_(new F(std::move(f))), call_([](void* f, bool run) { run ? (*static_cast<F*>(f))() : delete static_cast<F*>(f); }) {}
  Work(Work&& other) noexcept : what_(std::exchange(other.what_, nullptr)), call_(other.call_) {}
  Work& operator=(Work other) noexcept {
    std::swap(what_, other.what_);
    std::swap(call_, other.call_);
    return *this;
  }
  ~Work() { if (what_) call_(what_, false); }
  void operator()() const { call_(what_, true); }

 private:
  void* what_;
  void (*call_)(void*, bool run);   // or, if not to run it, delete it
};
using Group = std::vector<Work>;

// Operations are collected into an open group, closed by commit, and done by wait_group.
struct GroupQueue {
  Group open;
  std::list<Group> closed;   // of every thread: a deque would allocate for each, used or not
  void commit();
  void add(Work work);
  void wait(size_t left);   // completes the oldest groups until at most `left` remain
};
struct AsyncQueues {
  GroupQueue copies, stores, mma;
};
void send_later(void* bar, Work work);   // a TMA load on its way to shared memory; `bar` is the mbarrier it reports to
void deliver(void* bar);

// One thread's part of a wgmma: where its accumulators are, and its rows of a if they are in registers.
struct WgmmaPart {
  void* d;
  uint64_t a, b;
  unsigned a_regs[4];
  bool accumulate;
  void (*run)(const std::vector<WgmmaPart>& parts);
};
void wgmma_issue(const WgmmaPart& part);
void wgmma_close_group();
void wgmma_wait_group(size_t left, const char* file, int line);

}  // namespace cuemu
