// float32 by a narrow matrix: a float is the sum of three bfloat16 to the last bit, and of the nine products of such
// sums the six that count go through the tensor cores. The wide matrix is read once, straight into the registers from
// which wgmma multiplies; the narrow one is taken apart before, into lines as shared memory has them. Blocks beside each
// other sum parts of the reduction, and a last kernel adds these up.
// counters: warp instructions, millions; tensor pipe, %
#include "stream.cuh"
#include "wgmma_tiles.cuh"

constexpr int HEIGHT = 128, THREADS = 384, PLANES = 3, ALL = 256;  // rows of a block; threads of the other kernels

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

// Two floats as three pairs of bfloat16, whose sums they are: high, middle, low.
__device__ __forceinline__ void take_apart(float x, float y, u32 (&parts)[PLANES]) {
#pragma unroll
  for (int plane = 0; plane < PLANES; ++plane) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    parts[plane] = reinterpret_cast<const u32&>(pair);
    x -= __uint_as_float(parts[plane] << 16), y -= __uint_as_float(parts[plane] & 0xffff0000u);
  }
}

// The narrow matrix in pieces of 64 steps by WIDTH columns, plane by plane, swizzled as wgmma reads them. In each 16
// steps the order is that in which a thread's vectors of four floats hold them: its pairs lie 8 apart in an instruction.
template <int WIDTH, bool TURNED>
__global__ void __launch_bounds__(ALL) take_columns_apart(const GemmArgs given) {
  const GemmArgs p = seen<TURNED>(given);
  const i64 pieces = (p.k + DEPTH - 1) / DEPTH, across = (p.n + WIDTH - 1) / WIDTH, count = pieces * across * WIDTH * 8;
  for (i64 e = (i64)blockIdx.x * ALL + threadIdx.x; e < count; e += (i64)gridDim.x * ALL) {
    const bool along = p.b_row == 1;  // neighbouring threads read what lies side by side
    const int chunk = int(along ? e % 8 : e / WIDTH % 8), line = int(along ? e / 8 % WIDTH : e % WIDTH);
    const i64 piece = e / (8 * WIDTH), column = piece / pieces * WIDTH + line, first = piece % pieces * DEPTH + chunk / 2 * 16;
    u32 parts[4][PLANES];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const i64 l = first + 4 * pair + chunk % 2 * 2;
      float v[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        v[i] = column < p.n && l + i < p.k ? ((const float*)p.b)[(l + i) * p.b_row + column * p.b_col] : 0.0f;
      take_apart(v[0], v[1], parts[pair]);
    }
    unsigned char* to = (unsigned char*)p.work + piece * PLANES * WIDTH * 128 + line * 128 + (chunk ^ line % 8) * 16;
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane)
      *(uint4*)(to + plane * WIDTH * 128) = make_uint4(parts[0][plane], parts[1][plane], parts[2][plane], parts[3][plane]);
  }
}

