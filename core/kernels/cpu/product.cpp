// Computes linear layers (one tap) and 3×3 convolutions (nine taps) by one indirect matrix product, in INT8 or floats.
//
// INT8 activations are unsigned bytes with a zero point of 128, because vpdpbusd multiplies unsigned by signed; sums
// start at the weights' compensation for it, and are exact. Float weights are bf16 or fp32, float activations fp32. All
// tensors are channels-last. OpenMP threads share the work by output tiles, so a row's bits depend neither on other rows
// nor on its position nor on the number of threads. The indirection is XNNPACK's (Dukhan, 2019, "The Indirect
// Convolution Algorithm").

#include "low_rank.h"

namespace diptych {
namespace {

struct Geometry {
  int64_t out_height, out_width, pixels, rows;
  explicit Geometry(const Product& p) {
    if (p.taps == 1) {
      out_height = p.height, out_width = p.width;
    } else {
      const int64_t h = (p.height << p.upsample) - p.cut_height, w = (p.width << p.upsample) - p.cut_width;
      out_height = (h + p.before + 1 - 3) / p.stride + 1;
      out_width = (w + p.before + 1 - 3) / p.stride + 1;
    }
    pixels = out_height * out_width;
    rows = p.images * pixels;
  }
};

// `multiply` for a product, where `by` are the scales of the inputs' rows, or null for other kinds than Int8ByRow.
template <class Kind, int MR, int NV>
inline __attribute__((always_inline)) void multiply(const Product& p, const typename Kind::Element* const* a,
                                                    const float* by, int64_t steps, const char* b, int64_t n,
                                                    typename Kind::Sum (&sums)[MR][NV]) {
  if constexpr (std::is_same_v<Kind, Int8ByRow>) {
    const int64_t columns = (p.n + LANES - 1) / LANES * LANES;
    const int rows = opaque(MR);
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < NV; ++j) sums[i][j] = zero();
    for (int t = 0; t < p.taps; ++t, a += MR, by += MR, b += steps * NV * Kind::BYTES) {
      Int8::Sum parts[MR][NV];
      multiply<Int8, MR, NV>(a, opaque(1), steps, b, p.offset + t * columns, n, parts);
      for (int i = 0; i < rows; ++i)
        for (int j = 0; j < NV; ++j) sums[i][j] = fma(Int8::value(parts[i][j]), all(by[i]), sums[i][j]);
    }
  } else {
    multiply<Kind, MR, NV>(a, p.taps, steps, b, p.offset, n, sums);
  }
}

inline Vec activated(Vec v, int32_t act) {
  switch (act) {
    case 1: return silu(v);
    case 2: return gelu(v);
    case 3: return quick_gelu(v);
    case 4: return gelu_tanh(v);
    case 5: return tanh(v);
    case 6: return relu(v);
    default: return v;
  }
}

// Epilogue of sixteen columns of one row: adds the row bias and the residual, applies the activation, and stores.
inline void finish(const Product& p, const Geometry& g, Vec v, int64_t m, int64_t n) {
  const Mask mask = lanes(p.n - n);
  if (p.row_bias) v = v + load(p.row_bias + (m / g.pixels) * p.row_stride + n, mask);
  if (p.residual) v = v + load(p.residual + m * p.n + n, mask);
  v = activated(v, p.act);
  store(v, p.inverse, p.bytes, p.floats, m * p.n + n, n, mask);
}

template <class Kind>
inline Vec scaled(const Product& p, typename Kind::Sum sum, int64_t n) {
  const Vec raw = Kind::value(sum), bias = load(p.bias + n);
  return p.scale ? fma(raw, load(p.scale + n), bias) : raw + bias;
}

// Scaled sums of a tile, with the bias.
template <class Kind, int MR, int NV>
inline __attribute__((always_inline)) void sum(const Product& p, const typename Kind::Element* const* a,
                                               const float* by, int64_t steps, const char* b, int64_t n,
                                               Vec (&values)[MR][NV]) {
  typename Kind::Sum sums[MR][NV];
  multiply<Kind, MR, NV>(p, a, by, steps, b, n, sums);
  for (int i = 0, rows = opaque(MR); i < rows; ++i)
    for (int j = 0; j < NV; ++j) values[i][j] = scaled<Kind>(p, sums[i][j], n + j * LANES);
}

// Whether GEGLU's hidden and gate columns are in alternate blocks (tiles one vector wide) or within one tile.
template <int NV>
constexpr bool APART = NV == 1 && WIDEST == 1;

template <class Kind, int MR, int NV>
void tile(const Product& p, const Geometry& g, const typename Kind::Element* const* a, const float* by,
          const LowRank<Kind, MR>& branches, int64_t first, int count, int64_t n0, const char* b, int64_t depth) {
  const int64_t steps = p.channels / Kind::DEPTH;
  Vec values[MR][NV], gates[APART<NV> ? MR : 1][NV];
  sum<Kind, MR, NV>(p, a, by, steps, b, n0, values);
  if (branches.any()) branches.add(first, count, n0, values);
  if constexpr (APART<NV>)
    if (p.geglu) {
      sum<Kind, MR, NV>(p, a, by, steps, b + depth, n0 + LANES, gates);
      if (branches.any()) branches.add(first, count, n0 + LANES, gates);
    }
  for (int i = 0; i < count; ++i) {
    const int64_t m = first + i;
    if (p.geglu) {
      if constexpr (APART<NV> || NV % 2 == 0)
        for (int j = 0; j < NV; j += 2) {
          const int64_t n = n0 + j * LANES, at = n / 2;
          const Vec gate = APART<NV> ? gates[APART<NV> ? i : 0][0] : values[i][(j + 1) % NV];
          const Vec made = values[i][j] * (p.act ? activated(gate, p.act) : gelu(gate));
          store(made, p.inverse, p.bytes, p.floats, m * (p.n / 2) + at, at, lanes(p.n / 2 - at));
        }
      continue;
    }
    for (int j = 0; j < NV && n0 + j * LANES < p.n; ++j) finish(p, g, values[i][j], m, n0 + j * LANES);
  }
}

// Pointers to the inputs of MR output rows under each tap; padding points to `zero`.
template <class Element, int MR>
void gather(const Product& p, const Geometry& g, int64_t first, const Element* zero, const Element** a) {
  const Element* input = static_cast<const Element*>(p.a);
  if (p.taps == 1) {
    for (int i = 0; i < MR; ++i) a[i] = input + std::min<int64_t>(first + i, g.rows - 1) * p.a_stride;
    return;
  }
  const int h = static_cast<int>((p.height << p.upsample) - p.cut_height);
  const int w = static_cast<int>((p.width << p.upsample) - p.cut_width);
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
    if (first + i + 1 >= g.rows) continue;  // rows beyond the end repeat the last row and are not stored
    if (++x == out_width) {
      x = 0;
      if (++y == g.out_height) y = 0, ++image;
    }
  }
}

