// One pointer-indirect matrix product for linear layers (one tap) and 3×3 convolutions (nine), in INT8 or in floats.
//
// INT8 activations are unsigned bytes around a zero point of 128, because vpdpbusd multiplies unsigned by signed; sums
// start at minus the weights' share of that, and are exact. Float weights are bf16 or fp32, float activations fp32.
// Everything is channels-last. Work is divided among OpenMP threads by tiles of output, so a row's bits depend neither on
// its neighbours nor on its position nor on the number of threads. The indirection is XNNPACK's (Dukhan, 2019, "The
// Indirect Convolution Algorithm").

#include "product.h"

namespace diptych {
namespace {

struct Geometry {
  int64_t out_height, out_width, pixels, rows;
  explicit Geometry(const Product& p) {
    if (p.taps == 1) {
      out_height = p.height, out_width = p.width;
    } else {
      const int64_t h = p.height << p.upsample, w = p.width << p.upsample;
      out_height = (h + p.before + 1 - 3) / p.stride + 1;
      out_width = (w + p.before + 1 - 3) / p.stride + 1;
    }
    pixels = out_height * out_width;
    rows = p.images * pixels;
  }
};

// The three kinds of operand: how sixteen columns of a weight are read, and how a row's next input is spread.
struct Int8 {
  using Element = uint8_t;
  using Sum = __m512i;
  static constexpr int DEPTH = 4, BYTES = 64;  // inputs of one step; bytes of sixteen columns of them
  static Sum start(const int32_t* offset, int64_t n) { return _mm512_loadu_si512(offset + n); }
  static __m512i weight(const void* b) { return _mm512_loadu_si512(b); }
  static __m512i input(const uint8_t* a) {
    int32_t word;
    std::memcpy(&word, a, 4);
    return _mm512_set1_epi32(word);
  }
  static Sum add(Sum s, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(s, a, b); }
  static __m512 value(Sum s) { return _mm512_cvtepi32_ps(s); }
};

struct Fp32 {
  using Element = float;
  using Sum = __m512;
  static constexpr int DEPTH = 1, BYTES = 64;
  static Sum start(const int32_t*, int64_t) { return _mm512_setzero_ps(); }
  static __m512 weight(const void* b) { return _mm512_loadu_ps(b); }
  static __m512 input(const float* a) { return _mm512_set1_ps(*a); }
  static Sum add(Sum s, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, s); }
  static __m512 value(Sum s) { return s; }
};

struct Bf16 : Fp32 {  // weights only
  static constexpr int BYTES = 32;
  static __m512 weight(const void* b) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(b)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
};

template <class Kind, int MR, int NV>
inline __attribute__((always_inline)) void multiply(const typename Kind::Element* const* a, int taps, int64_t steps,
                                                    const char* b, const int32_t* offset, int64_t n,
                                                    typename Kind::Sum (&sums)[MR][NV]) {
  for (int i = 0; i < MR; ++i)
    for (int j = 0; j < NV; ++j) sums[i][j] = Kind::start(offset, n + LANES * j);
  for (int t = 0; t < taps; ++t, a += MR)
    for (int64_t k = 0; k < steps; ++k, b += NV * Kind::BYTES) {
      decltype(Kind::weight(b)) v[NV];
      for (int j = 0; j < NV; ++j) v[j] = Kind::weight(b + Kind::BYTES * j);
      for (int i = 0; i < MR; ++i) {
        const auto x = Kind::input(a[i] + Kind::DEPTH * k);
        for (int j = 0; j < NV; ++j) sums[i][j] = Kind::add(sums[i][j], x, v[j]);
      }
    }
}

// Scale, bias, what else is added, and the way out, for sixteen columns of one row.
inline void finish(const Product& p, const Geometry& g, __m512 v, int64_t m, int64_t n) {
  const __mmask16 mask = lanes(p.n - n);
  if (p.row_bias) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, p.row_bias + (m / g.pixels) * p.row_stride + n));
  if (p.residual) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, p.residual + m * p.n + n));
  if (p.silu) v = silu_ps(v);
  store(v, p.inverse, p.bytes, p.floats, m * p.n + n, n, mask);
}

template <class Kind, int MR, int NV>
void tile(const Product& p, const Geometry& g, const typename Kind::Element* const* a, int64_t first, int count,
          int64_t n0, const char* b) {
  typename Kind::Sum sums[MR][NV];
  multiply<Kind, MR, NV>(a, p.taps, p.channels / Kind::DEPTH, b, p.offset, n0, sums);
  for (int i = 0; i < count; ++i) {
    const int64_t m = first + i;
    __m512 value[NV];
    for (int j = 0; j < NV; ++j) {
      const int64_t n = n0 + j * LANES;
      const __m512 raw = Kind::value(sums[i][j]), bias = _mm512_loadu_ps(p.bias + n);
      value[j] = p.scale ? _mm512_fmadd_ps(raw, _mm512_loadu_ps(p.scale + n), bias) : _mm512_add_ps(raw, bias);
    }
    if (p.geglu) {  // the vectors of hidden and gate alternate
      if constexpr (NV % 2 == 0)
        for (int j = 0; j < NV; j += 2) {
          const int64_t n = (n0 + j * LANES) / 2;
          const __m512 gate = p.silu ? silu_ps(value[j + 1]) : gelu_ps(value[j + 1]);
          const __m512 made = _mm512_mul_ps(value[j], gate);
          store(made, p.inverse, p.bytes, p.floats, m * (p.n / 2) + n, n, lanes(p.n / 2 - n));
        }
      continue;
    }
    for (int j = 0; j < NV && n0 + j * LANES < p.n; ++j) finish(p, g, value[j], m, n0 + j * LANES);
  }
}

