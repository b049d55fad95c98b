// The copies of weights that a backward in FP8 multiplies: quantized as a forward's, and
// transposed, since tensor cores read E4M3 along K alone. A block of 128 x 128 values has the same
// scale either way round. Gate and up rows that are matrices of their own become one transpose.
#pragma once

#include "flashmoe/kernel/copy_weights.cuh"

namespace flashmoe {

__global__ __launch_bounds__(kCopyWeightsThreads)  //
    void turn_weights_kernel(const __grid_constant__ CopyWeightsArgs args) {
    constexpr int kRows = 8;  // a thread has so many, and as many columns
    static_assert(kCopyWeightsThreads * kRows * 8 == kScaleBlock * kScaleBlock);
    // [column], chunks of eight rows, in an order of the column's own: so what lanes write or read
    // together lies in different banks.
    __shared__ uint2 turned[kScaleBlock][kScaleLanes];
    const WeightBlock block(args);
    const auto* weight = static_cast<const uint4*>(args.weights[block.weight]);
    const int lane = threadIdx.x % kScaleLanes, group = threadIdx.x / kScaleLanes;
    uint4 values[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const int64_t row = block.row * kScaleBlock + group * kRows + i;
        values[i] = weight[(row * block.per_row + block.column) * kScaleLanes + lane];
    }
    const BlockScale of_block = scale_of_cta(values);
    uint2 encoded[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) encoded[i] = encode8(values[i], of_block.scale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // four columns each
        uint32_t rows[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) rows[i] = half == 0 ? encoded[i].x : encoded[i].y;
        uint32_t columns[2][4];  // a word has four rows
#pragma unroll
        for (int four = 0; four < 2; ++four) {
            const uint32_t* r = rows + 4 * four;
            const uint32_t low01 = __byte_perm(r[0], r[1], 0x5140);
            const uint32_t high01 = __byte_perm(r[0], r[1], 0x7362);
            const uint32_t low23 = __byte_perm(r[2], r[3], 0x5140);
            const uint32_t high23 = __byte_perm(r[2], r[3], 0x7362);
            columns[four][0] = __byte_perm(low01, low23, 0x5410);
            columns[four][1] = __byte_perm(low01, low23, 0x7632);
            columns[four][2] = __byte_perm(high01, high23, 0x5410);
            columns[four][3] = __byte_perm(high01, high23, 0x7632);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            turned[lane * 8 + half * 4 + i][group ^ lane] = {columns[0][i], columns[1][i]};
        }
    }
    __syncthreads();
    const int kind = block.kind, expert = block.nth % args.num_copies();
    const int first = (block.nth / args.num_copies()) * args.num_out[kind];  // up rows follow gates
    const int width = args.turned_width(kind);
    char* copy = args.copies + (kind ? args.num_copies() * args.turned_bytes(0) : 0) +
                 expert * args.turned_bytes(kind);
    const int64_t from_row = first + block.row * kScaleBlock;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const int column = group * kRows + i;
        char* to = copy + int64_t(block.column * kScaleBlock + column) * width + from_row;
        reinterpret_cast<uint2*>(to)[lane] = turned[column][lane ^ (column / 8)];
    }
    if (threadIdx.x == 0) {
        auto* scales = reinterpret_cast<float*>(copy + int64_t(args.num_in[kind]) * width);
        scales[block.column * scales_of_row(width) + from_row / kScaleBlock] = of_block.inverse;
    }
}

}  // namespace flashmoe
