// Arguments of the launches that copy operands for experts in FP8.
#pragma once

#include "flashmoe/kernel/entry.h"
#include "flashmoe/moe/plan.cuh"

namespace flashmoe {

struct CopyWeightsArgs {
    const void* const* weights;  // device: of fc1, then of fc2
    char* copies;                // one after another, in the same order
    // Numbers of fc1's weights, then of fc2's.
    int count[2];
    int num_out[2];
    int num_in[2];
    bool is_split;  // fc1's are all gates', then all ups'

    __host__ __device__ int blocks(int kind) const {
        return num_out[kind] / kScaleBlock * (num_in[kind] / kScaleBlock);
    }
    __host__ __device__ int64_t bytes(int kind) const {
        return copied_weight_bytes(num_out[kind], num_in[kind]);
    }
    int num_blocks() const { return count[0] * blocks(0) + count[1] * blocks(1); }
    int64_t all_bytes() const { return count[0] * bytes(0) + count[1] * bytes(1); }

    // Transposes, one of each expert's fc1.
    __host__ __device__ int num_copies() const { return count[1]; }
    __host__ __device__ int turned_width(int kind) const {
        return num_out[kind] * (kind == 0 and is_split ? 2 : 1);
    }
    __host__ __device__ int64_t turned_bytes(int kind) const {
        return copied_weight_bytes(num_in[kind], turned_width(kind));
    }
    int64_t all_turned_bytes() const { return num_copies() * (turned_bytes(0) + turned_bytes(1)); }
};

struct ReadRowsArgs {
    const PlanHeader* plan;
    int num_row_blocks;  // that both buffers hold
    int hidden;
    const char* rows;  // [row], fp8_row_bytes(hidden) each
    char* read;        // [row][hidden]
};

constexpr int kCopyWeightsThreads = 256, kReadRowsThreads = 256, kQuantizeThreads = 512;
constexpr int kQuantizeCtas = 4 * 132;  // as many as an H100 has room for

}  // namespace flashmoe
