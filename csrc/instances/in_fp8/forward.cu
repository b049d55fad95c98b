#include "flashmoe/base/in_fp8.h"

#include "flashmoe/kernel/layer.cuh"

namespace flashmoe {
KernelEntry forward_fp8(bool is_gated) { return forward_entry<__nv_bfloat16, false>(is_gated); }
}  // namespace flashmoe
