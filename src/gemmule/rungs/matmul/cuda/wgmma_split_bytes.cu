// Few rows (or columns) by a large matrix of bytes: tiles of 64 rows of that, so that there are as many blocks as
// multiprocessors, two of them on each, and two blocks of a cluster for a tile where there are fewer. A stage holds
// twice 128 steps; sums of float8 leave the tensor cores after each 128, while the next are multiplied.
// counters: warp instructions, millions; tensor pipe, %
#include "scales.cuh"
#include "leaving_tile.cuh"
#include "wgmma_bytes.cuh"

constexpr int HEIGHT = 64, DEEP = 2, THREADS = 160;   // rows of a tile; lines of 128 steps of a stage

// The sums of a stage, which begins where `more` is false: of integers while it runs, of float8 when it has been read.
template <class Both, int WIDTH>
__device__ __forceinline__ void multiply_lines(int (&sum)[1][WIDTH / 2], u32 a, u32 b, u32 slice, bool more) {
#pragma unroll
  for (int d = 0; d < DEEP; ++d)
    multiply_stage<Both, 1, WIDTH, true, true>(sum, a + d * slice, b + d * slice, more || d);
  ptx::wgmma_wait<0>();
}
template <class Both, int WIDTH>
__device__ __forceinline__ void multiply_lines(float (&sum)[1][WIDTH / 2], u32 a, u32 b, u32 slice, bool more) {
  float part[DEEP][1][WIDTH / 2];
#pragma unroll
  for (int d = 0; d < DEEP; ++d)
    multiply_stage<Both, 1, WIDTH, true, true>(part[d], a + d * slice, b + d * slice, false);
  ptx::wgmma_wait<1>();
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) sum[0][i] = more ? sum[0][i] + part[0][0][i] : part[0][0][i];
  ptx::wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) sum[0][i] += part[1][0][i];
}

__device__ __forceinline__ float to_bits(float v) { return v; }
__device__ __forceinline__ float to_bits(int v) { return __int_as_float(v); }

