"""CUDA C++ of the 8-bit product's epilogue: scales, biases, residual, GEGLU or SwiGLU, and the stores.

Part of the program of `gemm_source.py`, whose types and macros it uses. Columns' scales are in shared memory and the
residual's next columns in registers, so that no load waits behind the stores.
"""

from __future__ import annotations

ROWS = r"""
// The product's fragment: thread t of a consumer holds rows 16·warp + lane/4 (+8) and, of every 8 columns, two. The
// columns were permuted on their way in, so that its columns 32·g + 8·(lane%4) … +7 of the output are neighbours.
struct Rows { int pixel[2 * WM]; bool valid[2 * WM]; };
__device__ __forceinline__ Rows rows_of(const Problem& p, const Where& t, int consumer) {
  Rows r;
  int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  #pragma unroll
  for (int i = 0; i < 2 * WM; ++i) {
    int row = (consumer * WM + (i >> 1)) * 64 + warp * 16 + (i & 1) * 8 + (lane >> 2);
    int h = t.h + (row >> p.log_tile_w), w = t.w + (row & ((1 << p.log_tile_w) - 1));
    r.valid[i] = h < p.height && w < p.width;
    h = h * p.up + (t.phase >> 1); w = w * p.up + (t.phase & 1);
    r.pixel[i] = (t.image * (p.height * p.up) + h) * (p.width * p.up) + w;
  }
  return r;
}
"""

ACTIVATE = r"""
// hidden · gelu(gate), the normal distribution by tanh: within 6e-4 of the exact one, a small part of an 8-bit step.
// SILU: hidden · silu(gate), whose sigmoid is a tanh, within 3e-4 in the hardware's approximation.
__device__ __forceinline__ float activate(float hidden, float gate) {
#if SILU
  float t = 0.5f * gate;
#else
  float t = gate * fmaf(0.03470122f, gate * gate, 0.80015693f);
#endif
  asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(t));
  return hidden * gate * fmaf(0.5f, t, 0.5f);
}
__device__ __forceinline__ u32 quantize4(float a, float b, float c, float d) {
#if FP8
  u32 lo, hi;
  asm("{\n.reg .b16 r;\ncvt.rn.satfinite.e4m3x2.f32 r, %2, %1;\nmov.b32 %0, {r, 0};\n}" : "=r"(lo) : "f"(a), "f"(b));
  asm("{\n.reg .b16 r;\ncvt.rn.satfinite.e4m3x2.f32 r, %2, %1;\nmov.b32 %0, {r, 0};\n}" : "=r"(hi) : "f"(c), "f"(d));
  return lo | (hi << 16);
#else
  const float magic = 12582912.0f;  // 1.5 · 2^23: the sum's low byte is the integer, rounded half to even
  u32 x = __float_as_uint(fminf(fmaxf(a, -127.0f), 127.0f) + magic);
  u32 y = __float_as_uint(fminf(fmaxf(b, -127.0f), 127.0f) + magic);
  u32 z = __float_as_uint(fminf(fmaxf(c, -127.0f), 127.0f) + magic);
  u32 w = __float_as_uint(fminf(fmaxf(d, -127.0f), 127.0f) + magic);
  return __byte_perm(__byte_perm(x, y, 0x0040), __byte_perm(z, w, 0x0040), 0x5410);
#endif
}
"""

