// Declares the arguments of the kernels in tokens.cpp. calls.py mirrors these structures: change both together.

#pragma once

#include "norm.h"

namespace diptych {

struct RmsNorm {  // x / sqrt(mean(x²) + eps) · weight over channels; to `floats` if given, else to bytes
  const float *x, *weight, *inverse;
  uint8_t* bytes;
  float* floats;
  Modulation after;
  int64_t rows, channels;
  float eps;
};

// The positions of a forward's tokens and the KV cache pages of their sequences. Row m is the token at positions[m] of
// the sequence whose block table begins at table[sequences[m] · table_stride]. A page holds PAGE tokens: keys
// [kv_heads, d, PAGE], values [kv_heads, PAGE, d], as floats or as int8 with scales [kv_heads, PAGE] for each.
struct Paged {
  const int32_t *positions, *sequences, *table;
  void *keys, *values;
  float *key_scales, *value_scales;  // for int8 pages, else null
  int64_t rows, heads, kv_heads, d, table_stride;
};

// Applies rotary embeddings to queries and keys of qkv [rows, (heads + 2 · kv_heads) · d] (Su et al., 2021; in the
// split-half layout of transformers) and writes keys and values into their pages. Queries are rotated in place. `angles`
// holds d/2 cosines and then d/2 sines for each position. Given q_norm and k_norm [d], each head first passes an RMSNorm.
struct Rotate {
  Paged at;
  float* qkv;
  const float *angles, *q_norm, *k_norm;
  float eps;
};

// softmax(q · kᵀ · scale) · v of each row over its sequence's tokens up to its own position (causal), the last `window`
// of them if that is not 0. With `cap`, unless 0, a score s is cap · tanh(s / cap). Rows of q are q_stride floats apart.
// The result [rows, heads · d] is written to `floats` if given, else quantized to bytes (· inverse).
struct PagedAttention {
  Paged at;
  const float *q, *inverse;
  uint8_t* bytes;
  float* floats;
  int64_t q_stride, window;
  float scale, cap;
};

void rms_norm(const RmsNorm& r);
void rotate(const Rotate& r);
void paged_attention(const PagedAttention& a);

}  // namespace diptych
