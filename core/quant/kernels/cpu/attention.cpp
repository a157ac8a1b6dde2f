// Attention of few tokens, six queries at a time: all scores of a query are held, so it is for pictures of a thousand
// tokens and not for long texts. Knows queries, keys and values; knows nothing of where they come from.

#include "attention.h"

namespace diptych {
namespace {

constexpr int QUERIES = 6;

// scores[query, key] of one block of queries, 32 keys at a time, and the largest of each query.
void score(const float* const* rows, const float* transposed, float* scores, float* largest, int64_t d, int64_t keys,
           int64_t padded) {
  __m512 top[QUERIES];
  for (int i = 0; i < QUERIES; ++i) top[i] = _mm512_set1_ps(-INFINITY);
  for (int64_t s = 0; s < padded; s += 2 * LANES) {
    __m512 x[QUERIES], y[QUERIES];
    for (int i = 0; i < QUERIES; ++i) x[i] = y[i] = _mm512_setzero_ps();
    for (int64_t c = 0; c < d; ++c) {
      const float* column = transposed + c * padded + s;
      const __m512 k0 = _mm512_loadu_ps(column), k1 = _mm512_loadu_ps(column + LANES);
      for (int i = 0; i < QUERIES; ++i) {
        const __m512 q = _mm512_set1_ps(rows[i][c]);
        x[i] = _mm512_fmadd_ps(q, k0, x[i]);
        y[i] = _mm512_fmadd_ps(q, k1, y[i]);
      }
    }
    const __mmask16 m0 = lanes(keys - s), m1 = lanes(keys - s - LANES);
    for (int i = 0; i < QUERIES; ++i) {
      _mm512_storeu_ps(scores + i * padded + s, x[i]);
      _mm512_storeu_ps(scores + i * padded + s + LANES, y[i]);
      top[i] = _mm512_mask_max_ps(top[i], m0, top[i], x[i]);
      top[i] = _mm512_mask_max_ps(top[i], m1, top[i], y[i]);
    }
  }
  for (int i = 0; i < QUERIES; ++i) largest[i] = _mm512_reduce_max_ps(top[i]);
}

// exp(score − largest) in place; returns 1 / sum.
float soften(float* scores, float largest, int64_t keys, int64_t padded) {
  const __m512 most = _mm512_set1_ps(largest);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t s = 0; s < padded; s += LANES) {
    const __mmask16 mask = lanes(keys - s);
    const __m512 e = _mm512_maskz_mov_ps(mask, exp_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + s), most)));
    _mm512_storeu_ps(scores + s, e);
    sum = _mm512_add_ps(sum, e);
  }
  return 1.0f / _mm512_reduce_add_ps(sum);
}

}  // namespace

void attention(const Attention& a) {
  const int64_t padded = (a.keys + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
#pragma omp parallel
  {
    std::vector<float> transposed(a.d * padded, 0.0f), scores(QUERIES * padded);
#pragma omp for schedule(static)
    for (int64_t job = 0; job < a.images * a.heads; ++job) {
      const int64_t image = job / a.heads, head = job % a.heads;
      const float* k = a.k + image * a.keys * a.k_stride + head * a.d;
      const float* v = a.v + image * a.keys * a.v_stride + head * a.d;
      for (int64_t s = 0; s < a.keys; ++s)
        for (int64_t c = 0; c < a.d; ++c) transposed[c * padded + s] = k[s * a.k_stride + c] * a.scale;
      for (int64_t first = 0; first < a.tokens; first += QUERIES) {
        const int count = static_cast<int>(std::min<int64_t>(QUERIES, a.tokens - first));
        const float* rows[QUERIES];
        for (int i = 0; i < QUERIES; ++i)
          rows[i] = a.q + (image * a.tokens + first + std::min(i, count - 1)) * a.q_stride + head * a.d;
        float share[QUERIES];
        score(rows, transposed.data(), scores.data(), share, a.d, a.keys, padded);
        for (int i = 0; i < QUERIES; ++i) share[i] = soften(scores.data() + i * padded, share[i], a.keys, padded);
        for (int64_t c = 0; c < a.d; c += LANES) {
          __m512 sums[QUERIES];
          for (int i = 0; i < QUERIES; ++i) sums[i] = _mm512_setzero_ps();
          for (int64_t s = 0; s < a.keys; ++s) {
            const __m512 value = _mm512_loadu_ps(v + s * a.v_stride + c);
            for (int i = 0; i < QUERIES; ++i)
              sums[i] = _mm512_fmadd_ps(_mm512_set1_ps(scores[i * padded + s]), value, sums[i]);
          }
          for (int i = 0; i < count; ++i) {
            const int64_t channel = head * a.d + c, at = (image * a.tokens + first + i) * a.heads * a.d + channel;
            store(_mm512_mul_ps(sums[i], _mm512_set1_ps(share[i])), a.inverse, a.bytes, a.floats, at, channel, 0xffff);
          }
        }
      }
    }
  }
}

}  // namespace diptych