EPILOGUE = r"""
// What belongs to a tile's columns is fetched while they are multiplied and waits in shared memory: read from global
// memory behind the epilogue's stores, it cost a fifth of the time of a product with a short K.
struct Columns { float scale[(BN + 127) / 128], bias[(BN + 127) / 128]; };
__device__ __forceinline__ Columns columns_of(const Problem& p, const Where& t) {
  Columns c;
  #pragma unroll
  for (int i = 0; i < (BN + 127) / 128; ++i) {
    int at = i * 128 + (threadIdx.x & 127);
#if GEGLU
    int gate = at >= BN / 2, n = t.n / 2 + at - gate * (BN / 2), from = gate * p.columns + n;
#else
    int n = t.n + at, from = t.phase * p.columns + n;
#endif
    bool valid = at < BN && n < p.columns;
    c.scale[i] = valid ? p.scale[from] : 0.0f;
#if GEGLU
    c.bias[i] = valid && p.bias ? p.bias[from] : 0.0f;
    float inverse = valid && !gate ? p.out_inv_scale[p.inverse_step * n] : 1.0f;
    c.scale[i] *= inverse; c.bias[i] *= inverse;
#else
    c.bias[i] = valid && p.bias ? p.bias[n] : 0.0f;
    if (valid && p.row_bias) c.bias[i] += p.row_bias[t.image * p.row_bias_stride + n];
#endif
  }
  return c;
}
__device__ __forceinline__ void keep_columns(float* to, const Columns& c, int group) {
  asm volatile("bar.sync %0, 128;" :: "r"(3 + group) : "memory");  // the last tile's have been read
  #pragma unroll
  for (int i = 0; i < (BN + 127) / 128; ++i) {
    int at = i * 128 + (threadIdx.x & 127);
    if (at < BN) { to[at] = c.scale[i]; to[BN + at] = c.bias[i]; }
  }
  asm volatile("bar.sync %0, 128;" :: "r"(3 + group) : "memory");
}
__device__ __forceinline__ void read8(float (&v)[8], const float* from) {
  float4 a = *(const float4*)from, b = *(const float4*)(from + 4);
  v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w; v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
}
#define AHEAD (WM * BN <= 256)  // there are registers for the next columns of the residual
struct Residual { uint4 row[2 * WM]; };
__device__ __forceinline__ void fetch(Residual& r, const Problem& p, const Where& t, const Rows& rows, int g) {
  int n = t.n + 32 * g + 8 * (threadIdx.x & 3);
  if (!p.residual || t.n + 32 * g >= p.columns) return;
  #pragma unroll
  for (int i = 0; i < 2 * WM; ++i) if (rows.valid[i])
    r.row[i] = *(const uint4*)((const u8*)p.residual + (rows.pixel[i] * p.residual_stride + n) * 2);
}

#if GEGLU
__device__ __forceinline__ void scale_sums(acc_t (&acc)[WM][BN / 2], const Problem&, const Rows&,
                                           const float* columns) {
  #pragma unroll
  for (int g = 0; g < BN / 64; ++g) {
    float sh[8], sg[8], bh[8], bg[8];
    const float* from = columns + 32 * g + 8 * (threadIdx.x & 3);
    read8(sh, from); read8(sg, from + BN / 2); read8(bh, from + BN); read8(bg, from + BN + BN / 2);
    #pragma unroll
    for (int i = 0; i < 2 * WM; ++i)
      #pragma unroll
      for (int b = 0; b < 8; ++b) {
        int at = (8 * g + b) * 4 + 2 * (i & 1);
        acc[i >> 1][at] = BITS(fmaf((float)acc[i >> 1][at], sh[b], bh[b]));
        acc[i >> 1][at + 1] = BITS(fmaf((float)acc[i >> 1][at + 1], sg[b], bg[b]));
      }
  }
}
__device__ __forceinline__ void epilogue(const Problem& p, const Where& t, acc_t (&acc)[WM][BN / 2], const Rows& r,
                                         const float* columns, Residual&) {
  int q = threadIdx.x & 3;
  #pragma unroll
  for (int g = 0; g < BN / 64; ++g) {
    int n = t.n / 2 + 32 * g + 8 * q;
    if (t.n / 2 + 32 * g >= p.columns) break;
    float sh[8], sg[8], bh[8], bg[8];
    const float* from = columns + 32 * g + 8 * q;
    read8(sh, from); read8(sg, from + BN / 2); read8(bh, from + BN); read8(bg, from + BN + BN / 2);
#if ADDED
    float inverse[8];
    #pragma unroll
    for (int b = 0; b < 8; ++b) inverse[b] = p.out_inv_scale[p.inverse_step * (n + b)];
#endif
    #pragma unroll
    for (int i = 0; i < 2 * WM; ++i) {
      float v[8];
#if ADDED
      float more_h[8] = {}, more_g[8] = {};
      if (r.valid[i]) {
        const u8* more = (const u8*)p.residual + (r.pixel[i] * p.residual_stride + n) * 2;
        uint4 h = *(const uint4*)more, g4 = *(const uint4*)(more + (long long)p.columns * 2);
        add_pair(more_h[0], more_h[1], h.x); add_pair(more_h[2], more_h[3], h.y);
        add_pair(more_h[4], more_h[5], h.z); add_pair(more_h[6], more_h[7], h.w);
        add_pair(more_g[0], more_g[1], g4.x); add_pair(more_g[2], more_g[3], g4.y);
        add_pair(more_g[4], more_g[5], g4.z); add_pair(more_g[6], more_g[7], g4.w);
      }
#endif
      #pragma unroll
      for (int b = 0; b < 8; ++b) {
        const acc_t* sums = acc[i >> 1] + (8 * g + b) * 4 + 2 * (i & 1);
#if SHARES
        float hidden = FLOAT(sums[0]), gate = FLOAT(sums[1]);
#else
        float hidden = fmaf((float)sums[0], sh[b], bh[b]), gate = fmaf((float)sums[1], sg[b], bg[b]);
#endif
#if ADDED
        hidden = fmaf(more_h[b], inverse[b], hidden);  // of zeros nothing changes
        gate += more_g[b];
#endif
        v[b] = activate(hidden, gate);
      }
      uint2 packed = make_uint2(quantize4(v[0], v[1], v[2], v[3]), quantize4(v[4], v[5], v[6], v[7]));
      if (r.valid[i]) *(uint2*)((u8*)p.out + r.pixel[i] * p.out_stride + n) = packed;
    }
  }
}
#else
__device__ __forceinline__ void scale_sums(acc_t (&acc)[WM][BN / 2], const Problem& p, const Rows& r,
                                           const float* columns) {
  float row_scale[2 * WM];
  #pragma unroll
  for (int i = 0; i < 2 * WM; ++i) row_scale[i] = p.row_scale && r.valid[i] ? p.row_scale[r.pixel[i]] : 1.0f;
  #pragma unroll
  for (int g = 0; g < BN / 32; ++g) {
    float scale[8], bias[8];
    read8(scale, columns + 32 * g + 8 * (threadIdx.x & 3)); read8(bias, columns + BN + 32 * g + 8 * (threadIdx.x & 3));
    #pragma unroll
    for (int i = 0; i < 2 * WM; ++i)
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        int at = (4 * g + (j >> 1)) * 4 + 2 * (i & 1) + (j & 1);
        acc[i >> 1][at] = BITS(fmaf((float)acc[i >> 1][at] * row_scale[i], scale[j], bias[j]));
      }
  }
}
__device__ __forceinline__ void epilogue(const Problem& p, const Where& t, acc_t (&acc)[WM][BN / 2], const Rows& r,
                                         const float* columns, Residual& first) {
  int q = threadIdx.x & 3;
  float row_scale[2 * WM];
  #pragma unroll
  for (int i = 0; i < 2 * WM; ++i) row_scale[i] = p.row_scale && r.valid[i] ? p.row_scale[r.pixel[i]] : 1.0f;
#if AHEAD
  Residual next = first;
#endif
  #pragma unroll
  for (int g = 0; g < BN / 32; ++g) {
    int n = t.n + 32 * g + 8 * q;
    if (t.n + 32 * g >= p.columns) break;
#if AHEAD
    Residual now = next;
    if (g + 1 < BN / 32) fetch(next, p, t, r, g + 1);
#else
    Residual now;
    fetch(now, p, t, r, g);
#endif
    float scale[8], bias[8];
    read8(scale, columns + 32 * g + 8 * q); read8(bias, columns + BN + 32 * g + 8 * q);
    #pragma unroll
    for (int i = 0; i < 2 * WM; ++i) {
      float v[8];
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        acc_t sum = acc[i >> 1][(4 * g + (j >> 1)) * 4 + 2 * (i & 1) + (j & 1)];
#if SHARES
        v[j] = FLOAT(sum);
#else
        v[j] = fmaf((float)sum * row_scale[i], scale[j], bias[j]);
#endif
      }
      if (p.residual) {
        add_pair(v[0], v[1], now.row[i].x); add_pair(v[2], v[3], now.row[i].y);
        add_pair(v[4], v[5], now.row[i].z); add_pair(v[6], v[7], now.row[i].w);
      }
      uint4 packed = make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
      if (r.valid[i]) *(uint4*)((u8*)p.out + (r.pixel[i] * p.out_stride + n) * 2) = packed;
    }
  }
}
#endif
"""
