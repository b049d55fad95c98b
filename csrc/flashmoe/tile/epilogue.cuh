// From accumulators to memory: bf16 packing, and a 64 x 64 staging tile that TMA stores from.
#pragma once

#include <cuda_bf16.h>

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include "flashmoe/base/shape.cuh"
#include "flashmoe/ptx/ld_st.cuh"

namespace flashmoe {

constexpr int kStagingBytes = kBoxDim * kBoxDim * 2;

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ float2 unpack_bf16(uint32_t packed) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(packed));
}

// One warpgroup's way out of registers. After `begin`, `write` fills staging tiles (128-byte
// swizzle) and `store` sends the first of them; all 128 threads take part.
class TileStore {
 public:
    __device__ TileStore(uint8_t (*staging)[kStagingBytes], int warpgroup)
        : staging_(cute::cast_smem_ptr_to_uint(staging)), barrier_(warpgroup) {
        const uint32_t thread = threadIdx.x % 128, lane = thread % 32;
        row_address_ = staging_ + (thread / 32 * 16 + lane % 16) * 128;
        // The swizzle flips the 16-byte chunk by the row; both halves of a pair differ in one bit.
        first_chunk_ = (lane / 16) ^ (lane & 7);
    }

    // Waits until the previous stores have read the staging tiles.
    __device__ __forceinline__ void begin() {
        if (threadIdx.x % 128 == 0) cute::tma_store_wait<0>();
        sync();
    }

    // Columns 16 pair .. 16 pair + 15 of this warp's 16 rows: packed[2 j + i] holds the bf16 pair
    // of 8-column group j (0 or 1) and row half i, as the accumulator layout has it.
    __device__ __forceinline__ void write(int pair, const uint32_t (&packed)[4], int tile = 0) {
        const uint32_t chunk = uint32_t(2 * pair) ^ first_chunk_;
        ptx::stmatrix_x4(ptx::opaque(row_address_) + tile * kStagingBytes + chunk * 16, packed);
    }

    // Where a staging tile goes: a box of `map`.
    struct Target {
        const void* map;
        int column;
    };

    template <int kTiles>
    __device__ __forceinline__ void store(const Target (&targets)[kTiles], int row) {
        cute::tma_store_fence();
        sync();
        if (threadIdx.x % 128 == 0) {
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                cute::SM90_TMA_STORE_2D::copy(
                    targets[tile].map, __cvta_shared_to_generic(staging_ + tile * kStagingBytes),
                    targets[tile].column, row);
            }
            cute::tma_store_arrive();
        }
    }

    // All stores of this tile are visible: adds one to the counter of its block.
    __device__ __forceinline__ void publish(uint32_t* counter) {
        if (threadIdx.x % 128 == 0) {
            ptx::bulk_wait_complete();
            ptx::red_release_gpu(counter, 1);
        }
    }

 private:
    __device__ __forceinline__ void sync() {
        cutlass::arch::NamedBarrier::sync(128, uint32_t(barrier_));
    }

    uint32_t staging_;
    int barrier_;
    uint32_t row_address_;
    uint32_t first_chunk_;
};

}  // namespace flashmoe
