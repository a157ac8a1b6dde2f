// Selects the vector type of the instruction set (avx512.h or avx2.h) and defines functions that all kernels share.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__) && defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "avx2.h"
#else
#error "this processor has neither AVX-512 VNNI nor AVX2"
#endif

namespace diptych {

inline Vec exp(Vec x) {  // Cephes' expf: relative error below 2e-7 on [-87, 88], clamped outside
  // NaN stays NaN, so that errors remain visible.
  x = min(all(88.0f), max(all(-87.0f), x));
  const Vec n = nearest(x * all(1.44269504088896341f));
  Vec r = fnma(n, all(0.693359375f), x);
  r = fnma(n, all(-2.12194440e-4f), r);
  Vec p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p, r * r, r + all(1.0f));
  return times_power(p, n);
}

inline Vec silu(Vec x) { return x / (all(1.0f) + exp(zero() - x)); }

inline Vec gelu(Vec x) {  // x·Φ(x); erf by Abramowitz and Stegun 7.1.26, absolute error below 1.5e-7
  const Vec z = abs(x * all(0.70710678118654752f));
  const Vec t = all(1.0f) / fma(z, all(0.3275911f), all(1.0f));
  Vec p = all(1.061405429f);
  p = fma(p, t, all(-1.453152027f));
  p = fma(p, t, all(1.421413741f));
  p = fma(p, t, all(-0.284496736f));
  p = fma(p, t, all(0.254829592f));
  const Vec erf = fnma(p * t, exp(zero() - z * z), all(1.0f));
  return all(0.5f) * x * (all(1.0f) + negate_where_negative(erf, x));
}

inline Vec quick_gelu(Vec x) { return x / (all(1.0f) + exp(all(-1.702f) * x)); }  // x·σ(1.702 x)

inline Vec gelu_tanh(Vec x) {  // x/2·(1 + tanh(√(2/π)·(x + 0.044715 x³))), as x·σ(2 …), which does not cancel
  const Vec cubed = fma(all(0.044715f) * x * x, x, x);
  return x / (all(1.0f) + exp(all(-1.5957691216057308f) * cubed));
}

inline Vec tanh(Vec x) {  // relative error below 5e-7: Lambert's continued fraction at x / 8, then tanh 2y three times
  const Vec y = min(all(1.25f), max(all(-1.25f), x * all(0.125f)));
  const Vec s = y * y;
  const Vec over = fma(fma(s, all(21.0f), all(1260.0f)), s, all(10395.0f));
  Vec t = y * over / fma(fma(s + all(210.0f), s, all(4725.0f)), s, all(10395.0f));
  for (int i = 0; i < 3; ++i) t = (t + t) / fma(t, t, all(1.0f));
  return t;
}

inline Vec relu(Vec x) { return max(zero(), x); }  // NaN stays NaN

// Softmax's exp(score − largest) of `count` scores in place; returns 1 / sum. The last vector is filled with zeros.
inline float soften(float* scores, float largest, int64_t count) {
  const Vec most = all(largest);
  Vec sum = zero();
  for (int64_t s = 0; s < count; s += LANES) {
    const Vec e = masked(exp(load(scores + s) - most), lanes(count - s));
    save(scores + s, e);
    sum = sum + e;
  }
  return 1.0f / total(sum);
}

// Stores sixteen values of a tensor: unchanged if `floats` is given, else quantized to round(x) + 128 as bytes (-127…127
// becomes 1…255). Values are clamped as floats, because large ones overflow the conversion to integers.
inline void store(Vec value, const float* inverse, uint8_t* out, float* floats, int64_t at, int64_t channel,
                  Mask mask) {
  if (floats) return save(floats + at, value, mask);
  const Vec scaled = value * load(inverse + channel, mask);
  save_bytes(out + at, min(max(scaled, all(-127.0f)), all(127.0f)), mask);  // NaN becomes -127
}

}  // namespace diptych
