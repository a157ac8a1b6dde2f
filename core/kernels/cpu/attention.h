// Declares the arguments of the attention kernel. calls.py mirrors this structure: change both together.

#pragma once

#include "vector.h"

namespace diptych {

// softmax(q · kᵀ · scale) · v for each image and head; a token's heads are contiguous, and heads / kv_heads of them share
// keys and values. Strides are the distance between tokens in floats; `d`, the width of a head, is a multiple of 16. An
// image attends to its first lengths[image] keys (clamped to 1…keys), to all if `lengths` is null; with `causal`, a query
// to no key behind its own index. The result [images, tokens, heads · d] is written to `floats` if given, else quantized
// to bytes (· inverse).
struct Attention {
  const float *q, *k, *v, *inverse;
  const int32_t* lengths;
  uint8_t* bytes;
  float* floats;
  int64_t images, heads, kv_heads, tokens, keys, d, q_stride, k_stride, v_stride;
  float scale;
  int32_t causal;
};

void attention(const Attention& a);

}  // namespace diptych
