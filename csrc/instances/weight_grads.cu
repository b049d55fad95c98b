#include "flashmoe/kernel/weight_grads_kernel.cuh"

namespace flashmoe {
KernelEntry weight_grads_entry() {
    return {reinterpret_cast<const void*>(&weight_grads_kernel), kLayerThreads,
            int(sizeof(LayerBuffers))};
}
}  // namespace flashmoe
