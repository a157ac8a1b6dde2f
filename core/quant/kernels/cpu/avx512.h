// Sixteen floats in one AVX-512 register, and what a matrix product does with sixteen columns of weights.
// The same names as avx2.h; knows nothing of layers.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace diptych {

constexpr const char* INSTRUCTIONS = "avx512-vnni";
constexpr int LANES = 16;  // floats of one vector

using Vec = __m512;  // + - * / are the compiler's
using Mask = __mmask16;

// Which lanes of a vector are left of `left`: none where that is not positive.
inline Mask lanes(int64_t left) { return left >= LANES ? 0xffff : left <= 0 ? 0 : static_cast<Mask>((1u << left) - 1); }
constexpr Mask ALL = 0xffff;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec all(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* from) { return _mm512_loadu_ps(from); }
inline Vec load(const float* from, Mask mask) { return _mm512_maskz_loadu_ps(mask, from); }
inline Vec load(const int8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline void save(float* to, Vec v) { _mm512_storeu_ps(to, v); }
inline void save(float* to, Vec v, Mask mask) { _mm512_mask_storeu_ps(to, mask, v); }
inline Vec masked(Vec v, Mask mask) { return _mm512_maskz_mov_ps(mask, v); }  // zero elsewhere

inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }  // c − a · b
// Of a NaN and a number these return their second argument.
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec max(Vec a, Vec b, Mask mask) { return _mm512_mask_max_ps(a, mask, a, b); }  // a elsewhere
inline Vec abs(Vec v) { return _mm512_abs_ps(v); }
inline Vec nearest(Vec v) { return _mm512_roundscale_ps(v, 8); }
inline Vec times_power(Vec v, Vec n) { return _mm512_scalef_ps(v, n); }  // v · 2ⁿ
inline Vec negate_where_negative(Vec v, Vec of) {
  return _mm512_mask_sub_ps(v, _mm512_cmp_ps_mask(of, _mm512_setzero_ps(), _CMP_LT_OQ), _mm512_setzero_ps(), v);
}
inline float total(Vec v) { return _mm512_reduce_add_ps(v); }
inline float greatest(Vec v) { return _mm512_reduce_max_ps(v); }

// Integers between -127 and 127, + 128, as bytes.
inline void save_bytes(uint8_t* to, Vec v, Mask mask) {
  const __m512i made = _mm512_add_epi32(_mm512_cvtps_epi32(v), _mm512_set1_epi32(128));  // half to even
  _mm_mask_storeu_epi8(to, mask, _mm512_cvtepi32_epi8(made));
}

// The three kinds of operand: how sixteen columns of a weight are read, and how a row's next inputs are spread.
// `Stored` is an input in memory, `Element` one as `input` reads it.
struct Int8 {
  using Stored = uint8_t;
  using Element = uint8_t;
  using Sum = __m512i;
  static constexpr int DEPTH = 4, BYTES = 64;  // inputs of one step; bytes of sixteen columns of them
  static Sum start(const int32_t* offset, int64_t n) { return _mm512_loadu_si512(offset + n); }
  static __m512i weight(const void* b) { return _mm512_loadu_si512(b); }
  static __m512i input(const uint8_t* a) {
    int32_t word;
    std::memcpy(&word, a, 4);
    return _mm512_set1_epi32(word);
  }
  static Sum add(Sum s, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(s, a, b); }
  static Vec value(Sum s) { return _mm512_cvtepi32_ps(s); }
};

struct Fp32 {
  using Stored = float;
  using Element = float;
  using Sum = Vec;
  static constexpr int DEPTH = 1, BYTES = 64;
  static Sum start(const int32_t*, int64_t) { return zero(); }
  static Vec weight(const void* b) { return _mm512_loadu_ps(b); }
  static Vec input(const float* a) { return all(*a); }
  static Sum add(Sum s, Vec a, Vec b) { return fma(a, b, s); }
  static Vec value(Sum s) { return s; }
};

struct Bf16 : Fp32 {  // weights only
  static constexpr int BYTES = 32;
  static Vec weight(const void* b) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(b)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
};

// Of 32 registers: how many vectors of columns stand side by side in a tile, at most, and how many rows under so many.
constexpr int WIDEST = 4;
constexpr int tile_rows(int vectors) { return vectors == 4 ? 6 : vectors == 3 ? 8 : vectors == 2 ? 12 : 14; }
constexpr int KEYS_AT_ONCE = 2;   // vectors of them, under six queries
constexpr int HEADS_AT_ONCE = 4;  // that read the same keys

}  // namespace diptych
