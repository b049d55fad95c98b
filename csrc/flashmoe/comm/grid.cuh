// Steps that the CTAs of one launch take together. All counters are zero when a launch begins: the
// last CTA to leave zeroes them and opens the next epoch, so no launch needs a memset before it.
#pragma once

#include "flashmoe/comm/wait.cuh"
#include "flashmoe/protocol/grid.h"

namespace flashmoe {

// The barriers of a part of a CTA, by number.
enum NamedBarrier {
    kCtaBarrier,  // __syncthreads
    kPlannersBarrier,
    kRoutesPublished,
    kGradsPublished,
    kProcessorsBarrier,  // the first processor's; the second has the next
    kProcessorEnds = kProcessorsBarrier + kNumProcessors,  // likewise
};

// The threads of a CTA that plan: all warps but the last, which copies rows meanwhile.
struct Planners {
    __device__ __forceinline__ static int size() { return int(blockDim.x) - 32; }
    __device__ __forceinline__ static bool has_me() { return int(threadIdx.x) < size(); }
    __device__ __forceinline__ static void sync() { ptx::barrier_sync(kPlannersBarrier, size()); }
    // barrier.red would do it in one instruction, but compute-sanitizer's synccheck wants all warps
    // of the CTA at it.
    __device__ __forceinline__ static bool any(bool own) {
        __shared__ bool is_of_warp[32];
        const int lane = threadIdx.x % 32;
        const bool is_mine = __any_sync(~0u, own);
        if (lane == 0) is_of_warp[threadIdx.x / 32] = is_mine;
        sync();
        const bool is_any = __any_sync(~0u, lane < size() / 32 and is_of_warp[lane]);
        sync();
        return is_any;
    }
    __device__ __forceinline__ static bool all(bool own) { return not any(not own); }
};

// Runs `then` on one thread of the CTA that comes last; everything that any planner did before is
// visible to it. Scope: the planners of the grid.
template <class Then>
__device__ __forceinline__ void last_arrival(uint32_t* counter, Then then) {
    Planners::sync();
    if (threadIdx.x == 0) protocol::arrive<Atomics>(counter, gridDim.x, then);
}

// Waits for all CTAs and tells all of them the same: whether all of their threads may go on. A
// launch uses each barrier once. `meanwhile` is what a CTA does once it has come, and has nothing
// that others would find after the barrier. Scope: the planners of the grid; CTAs are resident
// together.
template <class Meanwhile>
__device__ __forceinline__ bool grid_barrier(const Watchdog& watchdog,
                                             uint32_t* word,
                                             bool may_go_on,
                                             Meanwhile meanwhile) {
    bool goes_on = Planners::all(may_go_on);
    if (threadIdx.x == 0) protocol::come_to_barrier<Atomics>(word, goes_on);
    meanwhile();
    if (threadIdx.x == 0) {
        goes_on = protocol::await_barrier<Atomics>(word, gridDim.x, [&](auto load, auto done) {
            return wait_for(watchdog, {Wait::kGridBarrier, -1, 0, gridDim.x}, load, done);
        });
    }
    return Planners::all(goes_on);
}
__device__ __forceinline__ bool grid_barrier(const Watchdog& watchdog,
                                             uint32_t* word,
                                             bool may_go_on) {
    return grid_barrier(watchdog, word, may_go_on, [] {});
}

}  // namespace flashmoe
