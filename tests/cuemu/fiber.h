// Fibers: stack switching for x86-64 and the memory of the stacks.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __asan_unpoison_memory_region(void const volatile*, size_t);
#endif

namespace cuemu {

// Saves the callee-saved registers and the stack pointer, then continues on another stack.
extern "C" void cuemu_switch(void** save_sp, void* load_sp);

// An odd number of pages, and tops that lie apart: at equal powers of two all would share few sets of every cache.
inline constexpr size_t kStackBytes = 65 * 4096;
inline constexpr size_t kApartBytes = 448;
inline constexpr size_t kPageBytes = 4096;

// One reserved range; a guard page below every stack turns an overflow into a fault that is reported.
class Stacks {
 public:
  bool reserve(size_t n) {
    if (n <= count_) return true;
    release();
    void* p = mmap(nullptr, n * kStackBytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    base_ = p == MAP_FAILED ? nullptr : static_cast<char*>(p);
    count_ = base_ ? n : 0;
    for (size_t i = 0; i < count_; ++i) mprotect(base_ + i * kStackBytes, kPageBytes, PROT_NONE);
    return base_ != nullptr;
  }
  // Every stack and every guard page is a mapping, of which a process has 65,530: between launches each loaded
  // module keeps a few stacks only.
  void trim() { if (count_ > 128) release(); }
  // The stack pointer of a fresh fiber that will start in `entry` (entered as if it had been called).
  void* fresh(size_t i, void (*entry)()) const {
    unpoison(low(i) + kPageBytes, kStackBytes - kPageBytes);
    void** sp = reinterpret_cast<void**>(base_ + (i + 1) * kStackBytes - i % 9 * kApartBytes);
    *--sp = nullptr;
    *--sp = reinterpret_cast<void*>(entry);
    for (int k = 0; k < 6; ++k) *--sp = nullptr;
    return sp;
  }
  char* low(size_t i) const { return base_ + i * kStackBytes; }

 private:
  // Fibers end without returning, so AddressSanitizer still marks their frames; the next user must not meet that.
  static void unpoison(void* p, size_t n) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(p, n);
#else
    (void)p, (void)n;
#endif
  }
  void release() {
    if (base_) unpoison(base_, count_ * kStackBytes);
    if (base_) munmap(base_, count_ * kStackBytes);
    base_ = nullptr;
    count_ = 0;
  }
  char* base_ = nullptr;
  size_t count_ = 0;
};

}  // namespace cuemu
