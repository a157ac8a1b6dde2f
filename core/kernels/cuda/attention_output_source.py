"""CUDA C++ of attention's output: division by the sums, quantization, and stores of 16 bytes.

Part of the program of `attention_source.py`, whose types and macros it uses.
"""

from __future__ import annotations

OUTPUT = r"""
#if OUTPUT
__device__ __forceinline__ u32 quantize2(float a, float b) {  // two bytes
#if OUTPUT == 2
  u32 r;
  asm("{\n.reg .b16 r;\ncvt.rn.satfinite.e4m3x2.f32 r, %2, %1;\nmov.b32 %0, {r, 0};\n}" : "=r"(r) : "f"(a), "f"(b));
  return r;
#else
  const float magic = 12582912.0f;  // 1.5 · 2^23: the sum's low byte is the integer, rounded half to even
  u32 x = __float_as_uint(fminf(fmaxf(a, -127.0f), 127.0f) + magic);
  u32 y = __float_as_uint(fminf(fmaxf(b, -127.0f), 127.0f) + magic);
  return __byte_perm(x, y, 0x0040) & 0xFFFFu;
#endif
}
#endif
// Lane q of a quad gives word w to lane w and receives the words q of all four.
__device__ __forceinline__ void transpose(u32 (&w)[4]) {
  int q = threadIdx.x & 3;
  bool odd = q & 1, high = q & 2;
  u32 a = __shfl_xor_sync(0xFFFFFFFFu, odd ? w[0] : w[1], 1), b = __shfl_xor_sync(0xFFFFFFFFu, odd ? w[2] : w[3], 1);
  if (odd) { w[0] = a; w[2] = b; } else { w[1] = a; w[3] = b; }
  a = __shfl_xor_sync(0xFFFFFFFFu, high ? w[0] : w[2], 2); b = __shfl_xor_sync(0xFFFFFFFFu, high ? w[1] : w[3], 2);
  if (high) { w[0] = a; w[1] = b; } else { w[2] = a; w[3] = b; }
}
__device__ __forceinline__ void store(const Problem& p, float (&o)[HEAD / 2], State& state, int image, int head,
                                      int row, int keys) {
  int q = threadIdx.x & 3;
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    float total = state.sum[i];
    total += __shfl_xor_sync(0xFFFFFFFFu, total, 1);
    total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
    float factor = 1.0f / total;
#if LENGTHS
    if (row + 8 * i >= keys) {
      factor = 0.0f;
      #pragma unroll
      for (int j = 0; j < HEAD / 8; ++j) o[4 * j + 2 * i] = o[4 * j + 2 * i + 1] = 0.0f;
    }
#endif
    bool valid = row + 8 * i < p.queries;
    #pragma unroll
    for (int slice = 0; slice < SLICES; ++slice) {
      const float* v = o + 32 * slice;
      long long at = image * p.out_image + (row + 8 * i) * p.out_row + head * p.out_head + 64 * slice + 16 * q;
#if OUTPUT
      u32 w[4];
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* f = p.out_inv_scale + p.inverse_step * (head * HEAD + 64 * slice + 16 * j + 2 * q);
        float f0 = factor * f[0], f1 = factor * f[p.inverse_step];
        float f2 = factor * f[8 * p.inverse_step], f3 = factor * f[9 * p.inverse_step];
        w[j] = quantize2(v[8 * j + 2 * i] * f0, v[8 * j + 2 * i + 1] * f1)
          | quantize2(v[8 * j + 4 + 2 * i] * f2, v[8 * j + 5 + 2 * i] * f3) << 16;
      }
      transpose(w);
      if (valid) *(uint4*)((u8*)p.out + at) = make_uint4(
        __byte_perm(w[0], w[1], 0x5410), __byte_perm(w[2], w[3], 0x5410), __byte_perm(w[0], w[1], 0x7632),
        __byte_perm(w[2], w[3], 0x7632));
#else
      u32 lo[4], hi[4];
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        lo[j] = pack(v[8 * j + 2 * i] * factor, v[8 * j + 2 * i + 1] * factor);
        hi[j] = pack(v[8 * j + 4 + 2 * i] * factor, v[8 * j + 5 + 2 * i] * factor);
      }
      transpose(lo); transpose(hi);
      if (valid) {
        *(uint4*)((u8*)p.out + at * 2) = make_uint4(lo[0], lo[1], lo[2], lo[3]);
        *(uint4*)((u8*)p.out + at * 2 + 16) = make_uint4(hi[0], hi[1], hi[2], hi[3]);
      }
#endif
    }
  }
}
#if LENGTHS
// Zeros for the 64 rows from `row` on, of which this thread has two.
__device__ __forceinline__ void clear(const Problem& p, int image, int head, int row) {
  State nothing = {};
  float zeros[HEAD / 2] = {};
  nothing.sum[0] = nothing.sum[1] = 1.0f;
  store(p, zeros, nothing, image, head, row, 0);
}
#endif
"""
