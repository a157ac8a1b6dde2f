// The arguments of what stands before a layer. Python fills the same structures (calls.py): keep the two in step.

#pragma once

#include "vector.h"

namespace diptych {

struct Quantize {  // x [rows, channels] · inverse[channels] → bytes
  const float* x;
  const float* inverse;
  uint8_t* bytes;
  int64_t rows, channels;
};

struct LayerNorm {  // over channels; bytes, or floats where given
  const float *x, *weight, *bias, *inverse;
  uint8_t* bytes;
  float* floats;
  int64_t rows, channels;
  float eps;
};

struct GroupNorm {  // over [pixels, group] of x and y side by side (c2 may be 0), then SiLU where asked
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
