#include "flashmoe/kernel/layer.cuh"

namespace flashmoe {
KernelEntry backward_bf16(bool is_gated) { return backward_entry<__nv_bfloat16, false>(is_gated); }
}  // namespace flashmoe
