#include "flashmoe/kernel/layer.cuh"

namespace flashmoe {
KernelEntry layer_silu(bool is_backward, bool is_gated) {
    return layer_entry<Activation::kSilu, false>(is_backward, is_gated);
}
}  // namespace flashmoe
