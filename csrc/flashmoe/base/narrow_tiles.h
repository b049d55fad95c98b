// The first include of a source with kernels whose tiles have half the columns (hopper.cuh). They
// are the same text, compiled once more in a namespace of its own, as with_slots.h does it.
#pragma once

#define FLASHMOE_NARROW_TILES
#define flashmoe flashmoe_narrow_tiles
