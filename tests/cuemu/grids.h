// How grids run: blocks one cluster after another, all blocks of a cluster (or of a cooperative grid) together.
// Part of runtime.cpp.
#pragma once
#include "launch.h"
#include "pending.h"
#include "threads.h"
#include "watchdog.h"
#ifdef CUEMU_BANKS
#include "banks.h"
#endif

namespace cuemu {

static unsigned next_random() {
  S.rng = S.rng * 6364136223846793005ull + 1442695040888963407ull;
  return unsigned(S.rng >> 33);
}
static bool reserve_shared(size_t blocks) {
  if (blocks > arena.count) {
    free(arena.base);
    arena.base = static_cast<char*>(aligned_alloc(1024, blocks * kSharedBytes));
    arena.count = arena.base ? blocks : 0;
  }
  for (size_t i = 0; i < blocks && arena.base; ++i) S.ctas[i].shared = arena.base + i * kSharedBytes;
  return arena.base != nullptr;
}
static void poison_shared(Cta& c) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(c.shared, kSharedBytes);
#endif
  memset(c.shared, kPoison, dynamic_limit());
  memset(c.shared + S.static_low, kPoison, kSharedBytes - S.static_low);
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(c.shared, S.static_low);
  for (const SharedVar& v : S.static_vars) __asan_unpoison_memory_region(c.shared + v.offset, v.bytes);
#endif
}
// A write past the end of the dynamic part shows here even without AddressSanitizer.
static void check_shared_end(const Cta& c) {
#if !defined(__SANITIZE_ADDRESS__)
  for (unsigned i = S.dynamic_end; i && i < dynamic_limit(); ++i)
    if (static_cast<unsigned char>(c.shared[i]) != kPoison) {
      snprintf(S.report.kind, sizeof S.report.kind, "shared_overrun");
      snprintf(S.report.text, sizeof S.report.text, "block (%u,%u,%u) wrote past its %u bytes of dynamic shared memory",
               c.index.x, c.index.y, c.index.z, S.cfg.smem);
      return;
    }
#else
  (void)c;
#endif
}

static uint3 unflatten(unsigned i, const dim3& d) { return {i % d.x, i / d.x % d.y, i / (d.x * d.y)}; }

static void set_up_cta(Cta& c, uint3 index, unsigned rank, unsigned cluster_first) {
  c.index = index;
  c.rank = rank;
  c.cluster_first = cluster_first;
  c.alive = S.threads;
  c.warps.resize((S.threads + 31) / 32);
  for (unsigned w = 0; w < c.warps.size(); ++w) {
    c.warps[w].meets.clear();   // and keeps their memory: one block follows another
    const unsigned left = S.threads - w * 32;
    c.warps[w].alive = left >= 32 ? ~0u : (1u << left) - 1;
  }
  memset(c.bar, 0, sizeof c.bar);
  memset(c.votes, 0, sizeof c.votes);
  poison_shared(c);
}

static void shuffle_order(std::vector<unsigned>& v) {
  if (!S.cfg.seed) return;
  for (unsigned i = unsigned(v.size()); i > 1; --i) std::swap(v[i - 1], v[next_random() % i]);
}

// Brings the lanes of a warp together, warps and lanes each in the order in which they are met first.
static void gather_warps(std::vector<unsigned>& order) {
  const unsigned warps = (S.threads + 31) / 32, none = ~0u;
  const auto warp_of = [&](unsigned i) { return i / S.threads * warps + i % S.threads / 32; };
  std::vector<unsigned> start(S.fibers.size() / S.threads * warps, none), found;
  unsigned places = 0;
  for (unsigned i : order) {
    unsigned& at = start[warp_of(i)];
    if (at == none) { at = places; places += 32; }
  }
  found.assign(places, none);
  for (unsigned i : order) found[start[warp_of(i)]++] = i;
  order.clear();
  for (unsigned i : found) if (i != none) order.push_back(i);
}

