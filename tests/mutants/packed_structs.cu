// A load is one instruction only where the type is aligned to its size. With PACKED the piece is a plain struct of
// halves, aligned to one of them, and the check must fail.
#include "ptx.cuh"
#include <cuda_fp16.h>

#ifdef PACKED
struct Piece { __half x, y, z, w; };
#else
typedef ptx::Vec<__half, 4> Piece;
#endif
static_assert(alignof(Piece) == sizeof(Piece), "vector loads are not forced");

__global__ void copy(const Piece* from, Piece* to) { to[threadIdx.x] = from[threadIdx.x]; }
