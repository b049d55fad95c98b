#include "flashmoe/kernel/layer.cuh"

namespace flashmoe {
KernelEntry layer_gelu(bool is_backward, bool is_gated) {
    return layer_entry<Activation::kGelu, false>(is_backward, is_gated);
}
}  // namespace flashmoe
