// Runs a program, a list of kernel calls with fixed buffers and shapes, so that Python runs a network by one call.
// It is the CPU's counterpart of a CUDA graph.

#include "attention.h"
#include "mixture.h"
#include "norm.h"
#include "product.h"
#include "rotary.h"
#include "rows.h"
#include "tokens.h"

#include <iterator>

extern "C" {

struct Call {
  int64_t kind;  // numbered as in diptych_size
  const void* arguments;
};

// Returns the size of an argument structure; Python compares it with the size of its mirror.
int64_t diptych_size(int64_t kind) {
  using namespace diptych;
  const int64_t sizes[] = {sizeof(Product),   sizeof(Quantize), sizeof(LayerNorm), sizeof(GroupNorm),
                           sizeof(Attention), sizeof(RmsNorm),  sizeof(Rotate),    sizeof(PagedAttention),
                           sizeof(RotateHeads), sizeof(Embed), sizeof(Place),
                           sizeof(Branch),    sizeof(BranchUse), sizeof(BranchRows), sizeof(Mixture)};
  return kind >= 0 && kind < static_cast<int64_t>(std::size(sizes)) ? sizes[kind] : -1;
}

// Returns the name of the instruction set that the kernels are compiled for.
const char* diptych_instructions() { return diptych::INSTRUCTIONS; }

void diptych_run(const Call* calls, int64_t count) {
  using namespace diptych;
  for (int64_t i = 0; i < count; ++i) switch (calls[i].kind) {
      case 0: product(*static_cast<const Product*>(calls[i].arguments)); break;
      case 1: quantize(*static_cast<const Quantize*>(calls[i].arguments)); break;
      case 2: layer_norm(*static_cast<const LayerNorm*>(calls[i].arguments)); break;
      case 3: group_norm(*static_cast<const GroupNorm*>(calls[i].arguments)); break;
      case 4: attention(*static_cast<const Attention*>(calls[i].arguments)); break;
      case 5: rms_norm(*static_cast<const RmsNorm*>(calls[i].arguments)); break;
      case 6: rotate(*static_cast<const Rotate*>(calls[i].arguments)); break;
      case 7: paged_attention(*static_cast<const PagedAttention*>(calls[i].arguments)); break;
      case 8: rotate_heads(*static_cast<const RotateHeads*>(calls[i].arguments)); break;
      case 14: mixture(*static_cast<const Mixture*>(calls[i].arguments)); break;
      case 9: embed(*static_cast<const Embed*>(calls[i].arguments)); break;
      default: place(*static_cast<const Place*>(calls[i].arguments));
    }
}
}
