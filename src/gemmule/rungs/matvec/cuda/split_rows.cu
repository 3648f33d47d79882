// Split rows: few rows, so long that many blocks share each; a second kernel adds their sums in fixed order.
// excerpt turn of row_stream.cuh
// counters: load requests, thousands; occupancy, %; issue slots used, %
#include "row_stream.cuh"

// Block y of a row has `share` columns of it, whole vectors: a product of its own, into the workspace.
template <class TA, class TX, class TY, int U, bool ALIGNED>
__global__ void __launch_bounds__(256, 4) split_rows(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  constexpr int V = Lanes<TA>::count;
#if __CUDA_ARCH__ >= 900 || defined(CUEMU)
  ptx::pdl_launch_dependents();
#endif
  // excerpt
  const int splits = gridDim.y, share = ((int)p.n / V / splits + 1) * V, first = blockIdx.y * share;
  GemvArgs q = p;
  q.n = max(min(share, (int)p.n - first), 0);
  q.a = (const TA*)p.a + min(first, (int)p.n);
  q.x = (const TX*)p.x + min(first, (int)p.n) * p.x_step;
  q.y = (Acc*)p.work + blockIdx.y * p.m;
  q.y_step = 1, q.alpha = 1, q.beta = 0;
  // end of excerpt
  stream_rows<TA, TX, Acc, 256, 256, 1, U, Alone, ALIGNED, false>(q);
}

// A warp for every row.
template <class TY, int SPLITS>
__global__ void __launch_bounds__(256) add_shares(const GemvArgs p) {
  typedef typename AccOf<TY>::type Acc;
  constexpr int EACH = (SPLITS + 31) / 32;
#if __CUDA_ARCH__ >= 900 || defined(CUEMU)
  ptx::pdl_wait();  // launched early: the partial sums are there only now
#endif
  const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= p.m) return;
  const Acc* work = (const Acc*)p.work + row;
  Acc v[EACH], total = 0;
#pragma unroll
  for (int e = 0; e < EACH; ++e) v[e] = e * 32 + lane < SPLITS ? work[(e * 32 + lane) * p.m] : 0;
#pragma unroll
  for (int e = 0; e < EACH; ++e) total += v[e];
  total = warp_sum(total);
  if (lane == 0) store_sum(p, (TY*)p.y + row * p.y_step, total);
}
