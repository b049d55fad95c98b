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
    uint32_t epoch;
    int num_row_blocks;
    int num_tokens;
    int num_n_tiles[2];  // tiles along N of GEMM0 and GEMM1
    int num_k_blocks[2];
    int group_blocks;  // row blocks that the schedule advances by

    const CUtensorMap* weight_maps;  // device: fc1 of every local expert, then fc2
    char* rows;                      // [row][hidden] bf16, filled by dispatch
    const char* result;              // [row][hidden] bf16, read by combine
    uint4* preact;                   // pre-activations in fragment order, or null
    float* dprob_partial;            // [row][GEMM0 tile]; backward
    char* out;                       // [token][hidden] bf16
    void* grad_probs;                // [token][expert]; backward
    bool grad_probs_is_bf16;

    // 64 x 64 boxes over row buffers: A of each GEMM, then what each GEMM's epilogue stores.
    CUtensorMap load_map[2];
    CUtensorMap store_map[2];
    CUtensorMap act_map;  // backward: scaled activation beside dpre
};

}  // namespace flashmoe
