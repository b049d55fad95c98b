#include "flashmoe/kernel/layer.cuh"

namespace flashmoe {
KernelEntry layer_silu_transposed(bool is_backward, bool is_gated) {
    return layer_entry<Activation::kSilu, true>(is_backward, is_gated);
}
}  // namespace flashmoe
