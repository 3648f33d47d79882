// Tiles of experts' codes on wgmma: 192 columns of a matrix meet up to 128 tokens, or 128 columns 256. Codes come to
// shared memory as they lie, become weights in the registers that the instruction reads, each rounded once, and meet all
// tokens of the tile.
// excerpt stages of wgmma_codes.cu
#include "expert_tiles.cuh"
#include "few_rows.cuh"
#include "float4.cuh"
#include "wgmma_tiles.cuh"

// LINE: bytes of a row of codes in a stage, whose 16-byte pieces TMA puts in another order in each of eight rows.
constexpr int LINE = 128, LINES = 2;

// Columns of a tile by its tokens; and threads: a warpgroup that asks for copies, and one for each 64 columns.
__device__ constexpr int columns_by(int width) { return width > 128 ? 128 : 192; }
__device__ constexpr int threads_by(int width) { return 128 + 2 * columns_by(width); }

template <class A, class B> struct Same { static constexpr bool value = false; };
template <class A> struct Same<A, A> { static constexpr bool value = true; };
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c, __half) { return ptx::fma_f16x2(a, b, c); }
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c, __nv_bfloat16) { return ptx::fma_bf16x2(a, b, c); }
template <int N> __device__ __forceinline__ void multiply(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool more, __half) {
  ptx::wgmma_f16_ra<N>(d, a, b, more);
}
template <int N> __device__ __forceinline__ void multiply(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool more, __nv_bfloat16) {
  ptx::wgmma_bf16_ra<N>(d, a, b, more);
}
template <class T> __device__ __forceinline__ float rounded(float v) { return wide<float>(narrow<T, float>(v)); }

// What turns the codes of one row into weights: w = (code - whole) scale + rest, where code - whole is exact, and the
// scale has a part beside what its own rounding keeps, so that w is rounded once. A word holds two weights: of codes of
// 4 bits in the low and the high half of a byte, of which the upper comes 16 times too large.
template <class T, class TS, int BITS, bool ZEROS> struct Row {
  static constexpr bool HALF = Same<T, __half>::value, EXACT = Same<T, TS>::value;
  static constexpr float UP = HALF ? 1.f : 64.f;   // of code - whole in bfloat16, so that bits are numbers
  u32 less, scale, below, rest;
  __device__ __forceinline__ void take(float s, float zero) {
    float whole = 1 << (BITS - 1);
    if (ZEROS) {   // of a zero point beyond a half's range, the part within; the other is in the rest
      const float near = HALF ? fminf(fmaxf(rintf(zero), -32768.f), 32768.f) : rintf(zero);
      whole = HALF ? rounded<T>(1024.f + near) - 1024.f : rounded<T>(near);
    }
    const float kept = rounded<T>(s * UP), left = ZEROS ? (whole - zero) * s : -0.f;
    less = HALF ? pair_of<T>(-(1024.f + whole), -((BITS == 4 ? 64.f : 1024.f) + whole)) : pair_of<T>(-whole / UP, -whole / UP);
    scale = pair_of<T>(kept, kept), rest = pair_of<T>(left, left);
    below = EXACT ? 0 : pair_of<T>(s * UP - kept, s * UP - kept);
  }
  static constexpr u32 UPS = HALF ? (BITS == 4 ? 0x2c003c00u : 0x3c003c00u) : (BITS == 4 ? 0x7d007f00u : 0x7f007f00u);
  __device__ __forceinline__ u32 weights(u32 bits, u32 up) const {   // up: UPS
    const u32 d = fma2(HALF ? bits | 0x64006400u : bits, up, less, T());
    return fma2(d, scale, EXACT ? rest : fma2(d, below, rest, T()), T());
  }
};

