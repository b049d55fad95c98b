// Reads a forward's received rows, which are in FP8, into bfloat16, for the gradients of fc1's
// weights.
#pragma once

#include "flashmoe/kernel/copies.h"
#include "flashmoe/tile/quantize.cuh"

namespace flashmoe {

__global__ __launch_bounds__(kReadRowsThreads)  //
    void read_rows_kernel(const __grid_constant__ ReadRowsArgs args) {
    const int rows = min(args.plan->num_row_blocks, args.num_row_blocks) * BLOCK_M;
    const int warps = int(gridDim.x) * kReadRowsThreads / 32;
    const int warp = int(blockIdx.x) * kReadRowsThreads / 32 + int(threadIdx.x) / 32;
    for (int row = warp; row < rows; row += warps) {
        const char* from = args.rows + int64_t(row) * fp8_row_bytes(args.hidden);
        const auto* values = reinterpret_cast<const uint4*>(from);
        const auto* scales = reinterpret_cast<const float*>(from + args.hidden);
        auto* read = reinterpret_cast<uint4*>(args.read) + int64_t(row) * args.hidden / 8;
#pragma unroll 4
        for (int at = threadIdx.x % 32; at < args.hidden / 16; at += 32) {
            const uint4 sixteen = values[at];
            const float inverse = scales[at / (kScaleBlock / 16)];
            read[2 * at] = decode8({sixteen.x, sixteen.y}, inverse);
            read[2 * at + 1] = decode8({sixteen.z, sixteen.w}, inverse);
        }
    }
}

}  // namespace flashmoe
