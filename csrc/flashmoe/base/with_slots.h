// The first include of a source with kernels, or host code, for layers with spare slots. They are
// the same text, compiled a second time in a namespace of its own. So the code for layers without
// slots contains nothing of slots, and its machine code is what it would be if slots did not exist.
#pragma once

#define FLASHMOE_REPLICAS
#define flashmoe flashmoe_with_slots