// Sums of parts: block row y of the grid takes the y-th, and stores it as plane y, `sums` bytes into the workspace.
template <int WIDTH, int STAGES, bool TURNED>
__global__ void __launch_bounds__(THREADS, 1) wgmma_6xbf16(const GemmArgs given) {
  typedef HalfTile<WIDTH, true> TileB;
  constexpr u32 STAGE = PLANES * TileB::BYTES;
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ __align__(8) u64 bars[2 * STAGES];
  const GemmArgs p = seen<TURNED>(given);
  const unsigned down = unsigned((p.m + HEIGHT - 1) / HEIGHT), across = unsigned((p.n + WIDTH - 1) / WIDTH);
  const i64 top = (i64)(blockIdx.x % down) * HEIGHT, left = (i64)(blockIdx.x / down) * WIDTH;
  const int all = int((p.k + DEPTH - 1) / DEPTH), share = (all + int(gridDim.y) - 1) / int(gridDim.y);
  const int first = share * int(blockIdx.y), steps = min(share, all - first);
  const u32 data = ptx::smem_addr(smem), full = ptx::smem_addr(bars), empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) ptx::mbar_init(full + 8 * s, 1), ptx::mbar_init(empty + 8 * s, 2);
    ptx::mbar_fence_init();
  }
  __syncthreads();
  int stage = 0, parity = 0;
  auto advance = [&] {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  };
  if (threadIdx.x < 128) {
    ptx::reg_dealloc<40>();
    if (threadIdx.x == 0) {
      const unsigned char* from = (const unsigned char*)p.work + ((i64)(blockIdx.x / down) * all + first) * STAGE;
      for (int s = 0; s < steps; ++s, advance()) {
        ptx::mbar_wait(empty + 8 * stage, parity ^ 1);
        ptx::mbar_arrive_expect_tx(full + 8 * stage, STAGE);
        ptx::bulk_load(data + stage * STAGE, from + (i64)s * STAGE, STAGE, full + 8 * stage);
      }
    }
    return;
  }
  ptx::reg_alloc<232>();
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const i64 row = top + (threadIdx.x / 32 - 4) * 16 + lane / 4;
  const float* a[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) a[half] = (const float*)p.a + min(row + 8 * half, p.m - 1) * p.a_row + 4 * quad;
  Chunk<float> held[2][4];
  auto load = [&](int s) {
    const i64 l = (i64)(first + s) * DEPTH;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        held[half][i] = Once::load((const Chunk<float>*)(a[half] + l + 16 * i), s < steps && l + 16 * i + 4 * quad < p.k);
  };
  float sum[WIDTH / 2];
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) sum[i] = 0;
  load(0);
  for (int s = 0; s < steps; ++s, advance()) {
    u32 parts[PLANES][4][4];   // plane, 16 steps, register of the instruction
    // excerpt apart
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        u32 three[PLANES];
        take_apart(held[r % 2][i].v[r / 2 * 2], held[r % 2][i].v[r / 2 * 2 + 1], three);
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) parts[plane][i][r] = three[plane];
      }
    // end of excerpt
    load(s + 1);
    ptx::mbar_wait(full + 8 * stage, parity);
    float part[WIDTH / 2];
    const u32 at = data + stage * STAGE;
    ptx::wgmma_fence();
#pragma unroll
    for (int order = PLANES - 1; order >= 0; --order)   // the smallest first
#pragma unroll
      for (int of_a = order; of_a >= 0; --of_a)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          ptx::wgmma_bf16_ra<WIDTH>(part, parts[of_a][i], TileB::descriptor(at + (order - of_a) * TileB::BYTES) + (i * TileB::NEXT >> 4),
                                    order < PLANES - 1 || of_a < order || i);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    if (threadIdx.x % 128 == 0) ptx::mbar_arrive(empty + 8 * stage);
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) sum[i] += part[i];
  }
  float* sums = (float*)((unsigned char*)p.work + (i64)across * all * STAGE) + (i64)blockIdx.y * p.m * p.n;
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) {
    const i64 at = row + i / 2 % 2 * 8, column = left + i / 4 * 8 + quad * 2 + i % 2;
    if (at < p.m && column < p.n) sums[at * p.n + column] = sum[i];
  }
}

// Add up the parts of each sum. What is not finite then, as an operand was not, or was beyond bfloat16, the warp computes
// anew from the operands themselves.
template <int WIDTH, int PARTS, bool TURNED>
__global__ void __launch_bounds__(ALL) add_parts(const GemmArgs given) {
  const GemmArgs p = seen<TURNED>(given);
  const i64 across = (p.n + WIDTH - 1) / WIDTH, pieces = (p.k + DEPTH - 1) / DEPTH, count = p.m * p.n;
  const float* sums = (const float*)((const unsigned char*)p.work + across * pieces * (PLANES * WIDTH * 128));
  const int lane = threadIdx.x % 32;
  for (i64 warp = ((i64)blockIdx.x * ALL + threadIdx.x) / 32; warp * 32 < count; warp += (i64)gridDim.x * (ALL / 32)) {
    const i64 e = min(warp * 32 + lane, count - 1);
    const i64 row = p.c_row == 1 ? e % p.m : e / p.n, column = p.c_row == 1 ? e / p.m : e % p.n;
    float total = 0;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) total += sums[part * count + row * p.n + column];
    unsigned lost = __ballot_sync(~0u, !(fabsf(total) <= 3.402823466e38f));
#pragma unroll 1
    for (; lost; lost &= lost - 1) {
      const int whose = __ffs(lost) - 1;
      const i64 i = __shfl_sync(~0u, row, whose), j = __shfl_sync(~0u, column, whose);
      float anew = 0;
      for (i64 l = lane; l < p.k; l += 32)
        anew += ((const float*)p.a)[i * p.a_row + l * p.a_col] * ((const float*)p.b)[l * p.b_row + j * p.b_col];
      anew = warp_sum(anew);
      if (lane == whose) total = anew;
    }
    if (warp * 32 + lane < count) finish((float*)p.c + row * p.c_row + column * p.c_col, total, p.alpha, p.beta);
  }
}
