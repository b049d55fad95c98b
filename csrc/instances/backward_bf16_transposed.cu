#include "flashmoe/kernel/layer.cuh"

namespace flashmoe {
KernelEntry backward_bf16_transposed(bool is_gated) {
    return backward_entry<__nv_bfloat16, true>(is_gated);
}
}  // namespace flashmoe
