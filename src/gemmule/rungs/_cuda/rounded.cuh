// What products share whose codes become weights in registers, each rounded once: x in order, weights out of codes, sums added up.
//
// Sums have p.m results and p.n products each, whichever way round the matrix is seen.
#pragma once
#include "fragments.cuh"
#include "ptx_wgmma.cuh"

constexpr int LINE = 128;  // bytes of 64 numbers of a column of x: what a swizzle spans
constexpr int GROUPED = 16;  // blocks of rows that are walked down before the next columns

template <class A, class B> struct Same { static constexpr bool value = false; };
template <class A> struct Same<A, A> { static constexpr bool value = true; };

template <int N> __device__ __forceinline__ void multiply(float (&d)[N / 2], const u32 (&a)[4], u64 b, __half) { ptx::wgmma_f16_ra<N>(d, a, b, true); }
template <int N> __device__ __forceinline__ void multiply(float (&d)[N / 2], const u32 (&a)[4], u64 b, __nv_bfloat16) { ptx::wgmma_bf16_ra<N>(d, a, b, true); }
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c, __half) { return ptx::fma_f16x2(a, b, c); }
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c, __nv_bfloat16) { return ptx::fma_bf16x2(a, b, c); }
template <class T> __device__ __forceinline__ u32 pair(float low, float high) {
  const T a = narrow<T, float>(low), b = narrow<T, float>(high);
  return u32(*(const unsigned short*)&b) << 16 | *(const unsigned short*)&a;
}
template <class T> __device__ __forceinline__ float rounding_of(float v) { return wide<float>(narrow<T, float>(v)); }

// What turns the codes of one row into weights: w = (code - whole) scale + rest, where code - whole is exact, and the scale has a
// part beside what its own rounding keeps, so that w is rounded once. UP: of code - whole in bfloat16, so that bits are numbers.
// All four are numbers of x's dtype, two in a word: less and scale, below and rest.
typedef ptx::Vec<u32, 2> Pairs;
template <class TX, class TS, int BITS, bool ZEROS> struct Row {
  static constexpr bool HALF = Same<TX, __half>::value, EXACT = Same<TX, TS>::value;
  static constexpr float UP = HALF ? 1.f : 64.f;
  u32 less, scale, below, rest;
  // high: the codes lie four bits higher.
  static __device__ __forceinline__ Pairs of(float s, float zero, bool high) {
    float whole = 1 << (BITS - 1);
    if (ZEROS) {  // of a zero point beyond a half's range, the part within; the other is in the rest
      const float near = HALF ? fminf(fmaxf(rintf(zero), -32768.f), 32768.f) : rintf(zero);
      whole = HALF ? rounding_of<TX>(1024.f + near) - 1024.f : rounding_of<TX>(near);
    }
    const float kept = rounding_of<TX>(s * UP);
    Pairs p;
    p[0] = pair<TX>(HALF ? -(whole + (BITS == 4 && high ? 64.f : 1024.f)) : -whole / UP, s * UP);
    p[1] = pair<TX>(EXACT ? 0.f : s * UP - kept, ZEROS ? (whole - zero) * s : -0.f);
    return p;
  }
  __device__ __forceinline__ void take(const Pairs& p) {
    less = __byte_perm(p[0], 0, 0x1010), scale = __byte_perm(p[0], 0, 0x3232);
    below = __byte_perm(p[1], 0, 0x1010), rest = __byte_perm(p[1], 0, 0x3232);
  }
  // Of two rows, a half of each word.
  __device__ __forceinline__ void take(const Words& w) { less = w[0], scale = w[1], below = w[2], rest = w[3]; }
  __device__ __forceinline__ u32 weights(u32 bits, bool high) const {
    u32 d;
    if constexpr (HALF) d = fma2(bits | 0x64006400u, BITS == 4 && high ? 0x2c002c00u : 0x3c003c00u, less, TX());
    else d = fma2(bits, BITS == 4 && high ? 0x7d007d00u : 0x7f007f00u, less, TX());
    return fma2(d, scale, EXACT ? rest : fma2(d, below, rest, TX()), TX());
  }
};

