#include "flashmoe/kernel/layer.cuh"

namespace flashmoe {
KernelEntry backward_fp16_transposed(bool is_gated) {
    return backward_entry<__half, true>(is_gated);
}
}  // namespace flashmoe
