// Few columns in one launch, by FP64 tensor cores: both operands come as they lie, by rings that each warp has to itself.
// counters by columns: DRAM read, MB; warp instructions, millions; tensor pipe, %
// excerpt tiles of unpacked_columns.cuh
#include "unpacked_columns.cuh"

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
