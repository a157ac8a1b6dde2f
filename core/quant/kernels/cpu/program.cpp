// Runs a list of calls one after another: what a CUDA graph is to a GPU. Buffers and shapes were fixed when the list was
// made, so that a whole network is one call from Python. The only file with a public interface beside `diptych_pack`.

#include "attention.h"
#include "norm.h"
#include "product.h"
#include "tokens.h"

extern "C" {

struct Call {
  int64_t kind;  // as in diptych_size
  const void* arguments;
};

// Sizes of the argument structures, so that Python can see whether it means the same.
int64_t diptych_size(int64_t kind) {
  using namespace diptych;
  const int64_t sizes[] = {sizeof(Product),   sizeof(Quantize), sizeof(LayerNorm), sizeof(GroupNorm),
                           sizeof(Attention), sizeof(RmsNorm),  sizeof(Rotate),    sizeof(PagedAttention)};
  return kind >= 0 && kind < 8 ? sizes[kind] : -1;
}

// The instruction set that all of it was compiled for.
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
      default: paged_attention(*static_cast<const PagedAttention*>(calls[i].arguments));
    }
}
}
