// The first include of a source with kernels, or host code, for layers whose experts compute in
// FP8. They are the same text, compiled once more in a namespace of its own, as with_slots.h does
// it: what products read is of 8 bits, and has scales. So the code for operands of 16 bits contains
// nothing of FP8, and its machine code is what it would be if FP8 did not exist.
#pragma once

#define FLASHMOE_IN_FP8
#define flashmoe flashmoe_in_fp8
