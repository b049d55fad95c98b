#include "flashmoe/kernel/layer.cuh"

namespace flashmoe {
KernelEntry layer_relu(bool is_backward, bool is_gated) {
    return layer_entry<Activation::kRelu, false>(is_backward, is_gated);
}
}  // namespace flashmoe
