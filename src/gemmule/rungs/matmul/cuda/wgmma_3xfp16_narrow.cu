// float32 by a narrow matrix as three products of halves, the wide matrix read once: TMA brings its floats, and a thread
// takes those of its rows apart into pairs of halves on their way to the tensor cores. 64 steps of a row, or of a column,
// share a power of two, which joins their sum when that leaves the tensor cores. The narrow matrix is taken apart before,
// into lines as shared memory has them. Blocks beside each other sum parts of the reduction; a last kernel adds these up.
// counters: warp instructions, millions; tensor pipe, %
#include "stream.cuh"
#include "wgmma_tiles.cuh"

constexpr int HEIGHT = 128, THREADS = 384, PLANES = 2, ALL = 256;  // rows of a block; threads of the other kernels
constexpr u32 WIDE = HEIGHT * DEPTH * 4;                           // bytes of a stage's floats, in lines of 32

// C seen as its transpose, which is B^T A^T, where B is the wide matrix.
template <bool TURNED>
__device__ __forceinline__ GemmArgs seen(const GemmArgs& p) {
  GemmArgs q = p;
  if (TURNED) {
    q.a = p.b, q.b = p.a, q.m = p.n, q.n = p.m, q.a_row = p.b_col, q.a_col = p.b_row, q.b_row = p.a_col, q.b_col = p.a_row;
    q.c_row = p.c_col, q.c_col = p.c_row;
  }
  return q;
}

// The power of two that brings the largest of some floats to [2^14, 2^15), and the one that takes back. Where all are
// below 2^-58 they stay as much smaller, so that two such powers are a float.
struct Power {
  float to, back;
  __device__ __forceinline__ explicit Power(float most) {
    const u32 e = max(__float_as_uint(most) >> 23, 69u);
    to = __uint_as_float((268 - e) << 23), back = __uint_as_float((e - 14) << 23);
  }
};
// Whether a pair of halves does not hold a float, brought there, to within 2^-22 of itself.
__device__ __forceinline__ bool is_lost(float v) { return v != 0.0f && fabsf(v) < 0x1p-14f; }

// Two floats as pairs of halves: high + low / 2^11.
__device__ __forceinline__ void take_apart(float x, float y, float to, u32& high, u32& low) {
  x *= to, y *= to;
  const __half2 near = __floats2half2_rn(x, y);
  const float2 held = __half22float2(near);
  const __half2 rest = __floats2half2_rn((x - held.x) * 2048.0f, (y - held.y) * 2048.0f);
  high = reinterpret_cast<const u32&>(near), low = reinterpret_cast<const u32&>(rest);
}

// The workspace. Powers that take back, of 64 steps: of a column all, negative where an element was lost; of a part of the
// reduction the largest of each row and column, and the largest of those that lost one.
template <int WIDTH> struct Work {
  i64 pieces, across;
  unsigned char* planes;
  float *powers, *sums;
  float2 *rows, *columns;
  __device__ __forceinline__ Work(const GemmArgs& p, int parts)
      : pieces((p.k + DEPTH - 1) / DEPTH), across((p.n + WIDTH - 1) / WIDTH), planes((unsigned char*)p.work) {
    powers = (float*)(planes + across * pieces * PLANES * WIDTH * 128);
    rows = (float2*)(powers + across * pieces * WIDTH);
    columns = rows + parts * p.m;
    sums = (float*)(columns + parts * across * WIDTH);
  }
};

