// Computes attention, six queries at a time, over short sequences: it keeps all scores of a query, which suits images of
// about a thousand tokens and not long texts.

#include "attention.h"

namespace diptych {
namespace {

constexpr int QUERIES = 6;
constexpr int STEP = KEYS_AT_ONCE * LANES;

// Computes scores[query, key] of one block of queries, STEP keys at a time, and each query's largest score.
void score(const float* const* rows, const float* transposed, float* scores, float* largest, int64_t d, int64_t keys,
           int64_t padded) {
  Vec top[QUERIES];
  for (int i = 0; i < QUERIES; ++i) top[i] = all(-INFINITY);
  for (int64_t s = 0; s < padded; s += STEP) {
    Vec sums[QUERIES][KEYS_AT_ONCE];
    for (auto& row : sums)
      for (Vec& sum : row) sum = zero();
    for (int64_t c = 0; c < d; ++c) {
      Vec k[KEYS_AT_ONCE];
      for (int j = 0; j < KEYS_AT_ONCE; ++j) k[j] = load(transposed + c * padded + s + j * LANES);
      for (int i = 0; i < QUERIES; ++i) {
        const Vec q = all(rows[i][c]);
        for (int j = 0; j < KEYS_AT_ONCE; ++j) sums[i][j] = fma(q, k[j], sums[i][j]);
      }
    }
    for (int j = 0; j < KEYS_AT_ONCE; ++j) {
      const int64_t at = s + j * LANES;
      for (int i = 0; i < QUERIES; ++i) {
        save(scores + i * padded + at, sums[i][j]);
        top[i] = max(top[i], sums[i][j], lanes(keys - at));
      }
    }
  }
  for (int i = 0; i < QUERIES; ++i) largest[i] = greatest(top[i]);
}

// exp(score − largest) in place; returns 1 / sum.
float soften(float* scores, float largest, int64_t keys, int64_t padded) {
  const Vec most = all(largest);
  Vec sum = zero();
  for (int64_t s = 0; s < padded; s += LANES) {
    const Mask mask = lanes(keys - s);
    const Vec e = masked(exp(load(scores + s) - most), mask);
    save(scores + s, e);
    sum = sum + e;
  }
  return 1.0f / total(sum);
}

}  // namespace

void attention(const Attention& a) {
  const int64_t padded = (a.keys + STEP - 1) / STEP * STEP;
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
          Vec sums[QUERIES];
          for (int i = 0; i < QUERIES; ++i) sums[i] = zero();
          for (int64_t s = 0; s < a.keys; ++s) {
            const Vec value = load(v + s * a.v_stride + c);
            for (int i = 0; i < QUERIES; ++i)
              sums[i] = fma(all(scores[i * padded + s]), value, sums[i]);
          }
          for (int i = 0; i < count; ++i) {
            const int64_t channel = head * a.d + c, at = (image * a.tokens + first + i) * a.heads * a.d + channel;
            store(sums[i] * all(share[i]), a.inverse, a.bytes, a.floats, at, channel, ALL);
          }
        }
      }
    }
  }
}

}  // namespace diptych
