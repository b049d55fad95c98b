// The fault that a rank reports to its host when it cannot go on.
#pragma once

#include "flashmoe/comm/kinds.cuh"

namespace flashmoe {

constexpr int kReasonBytes = 480;

// Lives at the start of the mailbox, in pinned host memory. Mirrors FlashMoEFault. A rank that
// refuses its call gives its peers a copy.
struct Fault {
    uint32_t code;
    uint32_t wait;  // Wait
    int32_t rank;
    int32_t peer;
    int32_t index;
    uint32_t epoch;
    uint32_t expected;
    uint32_t seen;
    char reason[kReasonBytes];  // kFaultRefused has a sentence here, which ends in 0

    // The code comes last, since a host that finds one reads the rest.
    __device__ __forceinline__ static void copy(const volatile Fault* from, volatile Fault* to) {
        const auto* source = reinterpret_cast<const volatile uint32_t*>(from);
        auto* target = reinterpret_cast<volatile uint32_t*>(to);
#pragma unroll 1
        for (int i = 1; i < int(sizeof(Fault) / sizeof(uint32_t)); ++i) target[i] = source[i];
        __threadfence_system();
        target[0] = source[0];
        __threadfence_system();
    }
};

constexpr uint32_t kFaultTimeout = 3;    // FLASHMOE_PEER_TIMEOUT
constexpr uint32_t kFaultRouting = 4;    // FLASHMOE_BAD_ROUTING
constexpr uint32_t kFaultRows = 5;       // FLASHMOE_TOO_MANY_ROWS
constexpr uint32_t kFaultRefused = 6;    // FLASHMOE_REFUSED
constexpr uint32_t kFaultUnmatched = 7;  // FLASHMOE_UNMATCHED

}  // namespace flashmoe
