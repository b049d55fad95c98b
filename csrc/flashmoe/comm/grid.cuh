// What the CTAs of one launch do together. All counters are zero when a launch begins: the last CTA
// to leave zeroes them and opens the next epoch, so no launch needs a memset before it.
#pragma once

#include "flashmoe/comm/wait.cuh"

namespace flashmoe {

// Runs `then` on one thread, of whichever CTA comes last; everything that any thread of the grid
// did before is visible to it. Scope: all threads of every CTA.
template <class Then>
__device__ __forceinline__ void last_arrival(uint32_t* counter, Then then) {
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::fence_acq_rel_sys();
        if (atomicAdd(counter, 1u) == gridDim.x - 1) {
            ptx::fence_acq_rel_sys();
            then();
        }
    }
}

// Scope: all threads of every CTA, which are resident together. Each barrier has its own counter.
__device__ __forceinline__ void grid_barrier(const Watchdog& watchdog, uint32_t* counter) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(counter, 1u);
        wait_count(watchdog, Role::kGridBarrier, 0, counter, gridDim.x);
        __threadfence();
    }
    __syncthreads();
}

}  // namespace flashmoe
