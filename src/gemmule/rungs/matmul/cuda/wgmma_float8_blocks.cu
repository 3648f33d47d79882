// float8 by wgmma with A in registers: a warpgroup's rows go there once for both halves of its columns. Each stage of 128 steps is a sum of its own there, and joins the
// others times the scale of its block of A and of B.
// counters: warp instructions, millions; tensor pipe, %
#include "scales.cuh"

#ifdef SCALES
// A's scales lie `step_a` apart from 2^rows_a rows to the next and `along_a` from 128 steps to the next; B's `step_b` apart
// from 128 columns to the next. Of what all share the step is 0.
struct BlockScaledGemmArgs : ScaledGemmArgs {
  i64 along_a, along_b, rows_a;
};
#undef GemmArgs
#define GemmArgs BlockScaledGemmArgs
#endif
#include "pack_bytes.cuh"
#include "ptx_wgmma_float8.cuh"
#include "wgmma_bytes.cuh"

template <class TA, class TB> struct Registers;
#define REGISTERS(TA, TB, op)                                                                                \
  template <> struct Registers<TA, TB> {                                                                     \
    static __device__ __forceinline__ void multiply(float (&d)[64], const u32 (&a)[4], u64 b, bool more) {   \
      ptx::op(d, a, b, more);                                                                                \
    }                                                                                                        \
  };
REGISTERS(e4m3, e4m3, wgmma_e4m3_ra)
REGISTERS(e5m2, e5m2, wgmma_e5m2_ra)
REGISTERS(e4m3, e5m2, wgmma_e4m3e5m2_ra)
REGISTERS(e5m2, e4m3, wgmma_e5m2e4m3_ra)
#undef REGISTERS

