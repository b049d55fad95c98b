// The copies of weights that experts in FP8 multiply: a CTA quantizes a block of 128 x 128 values,
// which has one scale. Among FP8's own kernels, for a forward, the copy has values and scales;
// among the others, for a backward, it has what these stand for, in bfloat16.
#pragma once

#include "flashmoe/kernel/copies.h"
#include "flashmoe/tile/quantize.cuh"

namespace flashmoe {

__global__ __launch_bounds__(kCopyWeightsThreads)  //
    void copy_weights_kernel(const __grid_constant__ CopyWeightsArgs args) {
    constexpr int kWarps = kCopyWeightsThreads / 32;
    constexpr int kRowsAtOnce = kCopyWeightsThreads / kScaleLanes;
    constexpr int kRounds = kScaleBlock / kRowsAtOnce;
    __shared__ __nv_bfloat162 most_of_warp[kWarps];
    const int blocks_of_fc1 = args.count[0] * args.blocks(0);
    const int kind = int(blockIdx.x) >= blocks_of_fc1;
    const int block = int(blockIdx.x) - (kind ? blocks_of_fc1 : 0);
    const int nth = block / args.blocks(kind), in_weight = block % args.blocks(kind);
    const int num_in = args.num_in[kind], per_row = num_in / kScaleBlock;
    const int block_row = in_weight / per_row, block_column = in_weight % per_row;
    const auto* weight = static_cast<const uint4*>(args.weights[(kind ? args.count[0] : 0) + nth]);
    char* copy = args.copies + (kind ? args.count[0] * args.bytes(0) : 0) + nth * args.bytes(kind);

    const int lane = threadIdx.x % kScaleLanes, row = threadIdx.x / kScaleLanes;
    // In chunks of eight values.
    const int64_t first =
        (int64_t(block_row * kScaleBlock + row) * per_row + block_column) * kScaleLanes + lane;
    const int64_t step = int64_t(kRowsAtOnce) * per_row * kScaleLanes;
    uint4 values[kRounds];
#pragma unroll
    for (int i = 0; i < kRounds; ++i) values[i] = weight[first + i * step];
    __nv_bfloat162 most{};
#pragma unroll
    for (int i = 0; i < kRounds; ++i) most = most_of8(values[i], most);
    most = most_of_lanes<32>(most, ~0u);
    if (threadIdx.x % 32 == 0) most_of_warp[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWarps; ++i) most = __hmax2(most, most_of_warp[i]);
    const BlockScale of_block = scale_of(most);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
        const uint2 encoded = encode8(values[i], of_block.scale);
        if constexpr (kIsFp8) {
            reinterpret_cast<uint2*>(copy)[first + i * step] = encoded;
        } else {
            reinterpret_cast<uint4*>(copy)[first + i * step] = decode8(encoded, of_block.inverse);
        }
    }
    if (kIsFp8 and threadIdx.x == 0) {
        auto* scales = reinterpret_cast<float*>(copy + int64_t(args.num_out[kind]) * num_in);
        scales[block_row * scales_of_row(num_in) + block_column] = of_block.inverse;
    }
}

}  // namespace flashmoe
