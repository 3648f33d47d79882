// Faults and endless loops of a kernel become reports instead of the end of the process.
#pragma once
#include "sched.h"

namespace cuemu {

inline void on_expiry(int) {
  if (!S.cur || S.in_runtime) {
    S.expired = true;   // the scheduler sees it at its next turn
    return;
  }
  char text[96];
  snprintf(text, sizeof text, "the launch took more than %.1f s of CPU time without end", S.cfg.timeout_s);
  fail_here("timeout", text);
}
inline void on_fault(int sig, siginfo_t* info, void*) {
  if (!S.cur || S.in_runtime) {   // not the kernel's: the default action
    signal(sig, SIG_DFL);
    return;
  }
  char text[160];
  const char* at = static_cast<const char*>(info->si_addr);
  const size_t i = size_t(S.cur - S.fibers.data());
  const char* guard = S.stacks.low(i);
  if (sig == SIGFPE) snprintf(text, sizeof text, "integer division by zero");
  else if (at >= guard && at < guard + kPageBytes) snprintf(text, sizeof text, "stack overflow of a thread");
  else snprintf(text, sizeof text, "access to invalid address %p", info->si_addr);
  fail_here("fault", text);
}

class Watchdog {
 public:
  explicit Watchdog(double seconds) {
    S.expired = false;
    stack_t alt{};
    alt.ss_sp = alternate_;
    alt.ss_size = sizeof alternate_;
    sigaltstack(&alt, &old_stack_);
    struct sigaction act{};
    act.sa_sigaction = on_fault;
    act.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < kSignals && !sanitized(); ++i) sigaction(signals_[i], &act, &old_[i]);
    struct sigaction tick{};
    tick.sa_handler = on_expiry;
    tick.sa_flags = SA_ONSTACK | SA_NODEFER;
    sigaction(alarm_signal(), &tick, &old_alarm_);
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = alarm_signal();
    event._sigev_un._tid = int(syscall(SYS_gettid));
    armed_ = timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer_) == 0;
    itimerspec spec{};
    spec.it_value.tv_sec = time_t(seconds);
    spec.it_value.tv_nsec = long((seconds - double(time_t(seconds))) * 1e9);
    if (armed_) timer_settime(timer_, 0, &spec, nullptr);
  }
  ~Watchdog() {
    if (armed_) timer_delete(timer_);
    sigaction(alarm_signal(), &old_alarm_, nullptr);
    for (int i = 0; i < kSignals && !sanitized(); ++i) sigaction(signals_[i], &old_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  static constexpr bool sanitized() {   // AddressSanitizer reports faults itself
#if defined(__SANITIZE_ADDRESS__)
    return true;
#else
    return false;
#endif
  }
  static int alarm_signal() { return SIGRTMIN + 5; }
  static constexpr int kSignals = 3;
  int signals_[kSignals] = {SIGSEGV, SIGBUS, SIGFPE};
  struct sigaction old_[kSignals]{}, old_alarm_{};
  stack_t old_stack_{};
  timer_t timer_{};
  bool armed_ = false;
  alignas(16) char alternate_[64 << 10];
};

}  // namespace cuemu
