// What the CTAs of one launch do together. All counters are zero when a launch begins: the last CTA
// to leave zeroes them and opens the next epoch, so no launch needs a memset before it.
#pragma once

#include "flashmoe/comm/wait.cuh"
#include "flashmoe/protocol/grid.h"

namespace flashmoe {

// Runs `then` on one thread, of whichever CTA comes last; everything that any thread of the grid
// did before is visible to it. Scope: all threads of every CTA.
template <class Then>
__device__ __forceinline__ void last_arrival(uint32_t* counter, Then then) {
    __syncthreads();
    if (threadIdx.x == 0) protocol::arrive<Atomics>(counter, gridDim.x, then);
}

struct GridBarrier {
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
        goes_on = protocol::barrier<Atomics>(
            &barrier->arrived, &barrier->verdict, gridDim.x, may_go_on, [&](auto load, auto done) {
                return wait_for(watchdog, {Role::kGridBarrier, -1, 0, protocol::kGo}, load, done);
            });
    }
    return __syncthreads_or(goes_on);
}

}  // namespace flashmoe
