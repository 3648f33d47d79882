// Many columns of x by wgmma: codes become weights in registers, each rounded once, and meet 32 to 256 columns at a time.
// counters: L2 hits, %; issue slots used, %; tensor pipe, %
#include "bias.cuh"
#include "rounded.cuh"

template <class TX, int BITS, int N, int PANELS>
__global__ void __launch_bounds__(256) turn_columns(const QuantArgs p) { turn<TX, BITS, N, PANELS>(p); }

template <class TY, int HEIGHT, int N, int PARTS, int PANELS>
__global__ void __launch_bounds__(256) add_parts(const QuantArgs p) { add<TY, HEIGHT, N, PARTS, PANELS>(p); }

// Two warpgroups below each other, each with TALL times 64 rows, and four warps that bring what they need: they ask for copies, and
// find out how codes become weights. While one warpgroup multiplies, the other takes codes apart. SPLIT: a stage has so many
// pieces of one group each. The blocks of a cluster share the sum and add up at the end;
// of PARTS of it, which no cluster holds, each stores what it has.
// `show`: the maps of x and of the codes, of which TMA then brings a stage at once, x as it lies: codes find its order on their way to
// registers. Else (0) a launch in front has put x in the order of codes.
template <class TX, class TY, class TS, int BITS, bool ZEROS, int SPLIT, int TALL, int N, int CLUSTER, int PARTS, int PANELS, int STAGES, class Map>
__device__ __forceinline__ void multiply_rounded(const QuantArgs& p, const Map show_x, const Map show_codes) {
  constexpr bool DIRECT = Same<Map, const ptx::TensorMap*>::value;
  constexpr int GROUPS = 2, HEIGHT = 64 * GROUPS * TALL, STEPS = Tile<BITS>::steps, TILES = 4 * PANELS / STEPS, COLUMNS = Tile<BITS>::columns, SHARES = CLUSTER * PARTS;
  constexpr int X_BYTES = PANELS * N * LINE, ROW_BYTES = TILES * 512, CODE_BYTES = HEIGHT / 16 * ROW_BYTES;
  typedef typename RowOf<TX, TS, BITS, ZEROS, Float4<TS>::is>::type Weights;
  static_assert(PARTS == 1 || !Float4<TS>::factors, "factors come to whole sums");
  static_assert(CLUSTER == 1 || PARTS == 1, "shared by a cluster, or in parts");
  static_assert(!DIRECT || (!Float4<TS>::is && SPLIT <= TILES * STEPS), "bytes of codes change places, an instruction has one group");
  extern __shared__ __align__(1024) unsigned char room[];
  if constexpr (PARTS > 1) ptx::pdl_launch_dependents();
  unsigned char* const codes = room + STAGES * X_BYTES;
  Pairs(*const made)[SPLIT][HEIGHT] = (Pairs(*)[SPLIT][HEIGHT])(codes + STAGES * CODE_BYTES);
  u64* const full = (u64*)(made + STAGES);
  u64* const empty = full + STAGES;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), g = lane / 4, t = lane % 4, group = warp / 4;
  const int m = (int)p.m, n = (int)p.n, across = (n + COLUMNS - 1) / COLUMNS;
  const Share<HEIGHT, N, SHARES> share(p);
  const int top = share.top, count = (across + TILES * SHARES - 1) / (TILES * SHARES);
  const int begin = share.rank * count;  // stages beyond the last column have no codes, and zeros for x

  if (threadIdx.x < STAGES) ptx::mbar_init(ptx::smem_addr(&full[threadIdx.x]), 1), ptx::mbar_init(ptx::smem_addr(&empty[threadIdx.x]), 4 * GROUPS);
  ptx::mbar_fence_init();
  __syncthreads();
  const auto meet = [&] {  // the blocks of a cluster
    __syncwarp();
    if constexpr (CLUSTER > 1) ptx::cluster_sync();
  };
  if (group == GROUPS) {
    ptx::reg_dealloc<72>();
    const int first = warp - 4 * GROUPS;
    if (first >= Bringers<STAGES>::warps) {
      meet(), meet();
      return;
    }
    const unsigned char* const x = (const unsigned char*)p.work + ((i64)share.pass * SHARES * count + begin) * X_BYTES;
    const int tile_row = min(top / 16 + min(lane, HEIGHT / 16 - 1), (m + 15) / 16 - 1);
    const unsigned char* const own = p.codes ? (const unsigned char*)p.codes + (i64)tile_row * across * 512 : nullptr;
    const auto ask_codes = [&](int q) {
      const int at = q % STAGES, tile = (begin + q) * TILES;
      const u32 bar = ptx::smem_addr(&full[at]);
      if constexpr (DIRECT) {  // what lies outside comes as zeros
        if (lane == 0) ptx::mbar_expect_tx(bar, CODE_BYTES + X_BYTES);
        __syncwarp();
        if (lane == 0) ptx::tma_load_3d(ptx::smem_addr(codes + at * CODE_BYTES), show_codes, bar, 0, tile * 4, top / 16);
        if (lane < PANELS) ptx::tma_load_3d(ptx::smem_addr(room + at * X_BYTES + lane * (N * LINE)), show_x, bar, ((begin + q) * PANELS + lane) * 64, share.pass * N, 0);
      } else {
        const int bytes = max(min(across - tile, TILES), 0) * 512;
        if (lane == 0) ptx::mbar_expect_tx(bar, HEIGHT / 16 * bytes + X_BYTES);
        __syncwarp();
        if (lane < HEIGHT / 16 && bytes > 0) ptx::bulk_load(ptx::smem_addr(codes + at * CODE_BYTES + lane * ROW_BYTES), own + (i64)tile * 512, bytes, bar);
      }
    };
    const auto ask_x = [&](int q) {
      if constexpr (!DIRECT) ask_for_x<X_BYTES>(room + q % STAGES * X_BYTES, x + (i64)q * X_BYTES, &full[q % STAGES]);
    };
    // Scales and zero points of SET pieces of a row each, asked for a stage ahead and all at once: a warp's loads have six counters, so that
    // who waits for one that was asked for between others waits for those as well.
    constexpr int ROWS = HEIGHT / 32, PIECES = SPLIT * ROWS, SET = PIECES < 16 ? PIECES : 16, SETS = PIECES / SET;
    const int groups = (int)p.groups, size = (int)p.group_size;
    const int shift = size & (size - 1) ? -1 : 31 - __clz(size);
    TS scales[SET];
    float zeros[SET];
    const int left = m - top - lane;  // beyond the last row and column codes may be anything: their weight is zero
    const auto look_up = [&](int q, int set) {
      const int from_column = (begin + q) * (TILES * COLUMNS);
      if (p.scale_row)
#pragma unroll
        for (int e = 0; e < SET; e += ROWS) {
          const int column = from_column + (set * SET + e) / ROWS * (TILES * COLUMNS / SPLIT), until = column < n ? left : 0;
          const i64 from = (i64)min(shift < 0 ? column / size : column >> shift, groups - 1) * m + top + lane;
          u64 scale = (u64)((const TS*)p.scales + from), zero = (u64)((const float*)p.zeros + from);
          ptx::pin(scale), ptx::pin(zero);  // not worked out again for each row
#pragma unroll
          for (int r = 0; r < ROWS; ++r) {
            scales[e + r] = until > 32 * r ? ptx::ld_nc((const TS*)scale + 32 * r) : TS(0.f);
            zeros[e + r] = ZEROS && until > 32 * r ? ptx::ld_nc((const float*)zero + 32 * r) : 0.f;
          }
        }
      else
#pragma unroll
        for (int e = 0; e < SET; ++e) {
          const bool there = from_column + (set * SET + e) / ROWS * (TILES * COLUMNS / SPLIT) < n;
          scales[e] = there ? *(const TS*)p.scales : TS(0.f);
          zeros[e] = ZEROS && there ? *(const float*)p.zeros : 0.f;
        }
    };
    const auto make = [&](int q) {
      const int at = q % STAGES;
#pragma unroll
      for (int set = 0; set < SETS; ++set) {
#pragma unroll
        for (int e = 0; e < SET; ++e) made[at][(set * SET + e) / ROWS][lane + (set * SET + e) % ROWS * 32] = Weights::of(wide<float>(scales[e]), zeros[e], lane & 8);
        if (set + 1 < SETS) look_up(q, set + 1);
        else look_up(q + Bringers<STAGES>::warps, 0);
      }
      __syncwarp();
      if (lane == 0) ptx::mbar_arrive(ptx::smem_addr(&full[at]));
    };
    Bringers<STAGES>::bring(first, count, empty, ask_codes, ask_x, [&] { look_up(first, 0); }, make);
    meet(), meet();
  } else {
    ptx::reg_alloc<216>();
    float d[TALL][N / 2] = {};
    const int own_tile = group * 4 * TALL + warp % 4, own_row = group * 64 * TALL + warp % 4 * 16 + g;
    const unsigned char* const own = codes + own_tile * ROW_BYTES;
    constexpr int ALL = TILES * STEPS, BATCH = TALL == 2 || ALL == 4 ? 2 : 4;
    constexpr int EVERY = DIRECT ? ALL / SPLIT : SPLIT < TILES ? TILES / SPLIT * STEPS : STEPS;
    u32 a[2][BATCH][TALL][4] = {};  // what is multiplied, and what comes next
    Weights of[TALL][2];
    int at = 0, parity = 0;
    // Where the codes of a tile lie that this lane multiplies. Its own as they come are those of neighbouring columns; beside x as it lies
    // it wants a word, or of two words the halves, of each lane that has the same rows. TMA has changed the places of 16 bytes.
    u32 spot[2][4], halves = t % 2 ? 0x7351 : 0x6240;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int line = own_tile * TILES * 4 + i / 4 * 4 + g / 2;
      spot[i / 4][i % 4] = DIRECT ? g / 2 * LINE + ((g % 2 * 4 + i % 4) ^ line % 8) * 16 + (BITS == 4 ? t / 2 : t) * 4 : lane * 16;
      if constexpr (DIRECT) ptx::pin(spot[i / 4][i % 4]);  // not worked out again for each stage
    }
    if constexpr (DIRECT) ptx::pin(halves);
