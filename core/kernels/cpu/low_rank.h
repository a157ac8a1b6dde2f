// Computes the low-rank branches of a tile of the matrix product: down · x once for each tile, up in its epilogue.
//
// A row's sums are added in one order, whatever the other rows of its tile get, so that its bits depend on nothing else.
// Over INT8 inputs down is INT8, too, in two matrices that together hold fifteen bits, and its sums are exact.

#pragma once

#include "multiply.h"

namespace diptych {
namespace {

constexpr float FINE = 1.0f / 254.0f;  // what a level of the second matrix counts
template <class Kind>
constexpr bool LEVELS = std::is_base_of_v<Int8, Kind>;

// The sums of sixteen ranks over `taps` taps from `t` on, of MR rows whose inputs under each tap are `a`.
template <int MR>
inline void sum_levels(const Product& p, const Branch& b, int64_t group, int t, int taps, const Int8::Element* const* a,
                       const int32_t* offset, Vec (&made)[MR]) {
  const int64_t steps = p.channels / Int8::DEPTH, tap = steps * Int8::BYTES;
  const char* w = static_cast<const char*>(b.down) + group * p.taps * tap * 2;
  if constexpr (WIDEST > 1) {
    Int8::Sum sums[MR][2];
    multiply<Int8, MR, 2>(a + t * MR, taps, steps, w + t * tap * 2, offset, 0, sums);
    for (int i = 0, rows = opaque(MR); i < rows; ++i)
      made[i] = fma(Int8::value(sums[i][1]), all(FINE), Int8::value(sums[i][0]));
  } else {
    Int8::Sum whole[MR][1], fine[MR][1];
    multiply<Int8, MR, 1>(a + t * MR, taps, steps, w + t * tap, offset, 0, whole);
    multiply<Int8, MR, 1>(a + t * MR, taps, steps, w + (p.taps + t) * tap, offset, LANES, fine);
    for (int i = 0, rows = opaque(MR); i < rows; ++i)
      made[i] = fma(Int8::value(fine[i][0]), all(FINE), Int8::value(whole[i][0]));
  }
}

// scale · down(x) of MR rows for every rank of a branch, to `low`, `stride` floats a row. `by` are the scales of the
// inputs' rows, for Int8ByRow.
template <class Kind, int MR>
void project(const Product& p, const Branch& b, float scale, const typename Kind::Element* const* a, const float* by,
             float* low, int64_t stride) {
  for (int64_t group = 0; group < b.groups; ++group, low += LANES) {
    Vec made[MR];
    if constexpr (std::is_same_v<Kind, Int8ByRow>) {
      for (int i = 0; i < MR; ++i) made[i] = zero();
      for (int t = 0; t < p.taps; ++t) {
        Vec part[MR];
        sum_levels<MR>(p, b, group, t, opaque(1), a, b.offset + (group * p.taps + t) * 2 * LANES, part);
        for (int i = 0; i < MR; ++i) made[i] = fma(part[i], all(by[t * MR + i]), made[i]);
      }
    } else if constexpr (LEVELS<Kind>) {
      sum_levels<MR>(p, b, group, 0, p.taps, a, b.offset + group * 2 * LANES, made);
    } else {
      Fp32::Sum sums[MR][1];
      const char* w = static_cast<const char*>(b.down) + group * p.taps * p.channels * Fp32::BYTES;
      multiply<Fp32, MR, 1>(a, p.taps, p.channels, w, nullptr, 0, sums);
      for (int i = 0, rows = opaque(MR); i < rows; ++i) made[i] = sums[i][0];
    }
    const Vec factor = LEVELS<Kind> ? load(b.scale + group * LANES) * all(scale) : all(scale);
    for (int i = 0; i < MR; ++i) save(low + i * stride, made[i] * factor);
  }
}

// The branches of one product, and down(x) of the tile that a thread is at.
template <class Kind, int MR>
class LowRank {
 public:
  LowRank(const Product& p, int64_t rows) : p_(p), tokens_(p.rows ? rows / p.rows->images : rows) {
    if (!p.rows) return;
    for (int64_t image = 0; image < p.rows->images; ++image) {
      int64_t ranks = 0;
      each(image, [&](const Branch& b, float) { ranks += b.groups * LANES; });
      stride_ = std::max(stride_, ranks);
    }
    low_.resize(MR * stride_);
  }

  bool any() const { return stride_ > 0; }

  // Computes down(x) of `count` rows from `first` on.
  void start(int64_t first, int count, const typename Kind::Element* const* a, const float* by) {
    segments(first, count, [&](int64_t image, int from, int to, bool whole) {
      float* low = low_.data();
      each(image, [&](const Branch& b, float scale) {
        if (whole) {
          project<Kind, MR>(p_, b, scale, a, by, low, stride_);
        } else if (to - from == 1 && p_.taps == 1) {
          project<Kind, 1>(p_, b, scale, a + from, by + from, low + from * stride_, stride_);
        } else {
          // Of other rows, too, into memory of its own.
          part_.resize(MR * b.groups * LANES);
          project<Kind, MR>(p_, b, scale, a, by, part_.data(), b.groups * LANES);
          for (int i = from; i < to; ++i)
            std::copy_n(part_.data() + i * b.groups * LANES, b.groups * LANES, low + i * stride_);
        }
        low += b.groups * LANES;
      });
    });
  }

