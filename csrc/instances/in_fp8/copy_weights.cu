#include "flashmoe/base/in_fp8.h"

#include "flashmoe/kernel/copy_weights.cuh"

namespace flashmoe {
KernelEntry copy_weights_entry() {
    return {reinterpret_cast<const void*>(&copy_weights_kernel), kCopyWeightsThreads, 0};
}
}  // namespace flashmoe
