// A few tokens an expert beside codes of 4 or 8 bits: codes become halves in registers, exactly, tensor cores sum a
// group of them, and its scale and zero point come to the sum.
#include "centred_codes.cuh"
#include "few_rows.cuh"

typedef ptx::Vec<u32, 4> Words;
typedef ptx::Vec<u32, 2> Pair;

__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], __half) { ptx::mma_f16(d, a, b); }
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], __nv_bfloat16) {
  ptx::mma_bf16(d, a, b);
}
__device__ __forceinline__ u32 ones(__half) { return 0x3c003c00; }
__device__ __forceinline__ u32 ones(__nv_bfloat16) { return 0x3f803f80; }

// ROWS columns of a matrix lie as rows of codes, LINE bytes of each in a stage, whose 16-byte pieces lie in another order
// in each of eight rows: what `ldmatrix` reads at a time lies in different banks.
constexpr int WARPS = 8, ROWS = 32, LINE = 128, STAGE = ROWS * LINE, STAGES = 2 * STAGE;

// Whether scales may come to weights as they are made.
template <class T, class TS> struct Folds { enum : bool { is = false }; };
template <> struct Folds<__nv_bfloat16, e8m0> { enum : bool { is = true }; };

template <class TS> __device__ __forceinline__ TS no_scale() {   // of columns that there are not
  if constexpr (Float4<TS>::is || Float8<TS>::is) return TS(0);
  else return narrow<TS, float>(0.f);
}
__device__ constexpr int ahead(int nt) { return nt == 1 ? 2 : 1; }   // blocks for which tokens are asked for before

// The lane's tokens of a block of 32 codes; zeros behind k. WHOLE: it does not lie there.
template <int BITS, bool WHOLE, class T, int NT>
__device__ __forceinline__ void bring(Words (&xs)[NT], const T* const (&x)[NT], int from, int k) {
#pragma unroll
  for (int c = 0; c < NT; ++c) {
    const T* const row = x[c] + from;
    if constexpr (BITS == 4) {
      xs[c] = WHOLE ? ptx::ld_nc((const Words*)row) : ptx::ld_nc_if((const Words*)row, from < k);
    } else {
      const Pair low = WHOLE ? ptx::ld_nc((const Pair*)row) : ptx::ld_nc_if((const Pair*)row, from < k);
      const Pair high = WHOLE ? ptx::ld_nc((const Pair*)(row + 16)) : ptx::ld_nc_if((const Pair*)(row + 16), from < k);
      xs[c][0] = low[0], xs[c][1] = low[1], xs[c][2] = high[0], xs[c][3] = high[1];
    }
  }
}

// One turn of a warp: from `start` on, of which every SPAN blocks lie within one group. WHOLE: no block lies behind k.
// from: the lane's row of the stage; scale and less: those of rows 8 r + g and the lane's EACH blocks.
template <class T, class TS, int BITS, bool ZEROS, int NT, int SPAN, bool WHOLE, int BLOCKS = 32 / BITS, int EACH = BLOCKS / 4>
__device__ __forceinline__ void multiply(float (&sum)[2][NT][4], Words (&xs)[BLOCKS][NT], const T* const (&x)[NT], int start, int k,
                                         int tiles, u32 from, const float (&scale)[4][EACH], const float (&less)[ZEROS ? 4 : 1][EACH]) {
  typedef Halves<T, TS, BITS> Codes;
  constexpr int AHEAD = ahead(NT);
  float products[2][NT][4], inputs[ZEROS ? NT : 1][4];   // of SPAN blocks; the sums of x alone
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    if (b + AHEAD < BLOCKS) bring<BITS, WHOLE>(xs[b + AHEAD], x, start + 32 * (b + AHEAD), k);
    if (b % SPAN == 0) {
#pragma unroll
      for (int c = 0; c < NT; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          products[0][c][e] = products[1][c][e] = 0;
          if constexpr (ZEROS) inputs[c][e] = 0;
        }
    }
    u32 of_x[NT][4];
#pragma unroll
    for (int c = 0; c < NT; ++c) {
      const Words& v = xs[b][c];
      constexpr int HALF = BITS == 4 ? 2 : 1;   // words from a code to the one it is paired with
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const u32 one = v[HALF == 2 ? i / 2 : i], other = v[HALF == 2 ? i / 2 + 2 : i + 1];
        of_x[c][i] = __byte_perm(one, other, 0x5410), of_x[c][i + 1] = __byte_perm(one, other, 0x7632);
      }
    }
    u32 words[BITS / 4][4];   // of rows 8 r + g
