// float32 by halves: each operand is the sum of a high and a low half, and of the four products the three that count
// go through the tensor cores. These cut off where they add, so that their sums of 64 steps are added up outside.
// counters: warp instructions, millions; tensor pipe, %
#include "split_halves.cuh"
#include "wgmma_specialized.cuh"

constexpr int HEIGHT = 128, HALF_HEIGHT = 64;   // of a tile, and of each warpgroup's part

__global__ void __launch_bounds__(256) row_maxima(const GemmArgs p) {
  __shared__ unsigned met[8][32];
  const Pairs pairs(p);
  if (blockIdx.x == 0 && threadIdx.x == 0) *pairs.list = 0;
  maxima_of(pairs.a, pairs, met);
  maxima_of(pairs.b, pairs, met);
}

__global__ void __launch_bounds__(256, 4) split_operands(const GemmArgs p) {
  __shared__ float tile[SIDE][SIDE + 1];
  __shared__ int shifts[SIDE];
  const Pairs pairs(p);
  split_tiles(pairs.a, pairs, tile, shifts);
  split_tiles(pairs.b, pairs, tile, shifts);
}

// d (64 x WIDTH) += the products of a stage's 64 steps, or is them where `more` is false.
template <int WIDTH>
__device__ __forceinline__ void multiply_64(float (&d)[WIDTH / 2], u32 a, u32 b, bool more) {
  const u64 of_a = HalfTile<64, true>::descriptor(a), of_b = HalfTile<WIDTH, true>::descriptor(b);
#pragma unroll
  for (int l = 0; l < DEPTH / 16; ++l)
    ptx::wgmma_f16<WIDTH>(d, of_a + (l * 32 >> 4), of_b + (l * 32 >> 4), more || l);
}

