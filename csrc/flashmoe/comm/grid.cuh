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

struct GridBarrier {
    static constexpr uint32_t kGo = 1, kStop = 2;

    uint32_t arrived;
    uint32_t verdict;
};

// Waits for all CTAs, each barrier once a launch. Whether to go on is decided once, by the last CTA
// to arrive, which calls may_go_on, or by the first to give up; so all CTAs return the same. Scope:
// all threads of every CTA, which are resident together.
template <class MayGoOn>
__device__ __forceinline__ bool grid_barrier(const Watchdog& watchdog,
                                             GridBarrier* barrier,
                                             MayGoOn may_go_on) {
    bool goes_on = false;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicAdd(&barrier->arrived, 1u) == gridDim.x - 1) {
            __threadfence();
            atomicCAS(&barrier->verdict, 0u, may_go_on() ? GridBarrier::kGo : GridBarrier::kStop);
        }
        const bool decided = wait_for(
            watchdog, {Role::kGridBarrier, -1, 0, GridBarrier::kGo},
            [=] { return ptx::ld_acquire_gpu(&barrier->verdict); },
            [](uint32_t seen) { return seen != 0; });
        if (not decided) atomicCAS(&barrier->verdict, 0u, GridBarrier::kStop);
        goes_on = ptx::ld_acquire_gpu(&barrier->verdict) == GridBarrier::kGo;
        __threadfence();
    }
    return __syncthreads_or(goes_on);
}

}  // namespace flashmoe
