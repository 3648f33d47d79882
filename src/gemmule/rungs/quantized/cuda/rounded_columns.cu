// Many columns of x by wgmma: codes become weights in registers, each rounded once, and meet 64 or 128 columns at a time.
// counters: L2 hits, %; issue slots used, %; tensor pipe, %
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
template <class T> __device__ __forceinline__ u32 twice(float v) {
  const T one = narrow<T, float>(v);
  const u32 bits = *(const unsigned short*)&one;
  return bits << 16 | bits;
}
template <class T> __device__ __forceinline__ float rounding_of(float v) { return wide<float>(narrow<T, float>(v)); }

// What turns the codes of one row into weights: w = (code - whole) scale + rest, where code - whole is exact, and the scale has a
// part beside what its own rounding keeps, so that w is rounded once. UP: of code - whole in bfloat16, so that bits are numbers.
template <class TX, class TS, int BITS, bool ZEROS> struct Row {
  static constexpr bool HALF = Same<TX, __half>::value, EXACT = Same<TX, TS>::value;
  static constexpr float UP = HALF ? 1.f : 64.f;
  u32 less, scale, below, rest;
  // high: the codes lie four bits higher.
  __device__ __forceinline__ void set(float s, float zero, bool high) {
    float whole = 1 << (BITS - 1);
    if (ZEROS) {  // of a zero point beyond a half's range, the part within; the other is in the rest
      const float near = HALF ? fminf(fmaxf(rintf(zero), -32768.f), 32768.f) : rintf(zero);
      whole = HALF ? rounding_of<TX>(1024.f + near) - 1024.f : rounding_of<TX>(near);
    }
    less = twice<TX>(HALF ? -(whole + (BITS == 4 && high ? 64.f : 1024.f)) : -whole / UP);
    const float kept = rounding_of<TX>(s * UP);
    scale = twice<TX>(s * UP);
    if (!EXACT) below = twice<TX>(s * UP - kept);
    rest = ZEROS ? twice<TX>((whole - zero) * s) : 0x80008000u;
  }
  __device__ __forceinline__ u32 weights(u32 bits, bool high) const {
    u32 d;
    if constexpr (HALF) d = fma2(bits | 0x64006400u, BITS == 4 && high ? 0x2c002c00u : 0x3c003c00u, less, TX());
    else d = fma2(bits, BITS == 4 && high ? 0x7d007d00u : 0x7f007f00u, less, TX());
    return fma2(d, scale, EXACT ? rest : fma2(d, below, rest, TX()), TX());
  }
};

// x by columns of 64 numbers, in the order that the codes of a tile have in registers: a warp has eight columns of one panel, and lane
// 4 g + t writes two times 16 bytes of column g.
template <class TX, int BITS, int N, int PANELS>
__global__ void __launch_bounds__(256) turn_columns(const QuantArgs p) {
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
        if (!(i & apart)) {
          const bool up = t & apart;
          const u32 got = __shfl_xor_sync(~0u, up ? w[i] : w[i | apart], apart);
          if (up) w[i] = got;
          else w[i | apart] = got;
        }
    *(Words*)(to + ((4 * half + t) ^ g) * 16) = w;
  }
}

