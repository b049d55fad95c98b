#include "flashmoe/kernel/layer.cuh"

namespace flashmoe {
KernelEntry forward_fp16_transposed(bool is_gated) { return forward_entry<__half, true>(is_gated); }
}  // namespace flashmoe
