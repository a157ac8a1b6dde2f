// Chooses experts for each row, gathers the rows of each expert, and computes its two products of them at once.

#include "mixture.h"

#include <numeric>

namespace diptych {
namespace {

// The experts with the highest scores, of equals the first, and their weights. NaN is taken for the lowest score.
void choose(const Mixture& m, const float* scores, int32_t* experts, float* weights) {
  std::vector<float> left(scores, scores + m.experts);
  for (float& score : left)
    if (!(score == score)) score = -1e30f;
  const float largest = *std::max_element(left.begin(), left.end());
  float sum = 0, chosen = 0;
  for (float score : left) sum += std::exp(score - largest);
  for (int64_t j = 0; j < m.top; ++j) {
    const auto best = std::max_element(left.begin(), left.end());
    experts[j] = static_cast<int32_t>(best - left.begin());
    weights[j] = std::exp(*best - largest);
    chosen += weights[j];
    *best = -INFINITY;
  }
  for (int64_t j = 0; j < m.top; ++j) weights[j] /= m.normalized ? chosen : sum;
}

void multiply(Product p, const void* a, void* out, int64_t rows) {
  p.a = a, p.images = p.height = 1, p.width = rows;
  if (p.inverse) p.bytes = static_cast<uint8_t*>(out);
  else p.floats = static_cast<float*>(out);
  product(p);
}

}  // namespace

void mixture(const Mixture& m) {
  const int64_t count = m.rows * m.top, row = m.channels * m.size;
  std::vector<int32_t> experts(count);
  std::vector<float> weights(count);
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < m.rows; ++r)
    choose(m, m.scores + r * m.experts, experts.data() + r * m.top, weights.data() + r * m.top);
  std::vector<int64_t> first(m.experts + 1), place(count);
  for (int32_t expert : experts) ++first[expert + 1];
  std::partial_sum(first.begin(), first.end(), first.begin());
  std::vector<int64_t> next(first.begin(), first.end() - 1);
  for (int64_t i = 0; i < count; ++i) place[i] = next[experts[i]]++;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(m.gathered + place[i] * row, static_cast<const char*>(m.a) + i / m.top * row, row);
  for (int64_t e = 0; e < m.experts; ++e) {
    const int64_t rows = first[e + 1] - first[e];
    if (!rows) continue;
    char* hidden = m.hidden + first[e] * m.inner * m.size;
    multiply(m.gated[e], m.gathered + first[e] * row, hidden, rows);
    multiply(m.down[e], hidden, m.results + first[e] * m.channels, rows);
  }
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < m.rows; ++r)
    for (int64_t c = 0; c < m.channels; c += LANES) {
      const Mask mask = lanes(m.channels - c);
      Vec y = zero();
      for (int64_t j = r * m.top; j < (r + 1) * m.top; ++j)
        y = fma(load(m.results + place[j] * m.channels + c, mask), all(weights[j]), y);
      save(m.out + r * m.channels + c, y + load(m.residual + r * m.channels + c, mask), mask);
    }
}

}  // namespace diptych
