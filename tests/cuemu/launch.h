// Launching: blocks one cluster after another, all blocks of a cluster (or of a cooperative grid) together.
#pragma once
#include "sched.h"
#include "shared.h"
#include "watchdog.h"

namespace cuemu {

void start_async(size_t fibers);   // async.h
void end_async();
#ifdef CUEMU_BANKS
void count_open_requests();   // banks.h
inline void end_of_group() { count_open_requests(); }
#else
inline void end_of_group() {}
#endif

inline uint3 unflatten(unsigned i, const dim3& d) { return {i % d.x, i / d.x % d.y, i / (d.x * d.y)}; }

inline void set_up_cta(Cta& c, uint3 index, unsigned rank, unsigned cluster_first) {
  c.index = index;
  c.rank = rank;
  c.cluster_first = cluster_first;
  c.alive = S.threads;
  c.warps.assign((S.threads + 31) / 32, Warp{});
  for (unsigned w = 0; w < c.warps.size(); ++w) {
    const unsigned left = S.threads - w * 32;
    c.warps[w].alive = left >= 32 ? ~0u : (1u << left) - 1;
  }
  memset(c.bar, 0, sizeof c.bar);
  memset(c.votes, 0, sizeof c.votes);
  poison_shared(c);
}

inline void shuffle_order(std::vector<unsigned>& v) {
  if (!S.cfg.seed) return;
  for (unsigned i = unsigned(v.size()); i > 1; --i) std::swap(v[i - 1], v[next_random() % i]);
}

// Runs the blocks `first` .. of one resident group to their end; false after an error.
inline bool run_group(const std::vector<uint3>& blocks) {
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
  S.alive = unsigned(S.fibers.size());
  S.idle = 0;
  S.pos = 0;
  S.cur = &S.fibers[S.order[0]];
  cuemu_switch(&S.main_sp, S.cur->sp);
  S.cur = nullptr;
  end_async();
  end_of_group();
  if (S.report.kind[0]) return false;
  for (unsigned b = 0; b < blocks.size(); ++b) check_shared_end(S.ctas[b]);
  return !S.report.kind[0];
}

inline bool config_error(const char* text) {
  snprintf(S.report.kind, sizeof S.report.kind, "launch");
  snprintf(S.report.text, sizeof S.report.text, "%s", text);
  return false;
}

inline bool prepare(const Config& cfg) {
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

template <class F>
void run(const Config& cfg, F&& body) {
  if (!prepare(cfg)) return;
  S.body = [](void* p) { (*static_cast<std::remove_reference_t<F>*>(p))(); };
  S.arg = static_cast<void*>(&body);
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

template <class T>
T parameter(void* p) {
  T v;
  memcpy(static_cast<void*>(&v), p, sizeof(T));
  return v;
}
template <class... A, size_t... I>
void call(void (*f)(A...), void** p, std::index_sequence<I...>) {
  f(parameter<std::decay_t<A>>(p[I])...);
}
// Returns -1 where the number or the size of the arguments is not the kernel's, else 0.
template <class... A>
int launch(void (*f)(A...), const Config* cfg, const long long* sizes, int count, void** args, Report* out) {
  const long long want[] = {static_cast<long long>(sizeof(std::decay_t<A>))..., 0};
  if (count != int(sizeof...(A))) return -1;
  for (int i = 0; i < count; ++i)
    if (sizes[i] != want[i]) return -1;
  run(*cfg, [&] { call(f, args, std::index_sequence_for<A...>{}); });
  S.stacks.trim();
  *out = S.report;
  return 0;
}
template <class... A>
int parameter_size(void (*)(A...), int i) {
  const int want[] = {int(sizeof(std::decay_t<A>))..., -1};
  return i < int(sizeof...(A)) ? want[i] : -1;
}

}  // namespace cuemu
