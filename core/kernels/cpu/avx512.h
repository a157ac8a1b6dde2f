// Defines a vector of sixteen floats in one AVX-512 register and the operand types of the matrix product.
// avx2.h defines the same names for AVX2.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace diptych {

constexpr const char* INSTRUCTIONS = "avx512-vnni";
constexpr int LANES = 16;  // floats per vector

using Vec = __m512;  // the compiler provides + - * /
using Mask = __mmask16;

// Activates the first `left` lanes; none if `left` is not positive.
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
inline Vec masked(Vec v, Mask mask) { return _mm512_maskz_mov_ps(mask, v); }  // zero in inactive lanes

inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }  // c − a · b
// If the first argument is NaN, these return the second.
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec max(Vec a, Vec b, Mask mask) { return _mm512_mask_max_ps(a, mask, a, b); }  // a in inactive lanes
inline Vec abs(Vec v) { return _mm512_abs_ps(v); }
inline Vec nearest(Vec v) { return _mm512_roundscale_ps(v, 8); }
inline Vec times_power(Vec v, Vec n) { return _mm512_scalef_ps(v, n); }  // v · 2ⁿ
inline Vec negate_where_negative(Vec v, Vec of) {
  return _mm512_mask_sub_ps(v, _mm512_cmp_ps_mask(of, _mm512_setzero_ps(), _CMP_LT_OQ), _mm512_setzero_ps(), v);
}
inline float total(Vec v) { return _mm512_reduce_add_ps(v); }
inline float greatest(Vec v) { return _mm512_reduce_max_ps(v); }

// Converts integers in [-127, 127] to bytes with a zero point of 128.
inline void save_bytes(uint8_t* to, Vec v, Mask mask) {
  const __m512i made = _mm512_add_epi32(_mm512_cvtps_epi32(v), _mm512_set1_epi32(128));  // rounds half to even
  _mm_mask_storeu_epi8(to, mask, _mm512_cvtepi32_epi8(made));
}

// The three operand types: each loads sixteen columns of a weight and broadcasts a row's next inputs.
// `Stored` is the type of inputs in memory, `Element` the type that `input` reads.
struct Int8 {
  using Stored = uint8_t;
  using Element = uint8_t;
  using Sum = __m512i;
  static constexpr int DEPTH = 4, BYTES = 64;  // inputs per step; bytes per step of sixteen columns
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

struct Bf16 : Fp32 {  // weights only; inputs are fp32
  static constexpr int BYTES = 32;
  static Vec weight(const void* b) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(b)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
};

// Tile size for 32 registers: maximum width in vectors of columns, and rows for a given width.
constexpr int WIDEST = 4;
constexpr int tile_rows(int vectors) { return vectors == 4 ? 6 : vectors == 3 ? 8 : vectors == 2 ? 12 : 14; }
constexpr int KEYS_AT_ONCE = 2;   // vectors of keys per block of six queries
constexpr int HEADS_AT_ONCE = 4;  // query heads per block that share keys

}  // namespace diptych