// The same of floats of 4 bits: a scale, which x's dtype holds, after what lifts codes, so that no weight is rounded but where a float16
// ends. A large scale comes after the lift, beside a small one the lift would be lost.
template <class TX, class TS> struct FloatRow {
  static constexpr bool HALF = Same<TX, __half>::value;
  u32 lift, scale;
  static __device__ __forceinline__ Pairs of(float s, float, bool) {
    const bool small = HALF && fabsf(s) < 2.f;
    Pairs p;
    p[0] = pair<TX>(small ? 1.f : HALF ? 16384.f : 0x1p126f, small ? s * 16384.f : s);
    p[1] = 0;
    return p;
  }
  __device__ __forceinline__ void take(const Pairs& p) { lift = __byte_perm(p[0], 0, 0x1010), scale = __byte_perm(p[0], 0, 0x3232); }
  __device__ __forceinline__ void take(const Words& w) { lift = w[0], scale = w[1]; }
  __device__ __forceinline__ u32 weights(u32 bits) const { return fma2(fma2(bits, lift, 0x80008000u, TX()), scale, 0x80008000u, TX()); }
};
template <class TX, class TS, int BITS, bool ZEROS, bool FLOATS> struct RowOf { typedef Row<TX, TS, BITS, ZEROS> type; };
template <class TX, class TS, int BITS, bool ZEROS> struct RowOf<TX, TS, BITS, ZEROS, true> { typedef FloatRow<TX, TS> type; };

// The scales and zero points of four rows in one group of columns: asked for in two loads, ahead of what is made of them.
template <class TX, class TS, int BITS, bool ZEROS, bool FLOATS = Float4<TS>::is> struct Quad {
  ptx::Vec<TS, 4> scale;
  ptx::Vec<float, 4> zero;
  // Whether loads of four are allowed: `rows` in all.
  static __device__ __forceinline__ bool whole(const QuantArgs& p, int rows) {
    return p.scale_row && rows % 4 == 0 && ((u64)p.scales & (4 * sizeof(TS) - 1)) == 0 && (!ZEROS || ((u64)p.zeros & 15) == 0);
  }
  // there: beyond the last column, codes may be anything, and so beyond the last row; their weight is zero.
  __device__ __forceinline__ void ask(const QuantArgs& p, int rows, int row, int group, bool there, bool in_fours) {
    const i64 from = (i64)group * rows;
    scale = {}, zero = {};
    if (in_fours) {
      if (there && row < rows) {
        scale = ptx::ld_nc((const ptx::Vec<TS, 4>*)((const TS*)p.scales + from + row));
        if constexpr (ZEROS) zero = ptx::ld_nc((const ptx::Vec<float, 4>*)((const float*)p.zeros + from + row));
      }
    } else
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (there && row + e < rows) {
          const i64 at = p.scale_row ? from + row + e : 0;
          scale[e] = ptx::ld_nc((const TS*)p.scales + at);
          if constexpr (ZEROS) zero[e] = ptx::ld_nc((const float*)p.zeros + at);
        }
  }
  // What makes weights in row e; high: the codes lie four bits higher.
  __device__ __forceinline__ Pairs of(int e, bool high) const { return RowOf<TX, TS, BITS, ZEROS, FLOATS>::type::of(wide<float>(scale[e]), zero[e], high); }
};

// x by columns of 64 numbers, in the order that the codes of a tile have in registers (BITS 0: as they come): a warp has eight columns of
// one panel, and lane 4 g + t writes two times 16 bytes of column g.
template <class TX, int BITS, int N, int PANELS> __device__ __forceinline__ void turn(const QuantArgs& p) {
  ptx::pdl_launch_dependents();
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, n = (int)p.n, columns = (int)p.columns;
  const int panels = (n + 64 * PANELS - 1) / (64 * PANELS) * PANELS, passes = (columns + N - 1) / N;
  const int item = blockIdx.x * 8 + threadIdx.x / 32, panel = item % panels, eight = item / panels;
  if (eight >= passes * (N / 8)) return;
  const int column = eight * 8 + g;
  const TX* const x = (const TX*)p.x + column * p.x_col;
  unsigned char* const to = (unsigned char*)p.work + (((i64)(eight / (N / 8)) * panels + panel) * N + eight % (N / 8) * 8 + g) * LINE;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int j = panel * 64 + (BITS == 4 ? 16 * t + 8 * half : 8 * t + 32 * half);
    Words w = {};
    if (column < columns) {
      if (p.x_step == 1 && !p.perm && j + 8 <= n && ((u64)(x + j) & 15) == 0) w = *(const Words*)(x + j);
      else {
        ptx::Vec<TX, 8> v;
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = j + e < n ? x[(p.perm ? (i64)p.perm[j + e] : (i64)(j + e)) * p.x_step] : TX(0.f);
        w = *(const Words*)&v;
      }
    }
    // What four lanes have of four steps becomes what one lane has of one.
#pragma unroll
    for (int apart = 1; apart < 4; apart *= 2)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (BITS && !(i & apart)) {
          const bool up = t & apart;
          const u32 got = __shfl_xor_sync(~0u, up ? w[i] : w[i | apart], apart);
          if (up) w[i] = got;
          else w[i | apart] = got;
        }
    *(Words*)(to + ((4 * half + t) ^ g) * 16) = w;
  }
}