#pragma unroll
    for (int i = 0; i < BITS / 4; ++i) ptx::ldmatrix_x4(words[i], from + (((BITS / 4 * b + i) ^ threadIdx.x % 8) << 4));
#pragma unroll
    for (int f = 0; f < 2; ++f) {
      u32 tile[2][4];   // of rows 16 f + g and those 8 below
#pragma unroll
      for (int hi = 0; hi < 2; ++hi) {
        if constexpr (BITS == 4) {
          Codes::of(words[0][2 * f + hi], tile[hi]);
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            u32 pairs[2];
            Codes::of(words[i][2 * f + hi], pairs);
            tile[hi][2 * i] = pairs[0], tile[hi][2 * i + 1] = pairs[1];
          }
        }
      }
#pragma unroll
      for (int s = 0; s < 4; s += 2) {
        const u32 a[4] = {tile[0][s], tile[1][s], tile[0][s + 1], tile[1][s + 1]};
#pragma unroll
        for (int c = 0; c < NT; ++c) {
          if (c && c >= tiles) break;
          const u32 both[2] = {of_x[c][s], of_x[c][s + 1]};
          mma(products[f][c], a, both, T());
          if constexpr (ZEROS)
            if (f == 0) {
              const u32 one = ones(T()), all[4] = {one, one, one, one};
              mma(inputs[c], all, both, T());
            }
        }
      }
    }
    if (b % SPAN == SPAN - 1) {   // the group's scale and zero, for its part in these blocks
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float factor = __shfl_sync(~0u, scale[r][b % EACH], (threadIdx.x & 28) | b / EACH);
        float taken = 0;
        if constexpr (ZEROS) taken = __shfl_sync(~0u, less[r][b % EACH], (threadIdx.x & 28) | b / EACH);
#pragma unroll
        for (int c = 0; c < NT; ++c)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float one = products[r / 2][c][r % 2 * 2 + e];
            if constexpr (ZEROS) one -= taken * inputs[c][e];
            sum[r / 2][c][r % 2 * 2 + e] += factor * one;
          }
      }
    }
  }
}

// The same of MXFP4 beside bfloat16, where no scale of the warp's turn is above 2: what lifts the bits of a code has its scale
// with it, so that one product makes the weight, exactly, and sums run on over groups. up: that of rows 8 r + g and the
// lane's two blocks, in pairs.
template <int NT>
__device__ __forceinline__ void multiply_scaled(float (&sum)[2][NT][4], Words (&xs)[8][NT], const __nv_bfloat16* const (&x)[NT], int start,
                                                int k, int tiles, u32 from, const u32 (&up)[4][2]) {
  typedef __nv_bfloat16 T;
  constexpr int AHEAD = ahead(NT);
#pragma unroll
  for (int b = 0; b < 8; ++b) {
    if (b + AHEAD < 8) bring<4, true>(xs[b + AHEAD], x, start + 32 * (b + AHEAD), k);
    u32 of_x[NT][4], words[4], scale[4];   // of rows 8 r + g
#pragma unroll
    for (int c = 0; c < NT; ++c)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const u32 one = xs[b][c][i / 2], other = xs[b][c][i / 2 + 2];
        of_x[c][i] = __byte_perm(one, other, 0x5410), of_x[c][i + 1] = __byte_perm(one, other, 0x7632);
      }
    ptx::ldmatrix_x4(words, from + ((b ^ threadIdx.x % 8) << 4));
#pragma unroll
    for (int r = 0; r < 4; ++r) scale[r] = __shfl_sync(~0u, up[r][b % 2], (threadIdx.x & 28) | b / 2);
#pragma unroll
    for (int f = 0; f < 2; ++f) {
      u32 tile[2][4];   // of rows 16 f + g and those 8 below
#pragma unroll
      for (int hi = 0; hi < 2; ++hi) Small<T>::of(words[2 * f + hi], tile[hi], scale[2 * f + hi]);
#pragma unroll
      for (int s = 0; s < 4; s += 2) {
        const u32 a[4] = {tile[0][s], tile[1][s], tile[0][s + 1], tile[1][s + 1]};
#pragma unroll
        for (int c = 0; c < NT; ++c) {
          if (c && c >= tiles) break;
          const u32 both[2] = {of_x[c][s], of_x[c][s + 1]};
          mma(sum[f][c], a, both, T());
        }
      }
    }
  }
}

