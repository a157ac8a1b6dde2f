// What language models need beside products: RMSNorm, rotary positions, and attention over pages of keys and values.
// A row's bits depend on its own sequence alone: not on the other rows, nor on which pages its tokens lie in.
//
// Knows rows, positions and pages; knows nothing of who owns a page.

#include "tokens.h"

namespace diptych {
namespace {

constexpr int64_t PAGE = LANES;  // tokens: a vector holds one channel of a page's keys

// How a page's numbers are read and written, sixteen at a time.
struct Floats {
  using Element = float;
  static __m512 read(const float* from) { return _mm512_loadu_ps(from); }
};

struct Bytes {
  using Element = int8_t;
  static __m512 read(const int8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
};

// One head of one token into its place of a page, `apart` elements from channel to channel.
void keep(const float* x, float* page, float*, int64_t d, int64_t apart) {
  for (int64_t c = 0; c < d; ++c) page[c * apart] = x[c];
}

void keep(const float* x, int8_t* page, float* scale, int64_t d, int64_t apart) {
  float largest = 0;
  for (int64_t c = 0; c < d; ++c) largest = std::max(largest, std::fabs(x[c]));
  *scale = largest > 0 ? largest / 127.0f : 1.0f;
  for (int64_t c = 0; c < d; ++c) page[c * apart] = static_cast<int8_t>(std::nearbyint(x[c] / *scale));
}

void turn(float* x, const float* angles, int64_t d) {
  const int64_t half = d / 2;
  for (int64_t c = 0; c < half; ++c) {
    const float a = x[c], b = x[c + half], cosine = angles[c], sine = angles[c + half];
    x[c] = a * cosine - b * sine;
    x[c + half] = b * cosine + a * sine;
  }
}

template <class T>
void rotate_row(const Rotate& r, int64_t m) {
  const Paged& p = r.at;
  const int64_t position = p.positions[m], place = position % PAGE;
  const int64_t page = p.table[p.sequences[m] * p.table_stride + position / PAGE];
  const float* angles = r.angles + position * p.d;
  float* q = r.qkv + m * (p.heads + 2 * p.kv_heads) * p.d;
  float *k = q + p.heads * p.d, *v = k + p.kv_heads * p.d;
  for (int64_t h = 0; h < p.heads; ++h) turn(q + h * p.d, angles, p.d);
  for (int64_t h = 0; h < p.kv_heads; ++h) {
    turn(k + h * p.d, angles, p.d);
    const int64_t head = page * p.kv_heads + h, token = head * PAGE + place;
    float* scales[2] = {p.key_scales ? p.key_scales + token : nullptr, p.key_scales ? p.value_scales + token : nullptr};
    keep(k + h * p.d, static_cast<T*>(p.keys) + head * p.d * PAGE + place, scales[0], p.d, PAGE);
    keep(v + h * p.d, static_cast<T*>(p.values) + token * p.d, scales[1], p.d, 1);
  }
}

// scores[head, key] of HEADS queries that read the same keys, a page of keys at a time.
template <class Kind, int HEADS>
void score(const PagedAttention& a, const float* q, const int32_t* pages, int64_t kv_head, int64_t count, float* scores,
           int64_t padded, float* largest) {
  const Paged& p = a.at;
  const __m512 scale = _mm512_set1_ps(a.scale);
  __m512 top[HEADS];
  for (int h = 0; h < HEADS; ++h) top[h] = _mm512_set1_ps(-INFINITY);
  for (int64_t first = 0; first < count; first += PAGE) {
    const int64_t head = pages[first / PAGE] * p.kv_heads + kv_head;
    const auto* keys = static_cast<const typename Kind::Element*>(p.keys) + head * p.d * PAGE;
    __m512 even[HEADS], odd[HEADS];  // two sums each, or every addition would wait for the one before
    for (int h = 0; h < HEADS; ++h) even[h] = odd[h] = _mm512_setzero_ps();
    for (int64_t c = 0; c < p.d; c += 2) {
      const __m512 k0 = Kind::read(keys + c * PAGE), k1 = Kind::read(keys + (c + 1) * PAGE);
      for (int h = 0; h < HEADS; ++h) {
        even[h] = _mm512_fmadd_ps(_mm512_set1_ps(q[h * p.d + c]), k0, even[h]);
        odd[h] = _mm512_fmadd_ps(_mm512_set1_ps(q[h * p.d + c + 1]), k1, odd[h]);
      }
    }
    const __mmask16 mask = lanes(count - first);
    const __m512 factor = p.key_scales ? _mm512_mul_ps(scale, _mm512_loadu_ps(p.key_scales + head * PAGE)) : scale;
    for (int h = 0; h < HEADS; ++h) {
      const __m512 s = _mm512_mul_ps(_mm512_add_ps(even[h], odd[h]), factor);
      _mm512_storeu_ps(scores + h * padded + first, s);
      top[h] = _mm512_mask_max_ps(top[h], mask, top[h], s);
    }
  }
  for (int h = 0; h < HEADS; ++h) largest[h] = _mm512_reduce_max_ps(top[h]);
}

// exp(score − largest) in place; returns 1 / sum.
float soften(float* scores, float largest, int64_t count) {
  const __m512 most = _mm512_set1_ps(largest);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t s = 0; s < count; s += LANES) {
    const __m512 x = _mm512_sub_ps(_mm512_loadu_ps(scores + s), most);
    const __m512 e = _mm512_maskz_mov_ps(lanes(count - s), exp_ps(x));
    _mm512_storeu_ps(scores + s, e);
    sum = _mm512_add_ps(sum, e);
  }
  return 1.0f / _mm512_reduce_add_ps(sum);
}

template <class Kind, int HEADS>
void attend(const PagedAttention& a, int64_t m, int64_t first_head, std::vector<float>& scores) {
  const Paged& p = a.at;
  const int64_t count = p.positions[m] + 1, padded = (count + PAGE - 1) / PAGE * PAGE;
  const int64_t kv_head = first_head / (p.heads / p.kv_heads);
  const int32_t* pages = p.table + p.sequences[m] * p.table_stride;
  if (scores.size() < static_cast<size_t>(HEADS * padded)) scores.resize(HEADS * padded);
  float share[HEADS];
  const float* q = a.q + m * a.q_stride + first_head * p.d;
  score<Kind, HEADS>(a, q, pages, kv_head, count, scores.data(), padded, share);
  for (int h = 0; h < HEADS; ++h) share[h] = soften(scores.data() + h * padded, share[h], count);
  if (p.value_scales)  // a token's scale is taken into its weight
    for (int64_t first = 0; first < count; first += PAGE) {
      const int64_t head = pages[first / PAGE] * p.kv_heads + kv_head;
      const __m512 factor = _mm512_loadu_ps(p.value_scales + head * PAGE);
      for (int h = 0; h < HEADS; ++h) {
        float* s = scores.data() + h * padded + first;
        _mm512_storeu_ps(s, _mm512_mul_ps(_mm512_loadu_ps(s), factor));
      }
    }
  for (int64_t c = 0; c < p.d; c += LANES) {
    __m512 sums[HEADS];
    for (int h = 0; h < HEADS; ++h) sums[h] = _mm512_setzero_ps();
    for (int64_t first = 0; first < count; first += PAGE) {
      const int64_t head = pages[first / PAGE] * p.kv_heads + kv_head, left = std::min(PAGE, count - first);
      const auto* v = static_cast<const typename Kind::Element*>(p.values) + head * PAGE * p.d + c;
      for (int64_t s = 0; s < left; ++s, v += p.d) {
        const __m512 value = Kind::read(v);
        for (int h = 0; h < HEADS; ++h)
          sums[h] = _mm512_fmadd_ps(_mm512_set1_ps(scores[h * padded + first + s]), value, sums[h]);
      }
    }
    for (int h = 0; h < HEADS; ++h) {
      const int64_t channel = (first_head + h) * p.d + c;
      store(_mm512_mul_ps(sums[h], _mm512_set1_ps(share[h])), a.inverse, a.bytes, a.floats,
            m * p.heads * p.d + channel, channel, 0xffff);
    }
  }
}

// Query heads that read the same keys go four, two or one at a time, always the same way for one model.
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
    __m512 square = _mm512_setzero_ps();
    for (int64_t c = 0; c < r.channels; c += LANES) {
      const __m512 x = _mm512_maskz_loadu_ps(lanes(r.channels - c), row + c);
      square = _mm512_fmadd_ps(x, x, square);
    }
    const __m512 rms = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(square) / r.channels + r.eps));
    for (int64_t c = 0; c < r.channels; c += LANES) {
      const __mmask16 mask = lanes(r.channels - c);
      const __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, row + c), rms);
      store(_mm512_mul_ps(x, _mm512_maskz_loadu_ps(mask, r.weight + c)), r.inverse, r.bytes, r.floats,
            m * r.channels + c, c, mask);
    }
  }
}

void rotate(const Rotate& r) {
#pragma omp parallel for schedule(static)
  for (int64_t m = 0; m < r.at.rows; ++m) r.at.key_scales ? rotate_row<int8_t>(r, m) : rotate_row<float>(r, m);
}

void paged_attention(const PagedAttention& a) { a.at.key_scales ? attend_all<Bytes>(a) : attend_all<Floats>(a); }

}  // namespace diptych
