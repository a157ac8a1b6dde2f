// Computes RMSNorm, rotary position embeddings, and attention over a paged KV cache, for language models.
// A row's bits depend on its own sequence alone: neither on other rows nor on which pages hold its tokens.

#include "tokens.h"

#include "rotary.h"

namespace diptych {
namespace {

constexpr int64_t PAGE = LANES;  // tokens: a vector holds one channel of a page's keys

// Reads and writes a page's values, sixteen at a time.
struct Floats {
  using Element = float;
  static Vec read(const float* from) { return load(from); }
};

struct Bytes {
  using Element = int8_t;
  static Vec read(const int8_t* from) { return load(from); }
};

// Writes one head of one token into its page; its channels are `apart` elements apart.
void keep(const float* x, float* page, float*, int64_t d, int64_t apart) {
  for (int64_t c = 0; c < d; ++c) page[c * apart] = x[c];
}

void keep(const float* x, int8_t* page, float* scale, int64_t d, int64_t apart) {
  float largest = 0;
  for (int64_t c = 0; c < d; ++c) largest = std::max(largest, std::fabs(x[c]));
  *scale = largest > 0 ? largest / 127.0f : 1.0f;
  for (int64_t c = 0; c < d; ++c) page[c * apart] = static_cast<int8_t>(std::nearbyint(x[c] / *scale));
}

template <class T>
void rotate_row(const Rotate& r, int64_t m) {
  const Paged& p = r.at;
  const int64_t position = p.positions[m], place = position % PAGE;
  const int64_t page = p.table[p.sequences[m] * p.table_stride + position / PAGE];
  const float* angles = r.angles + position * p.d;
  float* q = r.qkv + m * (p.heads + 2 * p.kv_heads) * p.d;
  float *k = q + p.heads * p.d, *v = k + p.kv_heads * p.d;
  turn_heads<false>(q, r.q_norm, r.eps, angles, p.heads, p.d);
  turn_heads<false>(k, r.k_norm, r.eps, angles, p.kv_heads, p.d);
  for (int64_t h = 0; h < p.kv_heads; ++h) {
    const int64_t head = page * p.kv_heads + h, token = head * PAGE + place;
    float* scales[2] = {p.key_scales ? p.key_scales + token : nullptr, p.key_scales ? p.value_scales + token : nullptr};
    keep(k + h * p.d, static_cast<T*>(p.keys) + head * p.d * PAGE + place, scales[0], p.d, PAGE);
    keep(v + h * p.d, static_cast<T*>(p.values) + token * p.d, scales[1], p.d, 1);
  }
}

// Computes scores[head, key] of HEADS queries that share keys, one page of keys at a time. Those of the first `before`
// keys, which are in the first page and behind the window, are -infinity.
template <class Kind, int HEADS>
void score(const PagedAttention& a, const float* q, const int32_t* pages, int64_t kv_head, int64_t before, int64_t count,
           float* scores, int64_t padded, float* largest) {
  const Paged& p = a.at;
  const Vec scale = all(a.scale);
  Vec top[HEADS];
  for (int h = 0; h < HEADS; ++h) top[h] = all(-INFINITY);
  for (int64_t first = 0; first < count; first += PAGE) {
    const int64_t head = pages[first / PAGE] * p.kv_heads + kv_head;
    const auto* keys = static_cast<const typename Kind::Element*>(p.keys) + head * p.d * PAGE;
    Vec even[HEADS], odd[HEADS];  // two sums per head break the chain of dependent additions
    for (int h = 0; h < HEADS; ++h) even[h] = odd[h] = zero();
    for (int64_t c = 0; c < p.d; c += 2) {
      const Vec k0 = Kind::read(keys + c * PAGE), k1 = Kind::read(keys + (c + 1) * PAGE);
      for (int h = 0; h < HEADS; ++h) {
        even[h] = fma(all(q[h * p.d + c]), k0, even[h]);
        odd[h] = fma(all(q[h * p.d + c + 1]), k1, odd[h]);
      }
    }
    const Mask mask = lanes(count - first);
    const Vec factor = p.key_scales ? scale * load(p.key_scales + head * PAGE) : scale;
    for (int h = 0; h < HEADS; ++h) {
      Vec s = (even[h] + odd[h]) * factor;
      if (a.cap > 0) s = tanh(s / all(a.cap)) * all(a.cap);
      save(scores + h * padded + first, s);
      if (first < before) {
        std::fill_n(scores + h * padded, before, -INFINITY);
        s = load(scores + h * padded);
      }
      top[h] = max(top[h], s, mask);
    }
  }
  for (int h = 0; h < HEADS; ++h) largest[h] = greatest(top[h]);
}

template <class Kind, int HEADS>
void attend(const PagedAttention& a, int64_t m, int64_t first_head, std::vector<float>& scores) {
  const Paged& p = a.at;
  const int64_t tokens = p.positions[m] + 1, begin = a.window ? std::max<int64_t>(0, tokens - a.window) : 0;
  const int64_t page = begin / PAGE, before = begin % PAGE, count = tokens - page * PAGE;  // from the window's first page
  const int64_t padded = (count + PAGE - 1) / PAGE * PAGE, kv_head = first_head / (p.heads / p.kv_heads);
  const int32_t* pages = p.table + p.sequences[m] * p.table_stride + page;
  if (scores.size() < static_cast<size_t>(HEADS * padded)) scores.resize(HEADS * padded);
  float share[HEADS];
  const float* q = a.q + m * a.q_stride + first_head * p.d;
  score<Kind, HEADS>(a, q, pages, kv_head, before, count, scores.data(), padded, share);
  for (int h = 0; h < HEADS; ++h) share[h] = soften(scores.data() + h * padded, share[h], count);
  if (p.value_scales)  // folds a token's scale into its weight
    for (int64_t first = 0; first < count; first += PAGE) {
      const int64_t head = pages[first / PAGE] * p.kv_heads + kv_head;
      const Vec factor = load(p.value_scales + head * PAGE);
      for (int h = 0; h < HEADS; ++h) {
        float* s = scores.data() + h * padded + first;
        save(s, load(s) * factor);
      }
    }
  for (int64_t c = 0; c < p.d; c += LANES) {
    Vec sums[HEADS];
    for (int h = 0; h < HEADS; ++h) sums[h] = zero();
    for (int64_t first = 0; first < count; first += PAGE) {
      const int64_t head = pages[first / PAGE] * p.kv_heads + kv_head, left = std::min(PAGE, count - first);
      const int64_t skip = first < before ? before : 0;
      const auto* v = static_cast<const typename Kind::Element*>(p.values) + (head * PAGE + skip) * p.d + c;
      for (int64_t s = skip; s < left; ++s, v += p.d) {
        const Vec value = Kind::read(v);
        for (int h = 0; h < HEADS; ++h)
          sums[h] = fma(all(scores[h * padded + first + s]), value, sums[h]);
      }
    }
    for (int h = 0; h < HEADS; ++h) {
      const int64_t channel = (first_head + h) * p.d + c;
      store(sums[h] * all(share[h]), a.inverse, a.bytes, a.floats,
            m * p.heads * p.d + channel, channel, ALL);
    }
  }
}

// Processes query heads that share keys four, two or one at a time; the split depends on the model alone.
template <class Kind>
void attend_all(const PagedAttention& a) {
  const Paged& p = a.at;
  const int64_t group = p.heads / p.kv_heads;
#pragma omp parallel
  {
    std::vector<float> scores;
#pragma omp for schedule(dynamic, 4)
    for (int64_t job = 0; job < p.rows * p.kv_heads; ++job) {
      const int64_t m = job / p.kv_heads, start = job % p.kv_heads * group;
      int64_t h = 0;
      if constexpr (HEADS_AT_ONCE == 4)
        for (; h + 4 <= group; h += 4) attend<Kind, 4>(a, m, start + h, scores);
      for (; h + 2 <= group; h += 2) attend<Kind, 2>(a, m, start + h, scores);
      for (; h < group; ++h) attend<Kind, 1>(a, m, start + h, scores);
    }
  }
}

}  // namespace

void rms_norm(const RmsNorm& r) {
#pragma omp parallel for schedule(static)
  for (int64_t m = 0; m < r.rows; ++m) {
    const float* row = r.x + m * r.channels;
    Vec square = zero();
    for (int64_t c = 0; c < r.channels; c += LANES) {
      const Vec x = load(row + c, lanes(r.channels - c));
      square = fma(x, x, square);
    }
    const Vec rms = all(1.0f / std::sqrt(total(square) / r.channels + r.eps));
    const float *scale = r.after.scale_of(m), *residual = r.after.residual_of(m, r.channels);
    for (int64_t c = 0; c < r.channels; c += LANES) {
      const Mask mask = lanes(r.channels - c);
      const Vec x = load(row + c, mask) * rms;
      store(modulated(x * load(r.weight + c, mask), scale, residual, c, mask),
            r.inverse, r.bytes, r.floats, m * r.channels + c, c, mask);
    }
  }
}

void rotate(const Rotate& r) {
#pragma omp parallel for schedule(static)
  for (int64_t m = 0; m < r.at.rows; ++m) r.at.key_scales ? rotate_row<int8_t>(r, m) : rotate_row<float>(r, m);
}

void paged_attention(const PagedAttention& a) { a.at.key_scales ? attend_all<Bytes>(a) : attend_all<Floats>(a); }

}  // namespace diptych