// The narrow matrix in pieces of 64 steps by WIDTH columns, high halves and then low ones, swizzled as wgmma reads them,
// in that order of steps in which a thread finds them where its row's lie: see `wgmma_3xfp16_narrow`.
template <int WIDTH, bool TURNED>
__global__ void __launch_bounds__(ALL) take_columns_apart(const GemmArgs given) {
  constexpr int EACH = WIDTH * 8 / ALL;   // chunks of 8 steps of a thread
  __shared__ float met[8][WIDTH];
  const GemmArgs p = seen<TURNED>(given);
  const Work<WIDTH> work(p, 0);
  const bool along = p.b_row == 1;  // neighbouring threads read what lies side by side
  for (i64 piece = blockIdx.x; piece < work.pieces * work.across; piece += gridDim.x) {
    float v[EACH][8];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int at = e * ALL + threadIdx.x, chunk = along ? at % 8 : at / WIDTH, line = along ? at / 8 : at % WIDTH;
      const i64 column = piece / work.pieces * WIDTH + line;
      const i64 first = piece % work.pieces * DEPTH + chunk / 4 * 32 + chunk / 2 % 2 * 4 + chunk % 2 * 2;
      float most = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const i64 l = first + i / 2 * 8 + i % 2;
        v[e][i] = column < p.n && l < p.k ? ((const float*)p.b)[l * p.b_row + column * p.b_col] : 0.0f;
        most = fmaxf(most, fabsf(v[e][i]));
      }
      met[chunk][line] = most;
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int at = e * ALL + threadIdx.x, chunk = along ? at % 8 : at / WIDTH, line = along ? at / 8 : at % WIDTH;
      float most = 0;
#pragma unroll
      for (int c = 0; c < 8; ++c) most = fmaxf(most, met[c][line]);
      const Power power(most);
      u32 high[4], low[4];
      bool lost = false;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        take_apart(v[e][2 * i], v[e][2 * i + 1], power.to, high[i], low[i]);
        lost |= is_lost(v[e][2 * i] * power.to) | is_lost(v[e][2 * i + 1] * power.to);
      }
      unsigned char* to = work.planes + piece * PLANES * WIDTH * 128 + line * 128 + (chunk ^ line % 8) * 16;
      *(uint4*)to = make_uint4(high[0], high[1], high[2], high[3]);
      *(uint4*)(to + WIDTH * 128) = make_uint4(low[0], low[1], low[2], low[3]);
      v[e][0] = lost ? -power.back : power.back;
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int at = e * ALL + threadIdx.x, chunk = along ? at % 8 : at / WIDTH, line = along ? at / 8 : at % WIDTH;
      met[chunk][line] = v[e][0];
    }
    __syncthreads();
    if (threadIdx.x < WIDTH) {
      float least = met[0][threadIdx.x];
#pragma unroll
      for (int c = 1; c < 8; ++c) least = fminf(least, met[c][threadIdx.x]);
      work.powers[piece * WIDTH + threadIdx.x] = least;
    }
    __syncthreads();
  }
}

