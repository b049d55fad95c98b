// The one place that waits. Every wait has a bound; one that runs out leaves a record in host
// memory that says who waited for what.
#pragma once

#include "flashmoe/ptx/ld_st.cuh"
#include "flashmoe/ptx/trace.cuh"

namespace flashmoe {

enum class Role : uint32_t {
    kNone = 0,
    kPlanRoutes,      // plan: the routing of a peer
    kDispatchRows,    // dispatch: a peer's rows are published
    kDispatchCopy,    // dispatch: a row on its way from the peer
    kLoaderStage,     // loader: a free stage of the pipeline
    kLoaderTile,      // loader: the processors take the next tile
    kLoaderRows,      // loader: rows of a block for GEMM0
    kLoaderAct,       // loader: activations of a block for GEMM1
    kProcessorTile,   // processor: the next tile
    kProcessorStage,  // processor: a full stage of the pipeline
    kCombineResult,   // combine: results of a block
    kReduceResult,    // reduce: a peer's share of a token
    kGridBarrier,     // plan: the other CTAs of the grid
    kRouting,         // not a wait: a token selects more experts than topk, or a probability is NaN
    kCount,

    // What a trace shows beside waits.
    kGemm0 = 32,
    kGemm1,
    kEpilogue0,
    kEpilogue1,
    kDispatch,
    kDeliver,
    kReduce,
};

// Lives at the start of the mailbox, in pinned host memory. Mirrors FlashMoEFault.
struct Fault {
    uint32_t code;
    uint32_t role;
    int32_t rank;
    int32_t peer;
    int32_t index;
    uint32_t epoch;
    uint32_t expected;
    uint32_t seen;
};

struct Watchdog {
    Fault* fault;      // pinned host memory
    uint32_t* raised;  // device word: the first fault of this group wins
    uint64_t timeout_ns;
    const uint32_t* epoch;  // the last one that ended
    int rank;
    Trace trace;

    __device__ __noinline__ void raise(
        uint32_t code, Role role, int peer, int index, uint32_t expected, uint32_t seen) const {
        if (atomicCAS(raised, 0u, 1u) != 0u) return;
        volatile Fault* record = fault;
        record->role = uint32_t(role);
        record->rank = rank;
        record->peer = peer;
        record->index = index;
        record->epoch = *epoch + 1;
        record->expected = expected;
        record->seen = seen;
        __threadfence_system();
        record->code = code;
        __threadfence_system();
    }
};

constexpr uint32_t kFaultTimeout = 3;  // FLASHMOE_PEER_TIMEOUT
constexpr uint32_t kFaultRouting = 4;  // FLASHMOE_BAD_ROUTING
constexpr uint32_t kFaultRows = 5;     // FLASHMOE_TOO_MANY_ROWS

// Epochs are compared with wrap-around: a peer may already be one launch ahead.
__device__ __forceinline__ bool epoch_reached(uint32_t seen, uint32_t wanted) {
    return int32_t(seen - wanted) >= 0;
}

// Polls `load` until `done` accepts its value. False when the time is up; the fault is then raised.
template <class Load, class Done>
__device__ __forceinline__ bool wait_for(const Watchdog& watchdog,
                                         Role role,
                                         int peer,
                                         int index,
                                         uint32_t expected,
                                         Load load,
                                         Done done) {
    const int64_t begin = Trace::now();
    auto seen = load();
    if (done(seen)) return true;
    const uint64_t start = ptx::globaltimer_ns();
    for (uint32_t spin = 1;; ++spin) {
        seen = load();
        if (done(seen)) {
            watchdog.trace.add(uint32_t(role), index, begin);
            return true;
        }
        __nanosleep(20);
        if (spin % 256 == 0 and ptx::globaltimer_ns() - start > watchdog.timeout_ns) break;
    }
    watchdog.raise(kFaultTimeout, role, peer, index, expected, uint32_t(seen));
    return false;
}

// As wait_for, in the middle of the fused kernel, where no other way out is left than to trap.
template <class Load, class Done>
__device__ __forceinline__ void wait_or_trap(const Watchdog& watchdog,
                                             Role role,
                                             int peer,
                                             int index,
                                             uint32_t expected,
                                             Load load,
                                             Done done) {
    if (not wait_for(watchdog, role, peer, index, expected, load, done)) {
        __trap();
        __builtin_unreachable();  // or the compiler would save the accumulators for afterwards
    }
}

// Waits until a counter of this GPU holds `target`.
__device__ __forceinline__ void wait_count(
    const Watchdog& watchdog, Role role, int index, const uint32_t* counter, uint32_t target) {
    wait_or_trap(
        watchdog, role, -1, index, target, [=] { return ptx::ld_acquire_gpu(counter); },
        [=](uint32_t seen) { return seen == target; });
}

}  // namespace flashmoe
