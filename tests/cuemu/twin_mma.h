// Twins: ldmatrix, mma.sync, packed arithmetic. Float sums are formed in double and rounded once.
#pragma once

namespace cuemu {

// One element of a register of a given kind.
enum class Kind { f16, bf16, tf32, e4m3, e5m2, s8, u8 };
constexpr int element_bytes(Kind k) { return k == Kind::tf32 ? 4 : k == Kind::f16 || k == Kind::bf16 ? 2 : 1; }

template <Kind K>
inline double element(const void* p) {
  if constexpr (K == Kind::f16) {
    short h;
    memcpy(&h, p, 2);
#ifdef __F16C__   // one instruction, where NVIDIA's header takes twenty
    typedef short Eight __attribute__((vector_size(16)));
    return __builtin_ia32_vcvtph2ps(Eight{h})[0];
#else
    return __half2float(__half(__half_raw{(unsigned short)h}));
#endif
  } else if constexpr (K == Kind::bf16) {
    unsigned bits = 0;
    memcpy(reinterpret_cast<char*>(&bits) + 2, p, 2);
    return __uint_as_float(bits);
  } else if constexpr (K == Kind::tf32) {   // the low 13 bits take no part
    unsigned bits;
    memcpy(&bits, p, 4);
    return __uint_as_float(bits & 0xffffe000u);
  } else if constexpr (K == Kind::e4m3) {
    __nv_fp8_e4m3 v;
    memcpy(static_cast<void*>(&v), p, 1);
    return float(v);
  } else if constexpr (K == Kind::e5m2) {
    __nv_fp8_e5m2 v;
    memcpy(static_cast<void*>(&v), p, 1);
    return float(v);
  } else if constexpr (K == Kind::s8) {
    return *static_cast<const int8_t*>(p);
  } else {
    return *static_cast<const uint8_t*>(p);
  }
}
template <class D>
inline D rounded(double sum) {
  if constexpr (std::is_same_v<D, int>) return int(unsigned(static_cast<long long>(sum)));
  else return D(sum);
}

// Row r, column c of the 16 x K operand a lies in register (r / 8) + 2 (c / 4E) of lane 4 (r % 8) + c % 4E / E.
template <Kind KA, Kind KB, class D>
void mma_finish(Meet& m) {
  constexpr int E = 4 / element_bytes(KA), K = 8 * E, B = element_bytes(KA);
  double a[16][K], b[K][8], sums[16][8];
  for (int r = 0; r < 16; ++r)
    for (int c = 0; c < K; ++c)
      a[r][c] = element<KA>(m.value[4 * (r % 8) + c % (4 * E) / E] + 4 * (r / 8 + 2 * (c / (4 * E))) + c % E * B);
  for (int n = 0; n < 8; ++n)
    for (int c = 0; c < K; ++c) b[c][n] = element<KB>(m.value[4 * n + c % (4 * E) / E] + 16 + 4 * (c / (4 * E))
        + c % E * B);
  for (bool before : {true, false}) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        double& sum = sums[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
        unsigned char* at = m.value[lane] + 24 + 4 * i;
        D d;
        if (before) {
          memcpy(&d, at, 4);
          sum = d;
        } else {
          d = rounded<D>(sum);
          memcpy(at, &d, 4);
        }
      }
    if (before) add_products(sums[0], a[0], b[0], 16, 8, K);
  }
  ++S.report.mma_ops;
}
template <Kind KA, Kind KB, class D>
void mma(D (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], const char* name, const char* file, int line) {
  unsigned char all[40];
  memcpy(all, a, 16);
  memcpy(all + 16, b, 8);
  memcpy(all + 24, d, 16);
  collective(~0u, all, sizeof all, name, file, line, mma_finish<KA, KB, D>,
             [&](const Meet& m) { memcpy(d, m.value[S.cur->lane] + 24, 16); });
}