// Sums of parts: block row y of the grid takes the y-th, and stores it as plane y of the sums.
template <int WIDTH, int STAGES, bool TURNED>
__global__ void __launch_bounds__(THREADS, 1)
wgmma_3xfp16_narrow(const GemmArgs given, const __grid_constant__ ptx::TensorMap map_a) {
  typedef HalfTile<WIDTH, true> TileB;
  constexpr u32 STAGE = WIDE + PLANES * TileB::BYTES;
  constexpr bool BY_TURNS = WIDTH > 64;   // low products first, then the high ones in the same registers
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ __align__(16) float powers[STAGES][WIDTH];
  __shared__ __align__(8) u64 bars[2 * STAGES];
  const GemmArgs p = seen<TURNED>(given);
  const Work<WIDTH> work(p, int(gridDim.y));
  const unsigned down = unsigned((p.m + HEIGHT - 1) / HEIGHT), tile = blockIdx.x / down;
  const i64 top = (i64)(blockIdx.x % down) * HEIGHT, left = (i64)tile * WIDTH;
  const int all = int(work.pieces), share = (all + int(gridDim.y) - 1) / int(gridDim.y);
  const int first = share * int(blockIdx.y), steps = min(share, all - first);
  const u32 data = ptx::smem_addr(smem), full = ptx::smem_addr(bars), empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) ptx::mbar_init(full + 8 * s, 1), ptx::mbar_init(empty + 8 * s, 8);
    ptx::mbar_fence_init();
  }
  __syncthreads();
  int stage = 0, parity = 0;
  auto advance = [&] {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  };
  const i64 begin = (i64)tile * all + first;   // its first piece of the narrow matrix
  if (threadIdx.x < 128) {
    ptx::reg_dealloc<40>();
    if (threadIdx.x == 0) {
      for (int s = 0; s < steps; ++s, advance()) {
        const u32 to = data + stage * STAGE, bar = full + 8 * stage;
        ptx::mbar_wait(empty + 8 * stage, parity ^ 1);
        ptx::mbar_arrive_expect_tx(bar, STAGE + WIDTH * 4);
        ptx::tma_load_3d(to, &map_a, bar, (first + s) * DEPTH, int(top), 0);
        ptx::tma_load_3d(to + WIDE / 2, &map_a, bar, (first + s) * DEPTH + 32, int(top), 0);
        ptx::bulk_load(to + WIDE, work.planes + (begin + s) * PLANES * TileB::BYTES, PLANES * TileB::BYTES, bar);
        ptx::bulk_load(ptx::smem_addr(powers[stage]), work.powers + (begin + s) * WIDTH, WIDTH * 4, bar);
      }
    } else if (threadIdx.x >= 32 && top == 0) {   // idle threads sum up what columns lost
      for (int c = threadIdx.x - 32; c < WIDTH; c += 96) {
        float largest = 0, lost = 0;
        for (int s = 0; s < steps; ++s) {
          const float back = work.powers[(begin + s) * WIDTH + c];
          largest = fmaxf(largest, fabsf(back)), lost = fmaxf(lost, -back);
        }
        work.columns[blockIdx.y * work.across * WIDTH + left + c] = make_float2(largest, lost);
      }
    }
    return;
  }
  ptx::reg_alloc<232>();
  const int lane = threadIdx.x % 32, quad = lane % 4, mine = (threadIdx.x / 32 - 4) * 16 + lane / 4;
  float sum[WIDTH / 2], largest[2] = {0, 0}, lost[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) sum[i] = 0;
  struct Apart {
    u32 high[4][4], low[4][4];   // 16 steps, register of the instruction
    float back[2];
  } even, odd;
  auto take = [&](Apart& to, int which, int turn, int half) {   // a stage's floats of one of a thread's two rows
    const unsigned char* const here = smem + which * STAGE;
    ptx::mbar_wait(full + 8 * which, turn);
    // excerpt apart
    const int row = mine + 8 * half;
    float4 v[4];   // of 32 steps a thread has 8 side by side: so no bank is asked twice
    float most = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = *(const float4*)(here + i / 2 * (WIDE / 2) + row * 128 + ((2 * quad + i % 2) ^ row % 8) * 16);
      most = fmaxf(fmaxf(fmaxf(most, fabsf(v[i].x)), fmaxf(fabsf(v[i].y), fabsf(v[i].z))), fabsf(v[i].w));
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const Power power(most);
    float least = most;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      least = fminf(fminf(fminf(least, fabsf(v[i].x)), fminf(fabsf(v[i].y), fabsf(v[i].z))), fabsf(v[i].w));
      take_apart(v[i].x, v[i].y, power.to, to.high[i][half], to.low[i][half]);
      take_apart(v[i].z, v[i].w, power.to, to.high[i][half + 2], to.low[i][half + 2]);
    }
    to.back[half] = power.back, largest[half] = fmaxf(largest[half], power.back);
    if (least * power.to < 0x1p-14f) {   // zeros, or lost
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (is_lost(v[i].x * power.to) | is_lost(v[i].y * power.to) | is_lost(v[i].z * power.to) | is_lost(v[i].w * power.to))
          lost[half] = fmaxf(lost[half], power.back);
    }
    // end of excerpt
  };
  // Multiplies one stage, and takes the next apart meanwhile: half by half where registers are few.
  auto multiply_and_take = [&](const Apart& now, Apart& next, bool more) {
    const u32 at = data + stage * STAGE + WIDE;
    const u64 of_high = TileB::descriptor(at), of_low = TileB::descriptor(at + TileB::BYTES);
    auto join = [&](const float (&part)[WIDTH / 2]) {   // a stage's sum, times its powers
#pragma unroll
      for (int i = 0; i < WIDTH / 2; i += 4) {
        const float2 of = *(const float2*)&powers[stage][i * 2 + quad * 2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          sum[i + 2 * half] += part[i + 2 * half] * (now.back[half] * fabsf(of.x));
          sum[i + 2 * half + 1] += part[i + 2 * half + 1] * (now.back[half] * fabsf(of.y));
        }
      }
    };
    float part[WIDTH / 2], cross[WIDTH / 2];
    auto high_products = [&] {
#pragma unroll
      for (int i = 0; i < 4; ++i) ptx::wgmma_f16_ra<WIDTH>(part, now.high[i], of_high + (i * TileB::NEXT >> 4), BY_TURNS || i > 0);
    };
    auto low_products = [&](float (&d)[WIDTH / 2]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) ptx::wgmma_f16_ra<WIDTH>(d, now.low[i], of_high + (i * TileB::NEXT >> 4), i > 0);
#pragma unroll
      for (int i = 0; i < 4; ++i) ptx::wgmma_f16_ra<WIDTH>(d, now.high[i], of_low + (i * TileB::NEXT >> 4), true);
    };
    const int ahead = stage + 1 == STAGES ? 0 : stage + 1, turn = ahead ? parity : parity ^ 1;
    ptx::wgmma_fence();
    if constexpr (BY_TURNS) {
      low_products(part);
      ptx::wgmma_commit();
      if (more) take(next, ahead, turn, 0);
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < WIDTH / 2; ++i) part[i] *= 0x1p-11f;   // on top of which go the high ones
      ptx::wgmma_fence();
      high_products();
      ptx::wgmma_commit();
      if (more) take(next, ahead, turn, 1);
      ptx::wgmma_wait<0>();
    } else {
      high_products();
      low_products(cross);
      ptx::wgmma_commit();
      if (more) take(next, ahead, turn, 0), take(next, ahead, turn, 1);
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < WIDTH / 2; ++i) part[i] += cross[i] * 0x1p-11f;
    }
    join(part);
    __syncwarp();
    if (lane == 0) ptx::mbar_arrive(empty + 8 * stage);
    advance();
  };
  if (steps > 0) take(even, 0, 0, 0), take(even, 0, 0, 1);
  for (int s = 0; s < steps; s += 2) {
    multiply_and_take(even, odd, s + 1 < steps);
    if (s + 1 < steps) multiply_and_take(odd, even, s + 2 < steps);
  }
  float* const sums = work.sums + (i64)blockIdx.y * p.m * p.n;
  const i64 row = top + mine;
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) {
    const i64 at = row + i / 2 % 2 * 8, column = left + i / 4 * 8 + quad * 2 + i % 2;
    if (at < p.m && column < p.n) sums[at * p.n + column] = sum[i];
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    lost[half] = fmaxf(lost[half], __shfl_xor_sync(~0u, lost[half], 1));
    lost[half] = fmaxf(lost[half], __shfl_xor_sync(~0u, lost[half], 2));
    if (left == 0 && quad == 0 && row + 8 * half < p.m)
      work.rows[blockIdx.y * p.m + row + 8 * half] = make_float2(largest[half], lost[half]);
  }
}

