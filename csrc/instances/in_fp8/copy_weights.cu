#include "flashmoe/base/in_fp8.h"

#include "flashmoe/kernel/copy_weights.cuh"
#include "flashmoe/kernel/quantize_grads.cuh"
#include "flashmoe/kernel/turn_weights.cuh"

namespace flashmoe {
KernelEntry copy_weights_entry() {
    return {reinterpret_cast<const void*>(&copy_weights_kernel), kCopyWeightsThreads, 0};
}
KernelEntry turn_weights_entry() {
    return {reinterpret_cast<const void*>(&turn_weights_kernel), kCopyWeightsThreads, 0};
}
KernelEntry quantize_grads_entry() {
    return {reinterpret_cast<const void*>(&quantize_grads_kernel), kQuantizeThreads, 0};
}
}  // namespace flashmoe