template <class TA, class TB, class TC, int WIDTH, int STAGES, int CLUSTER, bool TURNED>
__device__ __forceinline__ void blocks(const GemmArgs& given, const ptx::TensorMap& map_a, const ptx::TensorMap& map_b,
                                       const ptx::TensorMap* map_c) {
  constexpr int HEIGHT = 128, STEPS = 128, PARTS = WIDTH / 128;
  typedef HalfTile<HEIGHT, true> TileA;   // lines of 128 bytes, as of halves
  typedef HalfTile<WIDTH, true, CLUSTER> TileB;
  constexpr u32 STAGE = TileA::BYTES + TileB::BYTES;
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ __align__(8) u64 bars[2 * STAGES];
#ifdef SCALES
  static_assert(!TURNED, "rows of A have scales of their own, columns of B have not");
  __shared__ float scales[STAGES][HEIGHT + PARTS];
  const GemmArgs& p = given;
#else
  const GemmArgs p = TURNED ? turned(given) : given;
#endif
  const int steps = int((p.k + STEPS - 1) / STEPS), group = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int rank = CLUSTER == 1 ? 0 : int(ptx::cluster_rank());
  const u32 data = ptx::smem_addr(smem), full = ptx::smem_addr(bars), empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
#ifdef SCALES
      ptx::mbar_init(full + 8 * s, 2);
#else
      ptx::mbar_init(full + 8 * s, 1);
#endif
      ptx::mbar_init(empty + 8 * s, 2 * CLUSTER);
    }
    ptx::mbar_fence_init();
  }
  if constexpr (CLUSTER > 1) ptx::cluster_sync();
  else __syncthreads();
  const Walk walk(p, HEIGHT * CLUSTER, WIDTH);
  const unsigned first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER, last = walk.tiles * walk.batches;
  int stage = 0, parity = 0, batch, row, col;
  auto advance = [&] {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  };
  if (group == 0) {
    ptx::reg_dealloc<40>();
    for (unsigned index = first; index < last && threadIdx.x < 64; index += stride) {
      walk.at(index, batch, row, col);
      row = (row * CLUSTER + rank) * HEIGHT, col *= WIDTH;
      const int plane_a = p.a_batch ? batch : 0, plane_b = p.b_batch ? batch : 0;
#ifdef SCALES
      const float *of_a[HEIGHT / 32], *of_b = p.scale_b + min((i64)col / 128 + lane % PARTS, (p.n - 1) / 128) * p.step_b;
#pragma unroll
      for (int i = 0; i < HEIGHT / 32; ++i) of_a[i] = p.scale_a + (min((i64)row + i * 32 + lane, p.m - 1) >> p.rows_a) * p.step_a;
#endif
      for (int s = 0; s < steps; ++s, advance()) {
        if (threadIdx.x == 0) {
          const u32 to = data + stage * STAGE, bar = full + 8 * stage;
          ptx::mbar_wait_cluster(empty + 8 * stage, parity ^ 1);
          ptx::mbar_arrive_expect_tx(bar, STAGE);
          TileA::load(to, &map_a, bar, row, s * STEPS, plane_a);
          TileB::load(to + TileA::BYTES, &map_b, bar, col, s * STEPS, plane_b, rank);
        }
#ifdef SCALES
        if (threadIdx.x >= 32) {   // the second warp brings the scales: they are there when the stage is free
          float scale[HEIGHT / 32], of_col = *of_b;
#pragma unroll
          for (int i = 0; i < HEIGHT / 32; ++i) scale[i] = *of_a[i], of_a[i] += p.along_a;
          of_b += p.along_b;
          ptx::mbar_wait_cluster(empty + 8 * stage, parity ^ 1);
#pragma unroll
          for (int i = 0; i < HEIGHT / 32; ++i) scales[stage][i * 32 + lane] = scale[i];
          if (lane < PARTS) scales[stage][HEIGHT + lane] = of_col;
          __syncwarp();
          if (lane == 0) ptx::mbar_arrive(full + 8 * stage);
        }
#endif
      }
    }
  } else {
    ptx::reg_alloc<232>();
    const int own = (group - 1) * 64, t = threadIdx.x % 128, mine = own + t / 32 * 16;   // rows: the group's, the warp's
    const u32 out = data + STAGES * STAGE + (threadIdx.x / 32 - 4) * BUFFERS * OUT;
    const float alpha = float(p.alpha), beta = float(p.beta);
    const bool whole = map_c && p.beta == 0 && p.n % (16 / sizeof(TC)) == 0;   // else TMA would not do
    int buffer = 0;
    if (group == 2) ptx::named_arrive(1, 256);   // the first turn is the other's
    for (unsigned index = first; index < last; index += stride) {
      float sum[PARTS][64];
#pragma unroll
      for (int i = 0; i < PARTS * 64; ++i) sum[i / 64][i % 64] = 0;
      for (int s = 0; s < steps; ++s, advance()) {
        const u32 at = data + stage * STAGE;
        const u64 of_b = TileB::descriptor(at + TileA::BYTES);
        u32 of_a[4][4];   // 32 steps, register of the instruction
        ptx::mbar_wait(full + 8 * stage, parity);
        // excerpt registers
#pragma unroll
        for (int l = 0; l < 4; ++l)
          ptx::ldmatrix_x4(of_a[l], ptx::swizzle<ptx::Swizzle::b128>(at + (mine + lane % 16) * 128 + (2 * l + lane / 16) * 16));
#ifdef SCALES
        const float* of_stage = scales[stage];
        const float of_row[2] = {of_stage[mine + lane / 4], of_stage[mine + lane / 4 + 8]};
#endif
#pragma unroll
        for (int c = 0; c < PARTS; ++c) {
          float part[64];
#ifdef SCALES
          const float of_col = of_stage[HEIGHT + c], factor[2] = {of_row[0] * of_col, of_row[1] * of_col};
#endif
          ptx::named_sync(group, 256);
          ptx::wgmma_fence();
#pragma unroll
          for (int l = 0; l < 4; ++l) Registers<TA, TB>::multiply(part, of_a[l], of_b + ((c * 128 * 128 + l * 32) >> 4), l > 0);
          ptx::wgmma_commit();
          ptx::named_arrive(3 - group, 256);
          ptx::wgmma_wait<0>();
          if (c + 1 == PARTS) {   // one thread tells each block of the cluster that the stage is read
            if (CLUSTER == 1 && t == 0) ptx::mbar_arrive(empty + 8 * stage);
            if (CLUSTER > 1 && t < CLUSTER) ptx::mbar_signal_remote(empty + 8 * stage, t);
          }
#pragma unroll
          for (int i = 0; i < 64; ++i)
#ifdef SCALES
            sum[c][i] += part[i] * factor[i / 2 % 2];
#else
            sum[c][i] += part[i];
#endif
        }
        // end of excerpt
      }
      walk.at(index, batch, row, col);
      const int top = (row * CLUSTER + rank) * HEIGHT + mine;
      col *= WIDTH;
      if (whole) {
#pragma unroll
        for (int c = 0; c < WIDTH; c += Staged<TC>::COLS, buffer ^= 1) {   // each warp stores its 16 rows by TMA
          if (lane == 0) ptx::bulk_wait_read<BUFFERS - 1>();
          __syncwarp();
          Staged<TC>::put(out + buffer * OUT, sum[c / 128] + c % 128 / 2, alpha);
          ptx::fence_async();
          __syncwarp();
          if (lane == 0 && top < p.m && col + c < p.n) ptx::tma_store_3d(map_c, out + buffer * OUT, col + c, top, batch);
          if (lane == 0) ptx::bulk_commit();
        }
        continue;
      }
#pragma unroll
      for (int c = 0; c < WIDTH; c += Staged<float>::COLS) {   // or one by one
        __syncwarp();
        Staged<float>::put(out, sum[c / 128] + c % 128 / 2, 1.0f);
        __syncwarp();
        const i64 at = col + c + lane;
        TC* to = (TC*)p.c + batch * p.c_batch + top * p.c_row + at * p.c_col;
#pragma unroll 2
        for (int i = 0; i < 16; ++i, to += p.c_row) {
          const float v = ptx::ld_shared(ptx::swizzle<ptx::Swizzle::b128>(out + i * 128 + lane * 4));
          if (top + i < p.m && at < p.n) finish_scaled<TC, float>(to, v, alpha, beta);
        }
      }
    }
    if (group == 1) ptx::named_sync(1, 256);   // nobody's turn is left over
    if (lane == 0) ptx::bulk_wait<0>();
  }
  if constexpr (CLUSTER > 1) ptx::cluster_sync();   // nobody leaves while the others may still write to it
}

// TA and TB are the types of the tile's rows and columns: where C is TURNED those of B and A.
template <class TA, class TB, class TC, int HEIGHT, int WIDTH, int STAGES, int CLUSTER, bool TURNED>
__global__ void __launch_bounds__(384, 1)
multiply_bytes(const GemmArgs p, const __grid_constant__ ptx::TensorMap map_a, const __grid_constant__ ptx::TensorMap map_b,
               const __grid_constant__ ptx::TensorMap map_c) {
  blocks<TA, TB, TC, WIDTH, STAGES, CLUSTER, TURNED>(p, map_a, map_b, &map_c);
}
// The same, where TMA cannot store C: it goes there one by one.
template <class TA, class TB, class TC, int HEIGHT, int WIDTH, int STAGES, int CLUSTER, bool TURNED>
__global__ void __launch_bounds__(384, 1)
multiply_bytes_apart(const GemmArgs p, const __grid_constant__ ptx::TensorMap map_a,
                     const __grid_constant__ ptx::TensorMap map_b) {
  blocks<TA, TB, TC, WIDTH, STAGES, CLUSTER, TURNED>(p, map_a, map_b, nullptr);
}