template <int WIDTH, int STAGES>
__global__ void __launch_bounds__(384, 1)
wgmma_3xfp16(const GemmArgs p, const __grid_constant__ ptx::TensorMap map_a,
             const __grid_constant__ ptx::TensorMap map_b) {
  typedef HalfTile<HEIGHT, true> TileA;
  typedef HalfTile<WIDTH, true> TileB;
  constexpr u32 STAGE = 2 * (TileA::BYTES + TileB::BYTES);
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ __align__(8) u64 bars[2 * STAGES];
  __shared__ unsigned votes[2][2];
  const Pairs pairs(p);
  const int steps = int((p.k + DEPTH - 1) / DEPTH), group = threadIdx.x / 128;
  const u32 data = ptx::smem_addr(smem), full = ptx::smem_addr(bars), empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) ptx::mbar_init(full + 8 * s, 1), ptx::mbar_init(empty + 8 * s, 2);
    ptx::mbar_fence_init();
  }
  if (threadIdx.x < 4) votes[threadIdx.x / 2][threadIdx.x % 2] = 0;
  __syncthreads();
  const Walk walk(p, HEIGHT, WIDTH);
  const unsigned last = walk.tiles * walk.batches;
  int stage = 0, parity = 0, batch, row, col;
  auto advance = [&] {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  };
  if (group == 0) {
    ptx::reg_dealloc<40>();
    if (threadIdx.x == 0) {
      for (unsigned index = blockIdx.x; index < last; index += gridDim.x) {
        walk.at(index, batch, row, col);
        const int plane_a = p.a_batch ? 2 * batch : 0, plane_b = p.b_batch ? 2 * batch : 0;
        for (int s = 0; s < steps; ++s, advance()) {
          u32 to = data + stage * STAGE;
          const u32 bar = full + 8 * stage;
          ptx::mbar_wait(empty + 8 * stage, parity ^ 1);
          ptx::mbar_arrive_expect_tx(bar, STAGE);
#pragma unroll
          for (int part = 0; part < 2; ++part, to += TileA::BYTES)
            TileA::load(to, &map_a, bar, row * HEIGHT, s * DEPTH, plane_a + part);
#pragma unroll
          for (int part = 0; part < 2; ++part, to += TileB::BYTES)
            TileB::load(to, &map_b, bar, col * WIDTH, s * DEPTH, plane_b + part);
        }
      }
    }
    return;
  }
  ptx::reg_alloc<232>();
  const int t = threadIdx.x % 128, lane = t % 32;
  const u32 out = data + STAGES * STAGE + (threadIdx.x / 32 - 4) * OUT;
  const float alpha = float(p.alpha), beta = float(p.beta);
  const bool down = p.c_row == 1 && p.c_col != 1;
  auto release = [&](int which) {
    if (t == 0) ptx::mbar_arrive(empty + 8 * which);
  };
  unsigned turn = 0;
  for (unsigned index = blockIdx.x; index < last; index += gridDim.x) {
    float sum[WIDTH / 2], high[WIDTH / 2], cross[WIDTH / 2];
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) sum[i] = 0.0f;
    int before = 0;
    // excerpt
    for (int s = 0; s < steps; ++s, advance()) {
      const u32 high_a = data + stage * STAGE + (group - 1) * BLOCK, low_a = high_a + TileA::BYTES;
      const u32 high_b = data + stage * STAGE + 2 * TileA::BYTES, low_b = high_b + TileB::BYTES;
      ptx::mbar_wait(full + 8 * stage, parity);
      ptx::wgmma_fence();
      multiply_64<WIDTH>(high, high_a, high_b, false);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();   // the stage before is read: it may be loaded again while this one is multiplied
      if (s > 0) release(before);
      multiply_64<WIDTH>(cross, low_a, high_b, s > 0);
      multiply_64<WIDTH>(cross, high_a, low_b, true);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
#pragma unroll
      for (int i = 0; i < WIDTH / 2; ++i) sum[i] += high[i];   // rounds, while the tensor cores work on
      before = stage;
    }
    ptx::wgmma_wait<0>();
    release(before);
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) sum[i] = fmaf(cross[i], 0x1p-11f, sum[i]);
    // end of excerpt
    walk.at(index, batch, row, col);
    row = row * HEIGHT + (group - 1) * HALF_HEIGHT + t / 32 * 16, col *= WIDTH;   // the warp's 16 rows
    const i64 of_a = (p.a_batch ? batch * p.m : 0) + row, of_b = (p.b_batch ? batch * p.n : 0) + col;
    const int row_shift = row + lane % 16 < p.m ? pairs.a.shift[of_a + lane % 16] : 0;
    unsigned lost = row + lane % 16 < p.m ? pairs.a.lost[of_a + lane % 16] : 0;
    unsigned any = lost;
    for (int c = lane; c < WIDTH; c += 32) any |= col + c < p.n ? pairs.b.lost[of_b + c] : 0;
    if (__any_sync(~0u, any != 0)) {
      bool bad = false;
      const float upper = float(__shfl_sync(~0u, lost, lane / 4)), lower = float(__shfl_sync(~0u, lost, lane / 4 + 8));
#pragma unroll
      for (int i = 0; i < WIDTH / 2; ++i) {
        const int c = sum_col(t, i) + i % 2, r = row + lane / 4 + i / 2 % 2 * 8;
        if (r < p.m && col + c < p.n)
          bad |= suspect(sum[i], (i / 2 % 2 ? lower : upper) + float(pairs.b.lost[of_b + c]));
      }
      if (__any_sync(~0u, bad) && lane == 0) votes[turn & 1][group - 1] = turn + 1;
    }
    ptx::named_sync(group, 128);
    const bool again = votes[turn & 1][group - 1] == turn + 1;
    ++turn;
    if (again) {   // `compute_anew` stores this part of the tile
      if (t == 0) pairs.list[1 + atomicAdd(pairs.list, 1u)] = 2 * index + group - 1;
      continue;
    }
    float* const to = (float*)p.c + batch * p.c_batch;
#pragma unroll
    for (int c = 0; c < WIDTH; c += 32) {
      const int col_shift = col + c + lane < p.n ? pairs.b.shift[of_b + c + lane] : 0;
      __syncwarp();
      Staged<float>::put(out, sum + c / 2, 1.0f);
      __syncwarp();
#pragma unroll 4
      for (int i = 0; i < 16; ++i) {   // lanes go along the unit stride of C
        const int r = down ? lane % 16 : i, q = down ? 2 * i + lane / 16 : lane;
        const float v = ptx::ld_shared(ptx::swizzle<ptx::Swizzle::b128>(out + r * 128 + q * 4));
        const int back = -(__shfl_sync(~0u, row_shift, r) + __shfl_sync(~0u, col_shift, q));
#ifdef EPILOGUE
        finish_element<float>(p, batch, row + r, col + c + q, scale_by(v, back < -252 ? -252 : back));
#else
        if (row + r < p.m && col + c + q < p.n)
          finish_scaled<float, float>(to + (row + r) * p.c_row + (col + c + q) * p.c_col,
                                      scale_by(v, back < -252 ? -252 : back), alpha, beta);
#endif
      }
    }
  }
}

