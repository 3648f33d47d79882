// Few columns as they lie: how a warp keeps them beside its rows in shared memory, multiplies them on FP64 tensor cores,
// and copies what does not lie by 16 bytes.
#pragma once
#include "few_columns.cuh"
#include "ptx_f64.cuh"

// What a warp keeps of ROWS rows and N columns for a turn, which takes PIECES vectors of 16 bytes of a row. A row's
// pieces lie together; so do a column's where it lies ALONG the sum. Of columns in rows the N vectors that meet one piece
// do, behind which PAD vectors are left out: without them, or in another order, lanes would meet in the banks.
template <class T, int N, int PIECES_, bool ALONG> struct Layout {
  static constexpr int PIECES = PIECES_, V = Lanes<T>::count, CHUNK = PIECES * V, TILES = N > 8 ? 2 : 1;  // of 8 columns
  static constexpr int PAD = N == 2 ? 0 : 2, BLOCK = N + PAD, columns = PIECES * (ALONG ? N : BLOCK);
  __device__ static __forceinline__ int row(int i, int piece) { return i * PIECES + (PIECES == 8 ? piece ^ i % 2 * 4 : piece); }
  __device__ static __forceinline__ int along(int j, int piece) { return j % TILES * (N / TILES * PIECES) + row(j / TILES, piece); }
  // Vector q of CHUNK rows of N columns without gaps.
  __device__ static __forceinline__ int across(int q) { return q + q / N * PAD; }
};

// A warp's sums, which no lanes share: lane (g, t) gives pieces t and t + 4 of the rows g, g + 8, .. and of column g,
// or of columns 2 g and 2 g + 1 where there are two tiles; columns past the last repeat it.
template <class T, int ROWS, int N, int PIECES, bool ALONG> struct Sums {
  typedef Layout<T, N, PIECES, ALONG> L;
  static constexpr int R = ROWS / 16, TILES = L::TILES, V = L::V;
  double sum[R][TILES][4] = {};
  const int g = threadIdx.x / 4 % 8, t = threadIdx.x % 4, column = min(g, N / TILES - 1) * TILES;

  __device__ __forceinline__ int a_place() const { return L::row(g, t); }
  __device__ __forceinline__ int b_place() const { return ALONG ? L::along(column, t) : t * L::BLOCK; }
  // a, b: where this lane's vectors of the turn begin.
  __device__ __forceinline__ void add(const unsigned char* a, const unsigned char* b) {
    // Which of the two pieces lies first, the permutation says: the other 64 bytes on or back.
    const int a_other = g % 2 ? -64 : 64, b_other = column / TILES % 2 ? -64 : 64;
#pragma unroll
    for (int h = 0; h < PIECES / 4; ++h) {
      Chunk<T> v[2 * R];
#pragma unroll
      for (int r = 0; r < 2 * R; ++r) v[r] = *(const Chunk<T>*)(a + h * a_other + r * 8 * PIECES * 16);
      T w[TILES][V];
      if constexpr (ALONG) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) *(Chunk<T>*)w[i] = *(const Chunk<T>*)(b + h * b_other + i * (N / TILES * PIECES) * 16);
      } else {
#pragma unroll
        for (int step = 0; step < V; ++step) {
          const auto some = *(const ptx::Vec<T, TILES>*)((const T*)b + column + h * 4 * L::BLOCK * V + step * N);
#pragma unroll
          for (int i = 0; i < TILES; ++i) w[i][step] = some[i];
        }
      }
#pragma unroll
      // excerpt tiles
      for (int s = 0; s < V; s += 2)
#pragma unroll
        for (int r = 0; r < 2 * R; r += 2) {
          const double rows[4] = {v[r][s], v[r + 1][s], v[r][s + 1], v[r + 1][s + 1]};
#pragma unroll
          for (int i = 0; i < TILES; ++i) {
            const double columns[2] = {w[i][s], w[i][s + 1]};
            ptx::mma_f64_k8(sum[r / 2][i], rows, columns);
          }
        }
      // end of excerpt
    }
  }
  // Leaves the sums in part[row][column]; a lane has 2 TILES neighbours of a row.
  __device__ __forceinline__ void leave(T* part) const {
    constexpr int SIDE = 2 * TILES * sizeof(T) <= 16 ? 2 * TILES : 16 / sizeof(T);
    if (2 * TILES * t >= N) return;
#pragma unroll
    for (int r = 0; r < 2 * R; ++r)
#pragma unroll
      for (int first = 0; first < 2 * TILES; first += SIDE) {
        ptx::Vec<T, SIDE> some;
#pragma unroll
        for (int j = 0; j < SIDE; ++j) some[j] = (T)sum[r / 2][(first + j) % TILES][r % 2 * 2 + (first + j) / TILES];
        *(ptx::Vec<T, SIDE>*)(part + (g + 8 * r) * N + 2 * TILES * t + first) = some;
      }
  }
};

// Copies chunks element by element, from step l on; steps from k on, and columns from n on, become zero.
template <class T, class L, int ROWS>
__device__ __forceinline__ void copy_elements(unsigned to, const T* a, int l, int m, int k, i64 a_row) {
#pragma unroll 1
  for (int e = threadIdx.x % 32; e < ROWS * L::CHUNK; e += 32) {
    const int i = e / L::CHUNK, step = e % L::CHUNK;
    const T* from = a + min(i, m - 1) * a_row + min(l + step, k - 1);
    const unsigned place = L::row(i, step / L::V) * 16 + step % L::V * sizeof(T);
    ptx::cp_async<sizeof(T)>(to + place, from, l + step < k ? sizeof(T) : 0);
  }
}
template <class T, class L, int N, bool ALONG>
__device__ __forceinline__ void copy_columns(unsigned to, const T* b, int l, int n, int k, i64 b_row, i64 b_col) {
#pragma unroll 1
  for (int e = threadIdx.x % 32; e < N * L::CHUNK; e += 32) {
    const int step = ALONG ? e % L::CHUNK : e / N, j = ALONG ? e / L::CHUNK : e % N;
    const int vector = ALONG ? L::along(j, step / L::V) : L::across(e / L::V);
    const unsigned place = vector * 16 + (ALONG ? step : e) % L::V * sizeof(T);
    const T* from = b + min(l + step, k - 1) * b_row + min(j, n - 1) * b_col;
    ptx::cp_async<sizeof(T)>(to + place, from, l + step < k && j < n ? sizeof(T) : 0);
  }
}
