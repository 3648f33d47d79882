// Launching: from a kernel and the bytes of its arguments to the runtime, which knows neither's type.
#pragma once
#include <type_traits>
#include <utility>

#include "sched.h"

namespace cuemu {

// Runs body(arg) once for each thread of the grid.
Report run(const Config& cfg, void (*body)(void*), void* arg);

template <class T>
T parameter(void* p) {
  T v;
  memcpy(static_cast<void*>(&v), p, sizeof(T));
  return v;
}
template <class... A, size_t... I>
void call(void (*f)(A...), void** p, std::index_sequence<I...>) {
  f(parameter<std::decay_t<A>>(p[I])...);
}
// Returns -1 where the number or the size of the arguments is not the kernel's, else 0.
template <class... A>
int launch(void (*f)(A...), const Config* cfg, const long long* sizes, int count, void** args, Report* out) {
  const long long want[] = {static_cast<long long>(sizeof(std::decay_t<A>))..., 0};
  if (count != int(sizeof...(A))) return -1;
  for (int i = 0; i < count; ++i)
    if (sizes[i] != want[i]) return -1;
  auto body = [&] { call(f, args, std::index_sequence_for<A...>{}); };
  *out = run(*cfg, [](void* p) { (*static_cast<decltype(body)*>(p))(); }, &body);
  return 0;
}
template <class... A>
int parameter_size(void (*)(A...), int i) {
  const int want[] = {int(sizeof(std::decay_t<A>))..., -1};
  return i < int(sizeof...(A)) ? want[i] : -1;
}

}  // namespace cuemu
