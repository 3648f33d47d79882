// Early rows: streamed rows that begin while the grid before them still runs (see row_stream.cuh).
// excerpt prefetch of row_stream.cuh
// counters: load requests, thousands; occupancy, %; issue slots used, %
#include "row_stream.cuh"

template <class TA, class TX, class TY, int THREADS, int LANES, int U, bool ALIGNED, bool BATCHED>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS) early_rows(const GemvArgs p) {
  stream_rows<TA, TX, TY, THREADS, LANES, 1, U, Alone, ALIGNED, BATCHED, true>(p);
}
