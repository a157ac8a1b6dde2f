// The arguments of attention. Python fills the same structure (calls.py): keep the two in step.

#pragma once

#include "vector.h"

namespace diptych {

// softmax(q · kᵀ · scale) · v for each image and head; heads lie side by side within a token. Strides are the distance
// of two tokens in floats; `d`, the width of a head, is a multiple of 16. The result [images, tokens, heads · d] goes to
// bytes (· inverse), or to floats where given.
struct Attention {
  const float *q, *k, *v, *inverse;
  uint8_t* bytes;
  float* floats;
  int64_t images, heads, tokens, keys, d, q_stride, k_stride, v_stride;
  float scale;
};

void attention(const Attention& a);

}  // namespace diptych
