#include "flashmoe/kernel/layer.cuh"

namespace flashmoe {
KernelEntry forward_fp16(bool is_gated) { return forward_entry<__half, false>(is_gated); }
}  // namespace flashmoe
