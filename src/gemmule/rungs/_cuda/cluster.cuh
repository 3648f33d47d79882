// How the blocks of a cluster meet: compute capability 9.0 and above.
#pragma once
#include "ptx.cuh"

template <int BLOCKS> struct Cluster {
  static constexpr int blocks = BLOCKS;
  __device__ static __forceinline__ void arrive() { ptx::cluster_arrive(); }  // every thread, early
  __device__ static __forceinline__ void wait() { ptx::cluster_wait(); }      // every block of the cluster has begun
  __device__ static __forceinline__ void sync() { ptx::cluster_sync(); }

  // Store a value into shared memory of block `rank`, at the place of `local` here.
  template <class T>
  __device__ static __forceinline__ void push(T* local, T value, unsigned rank) {
    const unsigned address = ptx::mapa(ptx::smem_addr(local), rank);
    const unsigned* words = (const unsigned*)&value;
#pragma unroll
    for (int i = 0; i < (int)(sizeof(T) / 4); ++i) ptx::st_cluster<unsigned>(address + 4 * i, words[i]);
  }
};
