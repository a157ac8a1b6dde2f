// Declares the arguments of a mixture of experts. calls.py mirrors this structure: change both together.

#pragma once

#include "product.h"

namespace diptych {

// out[m] = residual[m] + Σ weight · expert(a[m]) over the `top` experts with the highest of scores[m], in that order.
// Weights are softmax(scores[m]), scaled to a sum of 1 where `normalized`. An expert is two products, of which `gated`
// gives what `down` reads, whose arguments lack rows, input and output; those that no row chose are not read.
struct Mixture {
  const void* a;         // [rows, channels], bytes or floats
  const float* scores;   // [rows, experts]
  const Product* gated;  // [experts]
  const Product* down;   // [experts]
  const float* residual; // [rows, channels]; may be `out`
  float* out;            // [rows, channels]
  char* gathered;        // [rows · top, channels], like `a`
  char* hidden;          // [rows · top, inner], bytes or floats
  float* results;        // [rows · top, channels]
  int64_t rows, channels, inner, experts, top, size;  // size: bytes of an element of `a` and of `hidden`
  int32_t normalized;
};

void mixture(const Mixture& m);

}  // namespace diptych