// Of floats of 4 bits, MXFP4: what is 2^126 times too small is lifted, and meets its power of two; both are exact.
template <class T> struct Row<T, e8m0, 4, false> {
  static constexpr u32 UPS = 0x7e807e80u;
  u32 scale;
  __device__ __forceinline__ void take(u32 exponent) { scale = (exponent ? exponent << 7 : 0x40) * 0x10001; }
  __device__ __forceinline__ u32 weights(u32 bits, u32 up) const {
    return fma2(fma2(bits, up, 0x80008000u, T()), scale, 0x80008000u, T());
  }
};

// Of floats of 8 bits: what is 2^120 times too small is lifted to a 512th, exactly, and w is rounded once as above.
template <class T, class S> struct Row<T, OfFloat8<S>, 8, false> {
  static constexpr u32 UPS = 0x77007700u;
  u32 scale, below;
  __device__ __forceinline__ void take(float s, float) {
    const float up = 512 * s, kept = rounded<T>(up);
    scale = pair_of<T>(kept, kept), below = Same<T, S>::value ? 0 : pair_of<T>(up - kept, up - kept);
  }
  __device__ __forceinline__ u32 weights(u32 bits, u32 up) const {
    const u32 d = fma2((bits << 8 & 0x80008000u) | (bits << 4 & 0x07f007f0u), up, 0x80008000u, T());
    return fma2(d, scale, Same<T, S>::value ? 0x80008000u : fma2(d, below, 0x80008000u, T()), T());
  }
};

// A thread's part of 16 columns by 32 steps, operands of two instructions: of rows g and g + 8, of which the line of the
// first begins at `line`, and the codes with piece `piece`. up: of a row.
template <class T, class TS, int BITS, bool ZEROS>
__device__ __forceinline__ void decode(u32 (&a)[2][4], const unsigned char* line, int piece, const Row<T, TS, BITS, ZEROS> (&rows)[2], u32 up) {
  const int g = threadIdx.x % 32 / 4;
  const u32 t = threadIdx.x % 4, pick = BITS == 4 ? 0x4040 | t | t << 8 : 2 * t | (2 * t + 1) << 8;
  ptx::Vec<u32, 4> from[BITS / 4][2];
#pragma unroll
  for (int i = 0; i < BITS / 4; ++i)
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) from[i][hi] = *(const ptx::Vec<u32, 4>*)(line + 8 * hi * LINE + ((piece + i) ^ g) * 16);
#pragma unroll
  for (int j = 0; j < 4; ++j)   // of eight steps
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) {
      if constexpr (Float4<TS>::is) {   // both codes of byte t at the tops of halves
        const u32 tops = __byte_perm(from[0][hi][j] << 4, from[0][hi][j], t << 4 | (t + 4) << 12);
        a[j / 2][hi + j % 2 * 2] = rows[hi].weights((tops & 0x80008000u) | (tops >> 6 & 0x01c001c0u), up);
        continue;
      }
      const u32 bits = BITS == 4 ? __byte_perm(from[0][hi][j], 0, pick) & 0x00f0000fu
                                 : __byte_perm(from[j / 2 * (BITS / 8)][hi][j % 2 * 2], from[j / 2 * (BITS / 8)][hi][j % 2 * 2 + 1], pick) & 0x00ff00ffu;
      a[j / 2][hi + j % 2 * 2] = rows[hi].weights(bits, up);
    }
}