// Each warp has two stages of its own: codes of the next turn, and the scales in registers, are on their way while one is
// multiplied. Nothing of a turn waits for memory but the tokens, which the L1 holds, two blocks of 32 codes ahead. A third
// stage leaves it less room, and takes longer.
// GATED: the columns are gates, then as many ups, and a slab has as many of each, whose silu(gate) * up is the result.
// room: the stages, the sums [PARTS][TOKENS][APART], then the list. rows: where a token's row lies in x and in y.
template <class T, class TC, class TS, int BITS, bool ZEROS, int NT, int WIDE, bool GATED, class Rows>
__device__ __forceinline__ void stream_codes(const QuantArgs& p, const Ends& ends, unsigned char* room, const Rows& row_of) {
  typedef Halves<T, TS, BITS> Codes;
  constexpr int COLUMNS = GATED ? 2 : 1, ACROSS = WIDE / COLUMNS, SLAB = ROWS * ACROSS;   // of the result
  constexpr int PARTS = WARPS / WIDE, TOKENS = 8 * NT, APART = ROWS * WIDE + 4;
  constexpr int V = 128 / BITS, DEPTH = 8 * V, BLOCKS = DEPTH / 32, EACH = BLOCKS / 4;
  float* const sums = (float*)(room + WARPS * STAGES);
  int* const first = (int*)(sums + PARTS * TOKENS * APART);
  const int all = (int)p.m, n = all / COLUMNS, k = (int)p.n, slabs = (n + SLAB - 1) / SLAB;
  const i64 items = (i64)list_pieces<32 * WARPS>(ends, TOKENS, first) * slabs;
  const int begin = (int)(items * blockIdx.x / gridDim.x), end = (int)(items * (blockIdx.x + 1) / gridDim.x);
  if (begin == end) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int across = warp % ACROSS * ROWS, ups = warp % WIDE / ACROSS * n, down = warp / WIDE * DEPTH;
  const int turns = (k + PARTS * DEPTH - 1) / (PARTS * DEPTH), groups = (int)p.groups;
  const int size = (int)p.group_size / 32, shift = size & (size - 1) ? -1 : 31 - __clz(size);   // in blocks
  auto group_of = [&](int block) { return shift < 0 ? block / size : block >> shift; };
  unsigned char* const stages = room + warp * STAGES;
  const u32 own = ptx::smem_addr(stages), to = own + lane / 8 * LINE + (lane % 8 ^ lane / 8) * 16;
  const i64 four_rows = 4 * p.code_row_bytes;
  Items walk{ends, first, slabs, TOKENS, expert_of(first + 1, ends.experts, begin / slabs)};
  Work at;
  const unsigned char* codes;
  int scales, rows, stage = 0;   // scales: the lane's first, below 2^31: a constraint of the rung
  TS soon[4][EACH];              // of rows 8 r + g and the lane's EACH blocks of a turn
  float less_soon[ZEROS ? 4 : 1][EACH];
  auto go_to = [&](int item) {
    at = walk.at(item);
    const int column = at.slab * SLAB + across;
    codes = (const unsigned char*)p.codes + ((i64)at.expert * all + ups + column + lane / 8) * p.code_row_bytes + lane % 8 * 16;
    rows = n - column, scales = (at.expert * all + ups + column + g) * groups;
  };
  auto ask = [&](int turn) {
    const int start = turn * PARTS * DEPTH + down, valid = start + lane % 8 * V < k ? 16 : 0;
    const unsigned char* from = codes + start * BITS / 8;
    if (rows >= ROWS) {
#pragma unroll
      for (int i = 0; i < 8; ++i, from += four_rows) ptx::cp_async<16>((to + stage + 4 * i * LINE) ^ (i % 2 * 64), from, valid);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i, from += four_rows) {
        const bool is = 4 * i + lane / 8 < rows;
        ptx::cp_async<16>((to + stage + 4 * i * LINE) ^ (i % 2 * 64), is ? from : (const unsigned char*)p.codes, is ? valid : 0);
      }
    }
    ptx::cp_async_commit();
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int block = min(start / 32 + EACH * t + i, k / 32 - 1);   // a group that goes on behind k ends there
      if (i && size % EACH == 0) {   // one group has them all
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          soon[r][i] = soon[r][0];
          if constexpr (ZEROS) less_soon[r][i] = less_soon[r][0];
        }
        continue;
      }
      int place = scales + group_of(block);
