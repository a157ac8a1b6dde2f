// What all kernels share: vectors of sixteen floats, their ends, a few functions, and the way to bytes.
// Knows AVX-512; knows nothing of layers.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if !defined(__AVX512F__) || !defined(__AVX512VNNI__) || !defined(__AVX512BW__) || !defined(__AVX512VL__)
#error "this processor has no AVX-512 VNNI"
#endif

namespace diptych {

constexpr int LANES = 16;  // floats of one vector

inline __m512 exp_ps(__m512 x) {  // Cephes' expf: relative error below 2e-7 on [-87, 88], clamped outside
  // Of a NaN and a number these return their second argument: what is NaN stays NaN, as nothing else would tell of it.
  x = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(_mm512_set1_ps(-87.0f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

inline __m512 silu_ps(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(x, _mm512_add_ps(one, exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

inline __m512 gelu_ps(__m512 x) {  // x·Φ(x); erf by Abramowitz and Stegun 7.1.26, absolute error below 1.5e-7
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 z = _mm512_abs_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.70710678118654752f)));
  const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(z, _mm512_set1_ps(0.3275911f), one));
  __m512 p = _mm512_set1_ps(1.061405429f);
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-1.453152027f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.421413741f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-0.284496736f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(0.254829592f));
  const __m512 e = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(z, z)));
  __m512 erf = _mm512_fnmadd_ps(_mm512_mul_ps(p, t), e, one);
  erf = _mm512_mask_sub_ps(erf, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), _mm512_setzero_ps(), erf);
  return _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(0.5f), x), _mm512_add_ps(one, erf));
}

// round(x) + 128 as bytes; -127…127 becomes 1…255. Clamped before it is an integer, which has no room for large floats.
inline __m128i bytes(__m512 scaled) {
  scaled = _mm512_min_ps(_mm512_max_ps(scaled, _mm512_set1_ps(-127.0f)), _mm512_set1_ps(127.0f));  // NaN becomes -127
  return _mm512_cvtepi32_epi8(_mm512_add_epi32(_mm512_cvtps_epi32(scaled), _mm512_set1_epi32(128)));  // half to even
}

// Which lanes of a vector are left of `left`: none where that is not positive.
inline __mmask16 lanes(int64_t left) {
  return left >= LANES ? 0xffff : left <= 0 ? 0 : static_cast<__mmask16>((1u << left) - 1);
}

// Sixteen values of a tensor of floats, to bytes or to floats, whichever output is given.
inline void store(__m512 value, const float* inverse, uint8_t* out, float* floats, int64_t at, int64_t channel,
                  __mmask16 mask) {
  if (floats) {
    _mm512_mask_storeu_ps(floats + at, mask, value);
  } else {
    _mm_mask_storeu_epi8(out + at, mask, bytes(_mm512_mul_ps(value, _mm512_maskz_loadu_ps(mask, inverse + channel))));
  }
}

}  // namespace diptych
