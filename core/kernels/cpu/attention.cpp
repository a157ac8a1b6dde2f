// Computes attention, six queries at a time, over short sequences: it keeps all scores of a query, which suits images of
// about a thousand tokens and not long texts.

#include "attention.h"

namespace diptych {
namespace {

constexpr int QUERIES = 6;
constexpr int STEP = KEYS_AT_ONCE * LANES;

// The keys of one image and head: `count` of them, transposed to [d, padded] and scaled.
struct Keys {
  const float* transposed;
  int64_t count, padded;
};

// Number of keys that query i of a block from `first` attends to.
template <bool CAUSAL>
int64_t reach(const Keys& keys, int64_t first, int i) {
  return CAUSAL ? std::min(first + i + 1, keys.count) : keys.count;
}

// Computes scores[query, key] of one block of queries, STEP keys at a time, and each query's largest score.
template <bool CAUSAL>
void score(const float* const* rows, const Keys& keys, int64_t first, float* scores, float* largest, int64_t d) {
  const int64_t most = reach<CAUSAL>(keys, first, QUERIES - 1), padded = keys.padded;
  Vec top[QUERIES];
  for (int i = 0; i < QUERIES; ++i) top[i] = all(-INFINITY);
  for (int64_t s = 0; s < most; s += STEP) {
    Vec sums[QUERIES][KEYS_AT_ONCE];
    for (auto& row : sums)
      for (Vec& sum : row) sum = zero();
    for (int64_t c = 0; c < d; ++c) {
      Vec k[KEYS_AT_ONCE];
      for (int j = 0; j < KEYS_AT_ONCE; ++j) k[j] = load(keys.transposed + c * padded + s + j * LANES);
      for (int i = 0; i < QUERIES; ++i) {
        const Vec q = all(rows[i][c]);
        for (int j = 0; j < KEYS_AT_ONCE; ++j) sums[i][j] = fma(q, k[j], sums[i][j]);
      }
    }
    for (int j = 0; j < KEYS_AT_ONCE; ++j) {
      const int64_t at = s + j * LANES;
      for (int i = 0; i < QUERIES; ++i) {
        save(scores + i * padded + at, sums[i][j]);
        top[i] = max(top[i], sums[i][j], lanes(reach<CAUSAL>(keys, first, i) - at));
      }
    }
  }
  for (int i = 0; i < QUERIES; ++i) largest[i] = greatest(top[i]);
}

// Computes one block of queries of one image and head.
template <bool CAUSAL>
void attend(const Attention& a, const Keys& keys, const float* v, int64_t image, int64_t head, int64_t first,
            float* scores) {
  const int count = static_cast<int>(std::min<int64_t>(QUERIES, a.tokens - first));
  const float* rows[QUERIES];
  for (int i = 0; i < QUERIES; ++i)
    rows[i] = a.q + (image * a.tokens + first + std::min(i, count - 1)) * a.q_stride + head * a.d;
  float share[QUERIES];
  score<CAUSAL>(rows, keys, first, scores, share, a.d);
  for (int i = 0; i < QUERIES; ++i)
    share[i] = soften(scores + i * keys.padded, share[i], reach<CAUSAL>(keys, first, i));
  const int64_t common = reach<CAUSAL>(keys, first, 0), most = reach<CAUSAL>(keys, first, QUERIES - 1);
  for (int64_t c = 0; c < a.d; c += LANES) {
    Vec sums[QUERIES];
    for (int i = 0; i < QUERIES; ++i) sums[i] = zero();
    for (int64_t s = 0; s < common; ++s) {
      const Vec value = load(v + s * a.v_stride + c);
      for (int i = 0; i < QUERIES; ++i) sums[i] = fma(all(scores[i * keys.padded + s]), value, sums[i]);
    }
    for (int64_t s = common; s < most; ++s) {  // keys behind the block's first query
      const Vec value = load(v + s * a.v_stride + c);
      for (int i = 0; i < QUERIES; ++i)
        if (s < reach<CAUSAL>(keys, first, i)) sums[i] = fma(all(scores[i * keys.padded + s]), value, sums[i]);
    }
    for (int i = 0; i < count; ++i) {
      const int64_t channel = head * a.d + c, at = (image * a.tokens + first + i) * a.heads * a.d + channel;
      store(sums[i] * all(share[i]), a.inverse, a.bytes, a.floats, at, channel, ALL);
    }
  }
}

}  // namespace

void attention(const Attention& a) {
  const int64_t widest = (a.keys + STEP - 1) / STEP * STEP;
#pragma omp parallel
  {
    std::vector<float> transposed(a.d * widest, 0.0f), scores(QUERIES * widest);
#pragma omp for schedule(static)
    for (int64_t job = 0; job < a.images * a.heads; ++job) {
      const int64_t image = job / a.heads, head = job % a.heads, kv_head = head / (a.heads / a.kv_heads);
      const int64_t count = a.lengths ? std::clamp<int64_t>(a.lengths[image], 1, a.keys) : a.keys;
      const Keys keys{transposed.data(), count, (count + STEP - 1) / STEP * STEP};
      const float* k = a.k + image * a.keys * a.k_stride + kv_head * a.d;
      const float* v = a.v + image * a.keys * a.v_stride + kv_head * a.d;
      for (int64_t s = 0; s < count; ++s)
        for (int64_t c = 0; c < a.d; ++c) transposed[c * keys.padded + s] = k[s * a.k_stride + c] * a.scale;
      for (int64_t first = 0; first < a.tokens; first += QUERIES)
        a.causal ? attend<true>(a, keys, v, image, head, first, scores.data())
                 : attend<false>(a, keys, v, image, head, first, scores.data());
    }
  }
}

}  // namespace diptych
