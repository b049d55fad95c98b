#include "flashmoe/kernel/layer.cuh"

namespace flashmoe {
KernelEntry forward_bf16_transposed(bool is_gated) {
    return forward_entry<__nv_bfloat16, true>(is_gated);
}
}  // namespace flashmoe
