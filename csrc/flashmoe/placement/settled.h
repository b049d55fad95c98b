// Slots where the experts in spare slots have been settled on before the routing is known. A Team,
// `counts`, `sources`, `slot_of` and `hosts` are as in balance.h, and `settled` as `hosts` was.
#pragma once

#include "flashmoe/placement/balance.h"

namespace flashmoe::placement {

// The policy of popular.h: a rank's tokens use its own replicas alone.
template <class Team>
FLASHMOE_PLACEMENT void use_own_replicas(
    const int* settled, int num_ranks, int num_experts, int spare_slots, uint8_t* sources) {
    const int local = num_experts / num_ranks;
    FLASHMOE_PLACEMENT_LOOP
    for (int expert = Team::index(); expert < num_experts; expert += Team::size()) {
        uint32_t elsewhere = 0;
        FLASHMOE_PLACEMENT_LOOP
        for (int rank = 0; rank < num_ranks; ++rank) {
            bool is_here = false;
            FLASHMOE_PLACEMENT_LOOP
            for (int spare = 0; spare < spare_slots; ++spare) {
                is_here |= settled[rank * spare_slots + spare] == expert;
            }
            sources[rank * num_experts + expert] = uint8_t(is_here << rank);
            elsewhere |= uint32_t(is_here) << rank;
        }
        sources[expert / local * num_experts + expert] = uint8_t(~elsewhere & ~(~0u << num_ranks));
    }
    Team::sync();
}

// Moves each replica to the slot that holds its expert; number_slots has given it any spare slot of
// its rank. `hosts` gets the replicas that some route uses, unless it is null.
template <class Team>
FLASHMOE_PLACEMENT void keep_slots(const int* settled,
                                   const int* counts,
                                   const uint8_t* sources,
                                   int num_ranks,
                                   int num_experts,
                                   int spare_slots,
                                   int* hosts,
                                   uint16_t* slot_of) {
    const int local = num_experts / num_ranks;
    FLASHMOE_PLACEMENT_LOOP
    for (int i = Team::index(); i < num_ranks * spare_slots; i += Team::size()) {
        const int rank = i / spare_slots, expert = settled[i];
        const int slot = rank * local + local + i;
        bool is_used = false;
        uint32_t left = expert < 0 ? 0 : sources[rank * num_experts + expert];
        FLASHMOE_PLACEMENT_LOOP
        for (int source = 0; left; left >>= 1, ++source) {
            if (!(left & 1)) continue;
            slot_of[source * num_experts + expert] = uint16_t(slot);
            is_used |= counts[source * num_experts + expert] > 0;
        }
        if (hosts) hosts[i] = is_used ? expert : -1;
    }
    Team::sync();
}

}  // namespace flashmoe::placement
