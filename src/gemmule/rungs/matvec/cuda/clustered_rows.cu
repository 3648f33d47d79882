// Clustered rows: the blocks of a cluster share a row, for few rows of great length (see row_stream.cuh).
// excerpt meeting of row_stream.cuh
// counters: load requests, thousands; occupancy, %; issue slots used, %
#include "cluster.cuh"
#include "row_stream.cuh"

template <class TA, class TX, class TY, int U, int CLUSTER, bool ALIGNED, bool BATCHED>
__global__ void __launch_bounds__(256, 4) clustered_rows(const GemvArgs p) {
  stream_rows<TA, TX, TY, 256, 256, 1, U, Cluster<CLUSTER>, ALIGNED, BATCHED>(p);
}
