// The sizes of one layer at run time, and the limits that they have at compile time.
#pragma once

#include <cstdint>

#include "flashmoe/base/hopper.cuh"

namespace flashmoe {

// Replicas of hot experts are for sources that include with_slots.h first. Any other has no spare
// slots at compile time, and a field for them is a constant, zero.
#ifdef FLASHMOE_REPLICAS
constexpr bool kHasReplicas = true;
#define FLASHMOE_SLOT_FIELD(type, name) type name
#define FLASHMOE_SET_SLOT_FIELD(field, value) field = value
#else
constexpr bool kHasReplicas = false;
#define FLASHMOE_SLOT_FIELD(type, name) \
    static constexpr type name {}
#define FLASHMOE_SET_SLOT_FIELD(field, value) static_cast<void>(value)
#endif

// Scales of products' operands, which only FP8 has.
#ifdef FLASHMOE_IN_FP8
#define FLASHMOE_SCALE_FIELD(type, name) type name
#else
#define FLASHMOE_SCALE_FIELD(type, name) static_assert(not kIsFp8)
#endif

// Kernels with spare slots or in FP8 have results whose bits depend on the number of ranks.
constexpr bool kMayBeRankInvariant = not kHasReplicas and not kIsFp8;

constexpr int kMaxRanks = 8;
constexpr int kMaxTopk = 16;
constexpr int kMaxLocalExperts = 512;  // places of a rank that compute experts
constexpr int kMaxSpareSlots = 64;     // places among them for other ranks' experts
constexpr int kMaxCtaTokens = 1024;    // most tokens that one CTA reduces

// Mirrors FlashMoEDtype.
enum class Dtype : int { kFloat32, kBFloat16, kFloat16 };

template <class Int>
__host__ __device__ constexpr Int ceil_div(Int a, Int b) {
    return (a + b - 1) / b;
}

template <class Int>
__host__ __device__ constexpr Int align_up(Int a, Int b) {
    return ceil_div(a, b) * b;
}

// The least power of two that is not less; n up to 32.
__host__ __device__ constexpr int power_of_two(int n) {
    int power = 1;
    while (power < n) power *= 2;
    return power;
}

// Lanes that poll one token's signals: one for each rank, rounded up to a power of two.
__host__ __device__ constexpr int chunk_lanes(int num_ranks) { return power_of_two(num_ranks); }

// Where gate and up rows of fc1 lie, and with them the columns of its outputs and their gradients:
// all gate rows come first, or both alternate in blocks. A column, of the intermediate ones, has
// one of each. Everything else takes fc1's rows in the order in which they lie.
struct GluRows {
    int blocks;      // the bits of a column that count whole blocks; 0 if all gate rows come first
    int to_up;       // from a column's gate row to its up row
    int tile_to_up;  // the same within a tile of GEMM0
    int half;        // from the first to the second half of such a tile's rows
    bool is_paired;  // gate and up rows alternate one by one, within what are blocks of eight here

    // `block` is a power of two and divides `intermediate`; 0 if all gate rows come first.
    static constexpr GluRows of(int intermediate, int block) {
        if (block == 0) return {0, intermediate, kBoxRows, intermediate, false};
        const int least = block < 8 ? 8 : block, box = kBoxRows;
        return {-least, least, least < box ? least : box, least > box ? least : box, block == 1};
    }
    __host__ __device__ constexpr int gate(int column) const { return column + (column & blocks); }
};

// Divides by a number that is known before the launch: a multiplication, and exact where both are
// below 2^16.
struct Divisor {
    uint32_t scale;  // the greatest number that fits, over the divisor

