// How a launch ends when somebody does not come. Every wait has a bound. A thread whose wait ends
// without what it waited for tells all ranks, by a word in each one's heap, and then every wait of
// every rank ends at once. What is computed from there on is void, and every rank that gets any of
// it learns so.
#pragma once

#include "flashmoe/protocol/atomics.h"

namespace flashmoe::protocol {

// The rank that gave up, plus one, if a peer has said so to this rank; else 0.
template <class A>
FLASHMOE_PROTOCOL uint32_t who_gave_up(const typename A::U32* word) {
    return A::template load_acquire<Scope::kSystem>(word);
}

// Called by every thread whose wait ends early, whether its own time is up or a peer gave up,
// before it goes on. It is not enough that the first thread informs all ranks: another thread that
// knows could hand void rows to a rank that does not know yet, and that rank would take them for
// right. The signal that comes with the rows is ordered after this thread's stores.
template <class A, class WordOf>
FLASHMOE_PROTOCOL void give_up(int num_ranks, uint32_t who, WordOf word_of) {
    FLASHMOE_KEEP_LOOP
    for (int rank = 0; rank < num_ranks; ++rank) {
        A::template store<Scope::kSystem>(word_of(rank), who);
    }
}

}  // namespace flashmoe::protocol
