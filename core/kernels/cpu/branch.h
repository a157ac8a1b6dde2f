// Declares the low-rank branches that a product adds to some of its rows (LoRA: Hu et al., 2021). branches.py mirrors
// these structures: change both together.

#pragma once

#include "vector.h"

namespace diptych {

// The ranks `begin` to `end` reach sixteen columns; their rows of `up` begin at vector `at`.
struct Span {
  int32_t begin, end, at;
};

// One adapter's share of a product: up · down(x). Ranks are in groups of sixteen, padded with zeros. Over INT8 inputs
// `down` is the sum of two int8 matrices, of which the second counts 1/254, times `scale`; else it is fp32.
struct Branch {
  const void* down;       // [groups, taps, channels, 16]; INT8: as `diptych_pack_down` arranges both matrices
  const int32_t* offset;  // INT8: [groups, 2, 16], −128 · the sums of both matrices' rows; by row of the input
                          // [groups, taps, 2, 16]
  const float* scale;     // INT8: [groups · 16]
  const float* up;        // for each vector of columns the rows of its span, sixteen columns each
  const Span* spans;      // of each vector of columns, in the order of the packed weights
  int64_t groups;
};

struct BranchUse {
  int32_t branch;
  float scale;
};

// Which branches the rows of each image get, in this order: uses[first[image]] to uses[first[image + 1]].
struct BranchRows {
  const BranchUse* uses;
  const int32_t* first;
  int64_t images;
};

}  // namespace diptych
