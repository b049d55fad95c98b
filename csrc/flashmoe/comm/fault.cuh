// What a rank tells its host when it cannot go on.
#pragma once

#include "flashmoe/comm/kinds.cuh"

namespace flashmoe {

// Lives at the start of the mailbox, in pinned host memory. Mirrors FlashMoEFault.
struct Fault {
    uint32_t code;
    uint32_t wait;  // Wait
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

}  // namespace flashmoe
