// Quantizes this rank's rows of dY into its heap, ahead of a backward in FP8: peers pull them from
// there, and so does the rank itself. In a forward the launch that plans does it for tokens.
#pragma once

#include "flashmoe/kernel/copies.h"
#include "flashmoe/moe/publish.cuh"
#include "flashmoe/moe/unmatched.cuh"

namespace flashmoe {

__global__ __launch_bounds__(kQuantizeThreads)  //
    void quantize_grads_kernel(const __grid_constant__ BackwardArgs args) {
    if (unmatched_ranks(args) == 0) quantize_tokens(args, kQuantizeThreads);
}

}  // namespace flashmoe
