// Streamed rows: lanes share rows, each with several independent 16-byte loads in flight (see row_stream.cuh).
// excerpt turn of row_stream.cuh
// counters: load requests, thousands; occupancy, %; issue slots used, %
#include "complex.cuh"
#include "float8_stream.cuh"
#include "row_stream.cuh"

// With 1024 threads on a multiprocessor a thread has 64 registers: enough for its loads, few enough that many
// loads are under way. From compute capability 10.0 on the compiler needs 80 for several unaligned rows of doubles.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define FEWER_BLOCKS(wide) (wide)
#else
#define FEWER_BLOCKS(wide) 0
#endif
template <class TA, class TX, class TY, int THREADS, int LANES, int R, int U, bool ALIGNED, bool BATCHED>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS - FEWER_BLOCKS(!ALIGNED && R > 1 && sizeof(TA) == 8))
streamed_rows(const GemvArgs p) {
  stream_rows<TA, TX, TY, THREADS, LANES, R, U, Alone, ALIGNED, BATCHED>(p);
}
