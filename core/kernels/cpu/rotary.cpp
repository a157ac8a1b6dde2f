// Normalizes and rotates queries and keys in place, for attention outside of a KV cache. A row's bits depend on it alone.

#include "rotary.h"

namespace diptych {
namespace {

template <bool INTERLEAVED>
void rotate_all(const RotateHeads& r) {
#pragma omp parallel for schedule(static)
  for (int64_t m = 0; m < r.rows; ++m) {
    const float* angles = r.angles + (r.positions ? r.positions[m] : m) * r.d;
    turn_heads<INTERLEAVED>(r.q + m * r.q_stride, r.q_norm, r.eps, angles, r.heads, r.d);
    turn_heads<INTERLEAVED>(r.k + m * r.k_stride, r.k_norm, r.eps, angles, r.kv_heads, r.d);
  }
}

}  // namespace

void rotate_heads(const RotateHeads& r) { r.interleaved ? rotate_all<true>(r) : rotate_all<false>(r); }

}  // namespace diptych
