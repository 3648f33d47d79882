// Where results go when the rows of a matrix are shared out to several GPUs (compiled with PEERS, the most of them).
//
// Each rank has an inbox that all others write to directly: two halves for products by turns, 8 bytes for every 4 of
// the result, the upper ones the number of the product. A word is there when it bears the number that is waited for:
// 8-byte stores are whole, so nothing is fenced, counted or reset. The last blocks of a grid wait for the words of all
// ranks and write the result, so that a product has ended here when the results of all are here.
//
// Two halves are enough: a rank sends product i + 1 after it has words of product i from every other, which a rank sends
// after it has gathered product i - 1. A rank without rows sends one word, so that this holds for it too.
#pragma once
#include "args.cuh"
#include "ptx_peers.cuh"

typedef ptx::u32 u32;

struct Peers {
  u64* inboxes[PEERS];
  const u64* inbox;  // of this rank
  u64* state;    // of this rank: 64 for every product gathered, and a share for blocks of the present one; a failure
  u64* alarm;    // memory of the host: number of the product, and 1 + the rank whose word did not come
  void* out;     // the whole result
  i64 half;      // words
  u64 patience_ns;
  int world, first, sent_empty;  // the word that row 0 of this rank has; that of a rank without rows, or -1
  int words, out_words, row_blocks;
  int ends[PEERS];  // of each rank's words
};

struct Delivery {
  u64 gathered;  // 64 for every product so far, and less for what this one's blocks have done
  template <class Args>
  __device__ __forceinline__ explicit Delivery(const Args& p) : gathered(ptx::ld_relaxed_sys(p.peers.state)) {}

  __device__ __forceinline__ u32 number() const { return (u32)(gathered >> 6) + 1; }
  __device__ __forceinline__ static u64 word(u32 number, u32 bits) { return (u64)number << 32 | bits; }
  __device__ __forceinline__ static i64 half(const Peers& p, u32 number) { return number & 1 ? p.half : 0; }

  __device__ __forceinline__ static void post(const Peers& p, u32 number, int at, u32 bits) {
#pragma unroll
    for (int q = 0; q < PEERS; ++q)
      if (q < p.world) ptx::st_relaxed_sys(p.inboxes[q] + half(p, number) + at, word(number, bits));
  }

  // Send the sum of a row to every rank.
  template <class T>
  __device__ __forceinline__ void send(const Peers& p, i64 row, T sum) const {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "2, 4 or 8 bytes");
    Delivery now = *this;
    ptx::pin(now.gathered);  // the block's loads do not wait for this one
    if constexpr (sizeof(T) == 2) {
      post(p, now.number(), p.first + (int)row, *(const unsigned short*)&sum);
    } else {
      constexpr int WORDS = sizeof(T) / 4;
#pragma unroll
      for (int w = 0; w < WORDS; ++w) post(p, now.number(), p.first + (int)row * WORDS + w, ((const u32*)&sum)[w]);
    }
  }

  // Whether this block is one of the last, which have gathered the result when this returns.
  template <class T, class Args>
  __device__ __forceinline__ bool gathers(const Args& args) const {
    const Peers& p = args.peers;
    if (__builtin_expect((int)blockIdx.x < p.row_blocks, 1)) return false;
    const int blocks = gridDim.x - p.row_blocks, stride = blocks * blockDim.x, block = blockIdx.x - p.row_blocks;
    const int me = block * blockDim.x + threadIdx.x;
    if (me == 0 && p.sent_empty >= 0) post(p, number(), p.sent_empty, 0);
    const u64 until = ptx::ld_relaxed_sys(p.state + 1) ? 0 : ptx::global_timer() + p.patience_ns;
#pragma unroll 1
    for (int e = me; e < p.words; e += EACH * stride) collect<T>(p, e, stride, until);
    __syncthreads();
    // Every block of this rank that needs the number has read it: its words are here. So the last share may come.
    if (threadIdx.x == 0) ptx::add_relaxed(p.state, block ? 1 : 64 - (blocks - 1));
    return true;
  }

 private:
  static constexpr int EACH = 4;  // words that a thread waits for at a time

  template <class T>
  __device__ __forceinline__ void collect(const Peers& p, int e, int stride, u64 until) const {
    const u32 wanted = number();
    const u64* inbox = p.inbox + half(p, wanted);
    u64 found[EACH];
    for (u32 tries = 1;; ++tries) {
      int missing = -1;
#pragma unroll
      for (int k = 0; k < EACH; ++k) {
        found[k] = e + k * stride < p.words ? ptx::ld_relaxed_sys(inbox + e + k * stride) : word(wanted, 0);
        if ((u32)(found[k] >> 32) != wanted) missing = e + k * stride;
      }
      if (missing < 0) break;
      if (tries % 64 == 0 && ptx::global_timer() > until) {
        fail(p, wanted, missing);
        break;
      }
    }
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      if (e + k * stride >= p.out_words) continue;
      const bool here = (u32)(found[k] >> 32) == wanted;  // what is not is NaN, or -1
      if constexpr (sizeof(T) == 2) ((unsigned short*)p.out)[e + k * stride] = here ? (unsigned short)found[k] : 0xffff;
      else ((u32*)p.out)[e + k * stride] = here ? (u32)found[k] : ~0u;
    }
  }

  // Tell the host, and later products: they wait no more.
  __device__ __forceinline__ static void fail(const Peers& p, u32 number, int missing) {
    if (ptx::ld_relaxed_sys(p.state + 1)) return;
    ptx::st_relaxed_sys(p.state + 1, 1);
    int rank = 0, empty = missing - p.out_words;  // words of ranks without rows come last
    for (; rank < p.world - 1; ++rank) {
      const bool none = p.ends[rank] == (rank ? p.ends[rank - 1] : 0);
      if (empty < 0 ? missing < p.ends[rank] : none && empty-- == 0) break;
    }
    ptx::st_relaxed_sys(p.alarm, word(number, 1 + rank));
  }
};

// Kernels that follow take their arguments with these behind them.
struct PeerGemvArgs : GemvArgs { Peers peers; };
struct PeerQuantArgs : QuantArgs { Peers peers; };
#define GemvArgs PeerGemvArgs
#define QuantArgs PeerQuantArgs