// Where each of MR output rows finds its input under each tap; `zero` where that is padding.
template <class Element, int MR>
void gather(const Product& p, const Geometry& g, int64_t first, const Element* zero, const Element** a) {
  const Element* input = static_cast<const Element*>(p.a);
  if (p.taps == 1) {
    for (int i = 0; i < MR; ++i) a[i] = input + std::min<int64_t>(first + i, g.rows - 1) * p.a_stride;
    return;
  }
  const int h = static_cast<int>(p.height << p.upsample), w = static_cast<int>(p.width << p.upsample);
  const int out_width = static_cast<int>(g.out_width), pixels = static_cast<int>(g.pixels);
  int64_t image = first / pixels;
  int rest = static_cast<int>(first % pixels), y = rest / out_width, x = rest % out_width;
  for (int i = 0; i < MR; ++i) {
    const Element* from = input + image * p.height * p.width * p.a_stride;
    for (int t = 0; t < 3; ++t) {
      const int yy = y * p.stride + t - p.before;
      const bool inside = yy >= 0 && yy < h;
      const Element* line = from + static_cast<int64_t>(yy >> p.upsample) * p.width * p.a_stride;
      for (int u = 0; u < 3; ++u) {
        const int xx = x * p.stride + u - p.before;
        a[(3 * t + u) * MR + i] = inside && xx >= 0 && xx < w ? line + (xx >> p.upsample) * p.a_stride : zero;
      }
    }
    if (first + i + 1 >= g.rows) continue;  // the last tile repeats the last row
    if (++x == out_width) {
      x = 0;
      if (++y == g.out_height) y = 0, ++image;
    }
  }
}

// How many vectors of columns stand side by side: equal numbers where they divide evenly.
int side_by_side(int64_t n16, bool geglu) {
  if (n16 % 4 == 0) return 4;
  if (!geglu && n16 % 3 == 0) return 3;
  return n16 % 2 == 0 ? 2 : 1;
}

template <class Kind, int MR, int NV>
void run(const Product& p, int64_t n16) {
  using Element = typename Kind::Element;
  const Geometry g(p);
  const int64_t tiles = (g.rows + MR - 1) / MR, blocks = n16 / NV;
  const int64_t depth = p.taps * (p.channels / Kind::DEPTH) * NV * Kind::BYTES;
  const std::vector<Element> zero(p.channels, static_cast<Element>(Kind::DEPTH == 4 ? 128 : 0));
#pragma omp parallel
  {
    const Element* a[9 * MR];
    int64_t gathered = -1;
#pragma omp for schedule(static)
    for (int64_t job = 0; job < tiles * blocks; ++job) {
      const int64_t t = job / blocks, block = job % blocks, first = t * MR;
      if (t != gathered) gather<Element, MR>(p, g, first, zero.data(), a), gathered = t;
      const int count = static_cast<int>(std::min<int64_t>(MR, g.rows - first));
      tile<Kind, MR, NV>(p, g, a, first, count, block * NV * LANES, static_cast<const char*>(p.w) + block * depth);
    }
  }
}

template <class Kind>
void choose(const Product& p) {
  const int64_t n16 = (p.n + LANES - 1) / LANES;
  switch (side_by_side(n16, p.geglu)) {
    case 4: return run<Kind, 6, 4>(p, n16);
    case 3: return run<Kind, 8, 3>(p, n16);
    case 2: return run<Kind, 12, 2>(p, n16);
    default: return run<Kind, 14, 1>(p, n16);
  }
}

// Weights [n, taps, channels] in the order in which `run` reads them; columns beyond n are zero.
template <class T, int DEPTH>
void arrange(const T* w, T* packed, int64_t n, int64_t taps, int64_t channels, bool geglu) {
  const int64_t n16 = (n + LANES - 1) / LANES, row = taps * channels;
  const int nv = side_by_side(n16, geglu);
  for (int64_t block = 0; block < n16 / nv; ++block)
    for (int64_t k = 0; k < row / DEPTH; ++k)
      for (int j = 0; j < nv; ++j)
        for (int lane = 0; lane < LANES; ++lane) {
          const int64_t vector = block * nv + j;
          const int64_t column = geglu ? (vector % 2) * (n / 2) + vector / 2 * LANES + lane : vector * LANES + lane;
          for (int b = 0; b < DEPTH; ++b, ++packed) *packed = column < n ? w[column * row + DEPTH * k + b] : T(0);
        }
}

}  // namespace

void product(const Product& p) {
  switch (p.kind) {
    case 0: return choose<Int8>(p);
    case 1: return choose<Fp32>(p);
    default: return choose<Bf16>(p);
  }
}

}  // namespace diptych

extern "C" void diptych_pack(const void* w, void* packed, int64_t n, int64_t taps, int64_t channels, int32_t kind,
                             int32_t geglu) {
  using namespace diptych;
  switch (kind) {
    case 0: return arrange<int8_t, 4>(static_cast<const int8_t*>(w), static_cast<int8_t*>(packed), n, taps, channels, geglu);
    case 1: return arrange<float, 1>(static_cast<const float*>(w), static_cast<float*>(packed), n, taps, channels, geglu);
    default:
      return arrange<uint16_t, 1>(static_cast<const uint16_t*>(w), static_cast<uint16_t*>(packed), n, taps, channels, geglu);
  }
}
