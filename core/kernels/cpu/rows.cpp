// Gathers rows of a table, and copies blocks of rows between buffers: embeddings, and sequences joined and split.

#include "rows.h"

namespace diptych {
namespace {

inline float wide(float value) { return value; }
inline float wide(uint16_t half) {  // bf16
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float made;
  std::memcpy(&made, &bits, sizeof made);
  return made;
}

template <class T>
void gather_rows(const Embed& e) {
#pragma omp parallel for schedule(static)
  for (int64_t m = 0; m < e.rows; ++m) {
    const T* from = static_cast<const T*>(e.table) + e.indices[m] * e.stride;
    const float* position = e.positions ? e.positions + m % e.tokens * e.channels : nullptr;
    float* to = e.floats + m * e.channels;
    for (int64_t c = 0; c < e.channels; ++c) to[c] = wide(from[c]) * e.scale;
    if (!position) continue;
    for (int64_t c = 0; c < e.channels; ++c) to[c] += position[c];
  }
}

}  // namespace

void embed(const Embed& e) { e.bf16 ? gather_rows<uint16_t>(e) : gather_rows<float>(e); }

void place(const Place& p) {
#pragma omp parallel for schedule(static)
  for (int64_t m = 0; m < p.images * p.rows; ++m) {
    const int64_t image = m / p.rows, row = m % p.rows;
    std::memcpy(p.out + image * p.out_image + row * p.out_row, p.x + image * p.x_image + row * p.x_row, p.size);
  }
}

}  // namespace diptych
