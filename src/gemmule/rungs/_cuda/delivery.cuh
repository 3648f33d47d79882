// Where the results of a matvec by rows go: into y, or, compiled with PEERS, to several GPUs.
#pragma once
#include "args.cuh"

#ifdef PEERS
#include "peers.cuh"
#else
struct Delivery {
  template <class Args> __device__ __forceinline__ explicit Delivery(const Args&) {}
  template <class T, class Args> __device__ __forceinline__ bool gathers(const Args&) const { return false; }
};
#endif
