// One thread an element of C beside codes of any groups: it looks up whose row it is in, then walks that row of A and a
// row of the expert's codes, group by group.
#include "float4.cuh"
#include "groups.cuh"

template <class T, class TC, class TS, int BITS> __global__ void __launch_bounds__(256) code_by_code(const QuantArgs p) {
  take_turn();
  const i64 across = (p.m + 31) / 32, i = blockIdx.x / across * 8 + threadIdx.x / 32, j = blockIdx.x % across * 32 + threadIdx.x % 32;
  if (i >= p.columns || j >= p.m) return;
  // excerpt
  const int expert = expert_of((const int*)p.work, (int)p.scale_row, i);
  if (expert == (int)p.scale_row) return;   // behind the last group
  const i64 row = expert * p.m + j;
  const unsigned char* const codes = (const unsigned char*)p.codes + row * p.code_row_bytes;
  const T* const x = (const T*)p.x + i * p.x_col;
  float sum = 0;
  for (i64 group = 0, l = 0; group < p.groups; ++group) {
    float zero = 1 << (BITS - 1), part = 0;
    if (!Float4<TS>::is && !Float8<TS>::is && p.zeros) zero = ((const float*)p.zeros)[row * p.groups + group];
    for (const i64 end = min(l + p.group_size, p.n); l < end; ++l) {
      const int code = BITS == 4 ? codes[l / 2] >> l % 2 * 4 & 15 : codes[l];
      const float value = Float4<TS>::is ? float4_value(code) : Float8<TS>::is ? float8_value(code) : code - zero;
      part += value * wide<float>(x[l * p.x_step]);
    }
    sum += wide<float>(((const TS*)p.scales)[row * p.groups + group]) * part;
  }
  // end of excerpt
  finish_scaled<TC, float>((TC*)p.y + i * p.y_col + j * p.y_step, by_factor<TS>(p, row, sum), (float)p.alpha, (float)p.beta);
}
