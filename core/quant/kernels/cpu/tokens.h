// The arguments of what language models need beside products. Python fills the same structures (calls.py): keep the two
// in step.

#pragma once

#include "vector.h"

namespace diptych {

struct RmsNorm {  // x / sqrt(mean(x²) + eps) · weight over channels; bytes, or floats where given
  const float *x, *weight, *inverse;
  uint8_t* bytes;
  float* floats;
  int64_t rows, channels;
  float eps;
};

// Where the tokens of a forward stand, and the pages that hold their sequences' keys and values. Row m is the token at
// positions[m] of the sequence whose page numbers begin at table[sequences[m] · table_stride]. A page has PAGE tokens:
// keys [kv_heads, d, PAGE], values [kv_heads, PAGE, d]; as floats, or as int8 with scales [kv_heads, PAGE] for each.
struct Paged {
  const int32_t *positions, *sequences, *table;
  void *keys, *values;
  float *key_scales, *value_scales;  // of int8 pages, else null
  int64_t rows, heads, kv_heads, d, table_stride;
};

// Rotates queries and keys of qkv [rows, (heads + 2 · kv_heads) · d] by their positions (Su et al., 2021; halves apart, as
// transformers lays them out) and puts keys and values into their pages. Queries are rotated in place. `angles` holds for
// each position d/2 cosines and then d/2 sines.
struct Rotate {
  Paged at;
  float* qkv;
  const float* angles;
};

// softmax(q · kᵀ · scale) · v of each row over its sequence's tokens up to its own position. Rows of q are q_stride floats
// apart. The result [rows, heads · d] goes to bytes (· inverse), or to floats where given.
struct PagedAttention {
  Paged at;
  const float *q, *inverse;
  uint8_t* bytes;
  float* floats;
  int64_t q_stride;
  float scale;
};

void rms_norm(const RmsNorm& r);
void rotate(const Rotate& r);
void paged_attention(const PagedAttention& a);

}  // namespace diptych
