// Many columns of x by wgmma: codes become weights in registers, each rounded once, and meet 32 to 256 columns at a time.
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
  __device__ __forceinline__ u32 weights(u32 bits) const { return fma2(fma2(bits, lift, 0x80008000u, TX()), scale, 0x80008000u, TX()); }
};
template <class TX, class TS, int BITS, bool ZEROS, bool FLOATS> struct RowOf { typedef Row<TX, TS, BITS, ZEROS> type; };
template <class TX, class TS, int BITS, bool ZEROS> struct RowOf<TX, TS, BITS, ZEROS, true> { typedef FloatRow<TX, TS> type; };

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

// Where parts of the sums lie: behind x, part by part, column by column, whole blocks of rows.
template <int N, int PANELS, int SHARES> __device__ __forceinline__ float* parts_of(const QuantArgs& p) {
  const i64 stages = (p.n + 64 * PANELS * SHARES - 1) / (64 * PANELS * SHARES) * SHARES, passes = (p.columns + N - 1) / N;
  return (float*)((unsigned char*)p.work + passes * stages * (PANELS * N * LINE));
}

// Adds up the parts of the sums, in order, four rows of a column at a time.
template <class TY, int HEIGHT, int N, int PARTS, int PANELS>
__global__ void __launch_bounds__(256) add_parts(const QuantArgs p) {
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

// Two warpgroups below each other, each with TALL times 64 rows, and four warps that bring what they need: they ask for copies, and
// find out how codes become weights. While one warpgroup multiplies, the other takes codes apart. SPLIT: a stage has so many
// pieces of one group each. The blocks of a cluster share the sum and add up at the end;
// of PARTS of it, which no cluster holds, each stores what it has.
template <class TX, class TY, class TS, int BITS, bool ZEROS, int SPLIT, int TALL, int N, int CLUSTER, int PARTS, int PANELS, int STAGES>
__global__ void __launch_bounds__(384, 1) rounded_columns(const QuantArgs p) {
  constexpr int GROUPS = 2, HEIGHT = 64 * GROUPS * TALL, STEPS = Tile<BITS>::steps, TILES = 4 * PANELS / STEPS, COLUMNS = Tile<BITS>::columns, SHARES = CLUSTER * PARTS;
  constexpr int X_BYTES = PANELS * N * LINE, ROW_BYTES = TILES * 512, CODE_BYTES = HEIGHT / 16 * ROW_BYTES;
  typedef typename RowOf<TX, TS, BITS, ZEROS, Float4<TS>::is>::type Weights;
  static_assert(PARTS == 1 || !Float4<TS>::factors, "factors come to whole sums");
  static_assert(CLUSTER == 1 || PARTS == 1, "shared by a cluster, or in parts");
  extern __shared__ __align__(1024) unsigned char room[];
  if constexpr (PARTS > 1) ptx::pdl_launch_dependents();
  unsigned char* const codes = room + STAGES * X_BYTES;
  Pairs(*const made)[SPLIT][HEIGHT] = (Pairs(*)[SPLIT][HEIGHT])(codes + STAGES * CODE_BYTES);
  u64* const full = (u64*)(made + STAGES);
  u64* const empty = full + STAGES;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), g = lane / 4, t = lane % 4, group = warp / 4;
  const int m = (int)p.m, n = (int)p.n, across = (n + COLUMNS - 1) / COLUMNS;
  const int passes = ((int)p.columns + N - 1) / N, down = (m + HEIGHT - 1) / HEIGHT;
  const int rank = blockIdx.x % SHARES, place = blockIdx.x / SHARES, count = (across + TILES * SHARES - 1) / (TILES * SHARES);
  const int first_row = place / (GROUPED * passes) * GROUPED, there = place % (GROUPED * passes), high = min(down - first_row, GROUPED);
  const int top = (first_row + there % high) * HEIGHT, pass = there / high;
  const int begin = rank * count;  // stages beyond the last column have no codes, and zeros for x

  if (threadIdx.x < STAGES) ptx::mbar_init(ptx::smem_addr(&full[threadIdx.x]), 1), ptx::mbar_init(ptx::smem_addr(&empty[threadIdx.x]), 4 * GROUPS);
  ptx::mbar_fence_init();
  __syncthreads();
  const auto meet = [&] {  // the blocks of a cluster
    __syncwarp();
    if constexpr (CLUSTER > 1) ptx::cluster_sync();
  };
  if (group == GROUPS) {
    ptx::reg_dealloc<56>();
    // Each warp brings whole stages, always the same of the ring: who waits for a stage's next phase has seen the one before end.
    constexpr int WARPS = STAGES % 4 == 0 ? 4 : STAGES % 3 == 0 ? 3 : 2;
    static_assert(STAGES % WARPS == 0, "a stage is always for the same warp");
    const int first = warp - 4 * GROUPS;
    if (first >= WARPS) {
      meet(), meet();
      return;
    }
    const unsigned char* const x = (const unsigned char*)p.work + ((i64)pass * SHARES * count + begin) * X_BYTES;
    const int tile_row = min(top / 16 + min(lane, HEIGHT / 16 - 1), (m + 15) / 16 - 1);
    const unsigned char* const own = p.codes ? (const unsigned char*)p.codes + (i64)tile_row * across * 512 : nullptr;
    const auto ask_codes = [&](int q) {
      const int at = q % STAGES, tile = (begin + q) * TILES, bytes = max(min(across - tile, TILES), 0) * 512;
      const u32 bar = ptx::smem_addr(&full[at]);
      if (lane == 0) ptx::mbar_expect_tx(bar, HEIGHT / 16 * bytes + X_BYTES);
      __syncwarp();
      if (lane < HEIGHT / 16 && bytes > 0) ptx::bulk_load(ptx::smem_addr(codes + at * CODE_BYTES + lane * ROW_BYTES), own + (i64)tile * 512, bytes, bar);
    };
    const auto ask_x = [&](int q) {
      const int at = q % STAGES;
      constexpr int COPIES = (X_BYTES + 32767) / 32768, EACH = X_BYTES / COPIES;
      if (lane < COPIES) ptx::bulk_load(ptx::smem_addr(room + at * X_BYTES + lane * EACH), x + (i64)q * X_BYTES + lane * EACH, EACH, ptx::smem_addr(&full[at]));
    };
    // Scales and zero points of SET pieces of a row each, asked for before the set in front of them is made use of.
    constexpr int ROWS = HEIGHT / 32, PIECES = SPLIT * ROWS, SET = PIECES < 8 ? PIECES : ROWS == 4 ? 8 : 4, SETS = PIECES / SET;
    const int groups = (int)p.groups, size = (int)p.group_size;
    const int shift = size & (size - 1) ? -1 : 31 - __clz(size);
    TS scales[SET];
    float zeros[SET];
    const auto look_up = [&](int q, int set) {
#pragma unroll
      for (int e = 0; e < SET; ++e) {
        const int piece = set * SET + e, column = (begin + q) * (TILES * COLUMNS) + piece / ROWS * (TILES * COLUMNS / SPLIT);
        const int row = min(top + lane + piece % ROWS * 32, m - 1);
        const i64 from = p.scale_row ? (i64)min(shift < 0 ? column / size : column >> shift, groups - 1) * m + row : 0;
        const bool there = column < n;  // beyond, codes may be anything: their weight is zero
        scales[e] = there ? ptx::ld_nc((const TS*)p.scales + from) : TS(0.f);
        zeros[e] = ZEROS && there ? ptx::ld_nc((const float*)p.zeros + from) : 0.f;
      }
    };
    const auto make = [&](int q) {
      const int at = q % STAGES;
#pragma unroll
      for (int set = 0; set < SETS; ++set) {
        Pairs one[SET];
#pragma unroll
        for (int e = 0; e < SET; ++e) one[e] = Weights::of(wide<float>(scales[e]), zeros[e], lane & 8);
        if (set + 1 < SETS) look_up(q, set + 1);
        else look_up(q + WARPS, 0);
#pragma unroll
        for (int e = 0; e < SET; ++e) made[at][(set * SET + e) / ROWS][lane + (set * SET + e) % ROWS * 32] = one[e];
      }
      __syncwarp();
      if (lane == 0) ptx::mbar_arrive(ptx::smem_addr(&full[at]));
    };
    const int at_once = min(STAGES, count);
#pragma unroll 1
    for (int q = first; q < at_once; q += WARPS) ask_codes(q);
    look_up(first, 0);
#pragma unroll 1
    for (int q = first; q < at_once; q += WARPS) make(q);
    ptx::pdl_wait();  // x lies in order
#pragma unroll 1
    for (int q = first; q < at_once; q += WARPS) ask_x(q);
#pragma unroll 1
    for (int q = STAGES + first; q < count; q += WARPS) {
      ptx::mbar_wait(ptx::smem_addr(&empty[q % STAGES]), q / STAGES % 2 ^ 1);
      ask_codes(q), ask_x(q), make(q);
    }
    meet(), meet();
  } else {
    ptx::reg_alloc<224>();
    float d[TALL][N / 2] = {};
    const int own_row = group * 64 * TALL + warp % 4 * 16 + g;
    const unsigned char* const own = codes + (group * 4 * TALL + warp % 4) * ROW_BYTES + lane * 16;
    constexpr int ALL = TILES * STEPS, BATCH = TALL == 2 || ALL == 4 ? 2 : 4, EVERY = SPLIT < TILES ? TILES / SPLIT * STEPS : STEPS;
    u32 a[2][BATCH][TALL][4] = {};  // what is multiplied, and what comes next
    Weights of[TALL][2];
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
          if (step % EVERY == 0) {
            const int piece = tile * SPLIT / TILES + (SPLIT > TILES ? t * (SPLIT / TILES) / 4 : 0);
#pragma unroll
            for (int i = 0; i < 2 * TALL; ++i) of[i / 2][i % 2].take(made[at][piece][own_row + i / 2 * 64 + i % 2 * 8]);
          }
#pragma unroll
          for (int i = 0; i < TALL; ++i)
            if constexpr (Float4<TS>::is) {
              Floats<TX, TS>::bits(v[tile][i][j], a[turn % 2][s][i]);
#pragma unroll
              for (int r = 0; r < 4; ++r) a[turn % 2][s][i][r] = of[i][r % 2].weights(a[turn % 2][s][i][r]);
            } else
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
        if (turn == ALL / BATCH / 2 - 1 && q > 0) {
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
    if constexpr (PARTS > 1) {  // a launch behind this one adds them up
      const i64 high_all = (i64)down * HEIGHT;
      float* const to = parts_of<N, PANELS, SHARES>(p) + ((i64)rank * passes + pass) * N * high_all + top;
#pragma unroll 4
      for (int i = threadIdx.x; i < N * HEIGHT / 4; i += 128 * GROUPS) {
        const int c = i / (HEIGHT / 4), row = i % (HEIGHT / 4) * 4;
        *(ptx::Vec<float, 4>*)(to + c * high_all + row) = *(const ptx::Vec<float, 4>*)(sums + c * APART + row);
      }
      return;
    }
    const int columns = min((int)p.columns - pass * N, N), rows = min(m - top - rank * MINE, MINE);
    if (p.y_step == 1) deliver<TY, TS, N, MINE, CLUSTER, APART, 128 * GROUPS, true>(p, sums + rank * MINE, top + rank * MINE, pass * N, rows, columns);
    else deliver<TY, TS, N, MINE, CLUSTER, APART, 128 * GROUPS, false>(p, sums + rank * MINE, top + rank * MINE, pass * N, rows, columns);
    meet();  // nobody leaves while others read
  }
}
