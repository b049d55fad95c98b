// The one place that waits. Every wait has a bound; one that runs out leaves a record in host
// memory that says who waited for what, and all ranks leave their launches.
#pragma once

#include "flashmoe/base/shape.cuh"
#include "flashmoe/comm/atomics.cuh"
#include "flashmoe/comm/counters.cuh"
#include "flashmoe/protocol/give_up.h"
#include "flashmoe/ptx/ld_st.cuh"
#include "flashmoe/ptx/trace.cuh"

namespace flashmoe {

enum class Role : uint32_t {
    kNone = 0,
    kPlanRoutes,         // plan: the routing of a peer
    kDispatchRows,       // dispatch: a peer's rows are published
    kDispatchCopy,       // dispatch: a row on its way from the peer
    kLoaderStage,        // loader: a free stage of the pipeline
    kLoaderTile,         // loader: the other roles take the next tile
    kLoaderRows,         // loader: rows of a block for GEMM0
    kLoaderAct,          // loader: what finishers make of GEMM0, of a block or (-1) of all
    kProcessorTile,      // processor: the next tile
    kProcessorStage,     // processor: a full stage of the pipeline
    kProcessorHandover,  // processor: the finisher has taken the last tile
    kFinisherTile,       // finisher: the next tile
    kFinisherRows,       // finisher: a processor's outputs
    kCombineResult,      // combine: results of a block
    kReduceResult,       // reduce: a peer's share of a token
    kGridBarrier,        // plan: the other CTAs of the grid
    kRouting,     // not a wait: a token selects more experts than topk, or a probability is NaN
    kPeerGaveUp,  // not a wait: another rank's wait ran out of time
    kCount,

    // What a trace or a record shows beside waits.
    kGemm0 = 32,
    kGemm1,
    kEpilogue0,
    kEpilogue1,
    kDispatch,
    kDeliver,
    kReduce,
    kPlan,     // what a launch begins with: publishing, and the plan
    kProcess,  // a processor's time from its first tile to its last
    kFinish,   // likewise a finisher's
    kWeightGrad,
    kStoreGrad,
};

// Which part of its role's work a trace shows, in place of a row block or an expert.
enum TracePart : int32_t {
    kNoPart = -1,
    kWhole = 0,
    kFirstRows = 1,  // of dispatch: the first tiles' own rows
    kMeanwhile = 1,  // of delivering: while tiles are computed
    kOne = 2,        // a unit that is delivered, a token that is reduced
    kSignals = 3,    // of a unit that is delivered
};

// Whether a wait's time is counted where it ends. Processors add theirs up and count them once, and
// of the others nobody asks for more: to count is to hold up what was waited for.
constexpr bool is_counted(Role role) {
    return role == Role::kLoaderRows or role == Role::kLoaderAct;
}

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

constexpr uint32_t kFaultTimeout = 3;  // FLASHMOE_PEER_TIMEOUT
constexpr uint32_t kFaultRouting = 4;  // FLASHMOE_BAD_ROUTING
constexpr uint32_t kFaultRows = 5;     // FLASHMOE_TOO_MANY_ROWS

struct Watchdog {
    Fault* fault;      // pinned host memory
    uint32_t* raised;  // device word: the first fault of this group wins
    uint64_t timeout_ns;
    const uint32_t* epoch;  // the last one that ended
    int rank;
    int num_ranks;
    // Every rank's word that tells it that some rank has given up: that rank, plus one. It stays
    // set; the host makes new memory.
    uint32_t* gave_up[kMaxRanks];
    Trace trace;

    // Inlined, as the others: a call would have to save the caller's registers.
    __device__ __forceinline__ void raise(
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
    // Tells every rank that `who`, less one, has given up, so that none waits for it. Every thread
    // does so whose wait ends early, not only the first: else one that was told could hand void
    // rows to a rank that has not been yet, and that would take them for right.
    __device__ __forceinline__ void give_up(uint32_t who) const {
        protocol::give_up<Atomics>(num_ranks, who, [this](int to) { return gave_up[to]; });
    }
    // The rank that has given up, plus one; else 0.
    __device__ __forceinline__ uint32_t who_gave_up() const {
        return protocol::who_gave_up<Atomics>(gave_up[rank]);
    }
};

// What is waited for, as a fault tells it.
struct Awaited {
    Role role;
    int peer;
    int index;
    uint32_t expected;
};

// Polls `load` until `done` accepts its value. False once this rank or another has given up; then
// every wait of the launch ends at once, and the launch with it: what it computes is void, but
// stays inside its buffers, since places come from a plan that was complete.
template <class Load, class Done>
__device__ __forceinline__ bool wait_for(const Watchdog& watchdog,
                                         const Awaited& what,
                                         Load load,
                                         Done done) {
    const int64_t begin = Trace::now();
    auto seen = load();
    if (done(seen)) return true;
    const uint64_t start = ptx::globaltimer_ns();
    for (uint32_t spin = 0;; ++spin) {
        seen = load();
        if (done(seen)) break;
        __nanosleep(20);
        if (spin % 256 != 0) continue;
        uint32_t who = watchdog.who_gave_up();
        if (who == 0) {
            if (ptx::globaltimer_ns() - start <= watchdog.timeout_ns) continue;
            watchdog.raise(kFaultTimeout, what.role, what.peer, what.index, what.expected,
                           uint32_t(seen));
            who = uint32_t(watchdog.rank) + 1;
        }
        watchdog.give_up(who);
        return false;
    }
    watchdog.trace.add(uint32_t(what.role), what.index, begin);
    if (is_counted(what.role)) {
        count_time(uint32_t(what.role), uint32_t(ptx::globaltimer_ns() - start));
    }
    return true;
}

}  // namespace flashmoe
