// The place of each word within its array of the owner's heap. Every place contains its writer,
// hence no two ranks write the same address (Theorem 3.1 of the paper).
#pragma once

#include "flashmoe/protocol/epoch.h"

namespace flashmoe::protocol {

// The index in RouteSignal[parity][src], row_block_bounds[parity][src] and refusals[parity][src];
// `src` writes there.
FLASHMOE_PROTOCOL_CONST int64_t route_word(uint32_t epoch, int num_ranks, int src) {
    return int64_t(parity(epoch)) * num_ranks + src;
}

// The index of a token's first route in routes[parity][src][token][k]. `src` writes there before
// any signal of the owner has come since the last launch: the places are the same for another
// layer.
FLASHMOE_PROTOCOL_CONST int64_t
route_place(uint32_t epoch, int num_ranks, int src, int heap_tokens, int heap_topk, int token) {
    return (route_word(epoch, num_ranks, src) * heap_tokens + token) * heap_topk;
}

// The index in result_signals[token][src]; `src` writes there.
FLASHMOE_PROTOCOL_CONST int64_t result_word(int token, int num_ranks, int src) {
    return int64_t(token) * num_ranks + src;
}

// The row in results[token][slot]; the rank that has the slot writes there.
FLASHMOE_PROTOCOL_CONST int64_t result_row(int token, int num_slots, int slot) {
    return int64_t(token) * num_slots + slot;
}

// The ranks that precede `rank` among all that compute for a token; their number is its slot.
FLASHMOE_PROTOCOL_CONST uint32_t slots_before(uint32_t ranks, int rank) {
    return ranks & ((1u << rank) - 1);
}

}  // namespace flashmoe::protocol