// Chooses the tile width in vectors of columns: equal widths if the columns divide evenly.
int side_by_side(int64_t n16, bool geglu) {
  if (WIDEST == 1) return 1;
  if (n16 % 4 == 0) return 4;
  if (!geglu && n16 % 3 == 0) return 3;
  return n16 % 2 == 0 ? 2 : 1;
}

template <class Kind, int NV, int MR>
void run(const Product& p, const Geometry& g, int64_t n16) {
  using Stored = typename Kind::Stored;
  using Element = typename Kind::Element;
  constexpr bool WIDENED = sizeof(Stored) < sizeof(Element);
  const int together = APART<NV> && p.geglu ? 2 : 1;  // blocks per tile
  const int64_t tiles = (g.rows + MR - 1) / MR, blocks = n16 / (NV * together);
  const int64_t depth = p.taps * (p.channels / Kind::DEPTH) * NV * Kind::BYTES;
  const std::vector<Stored> zero(p.channels, static_cast<Stored>(sizeof(Stored) == 1 ? 128 : 0));
#pragma omp parallel
  {
    const Stored* from[9 * MR];
    const Element* a[9 * MR];
    float by[9 * MR];
    std::vector<Element> wide(WIDENED ? p.taps * MR * p.channels : 0);
    LowRank<Kind, MR> branches(p, g.rows);
    int64_t gathered = -1;
#pragma omp for schedule(static)
    for (int64_t job = 0; job < tiles * blocks; ++job) {
      const int64_t t = job / blocks, block = job % blocks * together, first = t * MR;
      const int count = static_cast<int>(std::min<int64_t>(MR, g.rows - first));
      if (t != gathered) {
        gather<Stored, MR>(p, g, first, zero.data(), from), gathered = t;
        for (int i = 0; i < p.taps * MR; ++i) {
          if constexpr (std::is_same_v<Kind, Int8ByRow>)
            by[i] = from[i] == zero.data() ? 0.0f : p.a_scale[(from[i] - static_cast<const Stored*>(p.a)) / p.a_stride];
          if constexpr (WIDENED) {
            std::copy_n(from[i], p.channels, wide.data() + i * p.channels);
            a[i] = wide.data() + i * p.channels;
          } else {
            a[i] = from[i];
          }
        }
        if (branches.any()) branches.start(first, count, a, by);
      }
      const char* w = static_cast<const char*>(p.w) + block * depth;
      tile<Kind, MR, NV>(p, g, a, by, branches, first, count, block * NV * LANES, w, depth);
    }
  }
}

