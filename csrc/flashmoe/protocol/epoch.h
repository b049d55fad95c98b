// Epochs number the launches of a group, the same on all ranks. Words that peers write carry an
// epoch, so that they need no reset.
#pragma once

#include "flashmoe/protocol/atomics.h"

namespace flashmoe::protocol {

// Compared with wrap-around: a peer may already be one launch ahead.
FLASHMOE_PROTOCOL_CONST bool epoch_reached(uint32_t seen, uint32_t wanted) {
    return int32_t(seen - wanted) >= 0;
}

// The new value of `*epoch`, the number of the last launch that ended, when `epoch` ends. 0 marks
// fresh memory; it wraps past 0 and 1, since epochs alternate between even and odd.
FLASHMOE_PROTOCOL_CONST uint32_t ended_epoch(uint32_t epoch) { return epoch == ~0u ? 1 : epoch; }

FLASHMOE_PROTOCOL_CONST uint32_t next_epoch(uint32_t epoch) { return ended_epoch(epoch) + 1; }

// Routes, their signals and row bounds have two copies: a fast peer may publish epoch e + 1 while
// this rank still reads e.
FLASHMOE_PROTOCOL_CONST uint32_t parity(uint32_t epoch) { return epoch & 1; }

}  // namespace flashmoe::protocol