// Where parts of the sums lie: behind x, part by part, column by column, whole blocks of rows.
template <int N, int PANELS, int SHARES> __device__ __forceinline__ float* parts_of(const QuantArgs& p) {
  const i64 stages = (p.n + 64 * PANELS * SHARES - 1) / (64 * PANELS * SHARES) * SHARES, passes = (p.columns + N - 1) / N;
  return (float*)((unsigned char*)p.work + passes * stages * (PANELS * N * LINE));
}

// Adds up the parts of the sums, in order, four rows of a column at a time.
template <class TY, int HEIGHT, int N, int PARTS, int PANELS> __device__ __forceinline__ void add(const QuantArgs& p) {
  ptx::pdl_wait();
  const i64 high = (p.m + HEIGHT - 1) / HEIGHT * HEIGHT, i = (i64)blockIdx.x * 256 + threadIdx.x, column = i / (high / 4), row = i % (high / 4) * 4;
  if (column >= p.columns || row >= p.m) return;
  const float* const from = parts_of<N, PANELS, PARTS>(p) + column * high + row;
  const i64 apart = (p.columns + N - 1) / N * N * high;
  ptx::Vec<float, 4> part[PARTS], sum = {};
#pragma unroll
  for (int b = 0; b < PARTS; ++b) part[b] = *(const ptx::Vec<float, 4>*)(from + b * apart);
#pragma unroll
  for (int b = 0; b < PARTS; ++b)
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e] += part[b][e];
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if (row + e < p.m) store_quantised<TY>(p, row + e, column, sum[e]);
}

// Adds up what the blocks of a cluster have of some rows, and stores it, four results that lie side by side at a time: of one column
// (DOWN), or of one row.
template <class TY, class TS, int N, int ROWS, int CLUSTER, int APART, int THREADS, bool DOWN>
__device__ __forceinline__ void deliver(const QuantArgs& p, const float* sums, int top, int left, int rows, int columns) {
  const i64 apart = DOWN ? p.y_col : p.y_step;
  const bool vectors = (DOWN || p.y_col == 1) && apart % 4 == 0 && ((u64)p.y & (4 * sizeof(TY) - 1)) == 0 &&
                       __double_as_longlong(p.alpha) == 0x3ff0000000000000ll && __double_as_longlong(p.beta) == 0;
  u32 from[CLUSTER];
#pragma unroll
  for (int b = 0; b < CLUSTER; ++b) from[b] = CLUSTER > 1 ? ptx::mapa(ptx::smem_addr(sums), b) : 0;
#pragma unroll 2
  for (int i = threadIdx.x; i < N * ROWS / 4; i += THREADS) {
    const int c = DOWN ? i / (ROWS / 4) : (i / (4 * ROWS) * 4 + i % 4) * 4, row = DOWN ? i % (ROWS / 4) * 4 : i / 4 % ROWS;
    if (c >= columns || row >= rows) continue;
    ptx::Vec<float, 4> sum = {};
#pragma unroll
    for (int b = 0; b < CLUSTER; ++b) {
      const int at = c * APART + row;
      ptx::Vec<float, 4> part;
      if constexpr (DOWN) part = CLUSTER > 1 ? ptx::ld_cluster<ptx::Vec<float, 4>>(from[b] + 4 * at) : *(const ptx::Vec<float, 4>*)(sums + at);
      else
#pragma unroll
        for (int e = 0; e < 4; ++e) part[e] = CLUSTER > 1 ? ptx::ld_cluster<float>(from[b] + 4 * (at + e * APART)) : sums[at + e * APART];
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] += part[e];
    }
    if constexpr (Float4<TS>::factors)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (!DOWN || row + e < rows) sum[e] = by_factor<TS>(p, top + row + (DOWN ? e : 0), sum[e]);
    if (vectors && (DOWN ? row + 4 <= rows : c + 4 <= columns)) {
      ptx::Vec<TY, 4> out;
#ifdef BIAS
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] += wide<float>(((const TY*)p.bias)[top + row + (DOWN ? e : 0)]);
#endif
#pragma unroll
      for (int e = 0; e < 4; ++e) out[e] = narrow<TY, float>(sum[e]);
      *(ptx::Vec<TY, 4>*)((TY*)p.y + (top + row) * p.y_step + (left + c) * p.y_col) = out;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (DOWN ? row + e < rows : c + e < columns) store_quantised<TY>(p, top + row + (DOWN ? e : 0), left + c + (DOWN ? 0 : e), sum[e]);
    }
  }
}

