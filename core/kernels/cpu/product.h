// Declares the arguments of the matrix product. calls.py mirrors this structure: change both together.

#pragma once

#include "branch.h"
#include "vector.h"

namespace diptych {

// out[m, n] = scale[n] · Σ a[m, tap, k] · w[n, tap, k] + bias[n] + row_bias[image of m, n] + residual[m, n], then
// an activation or GEGLU, written to floats or quantized to bytes (· inverse[n]). For a convolution `height` and `width`
// are the input's, taps is 9, stride 1 or 2; padding is 1 at the bottom and right and `before` at the top and left.
// `upsample` 1 reads the input upsampled 2× (nearest neighbour), without its last row and column where `cut_height`
// and `cut_width` are 1. For a linear layer taps is 1 and the number of rows is
// images · height · width. `a_stride` is the distance between input pixels in elements; `diptych_pack` packs weights,
// and scale and bias are padded to a multiple of 16 columns. GEGLU takes no row_bias or residual; its gate
// passes through `act`, through GELU if there is none (with SiLU it is SwiGLU). With `a_scale` the sum is
// Σ a_scale[row] · Σ a[m, tap, k] · w[n, tap, k] over the taps, whose inputs lie in different rows of `a`. With `rows`
// the low-rank branches of a row's image are added behind the bias, to GEGLU's hidden half and gate alike.
struct Product {
  const void* a;
  const void* w;
  const int32_t* offset;  // [n]: −128 · the sum of a column's weights, with `a_scale` [taps, n]; INT8 only
  const float* scale;     // or null
  const float* bias;
  const float* row_bias;  // or null; images are `row_stride` floats apart
  const float* residual;  // or null
  const float* inverse;   // reciprocals of the output scales; for bytes
  const float* a_scale;   // or null: the scale of each row of `a`; INT8 only
  uint8_t* bytes;
  float* floats;  // output instead of bytes
  const Branch* const* branches;  // what `rows` names; null for one without a share in this product
  const BranchRows* rows;         // or null
  int64_t images, height, width, channels, n, a_stride, row_stride;
  int32_t kind, taps, stride, before, upsample, cut_height, cut_width, geglu;  // kind: 0 INT8, 1 fp32 weights, 2 bf16
  int32_t act;  // 0 none, 1 SiLU, 2 GELU (by erf), 3 x·σ(1.702 x), 4 GELU by tanh, 5 tanh, 6 ReLU
};

void product(const Product& p);

}  // namespace diptych
