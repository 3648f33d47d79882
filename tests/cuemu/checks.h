// The compiler's own checks (-fsanitize=alignment,bounds,...) report to these instead of to a library.
#pragma once
#include "sched.h"

extern "C" {
struct CuemuSource { const char* file; unsigned line, column; };
struct CuemuType { unsigned short kind, info; char name[1]; };
struct CuemuMismatch { CuemuSource at; const CuemuType* type; unsigned char log_alignment, access; };
struct CuemuBounds { CuemuSource at; const CuemuType *array, *index; };
struct CuemuShift { CuemuSource at; const CuemuType *left, *right; };

inline __attribute__((used)) void __ubsan_handle_type_mismatch_v1(CuemuMismatch* d, uintptr_t p) {
  if (!cuemu::S.cur) return;
  if (!p) cuemu::fail("fault", "null pointer used at %s:%u", cuemu::base_name(d->at.file), d->at.line);
  cuemu::fail("misaligned", "%s:%u: address %p of type %s is not a multiple of %u",
              cuemu::base_name(d->at.file), d->at.line, reinterpret_cast<void*>(p), d->type->name,
                  1u << d->log_alignment);
}
inline __attribute__((used)) void __ubsan_handle_out_of_bounds(CuemuBounds* d, uintptr_t index) {
  if (!cuemu::S.cur) return;
  cuemu::fail("out_of_bounds", "%s:%u: index %lld is outside %s", cuemu::base_name(d->at.file), d->at.line,
              static_cast<long long>(int(index)), d->array->name);
}
inline __attribute__((used)) void __ubsan_handle_shift_out_of_bounds(CuemuShift* d, uintptr_t, uintptr_t by) {
  if (!cuemu::S.cur) return;
  cuemu::fail("shift", "%s:%u: shift of %s by %lld", cuemu::base_name(d->at.file), d->at.line, d->left->name,
              static_cast<long long>(int(by)));
}
// Kernels call these, which do not come back: that is a third less to compile, and threads always report.
inline __attribute__((used, noreturn)) void __ubsan_handle_type_mismatch_v1_abort(CuemuMismatch* d, uintptr_t p) {
  __ubsan_handle_type_mismatch_v1(d, p);
  abort();
}
inline __attribute__((used, noreturn)) void __ubsan_handle_out_of_bounds_abort(CuemuBounds* d, uintptr_t index) {
  __ubsan_handle_out_of_bounds(d, index);
  abort();
}
inline __attribute__((used, noreturn)) void __ubsan_handle_shift_out_of_bounds_abort(CuemuShift* d, uintptr_t a,
                                                                                     uintptr_t by) {
  __ubsan_handle_shift_out_of_bounds(d, a, by);
  abort();
}
}
