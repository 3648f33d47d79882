// Twins: copies by the asynchronous proxy. A tensor map is the record that `tensor_map` in build.py packs.
#pragma once

namespace cuemu {

struct TensorRecord {
  uint64_t magic, address;
  unsigned element_bytes, rank, swizzle, dims[3], box[3], reserved;
  uint64_t stride_bytes[2];   // of dimensions 1 and 2
};
static_assert(sizeof(TensorRecord) <= 128, "as a CUtensorMap");
inline constexpr uint64_t kTensorMagic = 0x70616d5f756d6563ull;

inline const TensorRecord& tensor_record(const void* map, unsigned rank) {
  const TensorRecord& t = *static_cast<const TensorRecord*>(map);
  if (t.magic != kTensorMagic) fail("tma", "%p is not a tensor map", map);
  if (t.rank != rank) fail("tma", "a map of %u dimensions is used with %u coordinates", t.rank, rank);
  return t;
}
inline unsigned swizzled(unsigned offset, unsigned mode) {
  const unsigned mask = mode == 1 ? 7 : mode == 2 ? 3 : mode == 3 ? 1 : 0;
  return offset ^ (offset >> 7 & mask) << 4;
}
inline unsigned box_bytes(const TensorRecord& t) { return t.element_bytes * t.box[0] * t.box[1] * t.box[2]; }

// Calls f(byte of the box in shared memory, global address or null where outside, bytes) for each 16-byte chunk.
template <class F>
void over_box(const TensorRecord& t, const int (&at)[3], unsigned base, bool store, F&& f) {
  // A store ends with the 16 bytes that the last element lies in, and writes past it (seen on an H200).
  const long long width = store ? (t.dims[0] + 16 / t.element_bytes - 1) / (16 / t.element_bytes)
                                      * (16 / t.element_bytes) : t.dims[0];
  const unsigned row_bytes = t.box[0] * t.element_bytes, step = 16 / t.element_bytes;
  unsigned offset = base;
  for (unsigned z = 0; z < t.box[2]; ++z)
    for (unsigned y = 0; y < t.box[1]; ++y)
      for (unsigned b = 0; b < row_bytes; b += 16, offset += 16) {
        const long long x = at[0] + static_cast<long long>(b / 16 * step), row = at[1] + int(y), plane = at[2] + int(z);
        const bool rows_in = row >= 0 && row < t.dims[1] && plane >= 0 && plane < t.dims[2];
        for (unsigned e = 0; e < step; ++e) {
          const bool in = rows_in && x + e >= 0 && x + e < width;
          char* g = reinterpret_cast<char*>(t.address + uint64_t(plane * (long long)t.stride_bytes[1]) +
                                            uint64_t(row * (long long)t.stride_bytes[0])
                                                + uint64_t((x + e) * t.element_bytes));
          f(swizzled(offset, t.swizzle) + e * t.element_bytes, in ? g : nullptr, t.element_bytes);
        }
      }
}
// What an H200 answers with an illegal instruction: c0 off the 16-byte grid, and a store before the tensor's start.
inline void check_coordinates(const TensorRecord& t, const int (&c)[3], bool store) {
  const long long byte = static_cast<long long>(c[0]) * t.element_bytes;
  if (byte % 16)
    fail("tma", "coordinate %d is byte %lld of the contiguous dimension; it must be a multiple of 16", c[0], byte);
  if (store && (c[0] < 0 || c[1] < 0 || c[2] < 0))
    fail("tma", "a store at (%d, %d, %d): only loads take negative coordinates", c[0], c[1], c[2]);
}
inline void check_shared_at(unsigned addr, unsigned align, const char* what) {
  if ((addr & 0xffffff) % align) fail("misaligned", "%s: shared address 0x%x is not a multiple of %u", what, addr,
      align);
}

// Queues one delivery for each destination block, or does it here and now in an eager launch; `work` gets that block's shared memory.
template <class F>
void send(unsigned bar, unsigned mask, unsigned bytes, F work) {
  const Cta& own = *S.cur->cta;
  if (mask >> S.cluster_size) fail("tma", "multicast mask 0x%x in a cluster of %u", mask, S.cluster_size);
  for (unsigned r = 0; r < S.cluster_size; ++r) {
    if (!(mask >> r & 1)) continue;
    Cta& to = S.ctas[own.cluster_first + r];
    void* b = to.shared + (bar & 0xffffff);
    const unsigned full = (r + 1) << 24 | (bar & 0xffffff);
    ++S.report.async_copies;
    const auto deliver = [=, &to] {
      work(to.shared);
      mbarrier_deliver(mbarrier_at(full, "a bulk copy", "", 0), bytes);
    };
    if (S.cfg.eager) deliver();   // into memory, perhaps, that others still read
    else send_later(b, deliver);
  }
}
inline unsigned own_mask() { return 1u << S.cur->cta->rank; }

inline void load_box(unsigned dst, const void* map, unsigned bar, const int (&c)[3], unsigned rank, unsigned mask) {
  const TensorRecord t = tensor_record(map, rank);
  check_shared_at(dst, 128, "a tensor copy");
  check_coordinates(t, c, false);
  if (t.swizzle && (dst & 0xffffff) % (t.swizzle == 1 ? 1024 : t.swizzle == 2 ? 512 : 256))
    fail("misaligned", "a tensor copy: shared address 0x%x is not aligned to its swizzle pattern", dst);
  const int c0 = c[0], c1 = c[1], c2 = c[2];
  send(bar, mask, box_bytes(t), [=](char* shared) {
    over_box(t, {c0, c1, c2}, dst & 0xffffff, false, [&](unsigned at, const char* g, unsigned n) {
      if (g) memcpy(shared + at, g, n);
      else memset(shared + at, 0, n);
    });
  });
}
inline void load_bulk(unsigned dst, const void* src, unsigned bytes, unsigned bar, unsigned mask) {
  check_shared_at(dst, 16, "a bulk copy");
  if (bytes % 16 || reinterpret_cast<uintptr_t>(src) % 16)
    fail("misaligned", "a bulk copy of %u bytes from %p: both must be multiples of 16", bytes, src);
  send(bar, mask, bytes, [=](char* shared) { memcpy(shared + (dst & 0xffffff), src, bytes); });
}
inline void store_box(const void* map, unsigned src, const int (&c)[3], unsigned rank) {
  const TensorRecord t = tensor_record(map, rank);
  check_shared_at(src, 128, "a tensor store");
  check_coordinates(t, c, true);
  const char* shared = S.cur->cta->shared;
  const int c0 = c[0], c1 = c[1], c2 = c[2];
  ++S.report.async_copies;
  S.cur->queues->stores.add([=] {
    over_box(t, {c0, c1, c2}, src & 0xffffff, true, [&](unsigned at, char* g, unsigned n) {
      if (g) memcpy(g, shared + at, n);
    });
  });
}

}  // namespace cuemu

