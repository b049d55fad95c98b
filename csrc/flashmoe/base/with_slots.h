// What a source includes first whose kernels, or whose host code, are for layers with spare slots.
// These are the same text, compiled a second time in a namespace of their own: one without slots
// has no word of them then, and its machine code is what it would be if there were none.
#pragma once

#define FLASHMOE_REPLICAS
#define flashmoe flashmoe_with_slots
