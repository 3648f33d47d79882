// Products of doubles by residues: rows of A and columns of B become integers, these their residues modulo some coprime
// numbers of 8 bits, tensor cores multiply each modulo one, and the sums' residues tell the product. First each pair of
// a row and a column is judged: tiles of C in which one may be wrong by more than the bound are multiplied as doubles.
#define RESIDUES
#include "ptx_f64.cuh"
#include "wgmma_bytes.cuh"

constexpr int MOST = 16;   // moduli
__device__ constexpr int MODULI[MOST] = {256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197, 193};
constexpr int THREADS = 256, CHUNK = 512;   // steps of a line that are measured in one go
constexpr int LINES = 16, STEPS = 128, EIGHT = 8, GROUP_STEPS = 64;   // of a tile of residues; a thread's; a sample's
constexpr int TILE = 128;  // rows and columns of C that share a flag

__device__ __forceinline__ double power_of_two(int e) { return __longlong_as_double(i64(e + 1023) << 52); }
__device__ __forceinline__ int exponent_of(double v) { return int(__double_as_longlong(v) >> 52 & 2047) - 1023; }

// ---- what a line holds: a row of A, or a column of B --------------------------------------------------------

struct Part {
  double sum, squares, largest;
  i64 lowest;            // the exponent of the lowest bit that is set
};
struct Line {
  double sum, error;     // at least the sum of its absolute values; what each is rounded by at most
  int power, coarse;     // times 2^power numbers become integers, times 2^coarse float8
  double unused;
};

struct MeasureArgs {
  const void* from;
  void* parts;
  void* lines_to;
  void* live;
  i64 lines, steps, line_step, step_step, live_count;
  double most;   // the largest norm of a line of integers
};

__device__ __forceinline__ void add(Part& p, double v) {
  const i64 bits = __double_as_longlong(v);
  const int e = int(bits >> 52 & 2047);
  const i64 digits = (bits & ((1ll << 52) - 1)) | (e ? 1ll << 52 : 0);
  const double size = fabs(v);
  p.sum += size, p.squares = fma(v, v, p.squares), p.largest = fmax(p.largest, size);
  if (digits) p.lowest = min(p.lowest, i64(max(e, 1) - 1076 + __ffsll(digits)));
}
__device__ __forceinline__ void join(Part& p, const Part& q) {
  p.sum += q.sum, p.squares += q.squares, p.largest = fmax(p.largest, q.largest), p.lowest = min(p.lowest, q.lowest);
}
__device__ __forceinline__ Part nothing() { return {0, 0, 0, 1 << 20}; }