template <int N, bool Trans>
void ldmatrix(unsigned (&r)[N], unsigned addr, const char* file, int line) {
  unsigned out[4];
  auto finish = [&](Meet& m) {
    const char* row[32];
    for (int i = 0; i < 8 * N; ++i) {
      unsigned at;
      memcpy(&at, m.value[i], 4);
      row[i] = from_shared_address(at);
      if (at % 16) fail("misaligned", "ldmatrix at %s:%d: row address 0x%x of lane %d is not a multiple of 16",
                        base_name(file), line, at, i);
    }
#ifdef CUEMU_BANKS
    for (int j = 0; j < N; ++j) {   // each matrix is a pass of eight 16-byte rows
      Request rows;
      rows.lanes = 0xff;
      rows.bytes = 16;
      for (int i = 0; i < 8; ++i) memcpy(&rows.address[i], m.value[8 * j + i], 4);
      count_request(rows);
    }
#endif
    for (int lane = 0; lane < 32; ++lane)
      for (int j = 0; j < N; ++j)
        for (int e = 0; e < 2; ++e) {
          const int mine = lane / 4, pair = 2 * (lane % 4) + e;
          const char* from = Trans ? row[8 * j + pair] + 2 * mine : row[8 * j + mine] + 2 * pair;
          memcpy(m.value[lane] + 4 * j + 2 * e, from, 2);
        }
  };
  unsigned in[4] = {addr, 0, 0, 0};
  collective(~0u, in, 16, "ldmatrix", file, line, finish,
             [&](const Meet& m) { memcpy(out, m.value[S.cur->lane], sizeof out); });
  for (int j = 0; j < N; ++j) r[j] = out[j];
}
// Each lane gives its address, then its registers; the last lane to come stores all rows.
template <int N, bool Trans>
void stmatrix(unsigned addr, const unsigned (&r)[N], const char* file, int line) {
  auto finish = [&](Meet& m) {
    for (int i = 0; i < 8 * N; ++i) {
      unsigned at;
      memcpy(&at, m.value[i], 4);
      if (at % 16) fail("misaligned", "stmatrix at %s:%d: row address 0x%x of lane %d is not a multiple of 16",
                        base_name(file), line, at, i);
      char* row = from_shared_address(at);
      const int mine = i % 8;   // row of the matrix as it lies: a column of the fragment where it is transposed
      for (int e = 0; e < 8; ++e) {
        const int from_row = Trans ? e : mine, from_column = Trans ? mine : e;
        memcpy(row + 2 * e, m.value[from_row * 4 + from_column / 2] + 4 + 4 * (i / 8) + from_column % 2 * 2, 2);
      }
    }
  };
  unsigned in[1 + N] = {addr};
  for (int j = 0; j < N; ++j) in[1 + j] = r[j];
  collective(~0u, in, sizeof in, "stmatrix", file, line, finish, [](const Meet&) {});
}
template <class F>
inline unsigned by_half(F&& f) { return unsigned(f(0)) | unsigned(f(16)) << 16; }
inline __half half_at(unsigned v, int shift) { return __ushort_as_half(static_cast<unsigned short>(v >> shift)); }
inline __nv_bfloat16 bfloat_at(unsigned v, int shift) {
  return __ushort_as_bfloat16(static_cast<unsigned short>(v >> shift));
}

}  // namespace cuemu

