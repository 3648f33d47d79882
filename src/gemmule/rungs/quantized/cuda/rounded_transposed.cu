// The transposed product of many columns by wgmma: codes are turned in registers, and become weights there, each rounded once.
// counters: L2 hits, %; issue slots used, %; tensor pipe, %
#include "rounded.cuh"

// Results are the stored columns, and the sum runs down the stored rows.
__device__ __forceinline__ QuantArgs seen(QuantArgs p) {
  const i64 rows = p.m;
  p.m = p.n, p.n = rows;
  return p;
}

template <class TX, int BITS, int N, int PANELS>
__global__ void __launch_bounds__(256) turn_columns(const QuantArgs p) { turn<TX, 0, N, PANELS>(seen(p)); }

template <class TY, int HEIGHT, int N, int PARTS, int PANELS>
__global__ void __launch_bounds__(256) add_parts(const QuantArgs p) { add<TY, HEIGHT, N, PARTS, PANELS>(seen(p)); }

// A strip of 128 columns: two warpgroups take the two halves of a stage's 128 rows, and add up at the end. A word of codes, turned by
// movmatrix, has two neighbouring rows in its halves, which is how an operand of columns lies; scales, which belong to rows, lie in
// shared memory by two rows in a word. A warp has the instructions of one tile, or half of them.
template <class TX, class TY, class TS, int BITS, bool ZEROS, int SPLIT, int TALL, int N, int CLUSTER, int PARTS, int PANELS, int STAGES>
__global__ void __launch_bounds__(384, 1) rounded_transposed(const QuantArgs given) {
  static_assert(TALL == 1 && PANELS == 2, "a warpgroup has a panel of x, and two sets of sums");
  static_assert(CLUSTER == 1 || PARTS == 1, "shared by a cluster, or in parts");
  constexpr int GROUPS = 2, WIDTH = 128, DEPTH = 64 * PANELS, SETS = 2, SHARES = CLUSTER * PARTS;
  constexpr int COLUMNS = Tile<BITS>::columns, TILES = WIDTH / COLUMNS, OF_WARP = SETS * BITS / 4;  // words of a tile, for a warp
  constexpr int X_BYTES = PANELS * N * LINE, ROW_BYTES = TILES * 512, CODE_BYTES = DEPTH / 16 * ROW_BYTES;
  typedef typename RowOf<TX, TS, BITS, ZEROS, Float4<TS>::is>::type Weights;
  extern __shared__ __align__(1024) unsigned char room[];
  if constexpr (PARTS > 1) ptx::pdl_launch_dependents();
  unsigned char* const codes = room + STAGES * X_BYTES;
  Words(*const made)[SPLIT][DEPTH / 2] = (Words(*)[SPLIT][DEPTH / 2])(codes + STAGES * CODE_BYTES);  // of two rows
  u64* const full = (u64*)(made + STAGES);
  u64* const empty = full + STAGES;
  const QuantArgs p = seen(given);
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), g = lane / 4, t = lane % 4, group = warp / 4;
  const int m = (int)p.m, n = (int)p.n, across = (m + COLUMNS - 1) / COLUMNS, deep = (n + 15) / 16;
  const Share<WIDTH, N, SHARES> share(p);
  const int left = share.top, count = (n + DEPTH * SHARES - 1) / (DEPTH * SHARES);
  const int begin = share.rank * count;  // stages beyond the last row have no codes, and zeros for x

  if (threadIdx.x < STAGES) ptx::mbar_init(ptx::smem_addr(&full[threadIdx.x]), 1), ptx::mbar_init(ptx::smem_addr(&empty[threadIdx.x]), 4 * GROUPS);
  ptx::mbar_fence_init();
  __syncthreads();
  const auto meet = [&] {  // the blocks of a cluster
    __syncwarp();
    if constexpr (CLUSTER > 1) ptx::cluster_sync();
  };
  if (group == GROUPS) {
    ptx::reg_dealloc<56>();
    const int first = warp - 4 * GROUPS;
    if (first >= Bringers<STAGES>::warps) {
      meet(), meet();
      return;
    }
    const unsigned char* const x = (const unsigned char*)p.work + ((i64)share.pass * SHARES * count + begin) * X_BYTES;
    const int bytes = min(across - left / COLUMNS, TILES) * 512;  // of a row of tiles
    const auto ask_codes = [&](int q) {
      const int at = q % STAGES, top = (begin + q) * (DEPTH / 16), rows = min(max(deep - top, 0), DEPTH / 16);
      const u32 bar = ptx::smem_addr(&full[at]);
      if (lane == 0) ptx::mbar_expect_tx(bar, rows * bytes + X_BYTES);
      __syncwarp();
      if (lane < rows) {
        const unsigned char* const from = (const unsigned char*)p.codes + ((i64)(top + lane) * across + left / COLUMNS) * 512;
        ptx::bulk_load(ptx::smem_addr(codes + at * CODE_BYTES + lane * ROW_BYTES), from, bytes, bar);
      }
    };
    const auto ask_x = [&](int q) { ask_for_x<X_BYTES>(room + q % STAGES * X_BYTES, x + (i64)q * X_BYTES, &full[q % STAGES]); };
    // Scales and zero points of SET times two rows, asked for before the set in front of them is made use of.
    constexpr int PIECES = SPLIT * PANELS, SET = PIECES < 4 ? PIECES : 4, SETS_OF = PIECES / SET;
    const int groups = (int)p.groups, size = (int)p.group_size;
    TS scales[SET][2];
    float zeros[SET][2];
    const auto look_up = [&](int q, int set) {
#pragma unroll
      for (int e = 0; e < SET; ++e) {
        const int piece = set * SET + e, row = (begin + q) * DEPTH + piece % PANELS * 64 + 2 * lane;
        const int of = p.scale_row ? min((left + piece / PANELS * (WIDTH / SPLIT)) / size, groups - 1) : 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const i64 from = p.scale_row ? (i64)of * n + min(row + i, n - 1) : 0;
          const bool there = row + i < n;  // beyond, codes may be anything: their weight is zero
          scales[e][i] = there ? ptx::ld_nc((const TS*)p.scales + from) : TS(0.f);
          zeros[e][i] = ZEROS && there ? ptx::ld_nc((const float*)p.zeros + from) : 0.f;
        }
      }
    };
    const auto make = [&](int q) {
      const int at = q % STAGES;
#pragma unroll
      for (int set = 0; set < SETS_OF; ++set) {
        Pairs one[SET][2];
#pragma unroll
        for (int e = 0; e < 2 * SET; ++e) one[e / 2][e % 2] = Weights::of(wide<float>(scales[e / 2][e % 2]), zeros[e / 2][e % 2], lane & 4);
        if (set + 1 < SETS_OF) look_up(q, set + 1);
        else look_up(q + Bringers<STAGES>::warps, 0);
#pragma unroll
        for (int e = 0; e < SET; ++e) {
          Words w;
#pragma unroll
          for (int i = 0; i < 4; ++i) w[i] = __byte_perm(one[e][0][i / 2], one[e][1][i / 2], i % 2 ? 0x7632 : 0x5410);
          made[at][(set * SET + e) / PANELS][(set * SET + e) % PANELS * 32 + lane] = w;
        }
      }
      __syncwarp();
      if (lane == 0) ptx::mbar_arrive(ptx::smem_addr(&full[at]));
    };
    Bringers<STAGES>::bring(first, count, empty, ask_codes, ask_x, look_up, make);
    meet(), meet();
  } else {
    ptx::reg_alloc<224>();
    constexpr int HALVES = 4 / OF_WARP, STEPS = 4, BATCH = 2;  // warps of a tile; steps of a panel, of a turn
    float d[SETS][N / 2] = {};
    const int tile = warp % 4 / HALVES, half = warp % HALVES;
    const unsigned char* const own = codes + group * (DEPTH / 32) * ROW_BYTES + tile * 512 + lane * 16 + half * OF_WARP * 4;
    const int piece = (tile * COLUMNS + Tile<BITS>::of_lane * (g / 2)) / (WIDTH / SPLIT);
    u32 a[2][BATCH][SETS][4] = {};  // what is multiplied, and what comes next
    int at = 0, parity = 0;
#pragma unroll 1
    for (int q = 0; q < count; ++q) {
      ptx::mbar_wait(ptx::smem_addr(&full[at]), parity);
      const u64 x = ptx::wgmma_desc(ptx::smem_addr(room + at * X_BYTES + group * (N * LINE)), 16, 1024, ptx::Swizzle::b128);
      const Words* const rows = &made[at][piece][group * 32 + t];
      ptx::Vec<u32, OF_WARP> v[STEPS];
#pragma unroll
      for (int i = 0; i < STEPS; ++i) v[i] = *(const ptx::Vec<u32, OF_WARP>*)(own + at * CODE_BYTES + i * ROW_BYTES);
      // excerpt
#pragma unroll
      for (int turn = 0; turn < STEPS / BATCH; ++turn) {
#pragma unroll
        for (int s = 0; s < BATCH; ++s) {
          const int step = turn * BATCH + s;
          Weights of[2];
#pragma unroll
          for (int high = 0; high < 2; ++high) of[high].take(rows[step * 8 + high * 4]);
          u32 word[OF_WARP];
#pragma unroll
          for (int i = 0; i < OF_WARP; ++i) word[i] = ptx::movmatrix_trans(v[step][i]);
#pragma unroll
          for (int i = 0; i < SETS; ++i) {
            u32 floats[4];
            if constexpr (Float4<TS>::is) Floats<TX, TS>::bits(word[i], floats);
#pragma unroll
            for (int r = 0; r < 4; ++r) {  // of rows 8 further where r is odd, and of columns two further where r / 2 is
              u32& to = a[turn % 2][s][i][r % 2 * 2 + r / 2];
              if constexpr (Float4<TS>::is) to = of[r % 2].weights(floats[r]);
              else {
                const u32 from = word[BITS == 4 ? i : 2 * i + r / 2];
                const u32 bits = BITS == 4 ? from >> 8 * (r / 2) & (r % 2 ? 0x00f000f0u : 0x000f000fu) : from >> 8 * (r % 2) & 0x00ff00ffu;
                to = of[r % 2].weights(bits, r % 2);
              }
            }
          }
        }
#pragma unroll
        for (int r = 0; r < 4 * BATCH * SETS; ++r) ptx::pin(a[turn % 2][r / (4 * SETS)][r / 4 % SETS][r % 4]);
        ptx::wgmma_fence();
#pragma unroll
        for (int s = 0; s < BATCH; ++s)
#pragma unroll
          for (int i = 0; i < SETS; ++i) multiply<N>(d[i], a[turn % 2][s][i], x + ((turn * BATCH + s) * 32 >> 4), TX());
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();  // what came before is multiplied: until then its registers are read
#pragma unroll
        for (int r = 0; r < 4 * BATCH * SETS; ++r) ptx::pin(a[1 - turn % 2][r / (4 * SETS)][r / 4 % SETS][r % 4]);
        // end of excerpt
        if (turn == 0 && q > 0) {
          __syncwarp();
          if (lane == 0) ptx::mbar_arrive(ptx::smem_addr(&empty[at == 0 ? STAGES - 1 : at - 1]));
        }
      }
      if (++at == STAGES) at = 0, parity ^= 1;
    }
    ptx::wgmma_wait<0>();

    // The stages' room takes the sums, the second warpgroup's first. They are stored as floats, for a conversion of registers might be
    // moved before the wait.
    constexpr int APART = WIDTH + 4;
    static_assert(N * APART * 4 <= STAGES * (X_BYTES + CODE_BYTES), "sums fit");
    float* const sums = (float*)room;
#pragma unroll
    for (int turn = 1; turn >= 0; --turn) {
      ptx::named_sync(1, 128 * GROUPS);  // all is multiplied, or the others' sums are there
      if (group == turn)
#pragma unroll
        for (int i = 0; i < SETS; ++i) {
          float* const to = sums + 2 * t * APART + tile * COLUMNS + Tile<BITS>::of_lane * (g / 2) + g % 2 + 4 * (SETS * half + i);
#pragma unroll
          for (int j = 0; j < N / 2; ++j) {
            float& one = to[(8 * (j / 4) + j % 2) * APART + j % 4 / 2 * 2];
            one = turn ? d[i][j] : one + d[i][j];
          }
        }
    }
    ptx::named_sync(1, 128 * GROUPS);
    meet();
    give<TY, TS, WIDTH, N, CLUSTER, PARTS, PANELS, APART, 128 * GROUPS>(p, share, sums);
    meet();  // nobody leaves while others read
  }
}