namespace ptx {

inline void fence_async() {}
inline void prefetch_map(const TensorMap* m) { (void)m; }
inline void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
  cuemu::load_bulk(dst, src, bytes, bar, cuemu::own_mask());
}
inline void bulk_load_hint(u32 dst, const void* src, u32 bytes, u32 bar, u64) { bulk_load(dst, src, bytes, bar); }
inline void bulk_load_multicast(u32 dst, const void* src, u32 bytes, u32 bar, u16 mask) {
  cuemu::load_bulk(dst, src, bytes, bar, mask);
}
inline void tma_load_2d(u32 dst, const TensorMap* m, u32 bar, int c0, int c1) {
  cuemu::load_box(dst, m, bar, {c0, c1, 0}, 2, cuemu::own_mask());
}
inline void tma_load_2d_hint(u32 dst, const TensorMap* m, u32 bar, int c0, int c1, u64) {
  tma_load_2d(dst, m, bar, c0, c1);
}
inline void tma_load_2d_multicast(u32 dst, const TensorMap* m, u32 bar, int c0, int c1, u16 mask) {
  cuemu::load_box(dst, m, bar, {c0, c1, 0}, 2, mask);
}
inline void tma_load_3d(u32 dst, const TensorMap* m, u32 bar, int c0, int c1, int c2) {
  cuemu::load_box(dst, m, bar, {c0, c1, c2}, 3, cuemu::own_mask());
}
inline void tma_load_3d_multicast(u32 dst, const TensorMap* m, u32 bar, int c0, int c1, int c2, u16 mask) {
  cuemu::load_box(dst, m, bar, {c0, c1, c2}, 3, mask);
}
inline void bulk_store(void* dst, u32 src, u32 bytes) {
  cuemu::check_shared_at(src, 16, "a bulk store");
  if (bytes % 16 || reinterpret_cast<uintptr_t>(dst) % 16)
    cuemu::fail("misaligned", "a bulk store of %u bytes to %p: both must be multiples of 16", bytes, dst);
  const char* from = cuemu::from_shared_address(src);
  ++cuemu::S.report.async_copies;
  cuemu::S.cur->queues->stores.add([=] { memcpy(dst, from, bytes); });
}
inline void tma_store_2d(const TensorMap* m, u32 src, int c0, int c1) { cuemu::store_box(m, src, {c0, c1, 0}, 2); }
inline void tma_store_3d(const TensorMap* m, u32 src, int c0, int c1, int c2) {
  cuemu::store_box(m, src, {c0, c1, c2}, 3);
}
inline void bulk_commit() { cuemu::S.cur->queues->stores.commit(); }
template <int N>
void bulk_wait_read() { cuemu::S.cur->queues->stores.wait(N); }
template <int N>
void bulk_wait() { cuemu::S.cur->queues->stores.wait(N); }

}  // namespace ptx
