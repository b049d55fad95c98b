// The machine that the kernels are written for, a Hopper GPU (sm_90a), and how a launch fills it:
// tiles, threads, registers and shared memory. Another machine would have another such header.
#pragma once

namespace flashmoe {

// Tokens, weights and results are of 16 bits: bfloat16 or float16.
constexpr int kElementBytes = 2;

// Operands of products are the same or, in sources that include in_fp8.h first, E4M3 with a scale
// for each block of 128 along K.
#ifdef FLASHMOE_IN_FP8
constexpr bool kIsFp8 = true;
#else
constexpr bool kIsFp8 = false;
#endif
constexpr int kOperandBytes = kIsFp8 ? 1 : kElementBytes;
constexpr int kScaleBlock = 128;

// The tile that a CTA multiplies at a time. In sources that include narrow_tiles.h first it has
// half the columns. Such a tile reads more bytes for each product, but keeps its finishers for half
// the time.
constexpr int BLOCK_M = 128;  // rows; an expert's segment starts at a multiple of it
constexpr int kWideColumns = 256, kNarrowColumns = 128;
#ifdef FLASHMOE_NARROW_TILES
constexpr int BLOCK_N = kNarrowColumns;
#else
constexpr int BLOCK_N = kWideColumns;
#endif
constexpr int BLOCK_K = 128 / kOperandBytes;  // one row of TMA's and wgmma's swizzle
constexpr int kHalfRows = 64;                 // rows that one processor multiplies: the M of wgmma
constexpr int kBoxRows = 128;  // rows of M or N in one TMA box, which has BLOCK_K of K: 16 KiB
constexpr int kBoxBytes = kBoxRows * BLOCK_K * kOperandBytes;

// A CTA fills an SM, and a cluster of two shares the operands that both need.
constexpr int kClusterSize = 2;
constexpr int kMaxCtas = 256;

// The threads of a CTA: one warpgroup that communicates, and the processors.
constexpr int kLayerThreads = 384;
constexpr int kNumProcessors = 2;   // warpgroups that multiply
constexpr int kProcessorWarps = 4;  // warps of each
constexpr int kWarpRows = kHalfRows / kProcessorWarps;
static_assert(kNumProcessors * kHalfRows == BLOCK_M);
static_assert(kLayerThreads == 128 * (1 + kNumProcessors));

// A launch gives every thread the same registers, and setmaxnreg only moves them about: to ask for
// more than the launch has waits for ever. More threads would leave ptxas too few for wgmma.
constexpr int kLaunchRegisters = 65536 / kLayerThreads / 8 * 8;
// In FP8 there is a second accumulator, of half the columns.
constexpr int kProcessorRegisters = kIsFp8 ? 208 : 176;
constexpr int kCommRegisters = 3 * kLaunchRegisters - 2 * kProcessorRegisters;
static_assert(kLaunchRegisters == 168 and kCommRegisters == (kIsFp8 ? 88 : 152));
// Chunks of a row that a lane sums at a time: of a processor, and of a warp that communicates.
constexpr int kProcessorSums = 4;
constexpr int kCommSums = kIsFp8 ? 2 : 4;

// Shared memory. A stage holds BLOCK_K of both operands of a tile; so many stages, and the outputs
// on their way to the finishers, are all that there is room for.
constexpr int kStages = BLOCK_N == kNarrowColumns ? 5 : 3;
constexpr int kSmemBytes = 227 * 1024;      // static and dynamic, for one CTA
constexpr int kStaticSmemBytes = 1024;      // most that a layer has of it as static memory
constexpr int kPlanSmemBytes = 224 * 1024;  // dynamic, for a plan alone: places, and rows to copy

// A plan that is a launch of its own has a layer's threads: with more, the router has too few
// registers.
constexpr int kPlanThreads = kLayerThreads;

}  // namespace flashmoe
