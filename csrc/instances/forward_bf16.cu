#include "flashmoe/kernel/layer.cuh"

namespace flashmoe {
KernelEntry forward_bf16(bool is_gated) { return forward_entry<__nv_bfloat16, false>(is_gated); }
}  // namespace flashmoe
