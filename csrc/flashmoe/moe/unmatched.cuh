// A backward that some ranks do not have. All ranks that have it read so in their plans and leave
// at once: no epoch is taken and no rank waits. The reason stays with the host, and the next
// forward sends it to all ranks.
#pragma once

#include "flashmoe/moe/args.cuh"

namespace flashmoe {

// The ranks, a bit each, that lack the backward which this launch is a part of.
__device__ __forceinline__ uint32_t unmatched_ranks(const LayerArgs& args) {
    return args.first_plan != nullptr ? args.first_plan->unfollowed : 0;
}

// Leaves the reason. Scope: the grid.
__device__ __forceinline__ void raise_unmatched(const LayerArgs& args, uint32_t ranks) {
    if (blockIdx.x == 0 and threadIdx.x == 0) {
        args.watchdog.raise(kFaultUnmatched, Wait::kRouting, -1, -1, 0, ranks);
    }
}

// Fills `bytes`, a multiple of 16, with NaN of any type of elements. Scope: a CTA.
__device__ __forceinline__ void fill_with_nan(void* to, int64_t bytes) {
    for (int64_t i = threadIdx.x; i < bytes / int64_t(sizeof(uint4)); i += blockDim.x) {
        static_cast<uint4*>(to)[i] = {~0u, ~0u, ~0u, ~0u};
    }
}

// Makes the gradients of this rank's own weights NaN. Scope: a CTA.
__device__ __forceinline__ void spoil_weight_grads(const BackwardArgs& args) {
    const Shape& s = args.shape;
    const int64_t fc2_elements = int64_t(s.hidden) * s.intermediate;
    const int64_t fc1_elements = int64_t(s.hidden) * s.fc1_rows() / (s.is_split ? 2 : 1);
    const int element_bytes = args.weight_grads.dtype == Dtype::kFloat32 ? 4 : kElementBytes;
#pragma unroll 1
    for (int i = 0; i < s.num_matrices(); ++i) {
        void* const grad = args.weight_grads.pointers[i];
        if (grad == nullptr or s.is_spare(i % s.num_local_slots())) continue;
        const int64_t elements = i < s.num_fc1() ? fc1_elements : fc2_elements;
        fill_with_nan(grad, elements * element_bytes);
    }
}

}  // namespace flashmoe
