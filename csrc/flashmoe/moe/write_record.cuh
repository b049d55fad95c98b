// Writes a launch's record: the last CTA to leave does, to pinned host memory, where the host finds
// it without waiting for anything.
#pragma once

#include "flashmoe/moe/unmatched.cuh"

namespace flashmoe {

// Written by every launch's first CTA when it begins. Scope: a CTA.
__device__ __forceinline__ void begin_record(const LayerArgs& args) {
    if (blockIdx.x == 0 and threadIdx.x == 0) *args.workspace.begun_ns = ptx::globaltimer_ns();
}

// A record's words on replicas, which follow the rows of all slots: the experts in the spare ones,
// how many replicas of this rank's experts there are, the size of one in multiples of 64 elements,
// and the plan's own routes.
__device__ __forceinline__ uint32_t replica_word(const LayerArgs& args, int i) {
    const Shape& s = args.shape;
    if (i < s.spare_slots) return uint32_t(args.plan.hosts[s.rank * s.spare_slots + i]);
    if (i == s.spare_slots + 1) return uint32_t(s.expert_elements() / 64);
    if (i > s.spare_slots + 1) return uint32_t(args.plan.own_routes[i - s.spare_slots - 2]);
    uint32_t replicas = 0;
    for (int place = 0; place < s.num_ranks * s.spare_slots; ++place) {
        const int expert = args.plan.hosts[place];
        replicas += expert >= 0 and expert / s.num_local_experts() == s.rank;
    }
    return replicas;
}

// Calls `meanwhile` while the record's parts are being loaded. A launch that does nothing, since
// some ranks lack its backward, has no record. With kHasEnded a launch before has ended the epoch.
// Scope: the last CTA to leave.
template <bool kHasEnded = false, class Meanwhile>
__device__ __forceinline__ void write_record(const LayerArgs& args,
                                             bool is_backward,
                                             Meanwhile meanwhile) {
    if (args.records == nullptr or unmatched_ranks(args) != 0) return meanwhile();
    __shared__ RecordHead head;
    const Workspace& workspace = args.workspace;
    const int num_slots = args.shape.num_local_slots(), num_spare = args.shape.spare_slots;
    const int num_counts =
        num_spare > 0 ? num_slots + num_spare + Record::kReplicaWords : num_slots;
    // A thread loads its first word along with the head, since each round of loads delays the end.
    const auto* totals = reinterpret_cast<const volatile uint32_t*>(workspace.totals);
    const auto word_behind_head = [&](int i) {
        return i < Record::kFrontWords ? totals[i - Record::kHeadWords]
               : not kHasReplicas or i < Record::kFrontWords + num_slots
                   ? uint32_t(args.plan.expert_rows[i - Record::kFrontWords])
                   : replica_word(args, i - Record::kFrontWords - num_slots);
    };
    const int num_words = Record::kFrontWords + num_counts, mine = int(threadIdx.x);
    const bool has_early = mine >= Record::kHeadWords and mine < num_words;
    const uint32_t early = has_early ? word_behind_head(mine) : 0;
    const PlanHeader plan = *args.plan.header;
    const auto sequence = *workspace.num_records + 1;
    const uint32_t epoch = kHasEnded ? *workspace.epoch : current_epoch(workspace);
    const auto begin_ns = *workspace.begun_ns;
    meanwhile();
    if (threadIdx.x == 0) {
        head.sequence = sequence;
        head.checksum = 0;
        head.epoch = epoch;
        head.layer = args.layer;
        head.is_backward = is_backward;
        head.num_ctas = int(gridDim.x);
        head.num_tokens = args.num_tokens;
        head.num_rows = plan.num_rows;
        head.num_row_blocks = plan.num_row_blocks;
        head.num_counts = num_counts;
        head.spare_slots = num_spare;
        head.begin_ns = begin_ns;
        head.end_ns = ptx::globaltimer_ns();
        *workspace.num_records = sequence;
    }
    __syncthreads();
    auto* record = reinterpret_cast<volatile uint32_t*>(args.records + head.sequence % kNumRecords);
    const auto* front = reinterpret_cast<const volatile uint32_t*>(&head);
    uint32_t sum = 0;
    for (int i = mine; i < num_words; i += blockDim.x) {
        if (i == Record::kChecksumWord) continue;
        const uint32_t word = i < Record::kHeadWords ? front[i]
                              : i == mine            ? early
                                                     : word_behind_head(i);
        record[i] = word;
        sum += Record::checksum_of(uint32_t(i), word);
    }
    sum = __reduce_add_sync(~0u, sum);
    if (threadIdx.x % 32 == 0) atomicAdd_block(&head.checksum, sum);
    __syncthreads();
    if (threadIdx.x == 0) record[Record::kChecksumWord] = head.checksum;
}

}  // namespace flashmoe
