// A few tokens an expert beside codes of 4 or 8 bits: codes become halves in registers, exactly, tensor cores sum a
// group of them, and its scale and zero point come to the sum.
#include "dealt_codes.cuh"
#include "groups.cuh"

constexpr int WARPS = 8, ROWS = 32;   // ROWS columns of a matrix, which lie as rows of codes

template <class T, class TC, class TS, int BITS, int NT, int WIDE>
__global__ void __launch_bounds__(32 * WARPS, NT > 2 ? 1 : 2) streamed_codes(const QuantArgs p) {
  constexpr int SLAB = ROWS * WIDE, PARTS = WARPS / WIDE, TOKENS = 8 * NT, PITCH = SLAB + 4;
  constexpr int LOADS = NT == 1 ? 2 : 1, V = 128 / BITS, DEPTH = 4 * V * LOADS, BLOCKS = DEPTH / 32;   // V codes a vector
  extern __shared__ __align__(16) float part[];   // [PARTS][TOKENS][PITCH], then the list
  int* const first = (int*)(part + PARTS * TOKENS * PITCH);
  const Ends ends(p);
  const int n = (int)p.m, k = (int)p.n, slabs = (n + SLAB - 1) / SLAB;
  const i64 items = (i64)list_pieces<32 * WARPS>(ends, TOKENS, first) * slabs;
  const int begin = (int)(items * blockIdx.x / gridDim.x), end = (int)(items * (blockIdx.x + 1) / gridDim.x);
  if (begin == end) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int across = warp % WIDE * ROWS, down = warp / WIDE * DEPTH;
  const int turns = (k + PARTS * DEPTH - 1) / (PARTS * DEPTH), blocks_of_group = (int)p.group_size / 32, groups = (int)p.groups;
  const float middle = 1 << (BITS - 1);
  Items walk{ends, first, slabs, TOKENS, expert_of(first + 1, ends.experts, begin / slabs)};
  Work at;
  Words held[LOADS][4];
  const unsigned char* w;
  auto load = [&](int turn) {
    const int start = turn * PARTS * DEPTH + down;
#pragma unroll
    for (int h = 0; h < LOADS; ++h)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int from = start + 4 * V * h + V * t;
        held[h][r] = ptx::ld_cs_128_if((const Words*)(w + 8 * r * p.code_row_bytes + from * BITS / 8),
                                       from < k && at.slab * SLAB + across + 8 * r + g < n);
      }
  };
  auto go_to = [&](int item) {
    at = walk.at(item);
    w = (const unsigned char*)p.codes + ((i64)at.expert * n + at.slab * SLAB + across + g) * p.code_row_bytes;
  };
  go_to(begin);
  if (turns) load(0);
  for (int item = begin; item < end; ++item) {
    const Work now = at;
    const int tiles = (now.tokens + 7) / 8, column = now.slab * SLAB + across + g;   // the lane's first
    const T* const x = (const T*)p.x + (i64)(now.token + g) * p.x_col + (BITS == 4 ? 8 : 4) * t;
    const int of_scales = (now.expert * n + column) * groups;   // below 2^31: a constraint of the rung
    float sum[2][NT][4] = {};
    for (int turn = 0; turn < turns; ++turn) {
      const int start = turn * PARTS * DEPTH + down;
      float products[2][NT][4] = {}, inputs[NT][4] = {};   // of one group; the sums of x alone
#pragma unroll
      for (int h = 0; h < LOADS; ++h)
#pragma unroll
        for (int r = 0; r < 4; ++r) deal(held[h][r]);
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        const int from = start + 32 * b;
        u32 xs[NT][4];
#pragma unroll
        for (int c = 0; c < NT; ++c) {
          const T* const row = x + (c ? 8 * c * p.x_col : 0) + from;
          const bool there = from < k && 8 * c + g < now.tokens;
          if constexpr (BITS == 4) {
            const Words v = ptx::ld_nc_if((const Words*)row, there);
            xs[c][0] = __byte_perm(v[0], v[2], 0x5410), xs[c][1] = __byte_perm(v[0], v[2], 0x7632);
            xs[c][2] = __byte_perm(v[1], v[3], 0x5410), xs[c][3] = __byte_perm(v[1], v[3], 0x7632);
          } else {
            const Pair low = ptx::ld_nc_if((const Pair*)row, there);
            const Pair high = ptx::ld_nc_if((const Pair*)(row + 16), there);
            xs[c][0] = low[0], xs[c][1] = low[1], xs[c][2] = high[0], xs[c][3] = high[1];
          }
        }
#pragma unroll
        for (int f = 0; f < 2; ++f) {
          u32 low[4], high[4];
          if constexpr (BITS == 4) {
            halves(held[b / 4][2 * f][b % 4], low, T());
            halves(held[b / 4][2 * f + 1][b % 4], high, T());
          } else {
            u32 pairs[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              halves(held[b / 2][2 * f][b % 2 * 2 + i], pairs, T());
              low[2 * i] = pairs[0], low[2 * i + 1] = pairs[1];
              halves(held[b / 2][2 * f + 1][b % 2 * 2 + i], pairs, T());
              high[2 * i] = pairs[0], high[2 * i + 1] = pairs[1];
            }
          }
#pragma unroll
          for (int s = 0; s < 4; s += 2) {
            const u32 a[4] = {low[s], high[s], low[s + 1], high[s + 1]}, one = ones(T()), all[4] = {one, one, one, one};
#pragma unroll
            for (int c = 0; c < NT; ++c) {
              if (c >= tiles) break;
              const u32 both[2] = {xs[c][s], xs[c][s + 1]};
              mma(products[f][c], a, both, T());
              if (f == 0) mma(inputs[c], all, both, T());
            }
          }
        }
        const bool ends_here = b == BLOCKS - 1 || from + 32 >= k || (from / 32 + 1) % blocks_of_group == 0;
        if (ends_here && from < k) {   // the group's scale and zero, for its part in this turn
          const int group = from / 32 / blocks_of_group;
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            if (column + 8 * r >= n) continue;
            const int place = of_scales + 8 * r * groups + group;
            const float scale = wide<float>(((const TS*)p.scales)[place]);
            const float zero = p.zeros ? ((const float*)p.zeros)[place] : middle;
#pragma unroll
            for (int c = 0; c < NT; ++c)
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                float& one = products[r / 2][c][r % 2 * 2 + e];
                sum[r / 2][c][r % 2 * 2 + e] += scale * (one - zero * inputs[c][e]);
                one = 0;
              }
          }
#pragma unroll
          for (int c = 0; c < NT; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) inputs[c][e] = 0;
        }
      }
      if (turn + 1 < turns) load(turn + 1);
    }
    if (item + 1 < end) {
      go_to(item + 1);
      if (turns) load(0);
    }
    float* const mine = part + (warp / WIDE) * TOKENS * PITCH + across;
#pragma unroll
    for (int f = 0; f < 2; ++f)
#pragma unroll
      for (int c = 0; c < NT; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) mine[(8 * c + 2 * t + e % 2) * PITCH + 16 * f + g + e / 2 * 8] = sum[f][c][e];
    __syncthreads();
    const float alpha = (float)p.alpha, beta = (float)p.beta;
    for (int e = threadIdx.x; e < SLAB * now.tokens; e += 32 * WARPS) {
      const int token = e / SLAB, row = e % SLAB, to = now.slab * SLAB + row;
      float total = 0;
#pragma unroll
      for (int i = 0; i < PARTS; ++i) total += part[(i * TOKENS + token) * PITCH + row];
      if (to < n) finish_scaled<TC, float>((TC*)p.y + (i64)(now.token + token) * p.y_col + to * p.y_step, total, alpha, beta);
    }
    __syncthreads();
  }
}