    static constexpr Divisor of(int divisor) {
        return {divisor > 0 ? UINT32_MAX / uint32_t(divisor) : 0};
    }
    __host__ __device__ constexpr int divide(int value) const {
        return int(uint64_t(uint32_t(value) + 1) * scale >> 32);
    }
};
static_assert(Divisor::of(65535).divide(65534) == 0 and Divisor::of(65535).divide(65535) == 1 and
              Divisor::of(3).divide(65534) == 21844 and Divisor::of(3).divide(65535) == 21845);

// Bytes of a row in FP8: its values are followed by a scale for each 128 of them, and by pads up to
// a multiple of 16. So a copy of the row has its scales, too.
__host__ __device__ constexpr int fp8_row_bytes(int width) {
    return align_up(width + width / kScaleBlock * int(sizeof(float)), 16);
}
// Bytes of a row that products read along K.
__host__ __device__ constexpr int operand_row_bytes(int width) {
    return kIsFp8 ? fp8_row_bytes(width) : width * kOperandBytes;
}

// Bytes of the copy of a weight that a pass of experts in FP8 reads: in a forward its values, then
// the scales of blocks, in rows of whole multiples of 16 bytes; in a backward what these stand for.
__host__ __device__ constexpr int scales_of_row(int num_in) {
    return align_up(num_in / kScaleBlock, 4);
}
__host__ __device__ constexpr int64_t copied_weight_bytes(int num_out, int num_in) {
    const int64_t values = int64_t(num_out) * num_in * kOperandBytes;
    const int scales = num_out / kScaleBlock * scales_of_row(num_in) * int(sizeof(float));
    return values + (kIsFp8 ? scales : 0);
}

struct Shape {
    int rank;
    int num_ranks;
    int hidden;
    int intermediate;
    int num_experts;
    int topk;
    int max_tokens;
    int heap_tokens;  // tokens and choices that the heap is laid out for, which are the same for
    int heap_topk;    // all layers that share it
    bool is_gated;
    bool skip_zero_probs;
    bool is_split;  // gate and up rows of fc1 are matrices of their own, all gates' ahead of all
                    // ups'
    bool has_invariant_sums;  // read by is_rank_invariant
    GluRows glu;
    // Results of divisions that a plan with slots would otherwise do at every route.
    FLASHMOE_SLOT_FIELD(int, experts_of_rank);
    FLASHMOE_SLOT_FIELD(Divisor, by_experts);
    FLASHMOE_SLOT_FIELD(Divisor, by_slots);
    // A rank's places for replicas, which follow the places of its own experts. The next two are
    // the largest of all layers that have such places and share the heap: the number of experts,
    // and the elements of the weights in a rank's places.
    FLASHMOE_SLOT_FIELD(int, spare_slots);
    FLASHMOE_SLOT_FIELD(int, heap_experts);
    FLASHMOE_SLOT_FIELD(int64_t, heap_slot_elements);

    // True if no bit of any result may depend on the number of ranks.
    __host__ __device__ bool is_rank_invariant() const {
        return kMayBeRankInvariant and has_invariant_sums;
    }
    __host__ __device__ int num_local_experts() const {
        return kHasReplicas ? experts_of_rank : num_experts / num_ranks;
    }
    __host__ __device__ int first_expert() const { return rank * num_local_experts(); }
    // A slot is a place that computes an expert. Without spare ones, slots are experts.
    __host__ __device__ int num_local_slots() const { return num_local_experts() + spare_slots; }
    __host__ __device__ int num_slots() const { return num_experts + num_ranks * spare_slots; }
    __host__ __device__ int first_slot() const { return rank * num_local_slots(); }
    __host__ __device__ bool is_spare(int local_slot) const {
        return kHasReplicas and local_slot >= num_local_experts();
    }
    // An expert's fc1, fc2 and both biases have so many, and lie in a spare slot in this order.
    __host__ __device__ int64_t expert_elements() const {
        return int64_t(fc1_rows()) * hidden + int64_t(hidden) * intermediate + fc1_rows() + hidden;
    }
    __host__ __device__ int fc1_rows() const { return is_gated ? 2 * intermediate : intermediate; }
    // fc1's matrices of all local slots, then fc2's, in tables of weights and of their gradients.
    __host__ __device__ int num_fc1() const { return (is_split ? 2 : 1) * num_local_slots(); }
    __host__ __device__ int num_matrices() const { return num_fc1() + num_local_slots(); }
    // Rows of results, and of tokens as they are given; and of tokens as products read them.
    __host__ __device__ int row_bytes() const { return hidden * kElementBytes; }
    __host__ __device__ int token_bytes() const { return operand_row_bytes(hidden); }

    // A token uses at most this many ranks, and at most this many slots of one rank: replicas may
    // take more of its routes there than the rank has experts.
    __host__ __device__ int max_slots() const { return topk < num_ranks ? topk : num_ranks; }
    __host__ __device__ int max_local_routes() const {
        return topk < num_local_slots() ? topk : num_local_slots();
    }
    __host__ __device__ int64_t max_row_blocks() const {
        const int64_t rows = int64_t(num_ranks) * max_tokens * max_local_routes();
        return ceil_div<int64_t>(rows, BLOCK_M) + num_local_slots();
    }

    // The slot of an expert on the rank that owns it, and the rank that a slot is on.
    __device__ int home_slot(int expert) const {
        return expert + (kHasReplicas ? by_experts.divide(expert) * spare_slots : 0);
    }
    __device__ int rank_of_slot(int slot) const {
        return kHasReplicas ? by_slots.divide(slot) : slot / num_local_slots();
    }

    // Routing is processed in chunks of one warp's width; chunks of all sources are interleaved.
    __host__ __device__ int chunks_per_rank() const { return ceil_div(max_tokens, 32); }
    __host__ __device__ int num_chunks() const { return chunks_per_rank() * num_ranks; }
    // The most chunks of one CTA: a CTA places neighbours.
    __host__ __device__ int chunks_per_cta(int num_ctas) const {
        return ceil_div(num_chunks(), num_ctas);
    }
};

}  // namespace flashmoe
