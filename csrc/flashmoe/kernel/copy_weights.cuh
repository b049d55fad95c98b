// The copies of weights that experts in FP8 multiply: a CTA quantizes a block of 128 x 128 values,
// which has one scale. Among FP8's own kernels, for a forward, the copy has values and scales;
// among the others, for a backward, it has what these stand for, in bfloat16.
#pragma once

#include "flashmoe/kernel/copies.h"
#include "flashmoe/tile/quantize.cuh"

namespace flashmoe {

// The block of a weight that a CTA takes.
struct WeightBlock {
    int kind;         // 0 of fc1, 1 of fc2
    int nth, weight;  // the weight among those of its kind, and among all
    int row, column;  // in blocks
    int per_row;      // blocks

    __device__ __forceinline__ explicit WeightBlock(const CopyWeightsArgs& args) {
        const int blocks_of_fc1 = args.count[0] * args.blocks(0);
        kind = int(blockIdx.x) >= blocks_of_fc1;
        const int block = int(blockIdx.x) - (kind ? blocks_of_fc1 : 0);
        nth = block / args.blocks(kind);
        weight = (kind ? args.count[0] : 0) + nth;
        const int in_weight = block % args.blocks(kind);
        per_row = args.num_in[kind] / kScaleBlock;
        row = in_weight / per_row, column = in_weight % per_row;
    }
};

// The scale of the block whose values a CTA's threads have. Scope: a CTA.
template <int kRounds>
__device__ __forceinline__ BlockScale scale_of_cta(const uint4 (&values)[kRounds]) {
    constexpr int kWarps = kCopyWeightsThreads / 32;
    __shared__ __nv_bfloat162 most_of_warp[kWarps];
    __nv_bfloat162 most{};
#pragma unroll
    for (int i = 0; i < kRounds; ++i) most = most_of8(values[i], most);
    most = most_of_lanes<32>(most, ~0u);
    if (threadIdx.x % 32 == 0) most_of_warp[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWarps; ++i) most = __hmax2(most, most_of_warp[i]);
    return scale_of(most);
}

__global__ __launch_bounds__(kCopyWeightsThreads)  //
    void copy_weights_kernel(const __grid_constant__ CopyWeightsArgs args) {
    constexpr int kRowsAtOnce = kCopyWeightsThreads / kScaleLanes;
    constexpr int kRounds = kScaleBlock / kRowsAtOnce;
    const WeightBlock block(args);
    const int kind = block.kind, num_in = args.num_in[kind];
    const auto* weight = static_cast<const uint4*>(args.weights[block.weight]);
    char* copy =
        args.copies + (kind ? args.count[0] * args.bytes(0) : 0) + block.nth * args.bytes(kind);

    const int lane = threadIdx.x % kScaleLanes, row = threadIdx.x / kScaleLanes;
    // In chunks of eight values.
    const int64_t first =
        (int64_t(block.row * kScaleBlock + row) * block.per_row + block.column) * kScaleLanes +
        lane;
    const int64_t step = int64_t(kRowsAtOnce) * block.per_row * kScaleLanes;
    uint4 values[kRounds];
#pragma unroll
    for (int i = 0; i < kRounds; ++i) values[i] = weight[first + i * step];
    const BlockScale of_block = scale_of_cta(values);
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
        scales[block.row * scales_of_row(num_in) + block.column] = of_block.inverse;
    }
}

}  // namespace flashmoe
