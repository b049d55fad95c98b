// Replicas' gradients that come home in a launch after the backward's: fc1's, which the backward's
// last tiles have stored, and the biases', which launches of their own have stored. fc2's are added
// earlier (moe/slot_grads.cuh).
#pragma once

#include "flashmoe/kernel/entry.h"
#include "flashmoe/moe/slot_grads.cuh"
#include "flashmoe/moe/unmatched.cuh"

namespace flashmoe {

constexpr int kAddThreads = 512;

template <class Grad>
__global__ __launch_bounds__(kAddThreads, 2)  //
    void add_replicas_kernel(const __grid_constant__ BackwardArgs args) {
    if (unmatched_ranks(args) != 0) return;
    const Shape& s = args.shape;
    const uint32_t epoch = *args.workspace.epoch;  // the backward's, which has ended
    if (threadIdx.x < 32) {
        if (blockIdx.x == 0 and threadIdx.x == 0) {
            publish_slot_grads(args, SlotGrads::kOthers, epoch);
        }
        await_slot_grads(args, SlotGrads::kOthers, epoch);
    }
    __syncthreads();
    const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t step = int64_t(gridDim.x) * blockDim.x;
    for (int nth = 0;; ++nth) {
        const int place = place_of_replica(args, nth);
        if (place < 0) return;
        const PulledExpert expert(args, place);
        const float* from = expert.from;
        const int num_kinds = kExpertParts + s.is_split;  // fc1 has two then
        for (int kind = 0; kind < num_kinds; ++kind) {
            const int part = max(kind - s.is_split, 0);
            const int64_t count = part_elements(s, part) / (part == 0 and s.is_split ? 2 : 1);
            auto* to = static_cast<Grad*>(
                args.weight_grads.pointers[kind * s.num_local_slots() + expert.local]);
            if (to == nullptr) {
                // The owner wants none.
            } else if (part == 0) {
                add_fours<4>(to, from, thread, count / 4, step);
            } else if (part >= 2 and args.biases[0] != nullptr) {  // may begin at any element
                for (int64_t i = thread; i < count; i += step) to[i] = Grad(float(to[i]) + from[i]);
            }
            from += count;
        }
    }
}

template <class T>
KernelEntry add_replicas_entry(bool into_float32) {
    return {into_float32 ? reinterpret_cast<const void*>(&add_replicas_kernel<float>)
                         : reinterpret_cast<const void*>(&add_replicas_kernel<T>),
            kAddThreads, 0};
}

}  // namespace flashmoe
