// Multiplies the inputs of a few rows by a block of packed weights, in registers: the core of the matrix product.

#pragma once

#include <type_traits>

#include "product.h"

namespace diptych {
namespace {

// INT8 whose rows of inputs have a scale each, so that the exact sums of the taps are added up in floats.
struct Int8ByRow : Int8 {
  using Sum = Vec;
  static Vec value(Vec sum) { return sum; }
};

// A number that the compiler does not know. Loops over the rows of sums end at it: if all their indices were constants, GCC
// would hold each sum as a variable of its own, and spill half of them to memory at every step of `multiply`.
inline int opaque(int count) {
  asm volatile("" : "+r"(count));
  return count;
}

template <class Kind, int MR, int NV>
inline __attribute__((always_inline)) void multiply(const typename Kind::Element* const* a, int taps, int64_t steps,
                                                    const char* b, const int32_t* offset, int64_t n,
                                                    typename Kind::Sum (&sums)[MR][NV]) {
  for (int i = 0; i < MR; ++i)
    for (int j = 0; j < NV; ++j) sums[i][j] = Kind::start(offset, n + LANES * j);
  for (int t = 0; t < taps; ++t, a += MR)
    for (int64_t k = 0; k < steps; ++k, b += NV * Kind::BYTES) {
      decltype(Kind::weight(b)) v[NV];
      for (int j = 0; j < NV; ++j) v[j] = Kind::weight(b + Kind::BYTES * j);
      for (int i = 0; i < MR; ++i) {
        const auto x = Kind::input(a[i] + Kind::DEPTH * k);
        for (int j = 0; j < NV; ++j) sums[i][j] = Kind::add(sums[i][j], x, v[j]);
      }
    }
}

}  // namespace
}  // namespace diptych