// TA and TB are the types of the tile's rows and columns: where C is TURNED those of B and A.
template <class TA, class TB, class TC, int WIDTH, int STAGES, bool TURNED>
__global__ void __launch_bounds__(THREADS, 2)
wgmma_split_bytes(const GemmArgs given, const __grid_constant__ ptx::TensorMap map_a,
                  const __grid_constant__ ptx::TensorMap map_b) {
  typedef HalfTile<HEIGHT, true> TileA;
  typedef HalfTile<WIDTH, true> TileB;
  typedef Wgmma<TA, TB> Elements;
  typedef typename Elements::Sum Sum;
#ifdef SCALES
  typedef float Leaves;   // a sum on its way to C
#else
  typedef Sum Leaves;
#endif
  constexpr u32 SLICE = TileA::BYTES + TileB::BYTES, STAGE = DEEP * SLICE;
  constexpr int PAIRS = WIDTH / 16, STEPS = Elements::STEPS;   // pairs of fragments across
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ __align__(8) u64 bars[2 * STAGES];
  const GemmArgs p = TURNED ? turned(given) : given;
  const unsigned parts = ptx::cluster_size(), rank = ptx::cluster_rank(), index = blockIdx.x / parts;
  const unsigned down = unsigned((p.m + HEIGHT - 1) / HEIGHT), tiles = down * unsigned((p.n + WIDTH - 1) / WIDTH);
  const unsigned of_tile = index % tiles;
  const int batch = int(index / tiles), row = int(of_tile % down) * HEIGHT, col = int(of_tile / down) * WIDTH;
  const int all = int((p.k + DEEP * STEPS - 1) / (DEEP * STEPS)), share = (all + int(parts) - 1) / int(parts);
  // A part that is left without steps takes one past the end, of zeros.
  const int first = share * int(rank), steps = max(1, min(share, all - first));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 data = ptx::smem_addr(smem), full = ptx::smem_addr(bars), empty = full + 8 * STAGES;
  int stage = 0, parity = 0;
  auto advance = [&] {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  };
  auto load = [&](int s) {
    const u32 to = data + stage * STAGE, bar = full + stage * 8;
    ptx::mbar_arrive_expect_tx(bar, STAGE);
#pragma unroll
    for (int d = 0; d < DEEP; ++d) {
      const int k = ((first + s) * DEEP + d) * STEPS;
      TileA::load(to + d * SLICE, &map_a, bar, row, k, p.a_batch ? batch : 0);
      TileB::load(to + d * SLICE + TileA::BYTES, &map_b, bar, col, k, p.b_batch ? batch : 0);
    }
    advance();
  };
  if (threadIdx.x == 128) {
    ptx::prefetch_map(&map_a), ptx::prefetch_map(&map_b);
    for (int s = 0; s < STAGES; ++s) ptx::mbar_init(full + 8 * s, 1), ptx::mbar_init(empty + 8 * s, 1);
    ptx::mbar_fence_init();
#pragma unroll 1
    for (int s = 0; s < STAGES && s < steps; ++s) load(s);
  }
  __syncthreads();
  if (parts > 1) ptx::cluster_arrive_relaxed();
  Sum sum[1][WIDTH / 2];
  if (warp == 4) {   // its first thread loads, the others multiply
    if (lane == 0)
#pragma unroll 1
      for (int s = STAGES; s < steps; ++s) {
        ptx::mbar_wait(empty + stage * 8, parity ^ 1);
        load(s);
      }
    __syncwarp();
  } else {
    for (int s = 0; s < steps; ++s, advance()) {
      const u32 at = data + stage * STAGE;
      ptx::mbar_wait(full + stage * 8, parity);
      multiply_lines<typename Elements::Both, WIDTH>(sum, at, at + TileA::BYTES, SLICE, s > 0);
      if (threadIdx.x == 0) ptx::mbar_arrive(empty + stage * 8);
    }
  }
  TC* const c = (TC*)p.c + batch * p.c_batch;
  const Leaving<TC, HEIGHT, WIDTH> leaving{smem, p.c_col != 1, float(p.alpha)};
  const u64 places = u64(c) | u64(leaving.down ? p.c_col : p.c_row) * 2;
#ifdef EPILOGUE
  const bool whole = false;   // sums are finished one by one
#else
  const bool whole = sizeof(TC) == 2 && p.beta == 0 && (p.c_col == 1 || p.c_row == 1) && places % 16 == 0;
#endif
  // 8 x 16 sums of a warp from row i and column j of the tile, as `Leaving` has them.
  auto put = [&](int i, int j, float4 v) {
#ifdef SCALES
    const int at = row + i + lane / 4;
    const float of_row = at < p.m ? p.scale_a[at * p.step_a] : 0.0f;
    float* const each = &v.x;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int place = col + j + lane % 4 * 2 + e % 2 + e / 2 * 8;
      const float of_col = place < p.n ? p.scale_b[place * p.step_b] : 0.0f;
      each[e] = float(from_bits<Sum>(each[e])) * of_row * of_col;
    }
#endif
    if constexpr (sizeof(TC) == 2) if (whole) return leaving.put(i, j, v);
    leaving.keep(i, j, v);
  };
  auto fragments = [&](int i, int half) {   // 8 x 16 sums of this warp, from column 2 i
    const Sum* d = sum[0] + i + 2 * half;
    return make_float4(to_bits(d[0]), to_bits(d[1]), to_bits(d[4]), to_bits(d[5]));
  };
  int top = 0, rows = HEIGHT;
  __syncthreads();
  if (parts == 1) {
    if (warp < 4)
#pragma unroll
      for (int i = 0; i < WIDTH / 2; i += 8)
#pragma unroll
        for (int half = 0; half < 2; ++half) put(16 * warp + 8 * half, 2 * i, fragments(i, half));
  } else {
    // excerpt
    const u32 slots = data + STAGES * STAGE;
    const int each = 8 / int(parts);                 // eights of rows that a block stores
    ptx::cluster_wait();                             // all blocks of the cluster have begun
    if (warp < 4)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int eight = 2 * warp + half, slot = (int(rank) * each + eight % each) * PAIRS;
        const u32 there = ptx::mapa(slots + slot * 512 + lane * 16, eight / each);
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i += 8) ptx::st_cluster(there + i * 64, fragments(i, half));
      }
    ptx::cluster_sync();                             // what the other sent is here
    rows = each * 8, top = int(rank) * rows;
#pragma unroll 1
    for (int e = warp; e < each * PAIRS; e += 5) {
      const float4* const met = (const float4*)(smem + STAGES * STAGE);
      float4 total = met[e * 32 + lane];
      for (unsigned r = 1; r < parts; ++r) {
        const float4 v = met[(r * each * PAIRS + e) * 32 + lane];
        total.x = to_bits(from_bits<Sum>(total.x) + from_bits<Sum>(v.x));
        total.y = to_bits(from_bits<Sum>(total.y) + from_bits<Sum>(v.y));
        total.z = to_bits(from_bits<Sum>(total.z) + from_bits<Sum>(v.z));
        total.w = to_bits(from_bits<Sum>(total.w) + from_bits<Sum>(v.w));
      }
      put(top + e / PAIRS * 8, e % PAIRS * 16, total);
    }
    // end of excerpt
  }
  __syncthreads();
  if constexpr (sizeof(TC) == 2) if (whole) return leaving.store(p, c, row, col, top, rows);
  leaving.template finish<Leaves>(p, batch, row, col, top, rows);
}
