// Everything the fused launch reads, passed by value.
#pragma once

#include <cuda.h>

#include "flashmoe/comm/heap.cuh"
#include "flashmoe/comm/wait.cuh"
#include "flashmoe/moe/plan.cuh"

namespace flashmoe {

struct LayerArgs {
    Shape shape;
    Heap heap;
    Plan plan;
    Workspace workspace;
    Watchdog watchdog;
    // What this rank brings.
    int num_tokens;
    const char* x;               // [token][hidden] bf16; in the backward dY
    const void* probs;           // [token][expert], and
    const uint8_t* routing_map;  // [token][expert]: null if the plan exists already
    bool probs_is_bf16;
    int row_block_bound;  // blocks that the row buffers hold

    int num_n_tiles[2];  // tiles along N of GEMM0 and GEMM1
    int num_k_blocks[2];
    int group_units;  // row units that the schedule advances by

    const CUtensorMap* weight_maps;  // device: fc1 of every local expert, then fc2
    char* rows;                      // [row][hidden] bf16, filled by dispatch
    char* act;                       // [row][intermediate] bf16: fc2's input
    char* dpre;                      // [row][fc1_rows] bf16; backward
    char* result;                    // [row][hidden] bf16, read by combine
    uint4* preact;                   // pre-activations in fragment order, or null
    float* dprob_partial;            // [row][GEMM0 tile]; backward
    char* out;                       // [token][hidden] bf16
    void* grad_probs;                // [token][expert]; backward
    bool grad_probs_is_bf16;

    CUtensorMap load_map[2];  // A of each GEMM
};

// The epoch of this launch. 0 marks fresh memory; it wraps past 0 and 1, since epochs alternate
// between even and odd.
__device__ __forceinline__ uint32_t current_epoch(const Workspace& workspace) {
    return *workspace.epoch + 1;
}

// The last thing that a launch does: the last CTA to come zeroes the counters, so no launch needs a
// memset, and ends the epoch if its results are complete. Scope: all threads of the grid.
__device__ __forceinline__ void leave(const Workspace& workspace, bool ends_epoch) {
    __syncthreads();
    bool is_last = false;
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(&workspace.tickets->leaving, 1u) == gridDim.x - 1;
    }
    if (not __syncthreads_or(is_last)) return;
    uint32_t* words = reinterpret_cast<uint32_t*>(workspace.tickets);
    for (int64_t i = threadIdx.x; i < workspace.num_zeroed; i += blockDim.x) words[i] = 0;
    if (ends_epoch and threadIdx.x == 0) {
        const uint32_t epoch = current_epoch(workspace);
        *workspace.epoch = epoch == ~0u ? 1 : epoch;
    }
}

}  // namespace flashmoe