// Takes tiles that compute the fewest rows too many where there are few, as in decoding. A tile's height changes no bits.
template <class Kind, int NV>
void run(const Product& p, int64_t n16) {
  const Geometry g(p);
  if constexpr (NV == WIDEST) {
    if (g.rows <= 2) return run<Kind, NV, 2>(p, g, n16);
    if (g.rows <= 4 || g.rows == 7 || g.rows == 8) return run<Kind, NV, 4>(p, g, n16);
  }
  run<Kind, NV, tile_rows(NV)>(p, g, n16);
}

template <class Kind>
void choose(const Product& p) {
  const int64_t n16 = (p.n + LANES - 1) / LANES;
  if constexpr (WIDEST == 4) switch (side_by_side(n16, p.geglu)) {
      case 4: return run<Kind, 4>(p, n16);
      case 3: return run<Kind, 3>(p, n16);
      case 2: return run<Kind, 2>(p, n16);
    }
  run<Kind, 1>(p, n16);
}

// Packs weights [n, taps, channels] in the order in which `run` reads them; columns beyond n are zero.
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
    case 0: return p.a_scale ? choose<Int8ByRow>(p) : choose<Int8>(p);
    case 1: return choose<Fp32>(p);
    default: return choose<Bf16>(p);
  }
}

}  // namespace diptych

extern "C" void diptych_pack(const void* w, void* packed, int64_t n, int64_t taps, int64_t channels, int32_t kind,
                             int32_t geglu) {
  using namespace diptych;
  switch (kind) {
    case 0: return arrange<int8_t, Int8::DEPTH>(static_cast<const int8_t*>(w), static_cast<int8_t*>(packed), n, taps, channels, geglu);
    case 1: return arrange<float, 1>(static_cast<const float*>(w), static_cast<float*>(packed), n, taps, channels, geglu);
    default:
      return arrange<uint16_t, 1>(static_cast<const uint16_t*>(w), static_cast<uint16_t*>(packed), n, taps, channels, geglu);
  }
}

extern "C" void diptych_pack_down(const float* down, const float* inverse, void* packed, int32_t* offset, float* scale,
                                  int64_t ranks, int64_t taps, int64_t channels, int32_t kind) {
  diptych::pack_down(down, inverse, packed, offset, scale, ranks, taps, channels, kind);
}
