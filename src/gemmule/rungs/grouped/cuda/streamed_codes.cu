// A few tokens an expert beside codes of 4 or 8 bits: codes become halves in registers, exactly, tensor cores sum a
// group of them, and its scale and zero point come to the sum.
#include "centred_codes.cuh"
#include "groups.cuh"

typedef ptx::Vec<u32, 4> Words;
typedef ptx::Vec<u32, 2> Pair;

__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], __half) { ptx::mma_f16(d, a, b); }
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], __nv_bfloat16) {
  ptx::mma_bf16(d, a, b);
}
__device__ __forceinline__ u32 ones(__half) { return 0x3c003c00; }
__device__ __forceinline__ u32 ones(__nv_bfloat16) { return 0x3f803f80; }

// ROWS columns of a matrix lie as rows of codes. LINE: bytes of one in a stage; behind it 16 more, so that eight rows
// by four words lie in different banks.
constexpr int WARPS = 8, ROWS = 32, LINE = 128, PITCH = LINE + 16, STAGE = ROWS * PITCH;

// Each warp has two stages of its own: codes of the next, and the scales in registers, are on their way while one is
// multiplied. Nothing of a turn waits for memory but the tokens, which the L1 holds, two blocks of 32 codes ahead.
template <class T, class TC, class TS, int BITS, bool ZEROS, int NT, int WIDE>
__global__ void __launch_bounds__(32 * WARPS, NT > 2 ? 1 : 2) streamed_codes(const QuantArgs p) {
  take_turn();
  typedef Centred<T, BITS> Codes;
  constexpr int SLAB = ROWS * WIDE, PARTS = WARPS / WIDE, TOKENS = 8 * NT, APART = SLAB + 4;
  constexpr int V = 128 / BITS, DEPTH = 8 * V, BLOCKS = DEPTH / 32, EACH = BLOCKS / 4, AHEAD = NT == 1 ? 2 : 1;
  extern __shared__ __align__(16) unsigned char room[];   // the stages, [2][PARTS][TOKENS][APART], then the list
  constexpr int SUMS = PARTS * TOKENS * APART;
  float* const sums = (float*)(room + WARPS * 2 * STAGE);
  int* const first = (int*)(sums + 2 * SUMS);
  const Ends ends(p);
  const int n = (int)p.m, k = (int)p.n, slabs = (n + SLAB - 1) / SLAB;
  const i64 items = (i64)list_pieces<32 * WARPS>(ends, TOKENS, first) * slabs;
  const int begin = (int)(items * blockIdx.x / gridDim.x), end = (int)(items * (blockIdx.x + 1) / gridDim.x);
  if (begin == end) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int across = warp % WIDE * ROWS, down = warp / WIDE * DEPTH;
  const int turns = (k + PARTS * DEPTH - 1) / (PARTS * DEPTH), groups = (int)p.groups;
  const int size = (int)p.group_size / 32, shift = size & (size - 1) ? -1 : 31 - __clz(size);   // in blocks
  auto group_of = [&](int block) { return shift < 0 ? block / size : block >> shift; };
  Items walk{ends, first, slabs, TOKENS, expert_of(first + 1, ends.experts, begin / slabs)};
  unsigned char* const stages = room + warp * 2 * STAGE;
  const u32 own = ptx::smem_addr(stages) + lane / 8 * PITCH + lane % 8 * 16;
  Work at;
  const unsigned char* codes;
  int scales, rows, stage = 0;   // scales: the lane's first, below 2^31: a constraint of the rung
  TS soon[4][EACH];              // of rows 8 r + g and the lane's EACH blocks of a turn
  float less_soon[ZEROS ? 4 : 1][EACH];
  auto go_to = [&](int item) {
    at = walk.at(item);
    const int column = at.slab * SLAB + across;
    codes = (const unsigned char*)p.codes + ((i64)at.expert * n + column + lane / 8) * p.code_row_bytes + lane % 8 * 16;
    rows = n - column, scales = (at.expert * n + column + g) * groups;
  };
  const i64 four_rows = 4 * p.code_row_bytes;
  auto ask = [&](int turn) {
    const int start = turn * PARTS * DEPTH + down, valid = start + lane % 8 * V < k ? 16 : 0;
    const unsigned char* from = codes + start * BITS / 8;
    const u32 to = own + stage * STAGE;
    if (rows >= ROWS) {
#pragma unroll
      for (int i = 0; i < 8; ++i, from += four_rows) ptx::cp_async<16>(to + 4 * i * PITCH, from, valid);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i, from += four_rows) {
        const bool is = 4 * i + lane / 8 < rows;
        ptx::cp_async<16>(to + 4 * i * PITCH, is ? from : (const unsigned char*)p.codes, is ? valid : 0);
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
        soon[r][i] = is ? ((const TS*)p.scales)[place] : narrow<TS, float>(0.f);
        if constexpr (ZEROS) less_soon[r][i] = is ? ((const float*)p.zeros)[place] - (1 << (BITS - 1)) : 0.f;
      }
    }
  };
  go_to(begin);
  if (turns) ask(0);
  for (int item = begin; item < end; ++item) {
    const Work now = at;
    const int tiles = (now.tokens + 7) / 8;
    const T* const x = (const T*)p.x + (i64)(now.token + g) * p.x_col + (BITS == 4 ? 8 : 4) * t;
    float sum[2][NT][4] = {};
    for (int turn = 0; turn < turns; ++turn) {
      const int start = turn * PARTS * DEPTH + down;
      Words xs[BLOCKS][NT];
      auto bring = [&](int b) {   // the lane's tokens of a block
        const int from = start + 32 * b;
#pragma unroll
        for (int c = 0; c < NT; ++c) {
          const T* const row = x + (c ? 8 * c * p.x_col : 0) + from;
          const bool is = from < k && 8 * c + g < now.tokens;
          if constexpr (BITS == 4) {
            xs[b][c] = ptx::ld_nc_if((const Words*)row, is);
          } else {
            const Pair low = ptx::ld_nc_if((const Pair*)row, is), high = ptx::ld_nc_if((const Pair*)(row + 16), is);
            xs[b][c][0] = low[0], xs[b][c][1] = low[1], xs[b][c][2] = high[0], xs[b][c][3] = high[1];
          }
        }
      };
#pragma unroll
      for (int b = 0; b < AHEAD; ++b) bring(b);
      ptx::cp_async_wait<0>();
      __syncwarp();   // the stage is there for all lanes, and nobody reads the other one any more
      float scale[4][EACH], less[ZEROS ? 4 : 1][EACH];   // of what is multiplied, which is LIFT times less
#pragma unroll
      for (int i = 0; i < EACH; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          scale[r][i] = wide<float>(soon[r][i]) * Codes::LIFT;
          if constexpr (ZEROS) less[r][i] = less_soon[r][i] * (1 / Codes::LIFT);
        }
      const unsigned char* const held = stages + stage * STAGE + g * PITCH + 4 * t;
      stage ^= 1;
      int next = turn + 1;
      if (next == turns && item + 1 < end) go_to(item + 1), next = 0;
      if (next < turns) ask(next);
      float products[2][NT][4] = {}, inputs[ZEROS ? NT : 1][4] = {};   // of one group; the sums of x alone
      const int group = group_of(start / 32);
      int left = (group + 1) * size - start / 32;   // blocks to the group's end
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        if (b + AHEAD < BLOCKS) bring(b + AHEAD);
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
#pragma unroll
        for (int f = 0; f < 2; ++f) {
          u32 tile[2][4];   // of rows 16 f + g and those 8 below
#pragma unroll
          for (int hi = 0; hi < 2; ++hi) {
            const unsigned char* const row = held + (16 * f + 8 * hi) * PITCH + b * (4 * BITS);
            if constexpr (BITS == 4) {
              Codes::of(*(const u32*)row, tile[hi]);
            } else {
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                u32 pairs[2];
                Codes::of(*(const u32*)(row + 16 * i), pairs);
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
        if (--left == 0 || b == BLOCKS - 1) {   // the group's scale and zero, for its part in this turn
          left = size;
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const float factor = __shfl_sync(~0u, scale[r][b % EACH], (lane & ~3) | b / EACH);
            float taken = 0;
            if constexpr (ZEROS) taken = __shfl_sync(~0u, less[r][b % EACH], (lane & ~3) | b / EACH);
#pragma unroll
            for (int c = 0; c < NT; ++c)
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                float& one = products[r / 2][c][r % 2 * 2 + e];
                if constexpr (ZEROS) one -= taken * inputs[c][e];
                sum[r / 2][c][r % 2 * 2 + e] += factor * one;
                one = 0;
              }
          }
          if constexpr (ZEROS)
#pragma unroll
            for (int c = 0; c < NT; ++c)
#pragma unroll
              for (int e = 0; e < 4; ++e) inputs[c][e] = 0;
        }
      }
    }
    if (!turns && item + 1 < end) go_to(item + 1);
    float* const part = sums + item % 2 * SUMS;   // who is behind may still read those of the item before
    float* const mine = part + (warp / WIDE) * TOKENS * APART + across;
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
      float total = 0;
#pragma unroll
      for (int i = 0; i < PARTS; ++i) total += part[(i * TOKENS + token) * APART + row];
      if (to < n) finish_scaled<TC, float>((TC*)p.y + (i64)(now.token + token) * p.y_col + to * p.y_step, total, alpha, beta);
    }
  }
}
