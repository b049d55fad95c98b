#include "flashmoe/kernel/layer.cuh"

namespace flashmoe {
KernelEntry layer_relu_transposed(bool is_backward, bool is_gated) {
    return layer_entry<Activation::kRelu, true>(is_backward, is_gated);
}
}  // namespace flashmoe
