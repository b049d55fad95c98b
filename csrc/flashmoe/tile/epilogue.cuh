// From accumulators to memory: bf16 packing, a transposition in shared memory that makes a warp's
// stores whole lines, and how consumers learn of them.
#pragma once

#include <cuda_bf16.h>

#include "flashmoe/base/shape.cuh"
#include "flashmoe/ptx/ld_st.cuh"

namespace flashmoe {

constexpr int kWarpRows = 16;  // of a warpgroup's 64

template <int kTiles, int kColumns>
struct alignas(128) WarpStaging {
    uint8_t row[kTiles][kWarpRows][kColumns * 2];
};

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ float2 unpack_bf16(uint32_t packed) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(packed));
}

// One warp's way out of registers: `write` fills staging tiles of 16 rows, and `store` sends one of
// them to memory. No other warp is involved.
template <int kStagingTiles, int kStagingColumns>
class TileStore {
    using Staging = WarpStaging<kStagingTiles, kStagingColumns>;

 public:
    static constexpr int kColumns = kStagingColumns;

    __device__ explicit TileStore(Staging& staging)
        : staging_(uint32_t(__cvta_generic_to_shared(&staging))) {}

    // Columns 16 pair .. 16 pair + 15: packed[2 j + i] holds the bf16 pair of 8-column group j (0
    // or 1) and row half i, as the accumulator layout has it.
    __device__ __forceinline__ void write(int pair, const uint32_t (&packed)[4], int tile = 0) {
        const uint32_t lane = ptx::opaque(threadIdx.x % 32);
        ptx::stmatrix_x4(address(tile, lane % 16, 2 * pair + lane / 16), packed);
    }

    // `target`: the first of the 16 rows, which are `pitch` bytes apart.
    __device__ __forceinline__ void store(char* target, int64_t pitch, int tile = 0) {
        constexpr int kRowsPerStep = 32 / kChunks;
        const uint32_t lane = ptx::opaque(threadIdx.x % 32);
        target += int64_t(lane / kChunks) * pitch + lane % kChunks * 16;
        __syncwarp();
#pragma unroll
        for (int step = 0; step < kWarpRows / kRowsPerStep; ++step) {
            const uint32_t row = step * kRowsPerStep + lane / kChunks;
            *reinterpret_cast<uint4*>(target) = ptx::ld_shared(address(tile, row, lane % kChunks));
            target += kRowsPerStep * pitch;
        }
        __syncwarp();
    }

 private:
    static constexpr int kChunks = kColumns / 8;  // of 16 bytes in a row

    // Flips a row's chunks by the row, so that eight rows of one chunk lie in different banks.
    __device__ __forceinline__ uint32_t address(int tile, uint32_t row, uint32_t chunk) const {
        const uint32_t flipped = chunk ^ (row / (8 / kChunks) % kChunks);
        return staging_ + ((tile * kWarpRows + row) * kChunks + flipped) * 16;
    }

    uint32_t staging_;
};

// The stores of this warp that nobody has been told of. To publish them at once would stall until
// they are visible; during the next product that is long over. But they have to be settled before
// any wait, since what is waited for may depend on them. Scope: one warp.
class PendingStores {
 public:
    // Which counter waits is kept in shared memory, one word a warp: the processors have no
    // register for it.
    __device__ PendingStores(uint32_t* const& counters, int& index)
        : counters_(counters), index_(index) {
        index_ = kNone;
    }

    __device__ __forceinline__ bool exist() const { return index_ != kNone; }

    __device__ __forceinline__ void add(int index) {
        settle();
        index_ = index;
        __syncwarp();
    }
    // Adds one to the counter of the stores' block.
    __device__ __forceinline__ void settle() {
        const int index = index_;
        __syncwarp();
        if (index == kNone) return;
        if (threadIdx.x % 32 == 0) ptx::red_release_gpu(counters_ + index, 1);
        index_ = kNone;
        __syncwarp();
    }

 private:
    static constexpr int kNone = -1;

    uint32_t* const& counters_;
    volatile int& index_;
};

}  // namespace flashmoe
