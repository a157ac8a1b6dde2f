// Declares the arguments of kernels that move rows. calls.py mirrors these structures: change both together.

#pragma once

#include "vector.h"

namespace diptych {

// out[m] = table[indices[m]] · scale, plus positions[m % tokens] if given: an embedding, or a gather of a buffer's rows.
// The table's rows are `stride` elements apart, in fp32 or bf16.
struct Embed {
  const void* table;
  const int32_t* indices;
  const float* positions;
  float* floats;
  int64_t rows, channels, tokens, stride;
  float scale;
  int32_t bf16;
};

// Copies `rows` rows of `size` bytes for each image. Distances between rows and between images are in bytes.
struct Place {
  const char* x;
  char* out;
  int64_t images, rows, size, x_row, x_image, out_row, out_image;
};

void embed(const Embed& e);
void place(const Place& p);

}  // namespace diptych
