#include "flashmoe/kernel/bias_grad.cuh"
#include "flashmoe/kernel/wgrad.cuh"

namespace flashmoe {
KernelEntry wgrad_bf16(bool into_float32) { return wgrad_entry<__nv_bfloat16>(into_float32); }
KernelEntry bias_grad_bf16(bool into_float32) {
    return bias_grad_entry<__nv_bfloat16>(into_float32);
}
}  // namespace flashmoe
