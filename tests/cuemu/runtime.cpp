// What of the emulator depends on no kernel: compiled once for each set of flags, and linked to every kernel.
#include "cuemu.h"

#include "checks.h"
#include "grids.h"
#include "threads.h"

namespace cuemu {

State S;

// __shared__: one place per declaration and template instance, told apart by the address of a local static.
char* static_shared(const void* key, size_t bytes, size_t align) {
  Cta& c = *S.cur->cta;
  for (const SharedVar& v : S.static_vars)
    if (v.key == key) return c.shared + v.offset;
  const size_t gap = align < 16 ? 16 : align;
  const long long at = (static_cast<long long>(S.static_low) - static_cast<long long>(bytes)) & ~(long long)(gap - 1);
  S.static_bytes += unsigned(bytes);
  if (S.static_bytes > kMaxStaticBytes) fail("launch", "more than 48 KiB of static __shared__ memory");
  if (S.static_bytes + S.cfg.smem > kMaxDynamicBytes)
    fail("launch", "static and dynamic shared memory together exceed 227 KiB");
  ++S.in_runtime;
  S.static_vars.push_back({key, unsigned(at), bytes});
  --S.in_runtime;
  S.static_low = unsigned(at);
  for (Cta& each : S.ctas) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(each.shared + at, bytes);
#endif
    memset(each.shared + at, kPoison, bytes);
  }
  return c.shared + at;
}

void add_products(double* sums, const double* a, const double* b, int rows, int columns, int depth) {
  typedef double Four __attribute__((vector_size(32), aligned(8)));
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; c += 8) {
      Four* at = reinterpret_cast<Four*>(sums + r * columns + c);
      Four low = at[0], high = at[1];
      for (int k = 0; k < depth; ++k) {
        const Four* right = reinterpret_cast<const Four*>(b + k * columns + c);
        low += a[r * depth + k] * right[0];
        high += a[r * depth + k] * right[1];
      }
      at[0] = low;
      at[1] = high;
    }
}

}  // namespace cuemu
