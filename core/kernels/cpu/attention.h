// Declares the arguments of the attention kernel. calls.py mirrors this structure: change both together.

#pragma once

#include "vector.h"

namespace diptych {

// softmax(q · kᵀ · scale) · v for each image and head; a token's heads are contiguous. Strides are the distance between
// tokens in floats; `d`, the width of a head, is a multiple of 16. The result [images, tokens, heads · d] is written to
// `floats` if given, else quantized to bytes (· inverse).
struct Attention {
  const float *q, *k, *v, *inverse;
  uint8_t* bytes;
  float* floats;
  int64_t images, heads, tokens, keys, d, q_stride, k_stride, v_stride;
  float scale;
};

void attention(const Attention& a);

}  // namespace diptych
