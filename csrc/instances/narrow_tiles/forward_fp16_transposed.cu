#include "flashmoe/base/narrow_tiles.h"

#include "flashmoe/kernel/layer.cuh"

kernel_entries::KernelEntry kernel_entries::narrow_forward_fp16_transposed() {
    return flashmoe::entry_of<flashmoe::ForwardPass<__half, false, true>>();
}
