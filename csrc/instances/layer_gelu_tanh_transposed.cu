#include "flashmoe/kernel/layer.cuh"

namespace flashmoe {
KernelEntry layer_gelu_tanh_transposed(bool is_backward, bool is_gated) {
    return layer_entry<Activation::kGeluTanh, true>(is_backward, is_gated);
}
}  // namespace flashmoe
