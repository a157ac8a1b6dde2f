// Declares the arguments of the kernels in norm.cpp. calls.py mirrors these structures: change both together.

#pragma once

#include "vector.h"

namespace diptych {

// x [rows, channels] · inverse[channels] → bytes; without `inverse` each row by its own largest magnitude, with the scale
// that its bytes then have in scales[row]: NaN for a row with NaN or infinity. With both, a row that is beyond the range
// of bytes, and of an image of `tokens` rows that `within` names, is divided by scales[row]; all others have a scale of 1.
struct Quantize {
  const float* x;
  const float* inverse;  // or null
  uint8_t* bytes;
  float* scales;          // or null with `inverse`
  const int32_t* within;  // [images], 0 for one that is not named; with both
  int64_t rows, channels, tokens;
};

// Follows the normalization of a row y: residual[m] + y · row_scale[m / tokens]. Either may be null; row_scale has one
// row per image, `scale_stride` floats apart. `residual` may be the output.
struct Modulation {
  const float *row_scale, *residual;
  int64_t tokens, scale_stride;

  const float* scale_of(int64_t m) const { return row_scale ? row_scale + m / tokens * scale_stride : nullptr; }
  const float* residual_of(int64_t m, int64_t channels) const { return residual ? residual + m * channels : nullptr; }
};

// Modulates sixteen channels of one row, whose scale and residual are given.
inline Vec modulated(Vec y, const float* scale, const float* residual, int64_t c, Mask mask) {
  if (scale) y = y * load(scale + c, mask);
  if (residual) y = y + load(residual + c, mask);
  return y;
}

struct LayerNorm {  // over channels; weight and bias may both be null; to `floats` if given, else to bytes
  const float *x, *weight, *bias, *inverse;
  uint8_t* bytes;
  float* floats;
  Modulation after;
  int64_t rows, channels;
  float eps;
};

struct GroupNorm {  // over [pixels, group] of x and y concatenated (c2 may be 0), then optional SiLU
  const float *x, *y, *weight, *bias, *inverse;
  uint8_t* bytes;
  float* floats;
  int64_t images, pixels, c1, c2, groups;
  float eps;
  int32_t silu;
};

void quantize(const Quantize& q);
void layer_norm(const LayerNorm& l);
void group_norm(const GroupNorm& g);

}  // namespace diptych
