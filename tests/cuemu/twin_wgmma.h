// Twins: wgmma. It is done, for the whole warpgroup, when the first of its threads passes wgmma_wait;
// until then shared memory is still to be read and d still to be written.
#pragma once

namespace cuemu {

// Where element (row, k) of an operand lies, from its descriptor and its major-ness.
struct Operand {
  unsigned base, leading, stride, mode;
  explicit Operand(uint64_t d)
      : base(unsigned(d & 0x3fff) << 4), leading(unsigned(d >> 16 & 0x3fff) << 4),
        stride(unsigned(d >> 32 & 0x3fff) << 4), mode(unsigned(d >> 62)) {
    if (d >> 49 & 7) fail("wgmma", "descriptor base offset %u: the start of a swizzle pattern must be aligned",
        unsigned(d >> 49 & 7));
  }
  unsigned width() const { return mode == 1 ? 128 : mode == 2 ? 64 : mode == 3 ? 32 : 16; }
  unsigned at(unsigned row, unsigned k, unsigned bytes, bool k_major) const {
    const unsigned along = (k_major ? k : row) * bytes, across = k_major ? row : k, w = width();
    unsigned offset = base + across % 8 * w + along % w;
    if (k_major) offset += across / 8 * stride + along / w * leading;
    else if (mode) offset += across / 8 * stride + along / w * leading;
    else offset += across / 8 * leading + along / w * stride;
    return swizzled(offset, mode);
  }
};

template <Kind KA, Kind KB, class D, int N, bool RegsA, bool TransA, bool TransB>
void wgmma_run(const std::vector<WgmmaPart>& parts) {
  constexpr int B = element_bytes(KA), KS = 32 / B;
  const char* shared = S.cur->cta->shared;
  const WgmmaPart& first = parts[0];
  static double a[64][KS], b[KS][N], sums[64][N];
  for (const WgmmaPart& p : parts)
    if ((!RegsA && p.a != first.a) || p.b != first.b || p.accumulate != first.accumulate)
      fail("wgmma", "the threads of a warpgroup give different descriptors");
  for (int r = 0; r < 64; ++r)
    for (int k = 0; k < KS; ++k) {
      if constexpr (RegsA) {
        constexpr int E = 4 / B;   // elements of a register
        const WgmmaPart& p = parts[size_t(r / 16 * 32 + r % 8 * 4 + k % (4 * E) / E)];
        a[r][k] = element<KA>(reinterpret_cast<const char*>(p.a_regs + (r % 16 / 8 + 2 * (k / (4 * E)))) + k % E * B);
      } else {
        a[r][k] = element<KA>(shared + Operand(first.a).at(unsigned(r), unsigned(k), B, !TransA));
      }
    }
  const Operand of_b(first.b);
  for (int n = 0; n < N; ++n)
    for (int k = 0; k < KS; ++k) b[k][n] = element<KB>(shared + of_b.at(unsigned(n), unsigned(k), B, !TransB));
  for (bool before : {true, false}) {
    for (int t = 0; t < 128; ++t) {
      D* d = static_cast<D*>(parts[size_t(t)].d);
      for (int i = 0; i < N / 2; ++i) {
        double& sum = sums[t / 32 * 16 + t % 32 / 4 + 8 * (i % 4 / 2)][i / 4 * 8 + 2 * (t % 4) + i % 2];
        if (before) sum = first.accumulate ? double(d[i]) : 0.0;
        else d[i] = rounded<D>(sum);
      }
    }
    if (before) add_products(sums[0], a[0], b[0], 64, N, KS);
  }
  ++S.report.mma_ops;
}

}  // namespace cuemu

namespace ptx {

inline void wgmma_fence() {}
inline void wgmma_commit() { cuemu::wgmma_close_group(); }
template <int N>
void wgmma_wait(CUEMU_AT) { cuemu::wgmma_wait_group(N, file, line); }

#define CUEMU_WGMMA(name, KA, KB, D)                                                                            \
  template <int N, int TransA = 0, int TransB = 0>                                                              \
  void name(D (&d)[N / 2], u64 a, u64 b, bool accumulate) {                                                     \
    cuemu::wgmma_issue({d, a, b, {}, accumulate,                                                                \
                        cuemu::wgmma_run<cuemu::Kind::KA, cuemu::Kind::KB, D, N, false, TransA, TransB>});      \
  }
CUEMU_WGMMA(wgmma_f16, f16, f16, float)
CUEMU_WGMMA(wgmma_bf16, bf16, bf16, float)
CUEMU_WGMMA(wgmma_tf32, tf32, tf32, float)
CUEMU_WGMMA(wgmma_e4m3, e4m3, e4m3, float)
CUEMU_WGMMA(wgmma_e5m2, e5m2, e5m2, float)
CUEMU_WGMMA(wgmma_e4m3e5m2, e4m3, e5m2, float)
CUEMU_WGMMA(wgmma_e5m2e4m3, e5m2, e4m3, float)
CUEMU_WGMMA(wgmma_s8, s8, s8, int)
CUEMU_WGMMA(wgmma_u8, u8, u8, int)
CUEMU_WGMMA(wgmma_s8u8, s8, u8, int)
CUEMU_WGMMA(wgmma_u8s8, u8, s8, int)
#undef CUEMU_WGMMA
#define CUEMU_WGMMA_RA(name, kind)                                                                              \
  template <int N, int TransB = 0>                                                                              \
  void name(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool accumulate) {                                     \
    cuemu::wgmma_issue({d, 0, b, {a[0], a[1], a[2], a[3]}, accumulate,                                          \
                        cuemu::wgmma_run<cuemu::Kind::kind, cuemu::Kind::kind, float, N, true, false, TransB>});                   \
  }
CUEMU_WGMMA_RA(wgmma_f16_ra, f16)
CUEMU_WGMMA_RA(wgmma_bf16_ra, bf16)
#undef CUEMU_WGMMA_RA

}  // namespace ptx
