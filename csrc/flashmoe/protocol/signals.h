// Signals between ranks: the routing is there, the rows are there, a result is there.
#pragma once

#include "flashmoe/protocol/epoch.h"

namespace flashmoe::protocol {

// One word: the tokens that a rank brings to an epoch, or that it refuses its call.
struct RouteSignal {
    static constexpr uint32_t kRefused = 1u << 31;

    FLASHMOE_PROTOCOL static uint64_t make(uint32_t epoch, uint32_t tokens, bool refused) {
        return uint64_t(tokens | (refused ? kRefused : 0)) << 32 | epoch;
    }
    FLASHMOE_PROTOCOL static uint32_t epoch(uint64_t signal) { return uint32_t(signal); }
    FLASHMOE_PROTOCOL static bool is_refused(uint64_t signal) { return signal >> 63; }
    FLASHMOE_PROTOCOL static uint32_t tokens(uint64_t signal) {
        return uint32_t(signal >> 32) & ~kRefused;
    }
};

// One word: the row blocks that fit in a rank's buffers, and whether that rank has no backward of
// the forward that it begins.
struct RowBound {
    static constexpr uint32_t kUnfollowed = 1u << 31;

    FLASHMOE_PROTOCOL_CONST static uint32_t make(uint32_t blocks, bool is_unfollowed) {
        return blocks | (is_unfollowed ? kUnfollowed : 0);
    }
    FLASHMOE_PROTOCOL_CONST static uint32_t blocks(uint32_t word) { return word & ~kUnfollowed; }
    FLASHMOE_PROTOCOL_CONST static bool is_unfollowed(uint32_t word) { return word >> 31; }
};

// Gives every rank the reason of a refusal, by `give`, ahead of the signal that tells of it. Scope:
// the last thread of the grid to arrive.
template <class A, class Give>
FLASHMOE_PROTOCOL void give_reasons(int num_ranks, Give give) {
    FLASHMOE_KEEP_LOOP
    for (int rank = 0; rank < num_ranks; ++rank) give(rank);
    A::template fence<Scope::kSystem>();
}

// Tells every rank that this one's routes and its bound of rows are in its heap. Scope: the last
// thread of the grid to arrive, all of whose CTAs have written theirs before.
template <class A, class SignalOf>
FLASHMOE_PROTOCOL void publish_routes(int num_ranks, uint64_t signal, SignalOf signal_of) {
    for (int rank = 0; rank < num_ranks; ++rank) {
        A::template store<Scope::kSystem>(signal_of(rank), signal);
    }
}

// Equality decides: the word of this parity holds this epoch or the one two before.
template <class A, class Wait>
FLASHMOE_PROTOCOL auto await_routes(const typename A::U64* signal, uint32_t epoch, Wait wait) {
    return wait([=] { return A::template load_acquire<Scope::kSystem>(signal); },
                [=](uint64_t seen) { return RouteSignal::epoch(seen) == epoch; });
}

// Tells every rank that this one's rows are in its heap, and that it is done with the previous
// launch. Scope: the last thread of the grid to arrive.
template <class A, class SignalOf>
FLASHMOE_PROTOCOL void publish_rows(int num_ranks, uint32_t epoch, SignalOf signal_of) {
    for (int rank = 0; rank < num_ranks; ++rank) {
        A::template store<Scope::kSystem>(signal_of(rank), epoch);
    }
}

// Waits for every rank, also if it sent nothing: its signal is the proof that it has finished with
// the previous launch. A later epoch will do, since a peer that needs nothing from here may be one
// ahead. Afterwards rows may be read by TMA. Scope: a warp.
template <class A, class SignalOf, class Wait>
FLASHMOE_PROTOCOL void await_rows(int num_ranks, uint32_t epoch, SignalOf signal_of, Wait wait) {
    for (int src = A::lane(); src < num_ranks; src += A::kLanes) {
        const auto* signal = signal_of(src);
        wait(
            src, [=] { return A::template load_acquire<Scope::kSystem>(signal); },
            [=](uint32_t seen) { return epoch_reached(seen, epoch); });
    }
    A::sync_warp();
    A::fence_proxy_async();
}

// Tells a token's rank that the share that this warp has written is there. Scope: one thread, after
// the warp has come together.
template <class A>
FLASHMOE_PROTOCOL void publish_result(typename A::U32* signal, uint32_t epoch) {
    A::template release_fence<Scope::kSystem>();
    A::template store<Scope::kSystem>(signal, epoch);
}

// Waits for a share. Reads of the share are then ordered after the signal for this thread, and once
// the warp has come together for all of its lanes. A fence would also wait for the warp's earlier
// stores.
template <class A, class Wait>
FLASHMOE_PROTOCOL auto await_result(const typename A::U32* signal, uint32_t epoch, Wait wait) {
    return wait([=] { return A::template load_acquire<Scope::kSystem>(signal); },
                [=](uint32_t seen) { return seen == epoch; });
}

// Looks without waiting, for a warp that has other things to do.
template <class A>
FLASHMOE_PROTOCOL bool result_is_here(const typename A::U32* signal, uint32_t epoch) {
    return A::template load_acquire<Scope::kSystem>(signal) == epoch;
}

}  // namespace flashmoe::protocol