// CHUNK steps of a line that lies along them are measured by a warp; of 32 lines that lie across them by a block.
template <bool ALONG>
__global__ void __launch_bounds__(THREADS) measure(const MeasureArgs p) {
  constexpr int WARPS = THREADS / 32, SHARE = ALONG ? CHUNK : CHUNK / WARPS;   // a warp's steps
  __shared__ Part met[ALONG ? 1 : WARPS][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 blocks = ALONG ? p.lines : (p.lines + 31) / 32;
  const i64 unit = ALONG ? (i64)blockIdx.x * WARPS + warp : blockIdx.x;
  const i64 part = unit / blocks, line = ALONG ? unit % blocks : unit % blocks * 32 + lane;
  const i64 first = part * CHUNK + (ALONG ? 0 : warp * SHARE), end = min(p.steps, first + SHARE);
  const double* from = (const double*)p.from + line * p.line_step;
  Part found = nothing();
  if (line < p.lines)
#pragma unroll 8
    for (i64 s = first + (ALONG ? lane : 0); s < end; s += ALONG ? 32 : 1) add(found, from[s * p.step_step]);
  if (ALONG) {
#pragma unroll
    for (int d = 16; d; d /= 2)
      join(found, {__shfl_xor_sync(~0u, found.sum, d), __shfl_xor_sync(~0u, found.squares, d),
                   __shfl_xor_sync(~0u, found.largest, d), __shfl_xor_sync(~0u, found.lowest, d)});
    if (lane) return;
  } else {
    met[warp][lane] = found;
    __syncthreads();
    if (warp) return;
#pragma unroll
    for (int w = 1; w < WARPS; ++w) join(found, met[w][lane]);
  }
  if (part * CHUNK < p.steps && line < p.lines) ((Part*)p.parts)[part * p.lines + line] = found;
}

// A line's scale: the largest power of two that leaves its norm below `most`.
__global__ void __launch_bounds__(THREADS) settle(const MeasureArgs p) {
  const i64 line = (i64)blockIdx.x * THREADS + threadIdx.x, parts = (p.steps + CHUNK - 1) / CHUNK;
  if (line < p.live_count) ((int*)p.live)[line] = 0;
  if (line >= p.lines) return;
  Part all = nothing();
#pragma unroll 4
  for (i64 part = 0; part < parts; ++part) join(all, ((const Part*)p.parts)[part * p.lines + line]);
  constexpr double MORE = 1 + 0x1p-30;   // what the sums here are too small by
  Line found = {all.sum * MORE, 0, 0, 0, 0};
  if (!(all.sum < 0x1p500) || all.largest > 0x1p400 || (all.largest != 0 && all.largest < 0x1p-400)) {
    found.error = __longlong_as_double(0x7ff0000000000000ll);
  } else if (all.largest != 0) {
    found.power = exponent_of(p.most / (sqrt(all.squares) * MORE));
    found.coarse = 14 - exponent_of(all.largest);
    found.error = all.lowest >= -found.power ? 0 : power_of_two(-found.power - 1);
  }
  ((Line*)p.lines_to)[line] = found;
}

// ---- its residues --------------------------------------------------------------------------------------------

struct TakeArgs {
  const void* from;
  const void* lines_at;
  void* to;
  const int* live;    // 0 where no tile of C needs them
  i64 lines, steps, line_step, step_step;
  i64 width, plane, every;   // bytes of a line, and of a plane of lines; of how many groups of steps one is taken
};

// 256^i modulo m, nearest to 0, for four i, as four bytes.
__device__ constexpr int powers_of(int m, int first) {
  unsigned word = 0;
  int at = 1 % m;
  for (int i = 0; i < first + 4; ++i) {
    const int near = at > (m - 1) / 2 ? at - m : at;
    if (i >= first) word |= unsigned(near & 255) << 8 * (i - first);
    at = at * 256 % m;
  }
  return int(word);
}

// N residues of each number, or where N is 0 its size as float8 (e5m2), cut off.
template <bool ALONG, int N>
__global__ void __launch_bounds__(THREADS) take(const TakeArgs p) {
  __shared__ double tile[ALONG ? 1 : STEPS * LINES + STEPS / EIGHT];
  if (p.live && !*p.live) return;
  const i64 across = (p.width + STEPS - 1) / STEPS, down = (p.lines + LINES - 1) / LINES;
  const int line = threadIdx.x / (STEPS / EIGHT), eight = threadIdx.x % (STEPS / EIGHT) * EIGHT;
  auto step_of = [&](i64 at) { return N ? at : at / GROUP_STEPS * p.every * GROUP_STEPS + at % GROUP_STEPS; };
  for (i64 index = blockIdx.x; index < down * across; index += gridDim.x) {
    const i64 row = ALONG ? index / across * LINES : index % down * LINES;
    const i64 first = (ALONG ? index % across : index / down) * STEPS;
    double v[EIGHT];
    if constexpr (ALONG) {
      const i64 step = step_of(first + eight);
      const double* from = (const double*)p.from + (row + line) * p.line_step + step;
#pragma unroll
      for (int i = 0; i < EIGHT; ++i) v[i] = row + line < p.lines && step + i < p.steps ? from[i] : 0.0;
    } else {
      __syncthreads();
#pragma unroll
      for (int i = threadIdx.x; i < STEPS * LINES; i += THREADS) {
        const int s = i / LINES, l = i % LINES;
        const i64 step = step_of(first + s);
        const bool there = row + l < p.lines && step < p.steps;
        tile[i + s / EIGHT] = there ? ((const double*)p.from)[(row + l) * p.line_step + step * p.step_step] : 0.0;
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < EIGHT; ++i) v[i] = tile[(eight + i) * LINES + line + eight / EIGHT];
    }
    if (row + line >= p.lines || first + eight >= p.width) continue;
    const Line& known = ((const Line*)p.lines_at)[row + line];
    unsigned char* to = (unsigned char*)p.to + (row + line) * p.width + first + eight;
    if constexpr (N == 0) {
      u32 words[2] = {};
#pragma unroll
      for (int i = 0; i < EIGHT; ++i) {   // exponent and two digits, exponents counted from 15 for 1023
        const int code = int(__double_as_longlong(v[i]) >> 50 & 0x1fff) + 4 * (known.coarse + 15 - 1023);
        words[i / 4] |= u32(code < 4 ? 0 : min(code, 0x7b)) << 8 * (i % 4);
      }
      *(uint2*)to = make_uint2(words[0], words[1]);
    } else {
      const double scale = power_of_two(known.power);
      u32 low[EIGHT], high[EIGHT];   // eight digits with a sign
#pragma unroll
      for (int i = 0; i < EIGHT; ++i) {
        const u64 digits = (u64(__double2ll_rn(v[i] * scale)) + 0x8080808080808080ull) ^ 0x8080808080808080ull;
        low[i] = u32(digits), high[i] = u32(digits >> 32);
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
        constexpr int LEAST = 1 << 18;   // more than the digits' sums are below 0
        const int m = MODULI[n], of_low = powers_of(m, 0), of_high = powers_of(m, 4);
        const int begin = (LEAST + m - 1) / m * m + 128;
        const u32 inverse = u32(((1ull << 32) + m - 1) / m);
        u32 rest[EIGHT];               // 128 more than the residue
#pragma unroll
        for (int i = 0; i < EIGHT; ++i) {
          const u32 sum = u32(__dp4a(int(low[i]), of_low, __dp4a(int(high[i]), of_high, begin)));
          rest[i] = sum - u32(u64(sum) * inverse >> 32) * m;
        }
        u32 words[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
          words[i] = __byte_perm(__byte_perm(rest[4 * i], rest[4 * i + 1], 0x40),
                                 __byte_perm(rest[4 * i + 2], rest[4 * i + 3], 0x40), 0x5410) ^ 0x80808080u;
        *(uint2*)(to + n * p.plane) = make_uint2(words[0], words[1]);
      }
    }
  }
}

// ---- which tiles of C they suffice for --------------------------------------------------------------------------

struct JudgeArgs {
  const void* lines_a;
  const void* lines_b;
  unsigned char* flags;
  const float* sums;    // of products of sizes, of some steps: C is made of at least as much
  i64 rows, columns, lead, across;   // of C, int32 from row to row, flags of a row of tiles
  i64 live_at, all_live_at;          // bytes from the flags
  double steps, share;  // what of the sum of absolute products a sum may be wrong by
};

__global__ void __launch_bounds__(THREADS) judge(const JudgeArgs p) {
  const i64 wide = (p.columns + TILE - 1) / TILE, down = (p.rows + TILE - 1) / TILE;
  __shared__ int any;
  for (i64 index = blockIdx.x; index < down * wide; index += gridDim.x) {
    const i64 row = index / wide * TILE, column = index % wide * TILE + threadIdx.x % TILE;
    if (threadIdx.x == 0) any = 0;
    __syncthreads();
    bool wrong = false;
    if (column < p.columns) {
      const Line b = ((const Line*)p.lines_b)[column];
#pragma unroll 4
      for (i64 i = row + threadIdx.x / TILE; i < min(row + TILE, p.rows); i += THREADS / TILE) {
        const Line a = ((const Line*)p.lines_a)[i];
        const double error = a.error * b.sum + b.error * a.sum + p.steps * a.error * b.error;
        const double least = p.sums[i * p.lead + column] * power_of_two(-a.coarse) * power_of_two(-b.coarse);
        wrong |= !(error <= p.share * least);
      }
    }
    if (wrong) any = 1;
    __syncthreads();
    if (threadIdx.x == 0) {
      p.flags[index / wide * p.across + index % wide] = any != 0;
      if (!any) *(int*)(p.flags + p.live_at) = *(int*)(p.flags + p.all_live_at) = 1;
    }
  }
}

// ---- the products' residues ---------------------------------------------------------------------------------------

// 16 rows of 128 sums of a warp, modulo the batch's number. Of each 16 columns neighbours are 0, 1, 8, 9, 2, 3, 10 ...
template <> struct Staged<unsigned char> {
  static constexpr int COLS = 128;
  static __device__ __forceinline__ void put(u32 to, const int* d, int batch) {
    const int lane = threadIdx.x % 32, row = lane % 16, m = MODULI[batch];
    const int inverse = int(((1ll << 38) + m / 2) / m);
    auto rest = [&](int sum) { return u32(sum - ((int(i64(sum) * inverse >> 32) + 32) >> 6) * m); };
    auto four = [&](const int* s) {
      return __byte_perm(__byte_perm(rest(s[0]), rest(s[1]), 0x40), __byte_perm(rest(s[4]), rest(s[5]), 0x40), 0x5410);
    };
#pragma unroll
    for (int j = 0; j < 8; j += 2, d += 16) {
      const u32 r[4] = {four(d), four(d + 2), four(d + 8), four(d + 10)};
      ptx::stmatrix_x4(ptx::swizzle<ptx::Swizzle::b128>(to + row * 128 + (j + lane / 16) * 16), r);
    }
  }
};

template <int HEIGHT, int WIDTH, int STAGES>
__global__ void __launch_bounds__(384, 1)
multiply_residues(const GemmArgs p, const __grid_constant__ ptx::TensorMap map_a,
                  const __grid_constant__ ptx::TensorMap map_b, const __grid_constant__ ptx::TensorMap map_c) {
  if (!*(const int*)p.work) return;
  specialized<signed char, signed char, unsigned char, HEIGHT, WIDTH, STAGES, 1, true, true, false>(p, map_a, map_b, &map_c);
}

// ---- the product -------------------------------------------------------------------------------------------------

struct CombineArgs {
  const void* lines_a;
  const void* lines_b;
  double* c;
  const unsigned char* planes;       // of residues
  i64 rows, columns, lead, plane, row_step, column_step;
  i64 flags_at, across;              // bytes from the planes; flags of a row of tiles
  double whole[3], inverse;          // the product of the moduli in three pieces, the highest first
  double weights[MOST][3];           // 1 modulo one of the moduli, 0 modulo the others
  double alpha, beta;
};

__device__ __forceinline__ void store(double* c, double v, double alpha, double beta) {
  finish_scaled<double, double>(c, v, alpha, beta);
}

// 128 columns of 32 rows of C; a thread's four columns lie as Staged leaves them.
template <int N>
__global__ void __launch_bounds__(THREADS) combine(const CombineArgs p) {
  const unsigned wide = unsigned((p.columns + 127) / 128), lane = threadIdx.x % 32;
  const i64 left = i64(blockIdx.x % wide) * 128, top = i64(blockIdx.x / wide) * 32 + threadIdx.x / 32;
  const i64 column = left + lane / 4 * 16 + lane % 4 * 2;
  if (left + i64(lane) * 4 >= p.lead) return;
#pragma unroll 1
  for (i64 row = top; row < min(i64(blockIdx.x / wide) * 32 + 32, p.rows); row += THREADS / 32) {
    if ((p.planes + p.flags_at)[row / TILE * p.across + column / TILE]) continue;
    u32 words[N];
#pragma unroll
    for (int n = 0; n < N; ++n) words[n] = *(const u32*)(p.planes + n * p.plane + row * p.lead + left + lane * 4);
    const int power_a = ((const Line*)p.lines_a)[row].power;
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      double sum[3] = {};   // exact
#pragma unroll
      for (int n = 0; n < N; ++n) {
        // 2^52 + 128 + the residue
        const u32 low = __byte_perm(words[n] ^ 0x80808080u, 0, 0x4440 + i);
        const double r = __longlong_as_double(0x4330000000000000ll | i64(low)) - (0x1p52 + 128);
#pragma unroll
        for (int j = 0; j < 3; ++j) sum[j] = fma(r, p.weights[n][j], sum[j]);
      }
      const double times = rint(sum[0] * p.inverse);
#pragma unroll
      for (int j = 0; j < 3; ++j) sum[j] = fma(-times, p.whole[j], sum[j]);
      const double near = sum[0] + sum[1], part = near - sum[0];
      const double exact = near + ((sum[0] - (near - part)) + (sum[1] - part) + sum[2]);
      const i64 at = column + i % 2 + i / 2 * 8;
      if (at >= p.columns) continue;
      const int power = -power_a - ((const Line*)p.lines_b)[at].power, half = power / 2;
      store(p.c + row * p.row_step + at * p.column_step, exact * power_of_two(half) * power_of_two(power - half),
            p.alpha, p.beta);
    }
  }
}

// ---- what is left: tiles of doubles -------------------------------------------------------------------------------

constexpr int DEEP = 16, RING = 4;   // steps of a stage; stages

// A stage of an operand's lines in shared memory: pairs of doubles lie there as they do in memory, and what a fragment
// reads lies in different banks.
template <bool ALONG> struct Lines {
  enum { PITCH = (ALONG ? DEEP : TILE) + 4, SIZE = (ALONG ? TILE : DEEP) * PITCH };
  static __device__ __forceinline__ int place(int line, int step) {
    return ALONG ? line * PITCH + step : step * PITCH + line;
  }
  // Lines from `first` on, steps from `step` on; zeros outside.
  static __device__ __forceinline__ void fetch(double* to, const double* from, i64 first, i64 lines, i64 step, i64 steps,
                                               i64 line_step, i64 step_step) {
    const i64 lead = ALONG ? line_step : step_step, unit = ALONG ? step_step : line_step;
    const bool pairs = unit == 1 && (u64(from) | u64(lead) * 8) % 16 == 0;
#pragma unroll
    for (int i = threadIdx.x; i < TILE * DEEP / 2; i += THREADS) {
      constexpr int PAIRS = (ALONG ? DEEP : TILE) / 2;
      const int row = i / PAIRS, col = i % PAIRS * 2, line = ALONG ? row : col, s = ALONG ? col : row;
      const i64 left = ALONG ? steps - step - s : lines - first - line;
      const bool there = ALONG ? first + line < lines : step + s < steps;
      const int count = !there || left <= 0 ? 0 : left == 1 ? 1 : 2;
      const double* at = from + (count ? (first + line) * line_step + (step + s) * step_step : 0);
      const u32 place_at = ptx::smem_addr(to + place(line, s));
      if (pairs) {
        ptx::cp_async<16>(place_at, at, count * 8);
      } else {
        ptx::cp_async<8>(place_at, at, count ? 8 : 0);
        ptx::cp_async<8>(place_at + 8, count == 2 ? at + unit : from, count == 2 ? 8 : 0);
      }
    }
  }
};

// The tiles that have a flag, of which p.work is the first; each of 8 warps computes 64 x 32.
template <bool A_ALONG, bool B_ALONG>
__global__ void __launch_bounds__(THREADS, 1) recompute(const GemmArgs p) {
  typedef Lines<A_ALONG> A;
  typedef Lines<B_ALONG> B;
  extern __shared__ __align__(16) double stages[];
  const unsigned across = unsigned((p.n + TILE - 1) / TILE), tiles = across * unsigned((p.m + TILE - 1) / TILE);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int down = warp / 4 * 64, right = warp % 4 * 32;
  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    if (!((const unsigned char*)p.work)[tile]) continue;
    const i64 row = i64(tile / across) * TILE, column = i64(tile % across) * TILE;
    double sum[4][4][4] = {};
    auto load = [&](int stage, i64 step) {
      double* const to = stages + stage * (A::SIZE + B::SIZE);
      if (step < p.k) {
        A::fetch(to, (const double*)p.a, row, p.m, step, p.k, p.a_row, p.a_col);
        B::fetch(to + A::SIZE, (const double*)p.b, column, p.n, step, p.k, p.b_col, p.b_row);
      }
      ptx::cp_async_commit();
    };
    for (int s = 0; s < RING - 1; ++s) load(s, s * DEEP);
    int stage = 0;
#pragma unroll 1
    for (i64 step = 0; step < p.k; step += DEEP) {
      ptx::cp_async_wait<RING - 2>();
      __syncthreads();
      load((stage + RING - 1) % RING, step + (RING - 1) * DEEP);
      const double* const of_a = stages + stage * (A::SIZE + B::SIZE);
      const double* const of_b = of_a + A::SIZE;
      stage = (stage + 1) % RING;
#pragma unroll
      for (int s = 0; s < DEEP; s += 8) {
        double a[4][4], b[4][2];
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) a[i][e] = of_a[A::place(down + 16 * i + g + e % 2 * 8, s + t + e / 2 * 4)];
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) b[j][e] = of_b[B::place(right + 8 * j + g, s + t + e * 4)];
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) ptx::mma_f64_k8(sum[i][j], a[i], b[j]);
      }
    }
    __syncthreads();   // the next tile's loads
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const i64 r = row + down + 16 * i + g + e / 2 * 8, c = column + right + 8 * j + 2 * t + e % 2;
          if (r < p.m && c < p.n) store((double*)p.c + r * p.c_row + c * p.c_col, sum[i][j][e], p.alpha, p.beta);
        }
  }
}
