// Gathers the rows of a tile, 16 bytes a lane at a time, to where a TMA box would put them. A rank
// that is alone has all rows at home and can read them where its tokens have them: nothing is then
// dispatched, and no copy of the rows in the order of their experts is made.
#pragma once

#include "flashmoe/moe/plan.cuh"
#include "flashmoe/tile/pipeline.cuh"

namespace flashmoe {

// A warp copies four rows of 128 bytes at a time: this lane the chunk `lane % 8` of row `lane / 8`.
constexpr int kGatherRows = 4;

// The tokens of a tile's rows: a lane knows every 32nd.
class GatheredTokens {
 public:
    static constexpr int kCount = BLOCK_M / kGatherRows;  // rows that a lane copies of

    __device__ __forceinline__ GatheredTokens(const Plan& plan, int first_row) {
        const RowMeta* meta = plan.row_meta + first_row + int(threadIdx.x % 32);
#pragma unroll
        for (int i = 0; i < BLOCK_M / 32; ++i) token_[i] = meta[i * 32].token;
    }
    // The token of the ith row that this lane copies of; below 0 for a pad row.
    __device__ __forceinline__ int operator[](int i) const {
        const int row = i * kGatherRows;
        return __shfl_sync(~0u, token_[row / 32], row % 32 + int(threadIdx.x % 32) / 8);
    }

 private:
    int token_[BLOCK_M / 32];
};

// Copies 64 columns of each row into a box, as TMA's 128-byte swizzle has them; zeros for pad rows.
__device__ __forceinline__ void gather_box(const GatheredTokens& tokens,
                                           const char* x,
                                           int row_bytes,
                                           int column,
                                           uint8_t (&box)[kBoxBytes]) {
    constexpr int kBoxRowBytes = BLOCK_K * kElementBytes;
    const int lane = threadIdx.x % 32, row = lane / 8, chunk = lane % 8;
    const char* from = x + column * kElementBytes + chunk * 16;
    const uint32_t to = uint32_t(__cvta_generic_to_shared(box)) + row * kBoxRowBytes;
    // Row r has its chunk c at c ^ (r % 8); of a lane's rows every other one is 4 modulo 8 away.
    const uint32_t even = to + (chunk ^ row) * 16, odd = to + (chunk ^ row ^ kGatherRows) * 16;
#pragma unroll
    for (int i = 0; i < GatheredTokens::kCount; ++i) {
        const int token = tokens[i];
        ptx::copy_16_async((i % 2 == 0 ? even : odd) + i * kGatherRows * kBoxRowBytes,
                           from + int64_t(max(token, 0)) * row_bytes, token >= 0);
    }
}

}  // namespace flashmoe
