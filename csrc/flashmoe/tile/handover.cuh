// How a tile leaves the processors. Each of their warps rounds its 16 rows of outputs to 16 bits,
// lays them down in shared memory for a finisher, and goes on with the next product: what becomes
// of the outputs costs the tensor cores nothing. A finisher reads whole rows, a lane eight columns,
// and its stores are whole lines.
#pragma once

#include "flashmoe/ptx/ld_st.cuh"
#include "flashmoe/tile/element.cuh"
#include "flashmoe/tile/pipeline.cuh"

namespace flashmoe {

constexpr int kProcessorWarps = 4;       // of each
constexpr int kWarpRows = 16;            // of a processor's 64
constexpr int kRowChunks = BLOCK_N / 8;  // of 16 bytes

// Outputs of one processor's warp. A row's chunks are flipped by the row, so that eight rows of one
// chunk lie in different banks.
struct alignas(128) WarpOutputs {
    uint8_t row[kWarpRows][BLOCK_N * 2];
};

struct Handover {
    WarpOutputs outputs[kNumProcessors][kProcessorWarps];
    Barrier full[kNumProcessors][kProcessorWarps];
    Barrier empty[kNumProcessors][kProcessorWarps];
};

__device__ __forceinline__ void init_barriers(Handover& handover) {
    for (int processor = 0; processor < kNumProcessors; ++processor) {
        for (int warp = 0; warp < kProcessorWarps; ++warp) {
            handover.full[processor][warp].init(1);
            handover.empty[processor][warp].init(1);
        }
    }
}

// Lays down a warp's share of an accumulator. Scope: a warp of a processor.
template <class T, class Accumulator>
__device__ __forceinline__ void hand_over(const Watchdog& watchdog,
                                          Handover& handover,
                                          int processor,
                                          RingCursor<1>& cursor,
                                          const Accumulator& accumulator) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kProcessorWarps;
    wait_barrier(watchdog, Role::kProcessorHandover, handover.empty[processor][warp],
                 cursor.parity() ^ 1);
    const uint32_t row = lane % kWarpRows, flip = (lane / kWarpRows ^ row % 8) * 16;
    const uint32_t target =
        uint32_t(__cvta_generic_to_shared(handover.outputs[processor][warp].row[row]));
#pragma unroll
    for (int pair = 0; pair < BLOCK_N / 16; ++pair) {
        // packed[2 j + i] holds the pair of 8-column group j (0 or 1) and row half i.
        uint32_t packed[4];
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            const int at = pair * 8 + word * 2;
            packed[word] = pack<T>(accumulator(at), accumulator(at + 1));
        }
        ptx::stmatrix_x4(target + pair / 4 * 128 + (pair % 4 * 32 ^ flip), packed);
    }
    __syncwarp();
    if (lane == 0) handover.full[processor][warp].arrive();
    cursor.advance();
}

// Half the columns of a warp's share as they are, in float32. A row's chunks are flipped so that
// what half a warp writes at once lies in different banks.
template <int kHalf, class Accumulator>
__device__ __forceinline__ void lay_down_floats(WarpOutputs& outputs,
                                                const Accumulator& accumulator) {
    const uint32_t lane = threadIdx.x % 32, row = lane / 4, flip = row % 4 * 32;
    const uint32_t target = uint32_t(__cvta_generic_to_shared(outputs.row[row])) + lane % 4 * 8;
#pragma unroll
    for (int j = 0; j < BLOCK_N / 16; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = 4 * (kHalf * BLOCK_N / 16 + j) + 2 * i;
            ptx::st_shared(target + i * 8 * (BLOCK_N * 2) + (j * 32 ^ flip), accumulator(at),
                           accumulator(at + 1));
        }
    }
}

// Hands over a warp's share of an accumulator unrounded, half after half, since a half takes all
// the room there is. Scope: a warp of a processor.
template <class Accumulator>
__device__ __forceinline__ void hand_over_floats(const Watchdog& watchdog,
                                                 Handover& handover,
                                                 int processor,
                                                 RingCursor<1>& cursor,
                                                 const Accumulator& accumulator) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kProcessorWarps;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        wait_barrier(watchdog, Role::kProcessorHandover, handover.empty[processor][warp],
                     cursor.parity() ^ 1);
        if (half == 0) {
            lay_down_floats<0>(handover.outputs[processor][warp], accumulator);
        } else {
            lay_down_floats<1>(handover.outputs[processor][warp], accumulator);
        }
        __syncwarp();
        if (lane == 0) handover.full[processor][warp].arrive();
        cursor.advance();
    }
}

// A finishing warp's view of one processor's rows.
class HandedOver {
 public:
    __device__ explicit HandedOver(const WarpOutputs& outputs)
        : rows_(uint32_t(__cvta_generic_to_shared(&outputs))) {}

    __device__ __forceinline__ uint4 chunk(int row, int chunk) const {
        return ptx::ld_shared(rows_ + row * (BLOCK_N * 2) + (chunk ^ row % 8) * 16);
    }
    // This lane's four columns of half a row of floats.
    __device__ __forceinline__ float4 floats(int row) const {
        const uint4 v =
            ptx::ld_shared(rows_ + row * (BLOCK_N * 2) + (threadIdx.x % 32 ^ row % 4 * 2) * 16);
        return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                __uint_as_float(v.w)};
    }

 private:
    uint32_t rows_;
};

}  // namespace flashmoe
