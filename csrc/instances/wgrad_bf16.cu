#include "flashmoe/kernel/wgrad.cuh"

namespace flashmoe {
KernelEntry wgrad_bf16(bool into_float32) { return wgrad_entry<__nv_bfloat16>(into_float32); }
}  // namespace flashmoe