  // Adds up · down(x) to the columns from n on of the same rows.
  template <int NV>
  void add(int64_t first, int count, int64_t n, Vec (&values)[MR][NV]) const {
    segments(first, count, [&](int64_t image, int from, int to, bool whole) {
      const float* low = low_.data();
      each(image, [&](const Branch& b, float) {
        for (int j = 0; j < NV; ++j) {
          const Span& span = b.spans[n / LANES + j];
          const float* up = b.up + static_cast<int64_t>(span.at) * LANES;
          if (whole) {
            Vec made[MR];
            for (int i = 0; i < MR; ++i) made[i] = values[i][j];
            for (int r = span.begin; r < span.end; ++r, up += LANES) {
              const Vec column = load(up);
              for (int i = 0; i < MR; ++i) made[i] = fma(all(low[i * stride_ + r]), column, made[i]);
            }
            for (int i = 0; i < MR; ++i) values[i][j] = made[i];
          } else {
            for (int i = from; i < to; ++i) {
              Vec made = values[i][j];
              for (int r = span.begin; r < span.end; ++r)
                made = fma(all(low[i * stride_ + r]), load(up + (r - span.begin) * LANES), made);
              values[i][j] = made;
            }
          }
        }
        low += b.groups * LANES;
      });
    });
  }

 private:
  // Calls `with` the branches of an image that have a share in this product.
  template <class With>
  void each(int64_t image, With with) const {
    for (int32_t at = p_.rows->first[image]; at < p_.rows->first[image + 1]; ++at) {
      const BranchUse& use = p_.rows->uses[at];
      if (const Branch* b = p_.branches[use.branch]) with(*b, use.scale);
    }
  }

  // Calls `with` the rows of a tile that belong to one image, and whether these are all.
  template <class With>
  void segments(int64_t first, int count, With with) const {
    for (int from = 0; from < count;) {
      const int64_t image = (first + from) / tokens_;
      const int to = static_cast<int>(std::min<int64_t>(count, (image + 1) * tokens_ - first));
      with(image, from, to, from == 0 && to == count);
      from = to;
    }
  }

  const Product& p_;
  const int64_t tokens_;
  int64_t stride_ = 0;
  std::vector<float> low_, part_;
};

// Arranges down [ranks, taps, channels] for `project`: floats, or over INT8 inputs times 1 / inverse [channels] (or 1)
// as two matrices of levels. `kind`: 0 INT8, 1 INT8 by row, 2 floats. Ranks beyond the last are zero.
inline void pack_down(const float* down, const float* inverse, void* packed, int32_t* offset, float* scale,
                      int64_t ranks, int64_t taps, int64_t channels, int32_t kind) {
  const int64_t groups = (ranks + LANES - 1) / LANES, row = taps * channels;
  if (kind == 2) {
    float* to = static_cast<float*>(packed);
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t k = 0; k < row; ++k)
        for (int64_t lane = 0; lane < LANES; ++lane, ++to)
          *to = g * LANES + lane < ranks ? down[(g * LANES + lane) * row + k] : 0.0f;
    return;
  }
  constexpr int DEPTH = Int8::DEPTH, TOGETHER = WIDEST > 1 ? 2 : 1;
  std::vector<float> wanted(row);
  const int64_t sums = kind == 1 ? taps : 1;
  std::fill_n(offset, groups * sums * 2 * LANES, 0);
  std::fill_n(static_cast<int8_t*>(packed), groups * row * 2 * LANES, int8_t(0));
  for (int64_t r = 0; r < groups * LANES; ++r) {
    scale[r] = 0.0f;
    if (r >= ranks) continue;
    float most = 0.0f;
    for (int64_t k = 0; k < row; ++k) {
      wanted[k] = down[r * row + k] / (inverse ? inverse[k % channels] : 1.0f);
      most = std::max(most, std::abs(wanted[k]));
    }
    scale[r] = most / 127.0f;
    if (scale[r] == 0.0f) continue;
    const int64_t g = r / LANES, lane = r % LANES;
    int8_t* to = static_cast<int8_t*>(packed) + g * row * 2 * LANES;
    for (int64_t k = 0; k < row; ++k) {
      const float level = wanted[k] / scale[r];
      const float whole = std::min(127.0f, std::max(-127.0f, std::nearbyint(level)));
      const float fine = std::min(127.0f, std::max(-127.0f, std::nearbyint((level - whole) * 254.0f)));
      for (int half = 0; half < 2; ++half) {
        const int8_t value = static_cast<int8_t>(half ? fine : whole);
        const int64_t block = TOGETHER == 2 ? k / DEPTH * 2 + half : half * (row / DEPTH) + k / DEPTH;
        to[(block * LANES + lane) * DEPTH + k % DEPTH] = value;
        offset[((g * sums + (kind == 1 ? k / channels : 0)) * 2 + half) * LANES + lane] -= 128 * value;
      }
    }
  }
}

}  // namespace
}  // namespace diptych
