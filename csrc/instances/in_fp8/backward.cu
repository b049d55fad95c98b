#include "flashmoe/base/in_fp8.h"

#include "flashmoe/kernel/layer.cuh"

namespace flashmoe {
KernelEntry backward_fp8(bool is_gated) { return backward_entry<__nv_bfloat16, false>(is_gated); }
}  // namespace flashmoe
