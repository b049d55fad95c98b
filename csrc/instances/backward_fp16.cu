#include "flashmoe/kernel/layer.cuh"

namespace flashmoe {
KernelEntry backward_fp16(bool is_gated) { return backward_entry<__half, false>(is_gated); }
}  // namespace flashmoe
