// Complex numbers as element types: two floats or doubles side by side, at whole ones of which they may begin.
#pragma once
#include "args.cuh"

template <class F> struct Complex {
  F re, im;
  Complex() = default;
  __device__ __forceinline__ Complex(F re, F im = F(0)) : re(re), im(im) {}
  template <class T> __device__ __forceinline__ explicit Complex(T v) : re(wide<F, T>(v)), im(F(0)) {}
  template <class G> __device__ __forceinline__ explicit Complex(Complex<G> v) : re(F(v.re)), im(F(v.im)) {}
  __device__ __forceinline__ Complex& operator+=(Complex v) {
    re += v.re, im += v.im;
    return *this;
  }
};
typedef Complex<float> complex64;
typedef Complex<double> complex128;

template <class F> __device__ __forceinline__ Complex<F> operator+(Complex<F> a, Complex<F> b) { return a += b; }
template <class F> __device__ __forceinline__ Complex<F> operator*(Complex<F> a, Complex<F> b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
template <class F> __device__ __forceinline__ bool operator!=(Complex<F> a, Complex<F> b) {
  return a.re != b.re || a.im != b.im;
}
template <class F> __device__ __forceinline__ Complex<F> __shfl_xor_sync(unsigned mask, Complex<F> v, int lanes) {
  return {__shfl_xor_sync(mask, v.re, lanes), __shfl_xor_sync(mask, v.im, lanes)};
}

template <class F> struct AccOf<Complex<F>> { typedef Complex<F> type; };