// The sums over all steps of a warpgroup's 64 columns and N tokens: the least multiple of UNIT that holds `tokens`.
// codes, tokens' stages: rings.
template <class T, class TS, int BITS, bool ZEROS, int WIDTH, int STAGES, int UNIT, int N = UNIT>
__device__ __forceinline__ void products(float (&sum)[WIDTH / 2], const QuantArgs& p, const Work& work, Ring& x, Ring& codes,
                                         const unsigned char* lines, int own) {
  static_assert(is_width(N), "a width that wgmma is written out for");
  if constexpr (N < WIDTH)
    if (work.tokens > N)
      return products<T, TS, BITS, ZEROS, WIDTH, STAGES, UNIT, N + UNIT>(sum, p, work, x, codes, lines, own);
  constexpr int HEIGHT = columns_by(WIDTH), EACH = LINE * 8 / BITS / DEPTH;   // stages of tokens beside one of codes
  constexpr bool FLOATS = Float4<TS>::is;
  const int steps = ((int)p.n + DEPTH - 1) / DEPTH, each = (int)p.group_size / DEPTH;
  const int mine = own + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, m = (int)p.m;   // the first of the thread's rows
  const int row = min(work.slab * HEIGHT + mine, m - 1);   // what is behind the last counts for nothing
  float(&d)[N / 2] = (float(&)[N / 2])sum;
  const i64 place = ((i64)work.expert * m + row) * p.groups, next = min(8, m - 1 - row) * p.groups;
  const TS* scales = (const TS*)p.scales + place;
  const float* zeros = (const float*)p.zeros + place;
  TS scale[2];   // of the next group, as they come: nobody waits for them before they are needed
  float zero[2];
  u32 two[2];   // the scales of two groups, which are a stage of small floats, and how many were taken
  int taken = 0;
  auto fetch = [&] {
    if constexpr (FLOATS) {
      const int second = taken + 1 < (int)p.groups;
      two[0] = scales[0].bits | scales[second].bits << 8, two[1] = scales[next].bits | scales[next + second].bits << 8;
      scales += 2, taken += 2;
    } else {
      scale[0] = scales[0], scale[1] = scales[next], ++scales;
      if constexpr (ZEROS) zero[0] = zeros[0], zero[1] = zeros[next], ++zeros;
    }
  };
  Row<T, TS, BITS, ZEROS> rows[2];
  u32 a[2][2][4];   // of 32 steps by turns
  int before = 0, left = 0, group = 0;
  const u32 up = rows[0].UPS | u32(p.n < 0);   // the compiler would move a constant before each use
  fetch();
  // excerpt stages
  for (int s = 0; s < steps; ++s, x.advance<STAGES>()) {
    if (s % EACH == 0) codes.wait_full();
    u32 both[2];
    if constexpr (FLOATS) {
      both[0] = two[0], both[1] = two[1];
      if (s + 1 < steps) fetch();
    } else if (left == 0) {   // the scales of a group are asked for when the one before begins
#pragma unroll
      for (int r = 0; r < 2; ++r) rows[r].take(wide<float>(scale[r]), ZEROS ? zero[r] : 0.f);
      left = each ? each : steps;
      if (++group < (int)p.groups) fetch();
    }
    --left;
    const unsigned char* const line = lines + codes.stage * (HEIGHT * LINE) + mine * LINE;
    const u64 tokens = HalfTile<N, true>::descriptor(x.data + x.stage * HalfTile<WIDTH, true>::BYTES);
    x.wait_full();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (FLOATS) rows[0].take(both[0] >> 8 * h & 255), rows[1].take(both[1] >> 8 * h & 255);
      decode<T, TS, BITS, ZEROS>(a[h], line, (s % EACH * 2 + h) * (BITS / 4), rows, up);
#pragma unroll
      for (int e = 0; e < 8; ++e) ptx::pin(a[h][e / 4][e % 4]);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < 2; ++i) multiply<N>(d, a[h][i], tokens + ((2 * h + i) * 32 >> 4), s > 0 || h || i, T());
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();   // the steps before are read: their registers are free, and behind a stage its tokens
      if (h == 0 && s > 0 && threadIdx.x % 128 == 0) ptx::mbar_arrive(x.empty + 8 * before);
    }
    before = x.stage;
    if (s % EACH == EACH - 1 || s == steps - 1) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbar_arrive(codes.empty + 8 * codes.stage);
      codes.advance<LINES>();
    }
  }
  ptx::wgmma_wait<0>();
  if (threadIdx.x % 128 == 0) ptx::mbar_arrive(x.empty + 8 * before);
  // end of excerpt
}

