// Half the columns of a processor warp's rows in float32, laid down in the warp's room for TMA: in
// blocks of 32 columns. A block holds the rows, 128 bytes each, with the 128-byte swizzle.
#pragma once

#include "flashmoe/tile/handover.cuh"

namespace flashmoe {

constexpr int kFloatBlockColumns = 128 / sizeof(float);
constexpr int kHalfColumns = BLOCK_N / 2;
constexpr int kHalfBlocks = kHalfColumns / kFloatBlockColumns;
constexpr int kFloatBlockBytes = kWarpRows * 128;
static_assert(kHalfBlocks * kFloatBlockBytes <= sizeof(WarpOutputs));

// The address of a byte of a row in the first block.
__device__ __forceinline__ uint32_t float_at(const WarpOutputs& room, int row, int byte) {
    const uint32_t at = uint32_t(__cvta_generic_to_shared(&room)) + row * 128 + byte;
    return at ^ (at >> 7 & 7) << 4;
}

// Lays down half the columns of a warp's share of an accumulator. A lane has pairs of columns, four
// lanes have a group of eight columns, and the warp writes the same group of eight rows at a time.
// The four rows of half a warp would meet in the same banks, so odd rows take their groups in
// another order.
template <int kHalf, class Accumulator>
__device__ __forceinline__ void lay_down_floats(WarpOutputs& room, const Accumulator& accumulator) {
    constexpr int kGroups = kFloatBlockColumns / 8;
    const int lane = int(threadIdx.x % 32), row = lane / 4;
    const bool is_odd = row % 2 != 0;
    const uint32_t first = float_at(room, row, lane % 4 * 8) ^ (is_odd ? 64 : 0);
    // For ptxas alone: where only ordinary stores follow a main loop, it takes that for divergent,
    // and every stage's descriptors cost 16 moves to uniform registers.
    ptx::stmatrix_x4(uint32_t(__cvta_generic_to_shared(room.row[lane % kWarpRows])), {});
    __syncwarp();
#pragma unroll
    for (int block = 0; block < kHalfBlocks; ++block) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const auto at = [&](int of_block) {
                    return 4 * ((kHalf * kHalfBlocks + block) * kGroups + of_block) + 2 * i;
                };
                const int even = at(group), odd = at(group ^ 2);
                ptx::st_shared((first ^ group * 32) + block * kFloatBlockBytes + i * 8 * 128,
                               is_odd ? accumulator(odd) : accumulator(even),
                               is_odd ? accumulator(odd + 1) : accumulator(even + 1));
            }
        }
    }
}

// This lane's four columns of a row.
__device__ __forceinline__ float4 laid_down_floats(const WarpOutputs& room, int row) {
    constexpr int kLanes = kFloatBlockColumns / 4;
    const int lane = int(threadIdx.x % 32);
    const uint4 v =
        ptx::ld_shared(float_at(room, row, lane % kLanes * 16) + lane / kLanes * kFloatBlockBytes);
    return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}

}  // namespace flashmoe
