// Declares the arguments of the kernels in norm.cpp. calls.py mirrors these structures: change both together.

#pragma once

#include "vector.h"

namespace diptych {

struct Quantize {  // x [rows, channels] · inverse[channels] → bytes
  const float* x;
  const float* inverse;
  uint8_t* bytes;
  int64_t rows, channels;
};

struct LayerNorm {  // over channels; to `floats` if given, else to bytes
  const float *x, *weight, *bias, *inverse;
  uint8_t* bytes;
  float* floats;
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
