#include "flashmoe/kernel/bias_grad.cuh"
#include "flashmoe/kernel/wgrad.cuh"

namespace flashmoe {
KernelEntry wgrad_fp16(bool into_float32) { return wgrad_entry<__half>(into_float32); }
KernelEntry bias_grad_fp16(bool into_float32) { return bias_grad_entry<__half>(into_float32); }
}  // namespace flashmoe