// Which of the blocks that share a sum this one is, and whose: HEIGHT results from `top` on, of N columns of x.
template <int HEIGHT, int N, int SHARES> struct Share {
  int rank, top, pass, passes, down;
  __device__ __forceinline__ explicit Share(const QuantArgs& p) : rank(blockIdx.x % SHARES), passes(((int)p.columns + N - 1) / N), down(((int)p.m + HEIGHT - 1) / HEIGHT) {
    const int place = blockIdx.x / SHARES, first = place / (GROUPED * passes) * GROUPED, there = place % (GROUPED * passes), high = min(down - first, GROUPED);
    top = (first + there % high) * HEIGHT, pass = there / high;
  }
};

// What each of the warps does that bring stages: whole ones, always the same of the ring, for who waits for a stage's next phase has
// seen the one before end.
template <int STAGES> struct Bringers {
  static constexpr int warps = STAGES % 4 == 0 ? 4 : STAGES % 3 == 0 ? 3 : 2;
  static_assert(STAGES % warps == 0, "a stage is always for the same warp");
  template <class Codes, class X, class LookUp, class Make>
  static __device__ __forceinline__ void bring(int first, int count, const u64* empty, Codes ask_codes, X ask_x, LookUp look_up, Make make) {
    const int at_once = min(STAGES, count);
#pragma unroll 1
    for (int q = first; q < at_once; q += warps) ask_codes(q);
    look_up();
#pragma unroll 1
    for (int q = first; q < at_once; q += warps) make(q);
    ptx::pdl_wait();  // x lies in order
#pragma unroll 1
    for (int q = first; q < at_once; q += warps) ask_x(q);
#pragma unroll 1
    for (int q = STAGES + first; q < count; q += warps) {
      ptx::mbar_wait(ptx::smem_addr(&empty[q % STAGES]), q / STAGES % 2 ^ 1);
      ask_codes(q), ask_x(q), make(q);
    }
  }
};

// Asks for the x of a stage, which lies in one piece.
template <int BYTES> __device__ __forceinline__ void ask_for_x(unsigned char* to, const unsigned char* from, u64* full) {
  constexpr int COPIES = (BYTES + 32767) / 32768, EACH = BYTES / COPIES;
  const int lane = threadIdx.x % 32;
  if (lane < COPIES) ptx::bulk_load(ptx::smem_addr(to + lane * EACH), from + lane * EACH, EACH, ptx::smem_addr(full));
}

// Gives away a block's sums, APART floats a column, once all are there and the blocks of its cluster have met.
template <class TY, class TS, int HEIGHT, int N, int CLUSTER, int PARTS, int PANELS, int APART, int THREADS>
__device__ __forceinline__ void give(const QuantArgs& p, const Share<HEIGHT, N, CLUSTER * PARTS>& share, const float* sums) {
  constexpr int MINE = HEIGHT / CLUSTER;
  const int rank = share.rank, top = share.top, pass = share.pass;
  if constexpr (PARTS > 1) {  // a launch behind this one adds them up
    const i64 high_all = (i64)share.down * HEIGHT;
    float* const to = parts_of<N, PANELS, PARTS>(p) + ((i64)rank * share.passes + pass) * N * high_all + top;
#pragma unroll 4
    for (int i = threadIdx.x; i < N * HEIGHT / 4; i += THREADS) {
      const int c = i / (HEIGHT / 4), row = i % (HEIGHT / 4) * 4;
      *(ptx::Vec<float, 4>*)(to + c * high_all + row) = *(const ptx::Vec<float, 4>*)(sums + c * APART + row);
    }
  } else {
    const int columns = min((int)p.columns - pass * N, N), rows = min((int)p.m - top - rank * MINE, MINE);
    if (p.y_step == 1) deliver<TY, TS, N, MINE, CLUSTER, APART, THREADS, true>(p, sums + rank * MINE, top + rank * MINE, pass * N, rows, columns);
    else deliver<TY, TS, N, MINE, CLUSTER, APART, THREADS, false>(p, sums + rank * MINE, top + rank * MINE, pass * N, rows, columns);
  }
}