namespace ptx {

#define CUEMU_LDMATRIX(n)                                                                                        \
  inline void ldmatrix_x##n(u32 (&r)[n], u32 addr, CUEMU_AT) { cuemu::ldmatrix<n, false>(r, addr, file, line); } \
  inline void ldmatrix_x##n##_trans(u32 (&r)[n], u32 addr, CUEMU_AT) { cuemu::ldmatrix<n, true>(r, addr, file, line); }
CUEMU_LDMATRIX(1)
CUEMU_LDMATRIX(2)
CUEMU_LDMATRIX(4)
#undef CUEMU_LDMATRIX
inline void stmatrix_x4(u32 addr, const u32 (&r)[4], CUEMU_AT) { cuemu::stmatrix<4, false>(addr, r, file, line); }
inline void stmatrix_x2(u32 addr, const u32 (&r)[2], CUEMU_AT) { cuemu::stmatrix<2, false>(addr, r, file, line); }
inline void stmatrix_x2_trans(u32 addr, const u32 (&r)[2], CUEMU_AT) { cuemu::stmatrix<2, true>(addr, r, file, line); }
inline u32 movmatrix_trans(u32 v, CUEMU_AT) {
  u32 r = 0;
  auto finish = [](cuemu::Meet& m) {
    u16 rows[8][8];
    for (int lane = 0; lane < 32; ++lane) memcpy(&rows[lane / 4][2 * (lane % 4)], m.value[lane], 4);
    for (int lane = 0; lane < 32; ++lane) {
      const u16 pair[2] = {rows[2 * (lane % 4)][lane / 4], rows[2 * (lane % 4) + 1][lane / 4]};
      memcpy(m.value[lane], pair, 4);
    }
  };
  cuemu::collective(~0u, &v, 4, "movmatrix", file, line, finish,
                    [&](const cuemu::Meet& m) { memcpy(&r, m.value[cuemu::S.cur->lane], 4); });
  return r;
}

#define CUEMU_MMA(name, KA, KB, D)                                                            \
  inline void name(D (&d)[4], const u32 (&a)[4], const u32 (&b)[2], CUEMU_AT) {               \
    cuemu::mma<cuemu::Kind::KA, cuemu::Kind::KB>(d, a, b, #name, file, line);                 \
  }
CUEMU_MMA(mma_f16, f16, f16, float)
CUEMU_MMA(mma_bf16, bf16, bf16, float)
CUEMU_MMA(mma_tf32, tf32, tf32, float)
CUEMU_MMA(mma_e4m3, e4m3, e4m3, float)
CUEMU_MMA(mma_s8, s8, s8, int)
CUEMU_MMA(mma_u8, u8, u8, int)
CUEMU_MMA(mma_u8s8, u8, s8, int)
#undef CUEMU_MMA

inline void mma_f64(double (&d)[2], double a, double b, CUEMU_AT) {
  const double all[4] = {a, b, d[0], d[1]};
  auto finish = [](cuemu::Meet& m) {
    double v[32][4];
    for (int l = 0; l < 32; ++l) memcpy(v[l], m.value[l], 32);
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 2; ++i)
        for (int k = 0; k < 4; ++k) v[l][2 + i] = fma(v[4 * (l / 4) + k][0], v[4 * (2 * (l % 4) + i) + k][1],
            v[l][2 + i]);
    for (int l = 0; l < 32; ++l) memcpy(m.value[l], v[l], 32);
    ++cuemu::S.report.mma_ops;
  };
  cuemu::collective(~0u, all, 32, "mma_f64", file, line, finish,
                    [&](const cuemu::Meet& m) { memcpy(d, m.value[cuemu::S.cur->lane] + 16, 16); });
}
inline u32 to_tf32(float v) {
  const u32 bits = __float_as_uint(v);
  return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & 0xffffe000u;
}

template <int LUT>
u32 lop3(u32 a, u32 b, u32 c) {
  u32 r = 0;
  for (int i = 0; i < 8; ++i)
    if (LUT >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return r;
}
inline u32 sub_f16x2(u32 a, u32 b) {
  return cuemu::by_half([&](int s) { return __half_as_ushort(__hsub(cuemu::half_at(a, s), cuemu::half_at(b, s))); });
}
inline u32 fma_f16x2(u32 a, u32 b, u32 c) {
  return cuemu::by_half([&](int s) {
    return __half_as_ushort(__hfma(cuemu::half_at(a, s), cuemu::half_at(b, s), cuemu::half_at(c, s)));
  });
}
inline u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  return cuemu::by_half([&](int s) {
    return __bfloat16_as_ushort(__hfma(cuemu::bfloat_at(a, s), cuemu::bfloat_at(b, s), cuemu::bfloat_at(c, s)));
  });
}
inline int dp4a(int a, int b, int c) { return __dp4a(a, b, c); }
inline u32 dp4a_u8(u32 a, u32 b, u32 c) { return __dp4a(a, b, c); }
inline int dp4a_u8s8(u32 a, int b, int c) {
  for (int i = 0; i < 4; ++i) c = int(u32(c) + u32(int(a >> (8 * i) & 0xff) * int(int8_t(b >> (8 * i)))));
  return c;
}

}  // namespace ptx