#pragma unroll 1
    for (int q = 0; q < count; ++q) {
      ptx::mbar_wait(ptx::smem_addr(&full[at]), parity);
      const u64 x = ptx::wgmma_desc(ptx::smem_addr(room + at * X_BYTES), 16, 1024, ptx::Swizzle::b128);
      Words v[TILES][TALL];
#pragma unroll
      for (int i = 0; i < TILES * TALL; ++i) {
        const unsigned char* const from = own + at * CODE_BYTES + i % TALL * (4 * ROW_BYTES) + i / TALL * 512;
        Words& to = v[i / TALL][i % TALL];
        if constexpr (DIRECT)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const u32* const word = (const u32*)(from + spot[i / TALL % 2][e]);
            to[e] = BITS == 4 ? __byte_perm(word[0], word[2], halves) : word[0];
          }
        else to = *(const Words*)(from + spot[0][0]);
      }
      // excerpt
#pragma unroll
      for (int turn = 0; turn < ALL / BATCH; ++turn) {
#pragma unroll
        for (int s = 0; s < BATCH; ++s) {
          const int step = turn * BATCH + s, tile = step / STEPS, j = step % STEPS;
          if (step % EVERY == 0) {
            const int piece = DIRECT ? step / EVERY : tile * SPLIT / TILES + (SPLIT > TILES ? t * (SPLIT / TILES) / 4 : 0);
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
    constexpr int APART = HEIGHT + 4;  // four lanes that hold a row write to different banks
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
    give<TY, TS, HEIGHT, N, CLUSTER, PARTS, PANELS, APART, 128 * GROUPS>(p, share, sums);
    meet();  // nobody leaves while others read
  }
}

template <class TX, class TY, class TS, int BITS, bool ZEROS, int SPLIT, int TALL, int N, int CLUSTER, int PARTS, int PANELS, int STAGES>
__global__ void __launch_bounds__(384, 1) rounded_columns(const QuantArgs p) {
  multiply_rounded<TX, TY, TS, BITS, ZEROS, SPLIT, TALL, N, CLUSTER, PARTS, PANELS, STAGES>(p, 0, 0);
}

template <class TX, class TY, class TS, int BITS, bool ZEROS, int SPLIT, int TALL, int N, int CLUSTER, int PARTS, int PANELS, int STAGES>
__global__ void __launch_bounds__(384, 1) rounded_columns_direct(const QuantArgs p, const __grid_constant__ ptx::TensorMap map_x,
                                                                  const __grid_constant__ ptx::TensorMap map_codes) {
  multiply_rounded<TX, TY, TS, BITS, ZEROS, SPLIT, TALL, N, CLUSTER, PARTS, PANELS, STAGES>(p, &map_x, &map_codes);
}