// Add up the parts of each sum. What is not finite then, as an operand was not, or so small that elements lost might have
// moved it by more than 2^-22 of the sizes of its terms, the warp computes anew from the operands themselves.
template <int WIDTH, int PARTS, bool TURNED>
__global__ void __launch_bounds__(ALL) add_parts(const GemmArgs given) {
  const GemmArgs p = seen<TURNED>(given);
  const Work<WIDTH> work(p, PARTS);
  const i64 count = p.m * p.n, lines = work.across * WIDTH;
  // An element lost is off by 2^-36 of its power, so a term by 2^-21 of both powers.
  const float each = float((work.pieces + PARTS - 1) / PARTS * DEPTH * 4);
  const int lane = threadIdx.x % 32;
  for (i64 warp = ((i64)blockIdx.x * ALL + threadIdx.x) / 32; warp * 32 < count; warp += (i64)gridDim.x * (ALL / 32)) {
    const u32 e = u32(min(warp * 32 + lane, count - 1)), m = u32(p.m), n = u32(p.n);   // so few sums are taken
    const i64 row = p.c_row == 1 ? e % m : e / n, column = p.c_row == 1 ? e / m : e % n;
    float total = 0, off = 0;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      total += work.sums[part * count + row * p.n + column];
      const float2 of_row = work.rows[part * p.m + row], of_column = work.columns[part * lines + column];
      off += of_row.x * of_column.y + of_row.y * of_column.x;
    }
    const bool right = fabsf(total) <= 3.402823466e38f && fabsf(total) >= off * each;
    unsigned lost = __ballot_sync(~0u, !right);
#pragma unroll 1
    for (; lost; lost &= lost - 1) {
      const int whose = __ffs(lost) - 1;
      const i64 i = __shfl_sync(~0u, row, whose), j = __shfl_sync(~0u, column, whose);
      float anew = 0;
#pragma unroll 8
      for (i64 l = lane; l < p.k; l += 32)
        anew += ((const float*)p.a)[i * p.a_row + l * p.a_col] * ((const float*)p.b)[l * p.b_row + j * p.b_col];
      anew = warp_sum(anew);
      if (lane == whose) total = anew;
    }
    if (warp * 32 + lane < count) finish((float*)p.c + row * p.c_row + column * p.c_col, total, p.alpha, p.beta);
  }
}
