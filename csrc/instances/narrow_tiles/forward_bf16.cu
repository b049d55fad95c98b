#include "flashmoe/base/narrow_tiles.h"

#include "flashmoe/kernel/layer.cuh"

kernel_entries::KernelEntry kernel_entries::narrow_forward_bf16() {
    return flashmoe::entry_of<flashmoe::ForwardPass<__nv_bfloat16, false, false>>();
}
