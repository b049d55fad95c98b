// The plan of one launch: the row of each route that an expert of this rank receives. Every rank
// computes it from the routing of all ranks, in an order that depends on the routing alone; the
// forward keeps it for its backward.
#pragma once

#include "flashmoe/base/shape.cuh"
#include "flashmoe/protocol/order.h"

namespace flashmoe {

// One row of the receive buffer. A token that selects several experts here has several rows: the
// first ("owner") is fetched and fanned out, the last delivers the token's sum.
struct alignas(8) RowMeta {
    int32_t token;
    uint8_t src_rank;
    uint8_t slot;  // which result slot of the token belongs to this rank
    uint8_t flags;
    uint8_t leaf;  // the expert's in protocol/tree.h, if the layer is rank-invariant

    static constexpr uint8_t kOwner = 1, kLast = 2, kPad = 4, kHome = 8;
    __device__ bool is_owner() const { return flags & kOwner; }
    __device__ bool is_last() const { return flags & kLast; }
    __device__ bool is_pad() const { return flags & kPad; }
    // The only row of its token on this rank.
    __device__ bool is_alone() const { return is_owner() and is_last(); }
    // All rows of its token are on the token's own rank: their sum is its result.
    __device__ bool is_home() const { return flags & kHome; }
};
static_assert(sizeof(RowMeta) == 8);

// The same for a token, given the mask of the ranks that compute for it.
__device__ __forceinline__ bool is_home(uint32_t ranks, int rank) { return ranks == 1u << rank; }

// Another lane's row, whose words are given. Scope: one warp.
__device__ __forceinline__ RowMeta shuffled(uint2 words, int lane) {
    const uint2 of_lane = {__shfl_sync(~0u, words.x, lane), __shfl_sync(~0u, words.y, lane)};
    return reinterpret_cast<const RowMeta&>(of_lane);
}
__device__ __forceinline__ RowMeta shuffled(const RowMeta& meta, int lane) {
    return shuffled(reinterpret_cast<const uint2&>(meta), lane);
}

// The rows that a cluster computes together: two row blocks of one expert, or an expert's odd last
// one.
struct alignas(8) RowUnit {
    int32_t first_block;
    int16_t expert;      // local slot
    int16_t num_halves;  // halves of its blocks that have rows: only an expert's last one may lack
    __device__ int num_blocks() const { return ceil_div<int>(num_halves, BLOCK_M / kHalfRows); }
};

struct PlanHeader {
    int32_t num_row_blocks;
    int32_t num_units;
    int32_t num_rows;
    uint32_t unfollowed;  // mask of the ranks that have no backward of this forward
};

constexpr uint64_t kPlanAlign = 256;  // bytes, of each table

struct PlanLayout {
    uint64_t header, expert_rows, expert_block, units, row_meta, row_prob, token_rows, own_columns,
        own_ranks, groups, bytes;
    FLASHMOE_SLOT_FIELD(uint64_t, hosts);
};

__host__ __device__ inline PlanLayout plan_layout(const Shape& s) {
    const uint64_t blocks = s.max_row_blocks(), slots = s.num_local_slots();
    PlanLayout at{};
    uint64_t end = 0;
    auto take = [&end](uint64_t bytes) {
        const uint64_t offset = end;
        end = align_up<uint64_t>(end + bytes, kPlanAlign);
        return offset;
    };
    at.header = take(sizeof(PlanHeader));
    at.expert_rows = take(slots * sizeof(int32_t));
    at.expert_block = take((slots + 1) * sizeof(int32_t));
    at.units = take(blocks * sizeof(RowUnit));
    at.row_meta = take(blocks * BLOCK_M * sizeof(RowMeta));
    at.row_prob = take(blocks * BLOCK_M * sizeof(float));
    at.token_rows = take(uint64_t(s.num_ranks) * s.max_tokens * s.topk * sizeof(int32_t));
    at.own_columns = take(uint64_t(s.max_tokens) * s.topk * sizeof(int32_t));
    at.own_ranks = take(uint64_t(s.max_tokens) * sizeof(uint32_t));
    FLASHMOE_SET_SLOT_FIELD(at.hosts,
                            take((uint64_t(s.num_ranks) * s.spare_slots + 2) * sizeof(int32_t)));
    // No group is empty.
    at.groups = take((blocks + protocol::kMostLag + 1) * sizeof(int32_t));
    at.bytes = end;
    return at;
}

struct Plan {
    PlanHeader* header;
    int32_t* expert_rows;   // [local slot]: received rows
    int32_t* expert_block;  // [local slot + 1]: first block
    RowUnit* units;         // in the order of their tiles; none spans two experts
    RowMeta* row_meta;      // [row]
    float* row_prob;        // [row], 0 for pad rows
    int32_t* token_rows;    // [src rank][token][topk]: row, or -1 where not ours
    int32_t* own_columns;   // [own token][topk]: where a route's probability is, or -1
    uint32_t* own_ranks;    // [own token]: mask of the ranks that compute for it
    int max_tokens;
    int topk;
    // [rank][spare slot]: the expert whose replica it holds, or -1
    FLASHMOE_SLOT_FIELD(int32_t*, hosts);
    // How many routes of this rank's tokens stay on it, and how many there are.
    FLASHMOE_SLOT_FIELD(int32_t*, own_routes);

    static Plan at(void* base, const Shape& s) {
        const PlanLayout layout = plan_layout(s);
        auto place = [base](uint64_t offset) { return static_cast<char*>(base) + offset; };
        Plan plan{reinterpret_cast<PlanHeader*>(place(layout.header)),
                  reinterpret_cast<int32_t*>(place(layout.expert_rows)),
                  reinterpret_cast<int32_t*>(place(layout.expert_block)),
                  reinterpret_cast<RowUnit*>(place(layout.units)),
                  reinterpret_cast<RowMeta*>(place(layout.row_meta)),
                  reinterpret_cast<float*>(place(layout.row_prob)),
                  reinterpret_cast<int32_t*>(place(layout.token_rows)),
                  reinterpret_cast<int32_t*>(place(layout.own_columns)),
                  reinterpret_cast<uint32_t*>(place(layout.own_ranks)),
                  s.max_tokens,
                  s.topk};
        FLASHMOE_SET_SLOT_FIELD(plan.hosts, reinterpret_cast<int32_t*>(place(layout.hosts)));
        FLASHMOE_SET_SLOT_FIELD(plan.own_routes, plan.hosts + s.num_ranks * s.spare_slots);
        return plan;
    }
    __device__ __forceinline__ int32_t* rows_of(int src_rank, int token) const {
        return token_rows + (int64_t(src_rank) * max_tokens + token) * topk;
    }
    // [group]: its first unit, where groups are cut at experts' ends.
    __device__ __forceinline__ int32_t* groups() const {
        return reinterpret_cast<int32_t*>(own_ranks) +
               align_up(max_tokens, int(kPlanAlign / sizeof(uint32_t)));
    }
    // Places count rows in the order in which their tiles are computed, as if every unit had two
    // blocks.
    __device__ __forceinline__ int num_places() const {
        return header->num_units * kClusterSize * BLOCK_M;
    }
    // The row at a place, or -1 where a unit's second block is missing.
    __device__ __forceinline__ int row_at(int place) const {
        const RowUnit unit = units[place / (kClusterSize * BLOCK_M)];
        const int in_unit = place % (kClusterSize * BLOCK_M);
        return in_unit < unit.num_blocks() * BLOCK_M ? unit.first_block * BLOCK_M + in_unit : -1;
    }
};

}  // namespace flashmoe