template <class T, class TC, class TS, int BITS, bool ZEROS, int WIDTH, int STAGES>
__global__ void __launch_bounds__(threads_by(WIDTH), 1)
wgmma_codes(const QuantArgs p, const __grid_constant__ ptx::TensorMap map_x, const __grid_constant__ ptx::TensorMap map_codes) {
  take_turn();
  constexpr int HEIGHT = columns_by(WIDTH), THREADS = threads_by(WIDTH);
  constexpr int UNIT = WIDTH > 128 ? 64 : 32, BOX = UNIT;   // tokens of an instruction, of a copy
  constexpr u32 STAGE = HalfTile<WIDTH, true>::BYTES;
  extern __shared__ __align__(1024) unsigned char smem[];   // the stages of tokens, of codes, then the list
  __shared__ __align__(8) u64 x_bars[2 * STAGES], code_bars[2 * LINES];
  unsigned char* const lines = smem + STAGES * STAGE;
  int* const first = (int*)(lines + LINES * HEIGHT * LINE);
  const int group = threadIdx.x / 128, n = (int)p.m, slabs = (n + HEIGHT - 1) / HEIGHT;
  Ring x = make_ring<STAGES>(ptx::smem_addr(smem), x_bars, 1, HEIGHT / 64);
  Ring codes = make_ring<LINES>(ptx::smem_addr(lines), code_bars, 1, HEIGHT / 16);
  const i64 items = (i64)list_pieces<THREADS>(Ends(p), WIDTH, first) * slabs;   // the barriers are seen behind it
  Items walk{Ends(p), first, slabs, WIDTH, 0, UNIT};
  if (group == 0) {
    ptx::reg_dealloc<24>();
    if (threadIdx.x == 0) {
      const int steps = ((int)p.n + DEPTH - 1) / DEPTH;
      for (i64 item = blockIdx.x; item < items; item += gridDim.x) {
        const Work at = walk.at(item);
        const int boxes = (at.tokens + BOX - 1) / BOX;
        for (int s = 0; s < steps; ++s, x.advance<STAGES>()) {
          const u32 bar = x.full + 8 * x.stage;
          x.wait_empty();
          ptx::mbar_arrive_expect_tx(bar, boxes * (BOX * 128));
          for (int b = 0; b < boxes; ++b)
            ptx::tma_load_3d(x.data + x.stage * STAGE + b * (BOX * 128), &map_x, bar, s * DEPTH, at.token + b * BOX, 0);
        }
      }
    } else if (threadIdx.x == 32) {
      for (i64 item = blockIdx.x; item < items; item += gridDim.x) {
        const Work at = walk.at(item);
        for (int begin = 0; begin < (int)p.code_row_bytes; begin += LINE, codes.advance<LINES>()) {
          const u32 bar = codes.full + 8 * codes.stage;
          codes.wait_empty();
          ptx::mbar_arrive_expect_tx(bar, HEIGHT * LINE);   // rows behind the slab are other experts', or zeros
          ptx::tma_load_3d(codes.data + codes.stage * (HEIGHT * LINE), &map_codes, bar, begin, at.expert * n + at.slab * HEIGHT, 0);
        }
      }
    }
  } else {
    ptx::reg_alloc<(WIDTH > 128 ? 240 : 160)>();
    const int own = (group - 1) * 64, warp = threadIdx.x % 128 / 32;
    for (i64 item = blockIdx.x; item < items; item += gridDim.x) {
      const Work at = walk.at(item);
      float sum[WIDTH / 2];
      products<T, TS, BITS, ZEROS, WIDTH, STAGES, UNIT>(sum, p, at, x, codes, lines, own);
      const Results<TC> to{(TC*)p.y + at.token * p.y_col, p.y_col, p.y_step, n, (float)p.alpha, (float)p.beta};
      store_tokens<TC, WIDTH>(to, at.tokens, at.slab * HEIGHT + own + 16 * warp, sum);
    }
  }
}
