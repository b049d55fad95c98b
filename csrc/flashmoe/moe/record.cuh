// A launch's record of itself for the host, in pinned host memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flashmoe/base/shape.cuh"
#include "flashmoe/comm/counters.cuh"

namespace flashmoe {

constexpr int kNumRecords = 256;

struct RecordHead {
    uint64_t sequence;
    uint32_t checksum;  // covers all other words that the launch writes
    uint32_t epoch;
    int32_t layer;
    int32_t is_backward;
    int32_t num_ctas;
    int32_t num_tokens;
    int32_t num_rows;  // received, without pad rows
    int32_t num_row_blocks;
    int32_t num_counts;  // words after the totals
    int32_t spare_slots;
    uint64_t begin_ns, end_ns;
};

// Mirrors FlashMoERecord. Its words reach the host in any order: the checksum tells when all are
// there, which costs the launch no fence across PCIe.
struct Record {
    RecordHead head;
    Totals totals;  // sums over all launches so far
    int32_t expert_rows[kMaxLocalExperts];

    static constexpr int kChecksumWord = 2;
    static constexpr int kHeadWords = sizeof(RecordHead) / 4;
    static constexpr int kFrontWords = (sizeof(RecordHead) + sizeof(Totals)) / 4;
    static constexpr int kReplicaWords = 4;  // with spare slots, after their rows and experts

    // The summand of one word in the checksum.
    __host__ __device__ static uint32_t checksum_of(uint32_t index, uint32_t word) {
        const uint32_t mixed = (word ^ index * 0x9E3779B9u) * 0x85EBCA6Bu;
        return mixed ^ mixed >> 15;
    }
};
static_assert(offsetof(RecordHead, checksum) == 4 * Record::kChecksumWord);

}  // namespace flashmoe
