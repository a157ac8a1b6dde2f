"""CUDA C++ of LayerNorm with 8-bit output: one warp per row, 16- or 8-byte loads, with the next row prefetched.

Channels need not be a power of two, unlike Triton's blocks: 640 and 1280 leave no lane idle. `layer_norm.py` prepares
the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerNormVariant:
    """Compile-time parameters: `channels`, a multiple of 128, and E4M3 instead of int8."""

    channels: int
    fp8: bool = False

    @property
    def name(self) -> str:
        """The kernel's name, as profilers show it."""
        return f"layer_norm_{self.channels}" + "_fp8" * self.fp8


def source(variant: LayerNormVariant) -> str:
    """The whole program of one variant."""
    vector = 8 if variant.channels % 256 == 0 else 4  # channels per load
    head = {"NAME": variant.name, "CHANNELS": variant.channels, "FP8": int(variant.fp8), "WIDE": vector}
    return "".join(f"#define {name} {value}\n" for name, value in head.items()) + _PROGRAM


_PROGRAM = r"""
typedef unsigned char u8; typedef unsigned int u32;
// The order and types of these fields are repeated in layer_norm.py.
struct Problem {
  const u8* x; const u8* weight; const u8* bias; const float* inverse; u8* out;
  long long stride;          // of x's rows, in bytes
  int rows, inverse_step;
  float eps;
};
#define WORDS (WIDE / 2)                  // 32-bit words of one load
#define LOADS (CHANNELS / (32 * WIDE))    // of a lane, for a row
struct Row { u32 word[LOADS][WORDS]; };

__device__ __forceinline__ Row load(const u8* from) {
  Row r;
  int lane = threadIdx.x & 31;
  #pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const u8* at = from + (i * 32 + lane) * WIDE * 2;
#if WIDE == 8
    uint4 v = *(const uint4*)at;
    r.word[i][0] = v.x; r.word[i][1] = v.y; r.word[i][2] = v.z; r.word[i][3] = v.w;
#else
    uint2 v = *(const uint2*)at;
    r.word[i][0] = v.x; r.word[i][1] = v.y;
#endif
  }
  return r;
}
__device__ __forceinline__ float low(u32 w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float high(u32 w) { return __uint_as_float(w & 0xFFFF0000u); }
__device__ __forceinline__ float total(float x) {
  #pragma unroll
  for (int i = 16; i; i >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, i);
  return x;
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

extern "C" __global__ void __launch_bounds__(128) NAME(const __grid_constant__ Problem p) {
  int lane = threadIdx.x & 31, step = gridDim.x * 4;
  int row = blockIdx.x * 4 + threadIdx.x / 32;
  if (row >= p.rows) return;
  Row weight = load(p.weight), bias = load(p.bias), next = load(p.x + row * p.stride);
  float inverse = *p.inverse;
  for (; row < p.rows; row += step) {
    Row x = next;
    if (row + step < p.rows) next = load(p.x + (row + step) * p.stride);
    float sum = 0.0f, squares = 0.0f;
    #pragma unroll
    for (int i = 0; i < LOADS; ++i)
      #pragma unroll
      for (int j = 0; j < WORDS; ++j) sum += low(x.word[i][j]) + high(x.word[i][j]);
    float mean = total(sum) * (1.0f / CHANNELS);
    #pragma unroll
    for (int i = 0; i < LOADS; ++i)
      #pragma unroll
      for (int j = 0; j < WORDS; ++j) {
        float a = low(x.word[i][j]) - mean, b = high(x.word[i][j]) - mean;
        squares = fmaf(a, a, fmaf(b, b, squares));
      }
    float factor = rsqrtf(total(squares) * (1.0f / CHANNELS) + p.eps);
    #pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      float v[WIDE];
      #pragma unroll
      for (int j = 0; j < WORDS; ++j) {
        v[2 * j] = fmaf((low(x.word[i][j]) - mean) * factor, low(weight.word[i][j]), low(bias.word[i][j]));
        v[2 * j + 1] = fmaf((high(x.word[i][j]) - mean) * factor, high(weight.word[i][j]), high(bias.word[i][j]));
      }
      int channel = (i * 32 + lane) * WIDE;
      #pragma unroll
      for (int j = 0; j < WIDE; ++j) v[j] *= p.inverse_step ? p.inverse[channel + j] : inverse;
      u8* to = p.out + (long long)row * CHANNELS + channel;
#if WIDE == 8
      *(uint2*)to = make_uint2(quantize4(v[0], v[1], v[2], v[3]), quantize4(v[4], v[5], v[6], v[7]));
#else
      *(u32*)to = quantize4(v[0], v[1], v[2], v[3]);
#endif
    }
  }
}
"""