#pragma unroll
      for (int r = 0; r < 4; ++r, place += 8 * groups) {
        const bool is = 8 * r + g < rows;
        soon[r][i] = is ? ((const TS*)p.scales)[place] : no_scale<TS>();
        if constexpr (ZEROS) less_soon[r][i] = is ? ((const float*)p.zeros)[place] - (1 << (BITS - 1)) : 0.f;
      }
    }
  };
  go_to(begin);
  if (turns) ask(0);
  for (int item = begin; item < end; ++item) {
    const Work now = at;
    const int tiles = (now.tokens + 7) / 8;
    const T* x[NT];   // the lane's tokens; where there is none, some token, whose sums nobody stores
#pragma unroll
    for (int c = 0; c < NT; ++c)
      x[c] = (const T*)p.x + (i64)row_of.x(now.token + min(8 * c + g, now.tokens - 1)) * p.x_col + (BITS == 4 ? 8 : 4) * t;
    float sum[2][NT][4] = {};
    for (int turn = 0; turn < turns; ++turn) {
      const int start = turn * PARTS * DEPTH + down;
      Words xs[BLOCKS][NT];
#pragma unroll
      for (int b = 0; b < ahead(NT); ++b) bring<BITS, false>(xs[b], x, start + 32 * b, k);
      ptx::cp_async_wait<0>();
      __syncwarp();   // the stage is there for all lanes, and nobody reads the other one any more
      float scale[4][EACH], less[ZEROS ? 4 : 1][EACH];   // of what is multiplied, which is LIFT times less
      TS now_scale[Folds<T, TS>::is ? 4 : 1][EACH];
#pragma unroll
      for (int i = 0; i < EACH; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          scale[r][i] = wide<float>(soon[r][i]) * Codes::LIFT;
          if constexpr (Folds<T, TS>::is) now_scale[r][i] = soon[r][i];
          if constexpr (ZEROS) less[r][i] = less_soon[r][i] * (1 / Codes::LIFT);
        }
      const u32 held = own + stage + lane * LINE;
      stage ^= STAGE;
      int next = turn + 1;
      if (next == turns && item + 1 < end) go_to(item + 1), next = 0;
      if (next < turns) ask(next);
      constexpr int SPAN = Float4<TS>::is ? 1 : 4;   // in blocks, of whole turns
      if constexpr (Folds<T, TS>::is) {
        u32 up[4][EACH], most = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
          for (int r = 0; r < 4; ++r) up[r][i] = (now_scale[r][i].bits + 126) * 0x800080, most = max(most, (u32)now_scale[r][i].bits);
        if (start + DEPTH <= k && !__any_sync(~0u, most > 128)) {
          multiply_scaled<NT>(sum, xs, x, start, k, tiles, held, up);
          continue;
        }
      }
      if (size % SPAN == 0 && start + DEPTH <= k) multiply<T, TS, BITS, ZEROS, NT, SPAN, true>(sum, xs, x, start, k, tiles, held, scale, less);
      else multiply<T, TS, BITS, ZEROS, NT, 1, false>(sum, xs, x, start, k, tiles, held, scale, less);
    }
    if (!turns && item + 1 < end) go_to(item + 1);
    __syncthreads();   // nobody reads the sums of the item before any more
    float* const mine = sums + (warp / WIDE) * TOKENS * APART + warp % WIDE * ROWS;
#pragma unroll
    for (int f = 0; f < 2; ++f)
#pragma unroll
      for (int c = 0; c < NT; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) mine[(8 * c + 2 * t + e % 2) * APART + 16 * f + g + e / 2 * 8] = sum[f][c][e];
    __syncthreads();
    const float alpha = (float)p.alpha, beta = (float)p.beta;
    for (int e = threadIdx.x; e < SLAB * now.tokens; e += 32 * WARPS) {
      const int token = e / SLAB, row = e % SLAB, to = now.slab * SLAB + row;
      float total[COLUMNS] = {};
#pragma unroll
      for (int i = 0; i < PARTS * COLUMNS; ++i) total[i % COLUMNS] += sums[(i / COLUMNS * TOKENS + token) * APART + i % COLUMNS * SLAB + row];
      if constexpr (GATED) total[0] = total[0] / (1 + expf(-total[0])) * total[1];
      if (to < n) finish_scaled<TC, float>((TC*)p.y + (i64)row_of.y(now.token + token) * p.y_col + to * p.y_step, total[0], alpha, beta);
    }
  }
}

