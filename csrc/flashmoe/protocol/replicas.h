// How replicas of experts come to their holders and their gradients back: an owner pushes weights
// into a holder's slot, and pulls the gradients that the holder has left there.
//
// A slot is one piece of memory for all layers and owners. It may be written over once everybody
// who used it in the launch before has left that launch, which a rank's row signal of this launch
// says: the holder's for weights, and every rank's for gradients, since the slot may have had
// another owner.
#pragma once

#include "flashmoe/protocol/epoch.h"

namespace flashmoe::protocol {

// Waits until a rank has left the launch before, so that what it read there can be written over by
// bulk copies: a holder's slot, or a gradient that its owner pulled. Scope: the thread that writes.
template <class A, class Wait>
FLASHMOE_PROTOCOL void await_left(const typename A::U32* row_signal, uint32_t epoch, Wait wait) {
    wait([=] { return A::template load_acquire<Scope::kSystem>(row_signal); },
         [=](uint32_t seen) { return epoch_reached(seen, epoch); });
    A::fence_proxy_async();
}

// Tells a holder that an expert's weights are in its slot. Scope: the thread whose bulk copies have
// brought the last of them, after those of all others.
template <class A>
FLASHMOE_PROTOCOL void publish_weights(typename A::U32* weights_ready, uint32_t epoch) {
    A::bulk_wait_complete();
    A::template release_fence<Scope::kSystem>();
    A::template store<Scope::kSystem>(weights_ready, epoch);
}

// Waits for a replica's weights, to read them by TMA. Equality decides: the rank that pushes next
// waits for this holder to leave. Scope: the thread that reads.
template <class A, class Wait>
FLASHMOE_PROTOCOL void await_weights(const typename A::U32* weights_ready,
                                     uint32_t epoch,
                                     Wait wait) {
    wait([=] { return A::template load_acquire<Scope::kSystem>(weights_ready); },
         [=](uint32_t seen) { return seen == epoch; });
    A::fence_proxy_async();
}

// Tells every rank that a product's gradients of this rank's slots are stored. Scope: the thread
// whose bulk copies have stored the last of them, after those of all others.
template <class A, class WordOf>
FLASHMOE_PROTOCOL void publish_slot_grads(int num_ranks, uint32_t epoch, WordOf word_of) {
    A::bulk_wait_complete();
    A::template release_fence<Scope::kSystem>();
    FLASHMOE_KEEP_LOOP
    for (int rank = 0; rank < num_ranks; ++rank) {
        A::template store<Scope::kSystem>(word_of(rank), epoch);
    }
}

// Waits for a rank's gradients, to add those in its slots to the owner's. A later epoch will do: a
// peer that needs nothing from here may be one ahead, and it overwrites what it holds of this
// rank's only after this rank's row signal. Scope: the thread that adds.
template <class A, class Wait>
FLASHMOE_PROTOCOL void await_slot_grads(const typename A::U32* grads_ready,
                                        uint32_t epoch,
                                        Wait wait) {
    wait([=] { return A::template load_acquire<Scope::kSystem>(grads_ready); },
         [=](uint32_t seen) { return epoch_reached(seen, epoch); });
}

}  // namespace flashmoe::protocol
