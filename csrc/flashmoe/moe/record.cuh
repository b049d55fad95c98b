// What each launch tells of itself: the last CTA to leave writes it to pinned host memory, where
// the host finds it without waiting for anything.
#pragma once

#include "flashmoe/moe/args.cuh"

namespace flashmoe {

// Written by every launch's first CTA when it begins. Scope: a CTA.
__device__ __forceinline__ void begin_record(const LayerArgs& args) {
    if (blockIdx.x == 0 and threadIdx.x == 0) *args.workspace.begun_ns = ptx::globaltimer_ns();
}

// Scope: the last CTA to leave.
__device__ __forceinline__ void write_record(const LayerArgs& args, bool is_backward) {
    if (args.records == nullptr) return;
    const Workspace& workspace = args.workspace;
    const uint64_t sequence = *workspace.num_records + 1;
    volatile Record* record = args.records + sequence % kNumRecords;
    if (threadIdx.x == 0) record->sequence = 0;
    __threadfence_system();
    __syncthreads();
    const int num_experts = args.shape.num_local_experts();
    for (int expert = threadIdx.x; expert < num_experts; expert += blockDim.x) {
        record->expert_rows[expert] = args.plan.expert_rows[expert];
    }
    for (int i = threadIdx.x; i < Totals::kWords; i += blockDim.x) {
        reinterpret_cast<volatile unsigned long long*>(&record->totals)[i] =
            reinterpret_cast<volatile unsigned long long*>(workspace.totals)[i];
    }
    if (threadIdx.x == 0) {
        record->epoch = current_epoch(workspace);
        record->layer = args.layer;
        record->is_backward = is_backward;
        record->num_ctas = int(gridDim.x);
        record->num_tokens = args.num_tokens;
        record->num_rows = args.plan.header->num_rows;
        record->num_row_blocks = args.plan.header->num_row_blocks;
        record->num_experts = num_experts;
        record->begin_ns = *workspace.begun_ns;
        record->end_ns = ptx::globaltimer_ns();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        record->sequence = sequence;
        *workspace.num_records = sequence;
    }
}

}  // namespace flashmoe
