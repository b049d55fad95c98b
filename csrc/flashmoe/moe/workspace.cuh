// The workspace of a group: counters of one launch, which each launch leaves as zeros for the next,
// and what outlives launches, such as the epoch.
#pragma once

#include "flashmoe/base/shape.cuh"
#include "flashmoe/comm/atomics.cuh"
#include "flashmoe/comm/counters.cuh"
#include "flashmoe/protocol/epoch.h"
#include "flashmoe/protocol/grid.h"
#include "flashmoe/protocol/queue.h"

namespace flashmoe {

// Counters of one launch: zero when it begins, and zeroed by the last CTA that leaves.
struct Tickets {
    uint32_t tile, dispatch;
    uint32_t differentiated;    // finishers' shares of a backward's GEMM0 tiles, over all blocks
    uint32_t fc2_grads_stored;  // finishers that have sent all of their fc2 gradients
    uint32_t dispatched;        // dispatch warps whose rows are all copied
    uint32_t routes_published, rows_published, rows_taken, leaving;
    uint32_t barrier[3];         // rows are counted, rows are placed, replicas are planned
    uint32_t pushed;             // tickets for weights that replicas get
    uint32_t pulled;             // tickets for fc2's gradients that replicas have
    uint32_t grads_added;        // of these tickets, those whose gradients are added
    uint32_t slot_grads_stored;  // finishers that have sent their fc2 gradients of spare slots
    uint32_t tokens_copied;      // dispatch warps that have copied their share of a backward's x
};

// Takes the next `count` items off a counter. Scope: one warp.
__device__ __forceinline__ int take_tickets(uint32_t* counter, int count) {
    int first = 0;
    if (threadIdx.x % 32 == 0) first = int(protocol::take<Atomics>(counter, uint32_t(count)));
    return __shfl_sync(~0u, first, 0);
}

// Replicas that a launch has settled on, ahead of the forward that uses them.
struct Settled {
    uint32_t epoch;                             // the launch's that brought their weights
    int32_t hosts[kMaxRanks * kMaxSpareSlots];  // as in a plan of the same layer
    int32_t own_routes[2];                      // likewise, of the expected routes
};

struct Workspace {
    static constexpr int64_t kCtaCounts = int64_t(kMaxLocalExperts) * kMaxCtas;
    // Bytes from the start.
    static constexpr int kFc2GradsOffset = 24, kTotalsOffset = 128, kSettledOffset = 1024;

    uint32_t* raised;       // first fault wins; never zeroed by a launch
    uint32_t* epoch;        // the last launch's that ended
    uint64_t* begun_ns;     // when this launch began
    uint64_t* num_records;  // written by all launches so far
    uint64_t* fc2_grads;    // number of the last backward whose gradients of fc2 are complete
    Totals* totals;         // never zeroed
    Tickets* tickets;
    uint32_t* rows_ready;      // [block]: rows in place, 128 when full
    uint32_t* tile_ready;      // [GEMM][block]: warps' shares of the block's tiles stored
    uint32_t* selections;      // [slot]: routes of all ranks to it
    uint32_t* own_selections;  // [local slot]: routes of this rank to it
    uint32_t* cta_counts;      // [local slot][CTA]: rows of the chunks that this CTA placed
    int max_blocks;
    // With spare slots: [expert], routes of this rank; [rank][spare slot], pieces of weights there.
    FLASHMOE_SLOT_FIELD(uint32_t*, route_counts);
    FLASHMOE_SLOT_FIELD(uint32_t*, pushes);
    FLASHMOE_SLOT_FIELD(Settled*, settled);  // never zeroed
    int64_t num_zeroed;  // words from `tickets` on that each launch leaves as zeros

    __device__ __forceinline__ int tile_counter(int gemm, int block) const {
        return gemm * max_blocks + block;
    }

    static uint64_t bytes(const Shape& s) { return at(nullptr, s, nullptr); }

    static uint64_t at(void* base, const Shape& s, Workspace* out) {
        const int64_t blocks = s.max_row_blocks();
        constexpr int64_t kHead = 64;  // words apart, so that polled words share no line
        constexpr int64_t kFront = kHasReplicas ? 1024 : 256;
        static_assert(kTotalsOffset + sizeof(Totals) <= kSettledOffset);
        static_assert(kSettledOffset + (kHasReplicas ? sizeof(Settled) : 0) <=
                      kFront * sizeof(uint32_t));
        // Layers of other shapes share this memory: the words that are zero between launches begin
        // at one place for all of them, and no other words follow.
        const int64_t counted = s.spare_slots > 0 ? s.num_experts : 0;
        const int64_t zeroed = kHead + 3 * blocks + s.num_slots() + s.num_local_slots() + counted +
                               int64_t(s.num_ranks) * s.spare_slots;
        if (out != nullptr) {
            uint32_t* words = static_cast<uint32_t*>(base);
            out->raised = words;
            out->epoch = words + 1;
            out->begun_ns = reinterpret_cast<uint64_t*>(words + 2);
            out->num_records = reinterpret_cast<uint64_t*>(words + 4);
            out->fc2_grads =
                reinterpret_cast<uint64_t*>(static_cast<char*>(base) + kFc2GradsOffset);
            out->totals = reinterpret_cast<Totals*>(static_cast<char*>(base) + kTotalsOffset);
            FLASHMOE_SET_SLOT_FIELD(out->settled, reinterpret_cast<Settled*>(
                                                      static_cast<char*>(base) + kSettledOffset));
            out->cta_counts = words + kFront;
            out->tickets = reinterpret_cast<Tickets*>(words + kFront + kCtaCounts);
            out->rows_ready = words + kFront + kCtaCounts + kHead;
            out->tile_ready = out->rows_ready + blocks;
            out->max_blocks = int(blocks);
            out->selections = out->tile_ready + 2 * blocks;
            out->own_selections = out->selections + s.num_slots();
            uint32_t* const slot_words = out->own_selections + s.num_local_slots();
            FLASHMOE_SET_SLOT_FIELD(out->route_counts, slot_words);
            FLASHMOE_SET_SLOT_FIELD(out->pushes, slot_words + counted);
            out->num_zeroed = zeroed;
        }
        return sizeof(uint32_t) * (kFront + kCtaCounts + zeroed);
    }
};

// The epoch of this launch. 0 marks fresh memory; it wraps past 0 and 1, since epochs alternate
// between even and odd.
__device__ __forceinline__ uint32_t current_epoch(const Workspace& workspace) {
    return *workspace.epoch + 1;
}

// The last thing that a launch does. The last CTA to come calls `then`, zeroes the counters, so
// that no launch needs a memset, and ends the epoch if `then` returns true. Scope: all threads of
// the grid.
template <class Then>
__device__ __forceinline__ void leave(const Workspace& workspace, Then then) {
    __syncthreads();
    bool is_last = false;
    if (threadIdx.x == 0) {
        is_last = protocol::leave<Atomics>(&workspace.tickets->leaving, gridDim.x);
    }
    if (not __syncthreads_or(is_last)) return;
    const bool ends_epoch = then();
    protocol::reset<Atomics>(reinterpret_cast<uint32_t*>(workspace.tickets), threadIdx.x,
                             blockDim.x, workspace.num_zeroed);
    if (ends_epoch and threadIdx.x == 0) {
        *workspace.epoch = protocol::ended_epoch(current_epoch(workspace));
    }
}

}  // namespace flashmoe