template <class T, class TC, class TS, int BITS, bool ZEROS, int NT, int WIDE>
__global__ void __launch_bounds__(32 * WARPS, 2) streamed_codes(const QuantArgs p) {
  take_turn();
  extern __shared__ __align__(128) unsigned char room[];
  stream_codes<T, TC, TS, BITS, ZEROS, NT, WIDE, false>(p, Ends(p), room, Sorted());
}

// Through the gate: the result has half as many columns.
template <class T, class TC, class TS, int BITS, bool ZEROS, int NT, int WIDE>
__global__ void __launch_bounds__(32 * WARPS, 2) gated_codes(const QuantArgs p) {
  take_turn();
  extern __shared__ __align__(128) unsigned char room[];
  stream_codes<T, TC, TS, BITS, ZEROS, NT, WIDE, true>(p, Ends(p), room, Sorted());
}

// Of few rows that nobody sorted: each block sorts them for itself, reads them and writes where they lie. I: an index.
template <class T, class TC, class TS, int BITS, bool ZEROS, int NT, int WIDE, bool GATED, class I>
__global__ void __launch_bounds__(32 * WARPS, 2) routed_codes(const RoutedArgs p) {
  take_turn();
  extern __shared__ __align__(128) unsigned char room[];
  const int experts = (int)p.q.scale_row, slots = (int)p.q.columns;
  int* const order = (int*)(room + WARPS * STAGES + WARPS / WIDE * (8 * NT) * (ROWS * WIDE + 4) * 4) + experts + 1;
  int* const ends = order + 2 * FEW_SLOTS;
  const int place = sort_few<32 * WARPS>((const I*)p.q.work, slots, experts, ends, order, order + FEW_SLOTS), slot = threadIdx.x;
  if (p.places && blockIdx.x == 0 && slot < slots) p.places[slot] = place < 0 ? -1 : slot;
  for (int s = blockIdx.x; s < slots; s += gridDim.x)   // what names no expert is nothing
    if (order[FEW_SLOTS + s] < 0)
      for (int j = threadIdx.x; j < (int)p.q.m / (GATED ? 2 : 1); j += 32 * WARPS)
        ((TC*)p.q.y)[s * p.q.y_col + j * p.q.y_step] = narrow<TC, float>(0.f);
  Ends of(p.q);   // rows and experts; the ends are those that were sorted here
  of.at = ends;
  stream_codes<T, TC, TS, BITS, ZEROS, NT, WIDE, GATED>(p.q, of, room, Found{order, (int)p.top_k});
}
