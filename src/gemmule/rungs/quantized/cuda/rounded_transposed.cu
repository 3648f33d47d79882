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

// A strip of 128 columns: two warpgroups take the two halves of a stage's 128 rows, and add up at the end; beside 256 columns of x
// (WIDE), where registers hold one set of sums, each takes half of the strip. A word of codes, turned by
// movmatrix, has two neighbouring rows in its halves, which is how an operand of columns lies; scales, which belong to rows, lie in
// shared memory by two rows in a word. A warp has the instructions of one tile, or a part of them.
// `show`: the map of x, whose stages TMA then brings as they lie; else (0) a launch in front has put x in order.
template <class TX, class TY, class TS, int BITS, bool ZEROS, int SPLIT, int TALL, int N, int CLUSTER, int PARTS, int PANELS, int STAGES, class Map>
__device__ __forceinline__ void multiply_transposed(const QuantArgs& given, const Map show) {
  constexpr bool DIRECT = Same<Map, const ptx::TensorMap*>::value;
  constexpr bool WIDE = N == 256;
  static_assert(TALL == 1 && PANELS == (WIDE ? 1 : 2), "a warpgroup has a panel of x");
  static_assert(CLUSTER == 1 || PARTS == 1, "shared by a cluster, or in parts");
  constexpr int GROUPS = 2, WIDTH = 128, DEPTH = 64 * PANELS, SETS = WIDE ? 1 : 2, SHARES = CLUSTER * PARTS;
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
      if constexpr (DIRECT)
        if (lane < PANELS) ptx::tma_load_3d(ptx::smem_addr(room + at * X_BYTES + lane * (N * LINE)), show, bar, (begin + q) * DEPTH + 64 * lane, share.pass * N, 0);
      if (lane < rows) {
        const unsigned char* const from = (const unsigned char*)p.codes + ((i64)(top + lane) * across + left / COLUMNS) * 512;
        ptx::bulk_load(ptx::smem_addr(codes + at * CODE_BYTES + lane * ROW_BYTES), from, bytes, bar);
      }
    };
    const auto ask_x = [&](int q) {
      if constexpr (!DIRECT) ask_for_x<X_BYTES>(room + q % STAGES * X_BYTES, x + (i64)q * X_BYTES, &full[q % STAGES]);
    };
    // Scales and zero points of SET times four rows, each asked for as soon as those in front of it are made use of.
    typedef Quad<TX, TS, BITS, ZEROS> Four;
    constexpr int SET = SPLIT < 4 ? SPLIT : sizeof(TS) < 4 ? 4 : 2;
    const int groups = (int)p.groups, size = (int)p.group_size;
    const bool in_fours = Four::whole(p, n);
    Four next[SET];
    const bool mine = lane < DEPTH / 4;  // of rows
    const auto look_up = [&](int q, int piece) {
      next[piece % SET].ask(p, n, (begin + q) * DEPTH + 4 * lane, min((left + piece * (WIDTH / SPLIT)) / size, groups - 1), mine, in_fours);
    };
    const auto make = [&](int q) {
      const int at = q % STAGES;
#pragma unroll
      for (int piece = 0; piece < SPLIT; ++piece) {
#pragma unroll
        for (int e = 0; e < 4; e += 2) {  // two rows in a word
          const Pairs a = next[piece % SET].of(e, lane & 2), b = next[piece % SET].of(e + 1, lane & 2);
          Words w;
#pragma unroll
          for (int i = 0; i < 4; ++i) w[i] = __byte_perm(a[i / 2], b[i / 2], i % 2 ? 0x7632 : 0x5410);
          if (mine) made[at][piece][2 * lane + e / 2] = w;
        }
        look_up(piece + SET < SPLIT ? q : q + Bringers<STAGES>::warps, (piece + SET) % SPLIT);
      }
      __syncwarp();
      if (lane == 0) ptx::mbar_arrive(ptx::smem_addr(&full[at]));
    };
    Bringers<STAGES>::bring(first, count, empty, ask_codes, ask_x, [&] {
#pragma unroll
      for (int piece = 0; piece < SET; ++piece) look_up(first, piece);
    }, make);
    meet(), meet();
  } else {
    ptx::reg_alloc<224>();
    constexpr int HALVES = 4 / OF_WARP, STEPS = 4, BATCH = 2, APART = WIDTH + 4;  // warps of a tile; steps of a panel, of a turn; sums
    float d[SETS][N / 2] = {};
    const int tile = (WIDE ? warp : warp % 4) / HALVES, half = warp % HALVES, part = WIDE ? 0 : group;  // part: of rows
    int of_lane = part * (DEPTH / 32) * ROW_BYTES + tile * 512 + lane * 16 + half * OF_WARP * 4;
    const int piece = (tile * COLUMNS + Tile<BITS>::of_lane * (g / 2)) / (WIDTH / SPLIT);
    int place = (part * N + 2 * t) * APART + tile * COLUMNS + Tile<BITS>::of_lane * (g / 2) + g % 2 + 4 * SETS * half;  // of sums
    ptx::pin(of_lane), ptx::pin(place);  // else the compiler waits after each product
    const unsigned char* const own = codes + of_lane;
    u32 a[2][BATCH][SETS][4] = {};  // what is multiplied, and what comes next
    int at = 0, parity = 0;
#pragma unroll 1
    for (int q = 0; q < count; ++q) {
      ptx::mbar_wait(ptx::smem_addr(&full[at]), parity);
      const u64 x = ptx::wgmma_desc(ptx::smem_addr(room + at * X_BYTES + part * (N * LINE)), 16, 1024, ptx::Swizzle::b128);
      const Words* const rows = &made[at][piece][part * 32 + t];
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

    // The stages' room takes the sums of both warpgroups. They are stored as floats, for a conversion of registers might be moved before
    // the wait, and behind no branch, for which the compiler would wait after each product.
    static_assert((WIDE ? 1 : 2) * N * APART * 4 <= STAGES * (X_BYTES + CODE_BYTES), "sums fit");
    float* const sums = (float*)room;
    ptx::named_sync(1, 128 * GROUPS);  // all is multiplied
#pragma unroll
    for (int i = 0; i < SETS; ++i) {
      float* const to = sums + place + 4 * i;
#pragma unroll
      for (int j = 0; j < N / 2; ++j) to[(8 * (j / 4) + j % 2) * APART + j % 4 / 2 * 2] = d[i][j];
    }
    ptx::named_sync(1, 128 * GROUPS);
    if constexpr (!WIDE) {  // the two halves of the rows
#pragma unroll 4
      for (int i = threadIdx.x; i < N * APART / 4; i += 128 * GROUPS) {
        ptx::Vec<float, 4> one = ((const ptx::Vec<float, 4>*)sums)[i];
        const ptx::Vec<float, 4> other = ((const ptx::Vec<float, 4>*)(sums + N * APART))[i];
#pragma unroll
        for (int e = 0; e < 4; ++e) one[e] += other[e];
        ((ptx::Vec<float, 4>*)sums)[i] = one;
      }
      ptx::named_sync(1, 128 * GROUPS);
    }
    meet();
    give<TY, TS, WIDTH, N, CLUSTER, PARTS, PANELS, APART, 128 * GROUPS>(p, share, sums);
    meet();  // nobody leaves while others read
  }
}

template <class TX, class TY, class TS, int BITS, bool ZEROS, int SPLIT, int TALL, int N, int CLUSTER, int PARTS, int PANELS, int STAGES>
__global__ void __launch_bounds__(384, 1) rounded_transposed(const QuantArgs p) {
  multiply_transposed<TX, TY, TS, BITS, ZEROS, SPLIT, TALL, N, CLUSTER, PARTS, PANELS, STAGES>(p, 0);
}

template <class TX, class TY, class TS, int BITS, bool ZEROS, int SPLIT, int TALL, int N, int CLUSTER, int PARTS, int PANELS, int STAGES>
__global__ void __launch_bounds__(384, 1) rounded_transposed_direct(const QuantArgs p, const __grid_constant__ ptx::TensorMap map_x) {
  multiply_transposed<TX, TY, TS, BITS, ZEROS, SPLIT, TALL, N, CLUSTER, PARTS, PANELS, STAGES>(p, &map_x);
}
