// Normalizations that end in bytes for the INT8 layer behind them, or in floats.
//
// Knows statistics of rows and groups; knows nothing of what the layers behind compute.

#include "norm.h"

namespace diptych {

void quantize(const Quantize& q) {
#pragma omp parallel for schedule(static)
  for (int64_t m = 0; m < q.rows; ++m)
    for (int64_t c = 0; c < q.channels; c += LANES) {
      const __mmask16 mask = lanes(q.channels - c);
      const __m512 v = _mm512_maskz_loadu_ps(mask, q.x + m * q.channels + c);
      store(v, q.inverse, q.bytes, nullptr, m * q.channels + c, c, mask);
    }
}

void layer_norm(const LayerNorm& l) {
#pragma omp parallel for schedule(static)
  for (int64_t m = 0; m < l.rows; ++m) {
    const float* row = l.x + m * l.channels;
    __m512 sum = _mm512_setzero_ps(), square = _mm512_setzero_ps();
    for (int64_t c = 0; c < l.channels; c += LANES)
      sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(lanes(l.channels - c), row + c));
    const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / l.channels);
    for (int64_t c = 0; c < l.channels; c += LANES) {
      const __mmask16 mask = lanes(l.channels - c);
      const __m512 d = _mm512_maskz_sub_ps(mask, _mm512_maskz_loadu_ps(mask, row + c), mean);
      square = _mm512_fmadd_ps(d, d, square);
    }
    const __m512 rstd = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(square) / l.channels + l.eps));
    for (int64_t c = 0; c < l.channels; c += LANES) {
      const __mmask16 mask = lanes(l.channels - c);
      const __m512 v = _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, row + c), mean), rstd);
      store(_mm512_fmadd_ps(v, _mm512_maskz_loadu_ps(mask, l.weight + c), _mm512_maskz_loadu_ps(mask, l.bias + c)),
            l.inverse, l.bytes, l.floats, m * l.channels + c, c, mask);
    }
  }
}

namespace {

constexpr int64_t RUN = 32;  // pixels

// Mean (less the first pixel's value) and sum of squares around it of each channel of one image. Of a run of pixels they
// are taken around its first, and runs are merged as Chan et al. (1979) do: E[x²] − E[x]² would lose digits where the
// mean is large, and sums around one pixel of all would where that one is an outlier.
void channel_sums(const float* x, int64_t pixels, int64_t width, float* means, float* squares) {
  for (int64_t c = 0; c < width; c += LANES) {
    const __mmask16 mask = lanes(width - c);
    const float* p = x + c;
    const __m512 origin = _mm512_maskz_loadu_ps(mask, p);
    __m512 mean = _mm512_setzero_ps(), square = _mm512_setzero_ps();
    for (int64_t first = 0; first < pixels; first += RUN) {
      const int64_t count = std::min(RUN, pixels - first);
      const __m512 around = _mm512_maskz_loadu_ps(mask, p);
      __m512 s = _mm512_setzero_ps(), q = _mm512_setzero_ps();
      for (int64_t i = 0; i < count; ++i, p += width) {
        const __m512 d = _mm512_sub_ps(_mm512_maskz_loadu_ps(mask, p), around);
        s = _mm512_add_ps(s, d);
        q = _mm512_fmadd_ps(d, d, q);
      }
      const __m512 shift = _mm512_mul_ps(s, _mm512_set1_ps(1.0f / count));
      const __m512 apart = _mm512_sub_ps(_mm512_add_ps(_mm512_sub_ps(around, origin), shift), mean);
      const float share = static_cast<float>(count) / (first + count);
      mean = _mm512_fmadd_ps(apart, _mm512_set1_ps(share), mean);
      square = _mm512_add_ps(square, _mm512_fnmadd_ps(shift, s, q));
      square = _mm512_fmadd_ps(_mm512_mul_ps(apart, apart), _mm512_set1_ps(share * first), square);
    }
    _mm512_mask_storeu_ps(means + c, mask, mean);
    _mm512_mask_storeu_ps(squares + c, mask, square);
  }
}

// What the values of one image become, channel by channel: (x − around) · a + b.
struct Affine {
  std::vector<double> means;
  std::vector<float> parts, squares, around, a, b;
  explicit Affine(int64_t n) : means(n), parts(n), squares(n), around(n), a(n), b(n) {}

  void measure(const GroupNorm& g, int64_t image) {
    const int64_t channels = g.c1 + g.c2, size = channels / g.groups;
    for (int half = 0; half < (g.c2 ? 2 : 1); ++half) {
      const int64_t width = half ? g.c2 : g.c1, at = half ? g.c1 : 0;
      const float* x = (half ? g.y : g.x) + image * g.pixels * width;
      channel_sums(x, g.pixels, width, parts.data() + at, squares.data() + at);
      for (int64_t c = 0; c < width; ++c) means[at + c] = static_cast<double>(x[c]) + parts[at + c];
    }
    for (int64_t first = 0; first < channels; first += size) {
      double mean = 0, square = 0;
      for (int64_t c = first; c < first + size; ++c) mean += means[c] / size;
      for (int64_t c = first; c < first + size; ++c)
        square += squares[c] + (means[c] - mean) * (means[c] - mean) * g.pixels;
      const float rstd = static_cast<float>(1.0 / std::sqrt(square / (size * g.pixels) + g.eps));
      for (int64_t c = first; c < first + size; ++c) {
        around[c] = static_cast<float>(mean);
        a[c] = rstd * g.weight[c];
        b[c] = static_cast<float>(g.bias[c] - (mean - around[c]) * a[c]);  // with what the mean lost when rounded
      }
    }
  }

  void apply(const GroupNorm& g, int64_t pixel) const {
    for (int half = 0; half < (g.c2 ? 2 : 1); ++half) {
      const int64_t width = half ? g.c2 : g.c1, at = half ? g.c1 : 0;
      const float* x = (half ? g.y : g.x) + pixel * width;
      for (int64_t c = 0; c < width; c += LANES) {
        const __mmask16 mask = lanes(width - c);
        const __m512 d = _mm512_sub_ps(_mm512_maskz_loadu_ps(mask, x + c), _mm512_maskz_loadu_ps(mask, &around[at + c]));
        __m512 v = _mm512_fmadd_ps(d, _mm512_maskz_loadu_ps(mask, &a[at + c]), _mm512_maskz_loadu_ps(mask, &b[at + c]));
        if (g.silu) v = silu_ps(v);
        store(v, g.inverse, g.bytes, g.floats, pixel * (g.c1 + g.c2) + at + c, at + c, mask);
      }
    }
  }
};

}  // namespace

void group_norm(const GroupNorm& g) {
#pragma omp parallel
  {
    Affine affine(g.c1 + g.c2);
#pragma omp for schedule(static)
    for (int64_t image = 0; image < g.images; ++image) {
      affine.measure(g, image);
      for (int64_t i = 0; i < g.pixels; ++i) affine.apply(g, image * g.pixels + i);
    }
  }
}

}  // namespace diptych
