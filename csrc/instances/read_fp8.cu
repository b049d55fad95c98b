#include "flashmoe/kernel/copy_weights.cuh"
#include "flashmoe/kernel/read_rows.cuh"

namespace flashmoe {
KernelEntry copy_weights_entry() {
    return {reinterpret_cast<const void*>(&copy_weights_kernel), kCopyWeightsThreads, 0};
}
KernelEntry read_rows_entry() {
    return {reinterpret_cast<const void*>(&read_rows_kernel), kReadRowsThreads, 0};
}
}  // namespace flashmoe
