#include "flashmoe/kernel/layer.cuh"

namespace flashmoe {
KernelEntry layer_squared_relu(bool is_backward, bool is_gated) {
    return layer_entry<Activation::kSquaredRelu, false>(is_backward, is_gated);
}
}  // namespace flashmoe
