// A processor warp's share of a tile with rows and columns exchanged: the tile's columns are laid
// down as rows of 16. A product whose left operand can be gathered, and whose right one cannot, is
// computed as its transpose, and turned round here.
#pragma once

#include "flashmoe/tile/handover.cuh"

namespace flashmoe {

constexpr int kTurnedRows = BLOCK_N, kHalfTurnedRows = kTurnedRows / 2;
static_assert(kTurnedRows * kWarpRows * kElementBytes <= sizeof(WarpOutputs));
static_assert(kHalfTurnedRows * kWarpRows * sizeof(float) <= sizeof(WarpOutputs));

// The address of a chunk of eight rounded values in a row. Rows have two; the chunks of every
// other four rows change places, so that eight rows of one chunk lie in different banks.
__device__ __forceinline__ uint32_t turned_at(const WarpOutputs& room, int row, int chunk) {
    return uint32_t(__cvta_generic_to_shared(&room)) + row * kWarpRows * kElementBytes +
           (chunk ^ (row >> 2 & 1)) * 16;
}

// Lays down a warp's share of an accumulator, rounded.
template <class T, class Accumulator>
__device__ __forceinline__ void lay_down_turned(WarpOutputs& room, const Accumulator& accumulator) {
    const int lane = int(threadIdx.x % 32);
    const uint32_t target = turned_at(room, lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int pair = 0; pair < BLOCK_N / 16; ++pair) {
        uint32_t packed[4];  // as in lay_down
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            const int at = pair * 8 + word * 2;
            packed[word] = pack<T>(accumulator(at), accumulator(at + 1));
        }
        ptx::stmatrix_x4_turned(target + pair * 16 * kWarpRows * kElementBytes, packed);
    }
}

// The address of four floats of a row in one of the halves. The even ones of eight rows come first,
// and the chunks of the last two of four change places by pairs: what a warp lays down at a time,
// eight floats of four even or odd rows, lies in different banks.
__device__ __forceinline__ uint32_t turned_floats_at(const WarpOutputs& room, int row, int chunk) {
    constexpr int kRowBytes = kWarpRows * sizeof(float);
    const int place = row / 8 * 8 + row % 2 * 4 + row / 2 % 4;
    return uint32_t(__cvta_generic_to_shared(&room)) + place * kRowBytes +
           (chunk ^ row / 4 % 2 * 2) * 16;
}

// Lays down the rows of half the tile's columns in float32.
template <int kHalf, class Accumulator>
__device__ __forceinline__ void lay_down_turned_floats(WarpOutputs& room,
                                                       const Accumulator& accumulator) {
    constexpr int kRowBytes = kWarpRows * sizeof(float);
    const int lane = int(threadIdx.x % 32);
    const uint32_t first = turned_floats_at(room, lane % 4 * 2, lane / 16) + lane / 4 % 4 * 4;
    // For ptxas alone, as in lay_down_floats.
    ptx::stmatrix_x4(uint32_t(__cvta_generic_to_shared(room.row[lane % kWarpRows])), {});
    __syncwarp();
#pragma unroll
    for (int group = 0; group < kHalfTurnedRows / 8; ++group) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = 4 * (kHalf * kHalfTurnedRows / 8 + group) + 2 * i;
            const uint32_t to = (first ^ i * 32) + group * 8 * kRowBytes;
            ptx::st_shared(to, accumulator(at));
            ptx::st_shared(to + 4 * kRowBytes, accumulator(at + 1));
        }
    }
}

// This lane's four values of a row: four lanes have a row.
__device__ __forceinline__ float4 turned_floats(const WarpOutputs& room, int row) {
    const uint4 v = ptx::ld_shared(turned_floats_at(room, row, int(threadIdx.x % 4)));
    return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}

}  // namespace flashmoe
