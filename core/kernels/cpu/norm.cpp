// Computes quantization, LayerNorm and GroupNorm; outputs are bytes for an INT8 layer, or floats.

#include "norm.h"

namespace diptych {

namespace {

// Returns the scale of the bytes that it writes. The smallest magnitude replaces zero, which has no reciprocal.
float quantize_row(const float* x, uint8_t* bytes, int64_t channels) {
  Vec largest = all(1e-30f), unbounded = zero();
  for (int64_t c = 0; c < channels; c += LANES) {
    const Vec v = load(x + c, lanes(channels - c));
    largest = max(largest, abs(v));
    unbounded = fma(v, zero(), unbounded);  // NaN of NaN, which max may lose, and of infinity
  }
  const float most = greatest(largest);
  const Vec inverse = all(127.0f / most);
  for (int64_t c = 0; c < channels; c += LANES) {
    const Mask mask = lanes(channels - c);
    const Vec v = load(x + c, mask) * inverse;
    save_bytes(bytes + c, min(max(v, all(-127.0f)), all(127.0f)), mask);
  }
  return most / 127.0f + total(unbounded);
}

// By how much a row exceeds the range of bytes, at least 1. NaN is left to the bytes.
float excess(const float* x, const float* inverse, int64_t channels) {
  Vec largest = all(127.0f);
  for (int64_t c = 0; c < channels; c += LANES) {
    const Mask mask = lanes(channels - c);
    largest = max(largest, abs(load(x + c, mask) * load(inverse + c, mask)));
  }
  return greatest(largest) / 127.0f;
}

}  // namespace

void quantize(const Quantize& q) {
  if (!q.inverse) {
#pragma omp parallel for schedule(static)
    for (int64_t m = 0; m < q.rows; ++m)
      q.scales[m] = quantize_row(q.x + m * q.channels, q.bytes + m * q.channels, q.channels);
    return;
  }
#pragma omp parallel for schedule(static)
  for (int64_t m = 0; m < q.rows; ++m)
    for (int64_t c = 0; c < q.channels; c += LANES) {
      const Mask mask = lanes(q.channels - c);
      const Vec v = load(q.x + m * q.channels + c, mask);
      store(v, q.inverse, q.bytes, nullptr, m * q.channels + c, c, mask);
    }
  if (!q.scales) return;
#pragma omp parallel for schedule(static)
  for (int64_t m = 0; m < q.rows; ++m) {
    const float* row = q.x + m * q.channels;
    q.scales[m] = q.within[m / q.tokens] ? excess(row, q.inverse, q.channels) : 1.0f;
    if (q.scales[m] == 1.0f) continue;
    const Vec share = all(1.0f / q.scales[m]);
    for (int64_t c = 0; c < q.channels; c += LANES) {
      const Mask mask = lanes(q.channels - c);
      store(load(row + c, mask) * share, q.inverse, q.bytes, nullptr, m * q.channels + c, c, mask);
    }
  }
}

void layer_norm(const LayerNorm& l) {
#pragma omp parallel for schedule(static)
  for (int64_t m = 0; m < l.rows; ++m) {
    const float* row = l.x + m * l.channels;
    Vec sum = zero(), square = zero();
    for (int64_t c = 0; c < l.channels; c += LANES)
      sum = sum + load(row + c, lanes(l.channels - c));
    const Vec mean = all(total(sum) / l.channels);
    for (int64_t c = 0; c < l.channels; c += LANES) {
      const Mask mask = lanes(l.channels - c);
      const Vec d = masked(load(row + c, mask) - mean, mask);
      square = fma(d, d, square);
    }
    const Vec rstd = all(1.0f / std::sqrt(total(square) / l.channels + l.eps));
    const float *scale = l.after.scale_of(m), *residual = l.after.residual_of(m, l.channels);
    for (int64_t c = 0; c < l.channels; c += LANES) {
      const Mask mask = lanes(l.channels - c);
      Vec v = (load(row + c, mask) - mean) * rstd;
      if (l.weight) v = fma(v, load(l.weight + c, mask), load(l.bias + c, mask));
      store(modulated(v, scale, residual, c, mask), l.inverse, l.bytes, l.floats, m * l.channels + c, c, mask);
    }
  }
}

namespace {

constexpr int64_t RUN = 32;  // pixels

// Computes each channel's mean (minus the first pixel's value) and sum of squared deviations over one image. Each run of
// pixels uses its first pixel as origin, and runs are merged by Chan et al. (1979): E[x²] − E[x]² would lose digits if
// the mean is large, and a single origin for all pixels would if that pixel is an outlier.
void channel_sums(const float* x, int64_t pixels, int64_t width, float* means, float* squares) {
  for (int64_t c = 0; c < width; c += LANES) {
    const Mask mask = lanes(width - c);
    const float* p = x + c;
    const Vec origin = load(p, mask);
    Vec mean = zero(), square = zero();
    for (int64_t first = 0; first < pixels; first += RUN) {
      const int64_t count = std::min(RUN, pixels - first);
      const Vec around = load(p, mask);
      Vec s = zero(), q = zero();
      for (int64_t i = 0; i < count; ++i, p += width) {
        const Vec d = load(p, mask) - around;
        s = s + d;
        q = fma(d, d, q);
      }
      const Vec shift = s * all(1.0f / count);
      const Vec apart = around - origin + shift - mean;
      const float share = static_cast<float>(count) / (first + count);
      mean = fma(apart, all(share), mean);
      square = square + fnma(shift, s, q);
      square = fma(apart * apart, all(share * first), square);
    }
    save(means + c, mean, mask);
    save(squares + c, square, mask);
  }
}

// Computes each channel's a and b for one image: normalized x = (x − around) · a + b.
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
        b[c] = static_cast<float>(g.bias[c] - (mean - around[c]) * a[c]);  // corrects the rounding of the mean
      }
    }
  }

  void apply(const GroupNorm& g, int64_t pixel) const {
    for (int half = 0; half < (g.c2 ? 2 : 1); ++half) {
      const int64_t width = half ? g.c2 : g.c1, at = half ? g.c1 : 0;
      const float* x = (half ? g.y : g.x) + pixel * width;
      for (int64_t c = 0; c < width; c += LANES) {
        const Mask mask = lanes(width - c);
        const Vec d = load(x + c, mask) - load(&around[at + c], mask);
        Vec v = fma(d, load(&a[at + c], mask), load(&b[at + c], mask));
        if (g.silu) v = silu(v);
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
