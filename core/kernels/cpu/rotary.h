// Declares rotary position embeddings of queries and keys outside of a KV cache, and defines what rotates one head.
// calls.py mirrors the structure: change both together.

#pragma once

#include "vector.h"

namespace diptych {

// Applies rotary embeddings (Su et al., 2021) in place to q [rows, heads · d] and k [rows, kv_heads · d], whose rows are
// q_stride and k_stride floats apart. Row m reads row positions[m] of `angles`, or row m without positions: d/2 cosines,
// then d/2 sines. Channel c of a head turns with channel c + d/2, as in transformers; with `interleaved` channel 2c turns
// with 2c + 1, as in complex numbers. Given q_norm and k_norm [d], each head first passes an RMSNorm. d is a multiple of 16.
struct RotateHeads {
  float *q, *k;
  const float *q_norm, *k_norm, *angles;
  const int32_t* positions;
  int64_t rows, heads, kv_heads, d, q_stride, k_stride;
  float eps;
  int32_t interleaved;
};

void rotate_heads(const RotateHeads& r);

inline void norm_head(float* x, const float* weight, float eps, int64_t d) {
  Vec square = zero();
  for (int64_t c = 0; c < d; c += LANES) {
    const Vec v = load(x + c);
    square = fma(v, v, square);
  }
  const Vec rms = all(1.0f / std::sqrt(total(square) / d + eps));
  for (int64_t c = 0; c < d; c += LANES) save(x + c, load(x + c) * rms * load(weight + c));
}

template <bool INTERLEAVED>
inline void turn(float* x, const float* angles, int64_t d) {
  const int64_t half = d / 2;
  for (int64_t c = 0; c < half; ++c) {
    const int64_t first = INTERLEAVED ? 2 * c : c, second = INTERLEAVED ? first + 1 : c + half;
    const float a = x[first], b = x[second], cosine = angles[c], sine = angles[c + half];
    x[first] = a * cosine - b * sine;
    x[second] = b * cosine + a * sine;
  }
}

// Normalizes, if `norm` is given, and rotates each head of a row.
template <bool INTERLEAVED>
inline void turn_heads(float* x, const float* norm, float eps, const float* angles, int64_t heads, int64_t d) {
  for (int64_t h = 0; h < heads; ++h, x += d) {
    if (norm) norm_head(x, norm, eps, d);
    turn<INTERLEAVED>(x, angles, d);
  }
}

}  // namespace diptych
