// The arguments of a matrix product. Python fills the same structure (calls.py): keep the two in step.

#pragma once

#include "vector.h"

namespace diptych {

// out[m, n] = scale[n] · Σ a[m, tap, k] · w[n, tap, k] + bias[n] + row_bias[image of m, n] + residual[m, n], then SiLU or
// GEGLU where asked, to floats or to bytes (· inverse[n]). For a convolution `height` and `width` are the input's, taps
// is 9, stride 1 or 2; padding is 1 at the bottom and right and `before` at the top and left. `upsample` 1 reads the
// input doubled by nearest neighbours. For a linear layer taps is 1 and images · height · width is the number of rows.
// `a_stride` is the distance of two pixels of the input in elements; weights are packed by `diptych_pack`, and scale and
// bias reach to the next multiple of 16 columns. With GEGLU nothing else is added: no row_bias or residual; `silu` then makes it SwiGLU.
struct Product {
  const void* a;
  const void* w;
  const int32_t* offset;  // [n]: −128 · the sum of a column's weights; for INT8
  const float* scale;     // or null
  const float* bias;
  const float* row_bias;  // or null; `row_stride` floats from image to image
  const float* residual;  // or null
  const float* inverse;   // for bytes
  uint8_t* bytes;
  float* floats;  // given instead of bytes
  int64_t images, height, width, channels, n, a_stride, row_stride;
  int32_t kind, taps, stride, before, upsample, geglu, silu;  // kind: 0 INT8, 1 fp32 weights, 2 bf16 weights
};

void product(const Product& p);

}  // namespace diptych
