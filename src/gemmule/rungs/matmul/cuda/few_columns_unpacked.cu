// Few columns in one launch, by FP64 tensor cores: both operands come as they lie, by rings that each warp has to itself.
// counters by columns: DRAM read, MB; warp instructions, millions; tensor pipe, %
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
      // excerpt
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

// Warps split the sum and wait for none until their ends. Sizes are below 2^31 (a constraint). The last rows of the
// matrix are ROWS as well where it has as many: a block may compute rows of the one before again, and stores its own.
template <class T, int WARPS, int ROWS, int N, int PIECES, int STAGES, int RESIDENT, bool TURNED, bool ALONG>
__global__ void __launch_bounds__(32 * WARPS, RESIDENT) few_columns_unpacked(const GemmArgs args) {
  typedef Layout<T, N, PIECES, ALONG> L;
  constexpr int V = L::V, CHUNK = L::CHUNK, A_STAGE = ROWS * PIECES, STAGE = A_STAGE + L::columns;
  constexpr int SIDE = 32 / PIECES, EACH = (N + SIDE - 1) / SIDE;  // rows that a warp copies at a time, copies of columns
  static_assert(STAGES * STAGE * 16 >= ROWS * N * sizeof(T), "a warp's ring holds its sums");
  extern __shared__ __align__(128) unsigned char smem[];
  const GemmArgs p = seen<TURNED>(args);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, i0 = lane / PIECES, piece = lane % PIECES;
  Slab at = {0, (int)blockIdx.x * ROWS, 0};
  const T *a = (const T*)p.a, *b = (const T*)p.b;
  if (p.batch != 1 || p.n > N) {  // divisions before the first load would be time that nothing else fills
    at = slab_of(p, ROWS, N);
    a += at.batch * p.a_batch, b += at.batch * p.b_batch + (i64)at.group * N * p.b_col;
  }
  const int m = (int)p.m, k = (int)p.k, n = min((int)p.n - at.group * N, N);
  const int row0 = max(0, min(at.row, m - ROWS));
  a += row0 * p.a_row;
  // Chunks warp, warp + WARPS, ..: `turns` of them, not every block from the first one on. Blocks that read the same
  // columns at the same time would wait for each other in the L2.
  const int turns = ((k + CHUNK - 1) / CHUNK - warp + WARPS - 1) / WARPS;
  const int start = turns > 0 ? at.row / ROWS & ((1 << (31 - __clz(turns))) - 1) : 0;
  int next = start;

  // Whole chunks of aligned rows are copied by 16 bytes, `apart` bytes from one copy of a lane to its next.
  const T* from_a = a + i0 * p.a_row + ((warp + start * WARPS) * CHUNK + piece * V);
  const unsigned a_apart = (unsigned)p.a_row * (SIDE * sizeof(T));
  const bool a_lies = m >= ROWS && rows_aligned(a, p.a_row) && (u64)p.a_row < (1u << 31) / (ROWS * sizeof(T));
  const int whole_a = a_lies ? k / CHUNK : 0;
  const unsigned to = ptx::smem_addr(smem) + warp * (STAGES * STAGE * 16);
  unsigned to_a = to + L::row(i0, piece) * 16;
  ptx::pin(to_a);
  auto copy_a = [&](unsigned there) {
#pragma unroll
    for (int r = 0; r < ROWS / SIDE; ++r)
      ptx::cp_async<16>(to_a + there + r * 32 * 16, (const char*)from_a + (u64)a_apart * r);
  };
  const bool early = turns > 0 && warp + start * WARPS < whole_a;
  if (early) copy_a(0);  // while it is found out how the columns lie

  // Columns in rows without gaps are one piece of memory; with gaps, 32 lanes have to take whole rows.
  constexpr int OF_ROW = N < V ? 1 : N / V;
  constexpr bool WHOLE_ROWS = N >= V && 32 % OF_ROW == 0;
  const i64 b_chunk = (ALONG ? 1 : p.b_row) * CHUNK;
  const T* from_b = b + (warp + start * WARPS) * b_chunk;
  unsigned b_apart = 32 * 16;
  bool b_lies = n == N && (ALONG ? p.b_row : p.b_col) == 1;
  if (ALONG) {
    from_b += i0 * p.b_col + piece * V, b_apart = (unsigned)p.b_col * (SIDE * sizeof(T));
    b_lies = b_lies && rows_aligned(b, p.b_col) && (u64)p.b_col < (1u << 31) / (N * sizeof(T));
  } else if (p.b_row == N) {
    from_b += lane * V, b_lies = b_lies && ((u64)b & 15) == 0;
  } else {
    from_b += lane / OF_ROW * p.b_row + lane % OF_ROW * V, b_apart = (unsigned)p.b_row * (32 / OF_ROW * sizeof(T));
    b_lies = b_lies && WHOLE_ROWS && rows_aligned(b, p.b_row) && (u64)p.b_row < (1u << 31) / (CHUNK * sizeof(T));
  }
  const int whole_b = b_lies ? k / CHUNK : 0;
  constexpr bool STEADY = ALONG || 32 % N == 0;  // whether a lane's places lie equally far apart
  unsigned to_b[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    to_b[i] = to + (A_STAGE + (ALONG ? L::along(i * SIDE + i0, piece) : L::across(lane + 32 * i))) * 16;
    if (!STEADY || i == 0) ptx::pin(to_b[i]);
  }
  auto copy_b = [&](unsigned there) {
    constexpr int STEP = (ALONG ? 32 / L::TILES : 32 + 32 / N * L::PAD) * 16;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (N * PIECES % 32 == 0 || lane + 32 * i < N * PIECES)
        ptx::cp_async<16>((STEADY ? to_b[0] + i * STEP : to_b[i]) + there, (const char*)from_b + (u64)b_apart * i);
  };
  // Copies the chunk of a turn into the stage `there` bytes behind the first; what does not lie so, element by element.
  auto copy = [&](int turn, unsigned there, bool without_a) {
    if (turn < turns) {
      const int c = warp + next * WARPS;
      if (c < min(whole_a, whole_b)) {
        if (!without_a) copy_a(there);
        copy_b(there);
      } else {
        if (c >= whole_a) copy_elements<T, L, ROWS>(to + there, a, c * CHUNK, m - row0, k, p.a_row);
        else if (!without_a) copy_a(there);
        if (c < whole_b) copy_b(there);
        else copy_columns<T, L, N, ALONG>(to + there + A_STAGE * 16, b, c * CHUNK, n, k, p.b_row, p.b_col);
      }
      from_a += WARPS * CHUNK, from_b += WARPS * b_chunk;
      if (++next == turns) next = 0, from_a -= turns * (i64)(WARPS * CHUNK), from_b -= turns * (WARPS * b_chunk);
    }
    ptx::cp_async_commit();
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) copy(s, s * STAGE * 16, s == 0 && early);
  Sums<T, ROWS, N, PIECES, ALONG> sums;
  // Places that move from turn to turn: the compiler would compute them anew from the thread's number.
  int a_place = (warp * (STAGES * STAGE) + sums.a_place()) * 16;
  int b_place = (warp * (STAGES * STAGE) + A_STAGE + sums.b_place()) * 16;
  ptx::pin(a_place);
  ptx::pin(b_place);
  unsigned now = 0, there = (STAGES - 1) * STAGE * 16;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    ptx::cp_async_wait<STAGES - 2>();
    __syncwarp();  // this turn's copies are there for all lanes, and none of them reads the stage before any more
    copy(turn + STAGES - 1, there, false);
    there = now;
    sums.add(smem + (a_place + now), smem + (b_place + now));
    now = now == (STAGES - 1) * STAGE * 16 ? 0 : now + STAGE * 16;
  }
  ptx::cp_async_wait<0>();
  __syncwarp();
  sums.leave((T*)(smem + warp * (STAGES * STAGE * 16)));
  __syncthreads();
  const bool plain = __double_as_longlong(p.alpha) == 0x3ff0000000000000ll && __double_as_longlong(p.beta) == 0;
#pragma unroll 1
  for (int e = threadIdx.x; e < ROWS * N; e += 32 * WARPS) {
    const int i = TURNED ? e % ROWS : e / N, j = TURNED ? e / ROWS : e % N;
    T total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += ((const T*)(smem + w * (STAGES * STAGE * 16)))[i * N + j];
    if (row0 + i < at.row || j >= n || i >= m) continue;
    T* out = (T*)p.c + at.batch * p.c_batch + (i64)(row0 + i) * p.c_row + ((i64)at.group * N + j) * p.c_col;
    if (plain) *out = total;
    else finish(out, total, p.alpha, p.beta);
  }
}