// Runs the blocks `first` .. of one resident group to their end; false after an error.
static bool run_group(const std::vector<uint3>& blocks) {
  const unsigned n = S.threads;
  ++S.serial;
  S.fibers.resize(blocks.size() * n);
  S.cluster_bar.assign(blocks.size() / S.cluster_size, ClusterBarrier{});
  for (unsigned b = 0; b < blocks.size(); ++b)
    set_up_cta(S.ctas[b], blocks[b], b % S.cluster_size, b - b % S.cluster_size);
  for (unsigned i = 0; i < S.fibers.size(); ++i) {
    const unsigned id = i % n;
    Cta* c = &S.ctas[i / n];
    AsyncQueues* q = S.fibers[i].queues;
    S.fibers[i] = Fiber{S.stacks.fresh(i, entry), unflatten(id, S.block_dim), id, id % 32, id / 32,
                        false, c, "its start", "", 0, q, 0, nullptr};
  }
  start_async(S.fibers.size());
  S.order.resize(S.fibers.size());
  for (unsigned i = 0; i < S.order.size(); ++i) S.order[i] = i;
  shuffle_order(S.order);
  if (warps_run_ahead()) gather_warps(S.order);
  S.visits = 0;
  S.leave = false;
  S.alive = unsigned(S.fibers.size());
  S.idle = 0;
  S.pos = 0;
  S.cur = &S.fibers[S.order[0]];
  cuemu_switch(&S.main_sp, S.cur->sp);
  S.cur = nullptr;
  end_async();
#ifdef CUEMU_BANKS
  count_open_requests();
#endif
  if (S.report.kind[0]) return false;
  for (unsigned b = 0; b < blocks.size(); ++b) check_shared_end(S.ctas[b]);
  return !S.report.kind[0];
}

static bool config_error(const char* text) {
  snprintf(S.report.kind, sizeof S.report.kind, "launch");
  snprintf(S.report.text, sizeof S.report.text, "%s", text);
  return false;
}

static bool prepare(const Config& cfg) {
  S.cfg = cfg;
  S.report = Report{};
  S.in_runtime = 0;
  S.rng = cfg.seed * 0x9e3779b97f4a7c15ull;
  S.block_dim = dim3(cfg.block[0], cfg.block[1], cfg.block[2]);
  S.grid_dim = dim3(cfg.grid[0], cfg.grid[1], cfg.grid[2]);
  S.cluster_dim = dim3(cfg.cluster[0], cfg.cluster[1], cfg.cluster[2]);
  S.threads = S.block_dim.x * S.block_dim.y * S.block_dim.z;
  S.cluster_size = S.cluster_dim.x * S.cluster_dim.y * S.cluster_dim.z;
  if (!S.threads || S.threads > 1024) return config_error("a block has 1 to 1024 threads");
  if (!S.cluster_size || S.cluster_size > 16) return config_error("a cluster has 1 to 16 blocks");
  for (int i = 0; i < 3; ++i)
    if (!cfg.grid[i] || cfg.grid[i] % cfg.cluster[i]) return config_error("the grid must be a multiple of the cluster");
  if (cfg.smem > kMaxDynamicBytes) return config_error("more than 227 KiB of dynamic shared memory");
  S.static_vars.clear();
  S.static_low = kSharedBytes;
  S.static_bytes = S.dynamic_end = 0;
  const size_t blocks = size_t(S.grid_dim.x) * S.grid_dim.y * S.grid_dim.z;
  const size_t resident = cfg.cooperative ? blocks : S.cluster_size;
  if (resident * S.threads > 65536) return config_error("more than 65536 threads resident together");
  S.ctas.resize(resident);
  if (!reserve_shared(resident) || !S.stacks.reserve(resident * S.threads))
    return config_error("not enough memory for the stacks and the shared memory");
  return true;
}

static void run_all() {
  const Config& cfg = S.cfg;
  const dim3 clusters(cfg.grid[0] / cfg.cluster[0], cfg.grid[1] / cfg.cluster[1], cfg.grid[2] / cfg.cluster[2]);
  std::vector<unsigned> which(clusters.x * clusters.y * clusters.z);
  for (unsigned i = 0; i < which.size(); ++i) which[i] = i;
  shuffle_order(which);
  Watchdog watchdog(cfg.timeout_s);
  std::vector<uint3> blocks;
  for (unsigned i = 0; i < which.size(); ++i) {
    const uint3 c = unflatten(which[i], clusters);
    for (unsigned r = 0; r < S.cluster_size; ++r) {
      const uint3 in = unflatten(r, S.cluster_dim);
      blocks.push_back({c.x * S.cluster_dim.x + in.x, c.y * S.cluster_dim.y + in.y, c.z * S.cluster_dim.z + in.z});
    }
    if (cfg.cooperative && i + 1 < which.size()) continue;
    if (!run_group(blocks)) return;
    blocks.clear();
  }
}
Report run(const Config& cfg, void (*body)(void*), void* arg) {
  S.body = body;
  S.arg = arg;
  if (prepare(cfg)) run_all();
  S.stacks.trim();
  return S.report;
}

}  // namespace cuemu
