// Atomics: threads switch only at scheduler points, so a plain read-modify-write is atomic.
#pragma once
#include "sched.h"

namespace cuemu {
// CUDA takes atomicAdd(float*, int) by conversion; the second type is therefore not deduced.
template <class T>
struct same { using type = T; };
template <class T>
using value_of = typename same<T>::type;

// Exchange and compare-and-swap are what threads poll with: let the others run now and then.
inline void poll_point() {
  static unsigned calls = 0;
  if (++calls % 16 == 0) yield();
}
}  // namespace cuemu

template <class T>
T atomicAdd(T* p, cuemu::value_of<T> v) {
  const T old = *p;
  *p = old + v;
  return old;
}
template <class T>
T atomicSub(T* p, cuemu::value_of<T> v) {
  const T old = *p;
  *p = old - v;
  return old;
}
template <class T>
T atomicMax(T* p, cuemu::value_of<T> v) {
  const T old = *p;
  *p = old < v ? v : old;
  return old;
}
template <class T>
T atomicMin(T* p, cuemu::value_of<T> v) {
  const T old = *p;
  *p = v < old ? v : old;
  return old;
}
template <class T>
T atomicAnd(T* p, cuemu::value_of<T> v) {
  const T old = *p;
  *p = old & v;
  return old;
}
template <class T>
T atomicOr(T* p, cuemu::value_of<T> v) {
  const T old = *p;
  *p = old | v;
  return old;
}
template <class T>
T atomicXor(T* p, cuemu::value_of<T> v) {
  const T old = *p;
  *p = old ^ v;
  return old;
}
template <class T>
T atomicExch(T* p, cuemu::value_of<T> v) {
  cuemu::poll_point();
  const T old = *p;
  *p = v;
  return old;
}
template <class T>
T atomicCAS(T* p, cuemu::value_of<T> expected, cuemu::value_of<T> v) {
  cuemu::poll_point();
  const T old = *p;
  if (memcmp(&old, &expected, sizeof(T)) == 0) *p = v;
  return old;
}
inline unsigned atomicInc(unsigned* p, unsigned limit) {
  const unsigned old = *p;
  *p = old >= limit ? 0 : old + 1;
  return old;
}