// Two warpgroups below each other, each with TALL times 64 rows, and one warp that asks for copies. While one multiplies, the other
// takes codes apart. WHOLE: groups are whole stages. The blocks of a cluster share the sum and add up at the end.
template <class TX, class TY, class TS, int BITS, bool ZEROS, bool WHOLE, int TALL, int N, int CLUSTER, int STAGES>
__global__ void __launch_bounds__(384, 1) rounded_columns(const QuantArgs p) {
  constexpr int GROUPS = 2, HEIGHT = 64 * GROUPS * TALL, TILES = 8 / Tile<BITS>::steps, STEPS = Tile<BITS>::steps, PANELS = TILES * STEPS / 4, COLUMNS = Tile<BITS>::columns;
  constexpr int X_BYTES = PANELS * N * LINE, ROW_BYTES = TILES * 512, CODE_BYTES = HEIGHT / 16 * ROW_BYTES;
  extern __shared__ __align__(1024) unsigned char room[];
  unsigned char* const codes = room + STAGES * X_BYTES;
  u64* const full = (u64*)(codes + STAGES * CODE_BYTES);
  u64* const empty = full + STAGES;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), g = lane / 4, t = lane % 4, group = warp / 4;
  const int m = (int)p.m, n = (int)p.n, across = (n + COLUMNS - 1) / COLUMNS, all = (across + TILES - 1) / TILES;
  const int passes = ((int)p.columns + N - 1) / N, down = (m + HEIGHT - 1) / HEIGHT;
  const int rank = blockIdx.x % CLUSTER, place = blockIdx.x / CLUSTER, share = (all + CLUSTER - 1) / CLUSTER;
  const int first_row = place / (GROUPED * passes) * GROUPED, there = place % (GROUPED * passes), high = min(down - first_row, GROUPED);
  const int top = (first_row + there % high) * HEIGHT, pass = there / high;
  const int begin = rank * share, count = min(max(all - begin, 0), share);

  if (threadIdx.x < STAGES) ptx::mbar_init(ptx::smem_addr(&full[threadIdx.x]), 1), ptx::mbar_init(ptx::smem_addr(&empty[threadIdx.x]), 4 * GROUPS);
  ptx::mbar_fence_init();
  __syncthreads();
  const auto meet = [&] {  // the blocks of a cluster
    __syncwarp();
    if constexpr (CLUSTER > 1) ptx::cluster_sync();
  };
  if (group == GROUPS) {
    ptx::reg_dealloc<24>();
    if (warp > 4 * GROUPS) {  // one warp asks for copies
      meet(), meet();
      return;
    }
    const unsigned char* const x = (const unsigned char*)p.work + ((i64)pass * all + begin) * X_BYTES;
    const int tile_row = min(top / 16 + min(lane, HEIGHT / 16 - 1), (m + 15) / 16 - 1);
    const unsigned char* const own = p.codes ? (const unsigned char*)p.codes + (i64)tile_row * across * 512 : nullptr;
    const auto ask_codes = [&](int q) {
      const int at = q % STAGES, tile = (begin + q) * TILES, bytes = min(across - tile, TILES) * 512;
      const u32 bar = ptx::smem_addr(&full[at]);
      if (lane == 0) ptx::mbar_arrive_expect_tx(bar, HEIGHT / 16 * bytes + X_BYTES);
      __syncwarp();
      if (lane < HEIGHT / 16) ptx::bulk_load(ptx::smem_addr(codes + at * CODE_BYTES + lane * ROW_BYTES), own + (i64)tile * 512, bytes, bar);
    };
    constexpr int PARTS = 4, PART = X_BYTES / PARTS;
    const auto ask_x = [&](int q) {
      const int at = q % STAGES;
      if (lane < PARTS) ptx::bulk_load(ptx::smem_addr(room + at * X_BYTES + lane * PART), x + (i64)q * X_BYTES + lane * PART, PART, ptx::smem_addr(&full[at]));
    };
    for (int q = 0; q < min(STAGES, count); ++q) ask_codes(q);
    ptx::pdl_wait();  // x lies in order
    for (int q = 0; q < min(STAGES, count); ++q) ask_x(q);
#pragma unroll 1
    for (int q = STAGES; q < count; ++q) {
      ptx::mbar_wait(ptx::smem_addr(&empty[q % STAGES]), q / STAGES % 2 ^ 1);
      ask_codes(q), ask_x(q);
    }
    meet(), meet();
  } else {
    ptx::reg_alloc<240>();
    float d[TALL][N / 2] = {};
    const int own_row = top + group * 64 * TALL + warp % 4 * 16 + g, groups = (int)p.groups, size = (int)p.group_size;
    const int shift = size & (size - 1) ? -1 : 31 - __clz(size);
    constexpr int LOOKED = WHOLE ? 1 : TILES;  // what a stage has of scales
    TS scales[LOOKED][TALL][2];
    float zeros[LOOKED][TALL][2];
    int at_row[TALL][2];
#pragma unroll
    for (int i = 0; i < 2 * TALL; ++i) at_row[i / 2][i % 2] = p.scale_row ? min(own_row + 64 * (i / 2) + 8 * (i % 2), m - 1) : 0;
    const auto look_up = [&](int tile, TS (&s)[TALL][2], float (&z)[TALL][2]) {
      const int column = min(tile, across - 1) * COLUMNS + (WHOLE ? 0 : COLUMNS / 4 * t);
      const i64 from = p.scale_row ? (i64)min(shift < 0 ? column / size : column >> shift, groups - 1) * m : 0;
      const TS* const of = (const TS*)p.scales + from;
      const float* const less = (const float*)p.zeros + from;
#pragma unroll
      for (int i = 0; i < 2 * TALL; ++i) {
        s[i / 2][i % 2] = ptx::ld_nc(of + at_row[i / 2][i % 2]);
        z[i / 2][i % 2] = ZEROS ? ptx::ld_nc(less + at_row[i / 2][i % 2]) : 0.f;
      }
    };
#pragma unroll
    for (int tile = 0; tile < LOOKED; ++tile) look_up(begin * TILES + tile, scales[tile], zeros[tile]);
    const unsigned char* const own = codes + (group * 4 * TALL + warp % 4) * ROW_BYTES + lane * 16;
    constexpr int ALL = TILES * STEPS, BATCH = TALL == 2 ? 2 : 4;
    u32 a[2][BATCH][TALL][4] = {};  // what is multiplied, and what comes next
    Row<TX, TS, BITS, ZEROS> of[TALL][2];
    int at = 0, parity = 0;
#pragma unroll 1
    for (int q = 0; q < count; ++q) {
      ptx::mbar_wait(ptx::smem_addr(&full[at]), parity);
      const u64 x = ptx::wgmma_desc(ptx::smem_addr(room + at * X_BYTES), 16, 1024, ptx::Swizzle::b128);
      Words v[TILES][TALL];
#pragma unroll
      for (int i = 0; i < TILES * TALL; ++i) v[i / TALL][i % TALL] = *(const Words*)(own + at * CODE_BYTES + i % TALL * (4 * ROW_BYTES) + i / TALL * 512);
      // excerpt
#pragma unroll
      for (int turn = 0; turn < ALL / BATCH; ++turn) {
#pragma unroll
        for (int s = 0; s < BATCH; ++s) {
          const int step = turn * BATCH + s, tile = step / STEPS, j = step % STEPS;
          if (step % (WHOLE ? ALL : STEPS) == 0) {
            const int slot = WHOLE ? 0 : tile;
#pragma unroll
            for (int i = 0; i < 2 * TALL; ++i) of[i / 2][i % 2].set(wide<float>(scales[slot][i / 2][i % 2]), zeros[slot][i / 2][i % 2], i % 2);
            look_up((begin + q + 1) * TILES + tile, scales[slot], zeros[slot]);  // a stage ahead
          }
#pragma unroll
          for (int i = 0; i < TALL; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
              const u32 word = v[tile][i][BITS == 4 ? j : 2 * j + r / 2];
              const u32 bits = BITS == 4 ? word >> 8 * (r / 2) & (r % 2 ? 0x00f000f0u : 0x000f000fu) : word >> 8 * (r % 2) & 0x00ff00ffu;
              a[turn % 2][s][i][r] = of[i][r % 2].weights(bits, r % 2);
            }
        }
#pragma unroll
        for (int r = 0; r < 4 * BATCH * TALL; ++r) ptx::pin(a[turn % 2][r / (4 * TALL)][r / 4 % TALL][r % 4]);
        ptx::wgmma_fence();
#pragma unroll
        for (int s = 0; s < BATCH; ++s)
#pragma unroll
          for (int i = 0; i < TALL; ++i) {
            const int step = turn * BATCH + s;  // of a panel's four
            multiply<N>(d[i], a[turn % 2][s][i], x + ((step / 4 * N * LINE + step % 4 * 32) >> 4), TX());
          }
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();  // what came before is multiplied: until then its registers are read
#pragma unroll
        for (int r = 0; r < 4 * BATCH * TALL; ++r) ptx::pin(a[1 - turn % 2][r / (4 * TALL)][r / 4 % TALL][r % 4]);
        // end of excerpt
        if (turn == TALL - 1 && q > 0) {
          __syncwarp();
          if (lane == 0) ptx::mbar_arrive(ptx::smem_addr(&empty[at == 0 ? STAGES - 1 : at - 1]));
        }
      }
      if (++at == STAGES) at = 0, parity ^= 1;
    }
    ptx::wgmma_wait<0>();

    // The stages' room takes the sums, and each block of the cluster adds up a share of the rows. They are stored as floats, for a
    // conversion of registers might be moved before the wait.
    constexpr int MINE = HEIGHT / CLUSTER, APART = HEIGHT + 4;  // four lanes that hold a row write to different banks
    static_assert(N * APART * 4 <= STAGES * (X_BYTES + CODE_BYTES), "sums fit");
    float* const sums = (float*)room;
    ptx::named_sync(1, 128 * GROUPS);  // all is multiplied
#pragma unroll
    for (int i = 0; i < TALL; ++i) {
      float* const to = sums + 2 * t * APART + (group * TALL + i) * 64 + warp % 4 * 16 + g;
#pragma unroll
      for (int j = 0; j < N / 2; ++j) to[(8 * (j / 4) + j % 2) * APART + j % 4 / 2 * 8] = d[i][j];
    }
    ptx::named_sync(1, 128 * GROUPS);
    meet();
    const int columns = min((int)p.columns - pass * N, N), rows = min(m - top - rank * MINE, MINE);
    const bool down_first = p.y_step == 1;
    u32 from[CLUSTER];
#pragma unroll
    for (int c = 0; c < CLUSTER; ++c) from[c] = CLUSTER > 1 ? ptx::mapa(ptx::smem_addr(sums + rank * MINE), c) : 0;
#pragma unroll 2
    for (int i = threadIdx.x; i < N * MINE; i += 128 * GROUPS) {
      const int c = down_first ? i / MINE : i % N, row = down_first ? i % MINE : i / N;
      if (c >= columns || row >= rows) continue;
      float sum = 0;
      if constexpr (CLUSTER == 1) sum = sums[c * APART + row];
#pragma unroll
      for (int b = 0; CLUSTER > 1 && b < CLUSTER; ++b) sum += ptx::ld_cluster<float>(from[b] + 4 * (c * APART + row));
      store_quantised<TY>(p, top + rank * MINE + row, pass * N + c, sum);
    }
    meet();  // nobody leaves while others read
  }
}