// Parts of tiles whose sums are suspect, from the operands themselves by multiply-adds, in sums of 64 steps each.
template <int WIDTH>
__global__ void __launch_bounds__(256, 2) compute_anew(const GemmArgs p) {
  constexpr int LENGTH = 16, ACROSS = WIDTH / 16;   // steps in shared memory; columns of a thread, in fours
  typedef ptx::Vec<float, 4> Four;
  __shared__ __align__(16) float a[LENGTH][HALF_HEIGHT + 4], b[LENGTH][WIDTH + 4];
  const Pairs pairs(p);
  const Walk walk(p, HEIGHT, WIDTH);
  const int t = threadIdx.x, ty = t / 16, tx = t % 16;
  const bool a_across = p.a_row == 1, b_across = p.b_col == 1;
  const unsigned count = *pairs.list;
  for (unsigned at = blockIdx.x; at < count; at += gridDim.x) {
    const unsigned which = pairs.list[1 + at];
    int batch, row, col;
    walk.at(which / 2, batch, row, col);
    row = row * HEIGHT + int(which % 2) * HALF_HEIGHT, col *= WIDTH;
    const float *const from_a = pairs.a.plane(batch), *const from_b = pairs.b.plane(batch);
    float next_a[4], next_b[ACROSS], total[4][ACROSS] = {}, part[4][ACROSS] = {};
    auto fetch = [&](i64 first) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = a_across ? t % 64 : t / 16 + 16 * i, l = a_across ? t / 64 + 4 * i : t % 16;
        next_a[i] = element_or_zero(from_a, row + r, first + l, p.m, p.k, p.a_row, p.a_col);
      }
#pragma unroll
      for (int i = 0; i < ACROSS; ++i) {
        const int c = b_across ? t % WIDTH : t / 16 + 16 * i, l = b_across ? t / WIDTH + 256 / WIDTH * i : t % 16;
        next_b[i] = element_or_zero(from_b, first + l, col + c, p.k, p.n, p.b_row, p.b_col);
      }
    };
    fetch(0);
    for (i64 first = 0; first < p.k; first += LENGTH) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        (a_across ? a[t / 64 + 4 * i][t % 64] : a[t % 16][t / 16 + 16 * i]) = next_a[i];
#pragma unroll
      for (int i = 0; i < ACROSS; ++i)
        (b_across ? b[t / WIDTH + 256 / WIDTH * i][t % WIDTH] : b[t % 16][t / 16 + 16 * i]) = next_b[i];
      __syncthreads();
      fetch(first + LENGTH);   // zeros behind the last step
#pragma unroll
      for (int l = 0; l < LENGTH; ++l) {
        const Four left = *(const Four*)&a[l][ty * 4];
#pragma unroll
        for (int c = 0; c < ACROSS; c += 4) {
          const Four right = *(const Four*)&b[l][c * 16 + tx * 4];
#pragma unroll
          for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int i = 0; i < 4; ++i) part[r][c + i] = fmaf(left[r], right[i], part[r][c + i]);
        }
      }
      __syncthreads();
      if (first / LENGTH % 4 != 3 && first + LENGTH < p.k) continue;
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < ACROSS; ++c) total[r][c] += part[r][c], part[r][c] = 0.0f;
    }
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int c = 0; c < ACROSS; ++c)
#ifdef EPILOGUE
        finish_element<float>(p, batch, row + ty * 4 + r, col + c / 4 * 64 + tx * 4 + c % 4, total[r][c]);
#else
        finish_at<float>(p, batch, row + ty * 4 + r, col + c / 4 * 64 + tx * 4 + c % 4, total[r][c]);
#endif
  }
}
