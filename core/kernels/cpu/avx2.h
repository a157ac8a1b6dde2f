// Defines a vector of sixteen floats in two AVX2 registers and the operand types of the matrix product.
// avx512.h defines the same names for AVX-512.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace diptych {

constexpr const char* INSTRUCTIONS = "avx2";
constexpr int LANES = 16;  // floats per vector

struct Vec {
  __m256 lo, hi;
};

// Number of active lanes, counted from the first. Masked stores are slow on many AVX2 processors, so partial vectors go
// through a buffer in memory.
struct Mask {
  int count;
};
constexpr Mask ALL{LANES};

// Activates the first `left` lanes; none if `left` is not positive.
inline Mask lanes(int64_t left) { return {left >= LANES ? LANES : left <= 0 ? 0 : static_cast<int>(left)}; }

inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }

inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline Vec load(const float* from, Mask mask) {
  if (mask.count == LANES) return load(from);
  float held[LANES] = {};
  std::memcpy(held, from, mask.count * sizeof(float));
  return load(held);
}
inline Vec load(const int8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
inline void save(float* to, Vec v) {
  _mm256_storeu_ps(to, v.lo);
  _mm256_storeu_ps(to + 8, v.hi);
}
inline void save(float* to, Vec v, Mask mask) {
  if (mask.count == LANES) return save(to, v);
  float held[LANES];
  save(held, v);
  std::memcpy(to, held, mask.count * sizeof(float));
}

namespace two {

inline Vec within(Mask mask) {  // all bits set in active lanes
  const __m256i count = _mm256_set1_epi32(mask.count), first = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(count, first)),
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, _mm256_add_epi32(first, _mm256_set1_epi32(8))))};
}

inline __m256 times_power(__m256 v, __m256 n) {
  const __m256i shifted = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), shifted));
}

inline __m256 negate(__m256 v, __m256 of) {  // flips signs where `of` is negative
  return _mm256_xor_ps(v, _mm256_and_ps(of, _mm256_set1_ps(-0.0f)));
}

}  // namespace two

inline Vec masked(Vec v, Mask mask) {  // zero in inactive lanes
  const Vec bits = two::within(mask);
  return {_mm256_and_ps(v.lo, bits.lo), _mm256_and_ps(v.hi, bits.hi)};
}

inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline Vec fnma(Vec a, Vec b, Vec c) {  // c − a · b
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
// If the first argument is NaN, these return the second.
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec max(Vec a, Vec b, Mask mask) {  // a in inactive lanes
  const Vec bits = two::within(mask), most = max(a, b);
  return {_mm256_blendv_ps(a.lo, most.lo, bits.lo), _mm256_blendv_ps(a.hi, most.hi, bits.hi)};
}
inline Vec abs(Vec v) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, v.lo), _mm256_andnot_ps(sign, v.hi)};
}
inline Vec nearest(Vec v) {
  constexpr int MODE = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(v.lo, MODE), _mm256_round_ps(v.hi, MODE)};
}
inline Vec times_power(Vec v, Vec n) {  // v · 2ⁿ for v near 1 and integer n in [-126, 127]
  return {two::times_power(v.lo, n.lo), two::times_power(v.hi, n.hi)};
}
inline Vec negate_where_negative(Vec v, Vec of) { return {two::negate(v.lo, of.lo), two::negate(v.hi, of.hi)}; }
inline float total(Vec v) {
  const __m256 eight = _mm256_add_ps(v.lo, v.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 pair = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
inline float greatest(Vec v) {
  const __m256 eight = _mm256_max_ps(v.lo, v.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 pair = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}

// Converts integers in [-127, 127] to bytes with a zero point of 128.
inline void save_bytes(uint8_t* to, Vec v, Mask mask) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(v.lo), _mm256_cvtps_epi32(v.hi));  // rounds half to even
  const __m256i ordered = _mm256_add_epi16(_mm256_permute4x64_epi64(words, 0xd8), _mm256_set1_epi16(128));
  const __m128i made = _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  if (mask.count == LANES) return _mm_storeu_si128(reinterpret_cast<__m128i*>(to), made);
  uint8_t held[LANES];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(held), made);
  std::memcpy(to, held, mask.count);
}

// The three operand types: each loads sixteen columns of a weight and broadcasts a row's next inputs.
// `Stored` is the type of inputs in memory, `Element` the type that `input` reads.
struct Int8 {  // vpmaddubsw would saturate on full-range products, so both operands are widened to 16 bits
  using Stored = uint8_t;
  using Element = uint16_t;
  struct Sum {
    __m256i lo, hi;
  };
  static constexpr int DEPTH = 2, BYTES = 32;  // inputs per step; bytes per step of sixteen columns
  static Sum start(const int32_t* offset, int64_t n) {
    const auto* from = reinterpret_cast<const __m256i*>(offset + n);
    return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
  }
  static Sum weight(const void* b) {
    const auto* from = static_cast<const __m128i*>(b);
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(from)), _mm256_cvtepi8_epi16(_mm_loadu_si128(from + 1))};
  }
  static __m256i input(const uint16_t* a) {
    int32_t pair;
    std::memcpy(&pair, a, 4);
    return _mm256_set1_epi32(pair);
  }
  static Sum add(Sum s, __m256i a, Sum b) {
    return {_mm256_add_epi32(s.lo, _mm256_madd_epi16(a, b.lo)), _mm256_add_epi32(s.hi, _mm256_madd_epi16(a, b.hi))};
  }
  static Vec value(Sum s) { return {_mm256_cvtepi32_ps(s.lo), _mm256_cvtepi32_ps(s.hi)}; }
};

struct Fp32 {
  using Stored = float;
  using Element = float;
  using Sum = Vec;
  static constexpr int DEPTH = 1, BYTES = 64;
  static Sum start(const int32_t*, int64_t) { return zero(); }
  static Vec weight(const void* b) { return load(static_cast<const float*>(b)); }
  static __m256 input(const float* a) { return _mm256_set1_ps(*a); }
  static Sum add(Sum s, __m256 a, Vec b) { return {_mm256_fmadd_ps(a, b.lo, s.lo), _mm256_fmadd_ps(a, b.hi, s.hi)}; }
  static Vec value(Sum s) { return s; }
};

struct Bf16 : Fp32 {  // weights only; inputs are fp32
  static constexpr int BYTES = 32;
  static Vec weight(const void* b) {
    const auto* from = static_cast<const __m128i*>(b);
    return {wide(_mm_loadu_si128(from)), wide(_mm_loadu_si128(from + 1))};
  }
  static __m256 wide(__m128i halves) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
};

// Tile size for 16 registers: maximum width in vectors of columns, and rows for a given width.
constexpr int WIDEST = 1;
constexpr int tile_rows(int) { return 6; }
constexpr int KEYS_AT_ONCE = 1;   // vectors of keys per block of six queries
constexpr int HEADS_AT_ONCE = 2;  // query heads per block that share keys

}  // namespace diptych
