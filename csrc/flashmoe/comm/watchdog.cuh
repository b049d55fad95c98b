// How a rank gives up: it leaves a fault for its host, the first one of the group alone, and tells
// all ranks, so that each of them leaves its launch.
#pragma once

#include "flashmoe/base/shape.cuh"
#include "flashmoe/comm/atomics.cuh"
#include "flashmoe/comm/fault.cuh"
#include "flashmoe/protocol/give_up.h"
#include "flashmoe/ptx/trace.cuh"

namespace flashmoe {

struct Watchdog {
    Fault* fault;      // pinned host memory
    uint32_t* raised;  // device word: the first fault of this group wins
    uint64_t timeout_ns;
    const uint32_t* epoch;  // the last launch's that ended
    int rank;
    int num_ranks;
    // Each rank's word that tells it which rank has given up: that rank, plus one. It stays set;
    // the host makes new memory.
    uint32_t* gave_up[kMaxRanks];
    Trace trace;

    // Inlined like the functions below, since a call would have to save the caller's registers.
    __device__ __forceinline__ void raise(
        uint32_t code, Wait wait, int peer, int index, uint32_t expected, uint32_t seen) const {
        if (atomicCAS(raised, 0u, 1u) != 0u) return;
        volatile Fault* record = fault;
        record->wait = uint32_t(wait);
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
    // Leaves a fault if some rank has given up, and tells whether one has.
    __device__ __forceinline__ bool raise_if_given_up() const {
        const uint32_t who = who_gave_up();
        if (who != 0) raise(kFaultTimeout, Wait::kPeerGaveUp, int(who) - 1, 0, 0, 0);
        return who != 0;
    }
    // Leaves the fault of a rank that refuses its call.
    __device__ __forceinline__ void repeat(const volatile Fault* told) const {
        if (atomicCAS(raised, 0u, 1u) == 0u) Fault::copy(told, fault);
    }
    // Tells every rank that `who`, less one, has given up, so that none waits for it. Every thread
    // whose wait ends early does so, not only the first: otherwise a thread that already knows
    // could hand void rows to a rank that does not know yet, and that rank would take them for
    // right.
    __device__ __forceinline__ void give_up(uint32_t who) const {
        protocol::give_up<Atomics>(num_ranks, who, [this](int to) { return gave_up[to]; });
    }
    // The rank that has given up, plus one; else 0.
    __device__ __forceinline__ uint32_t who_gave_up() const {
        return protocol::who_gave_up<Atomics>(gave_up[rank]);
    }
};

}  // namespace flashmoe
