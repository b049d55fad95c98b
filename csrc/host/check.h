// Refusals of every call before it reaches a GPU: structs of another version, problems that the
// kernels cannot serve, pointers that they cannot read.
#pragma once

#include <algorithm>
#include <cmath>

#include "flashmoe/kernel/plan_report.h"
#include "flashmoe/moe/args.cuh"
#include "flashmoe/moe/place.cuh"
#include "flashmoe/moe/publish.cuh"
#include "flashmoe/protocol/tree.h"
#include "host/error.h"

namespace flashmoe {

static_assert(int(Dtype::kBFloat16) == FLASHMOE_BFLOAT16 and
              int(Dtype::kFloat16) == FLASHMOE_FLOAT16);
static_assert(sizeof(PlanHeader) == FLASHMOE_PLAN_HEADER_BYTES);
static_assert(kMaxRanks == FLASHMOE_MAX_RANKS and kMaxTopk == FLASHMOE_MAX_TOPK and
              kMaxLocalExperts == FLASHMOE_MAX_LOCAL_EXPERTS and
              kMaxSpareSlots == FLASHMOE_MAX_SPARE_SLOTS);

inline Shape shape_of(const FlashMoEProblem* p) {
    Shape shape{p->rank,
                p->num_ranks,
                p->hidden,
                p->intermediate,
                p->num_experts,
                p->topk,
                p->max_tokens,
                p->heap_tokens,
                p->heap_topk,
                p->is_gated != 0,
                p->skip_zero_probs != 0,
                p->is_split != 0,
                p->rank_invariant != 0,
                GluRows::of(p->intermediate, p->glu_interleave)};
    const int local = p->num_ranks > 0 ? p->num_experts / p->num_ranks : 0;
    FLASHMOE_SET_SLOT_FIELD(shape.experts_of_rank, local);
    FLASHMOE_SET_SLOT_FIELD(shape.by_experts, Divisor::of(local));
    FLASHMOE_SET_SLOT_FIELD(shape.by_slots, Divisor::of(local + p->spare_slots));
    FLASHMOE_SET_SLOT_FIELD(shape.spare_slots, p->spare_slots);
    FLASHMOE_SET_SLOT_FIELD(shape.heap_experts, p->heap_experts);
    FLASHMOE_SET_SLOT_FIELD(shape.heap_slot_elements, p->heap_slot_elements);
    return shape;
}

constexpr int kMaxPlacementBytes = kPlanSmemBytes - int(sizeof(RowCopySmem));
constexpr int kMaxWidth = 1 << 20;               // bounds hidden and intermediate
constexpr int kMaxTokens = 1 << 24;              // bounds one rank's tokens
constexpr int64_t kMaxSlotElements = 1ll << 48;  // more than the widest experts have
constexpr uint64_t kMaxTimeoutNs = 1ull << 62;   // deadlines are sums of signed nanoseconds

// Forwards multiply in FP8, and with the second backwards, too.
inline bool is_in_fp8(const FlashMoEProblem* p) { return p->experts != FLASHMOE_AS_GIVEN; }
inline bool has_fp8_dgrad(const FlashMoEProblem* p) { return p->experts == FLASHMOE_FP8_DGRAD; }

inline int forward_tiles(const FlashMoEProblem* p, int columns = BLOCK_N) {
    // Half of a gated tile's columns are `up`.
    return ceil_div(p->intermediate, p->is_gated ? columns / 2 : columns);
}

inline int backward_tiles(const FlashMoEProblem* p) { return ceil_div(p->intermediate, BLOCK_N); }

// A stage takes longer to gather than by TMA, by a fixed share of its time, and a row that is
// copied is written once. Both are in proportion to the hidden size, so what decides is how many
// tiles read a row: at four, gathering takes 1 to 5 % less of a forward than copying, at seven 6 %
// more.
constexpr int kMostReads = 4;

// As many tiles of gated experts may read a row on a rank that is alone: at five, gathering takes
// 1.3 % less of an evaluation, at six 0.8 % less to 0.7 % more. Experts without a gate may have
// narrow tiles, and twice as many of those would read a row.
constexpr int kMostReadsOfGated = 5;

// As many tiles may read a row for fc1's gradient, whose products wait for nothing when rows are
// copied: a stage that is gathered takes longer for each of them. More tiles read copies, which the
// backward's dispatch warps make while its other products run.
constexpr int kMostReadsOfGrads = 2;

// How a pass gets at rows that were not kept, if it can do so from x: a rank that is alone has all
// tokens at home. A backward reads rows for fc1's gradients. Rows in FP8 are not what tokens are.
inline FlashMoETokens reads_tokens(const FlashMoEProblem* p, bool is_backward) {
    if (is_in_fp8(p) or p->num_ranks > 1) return FLASHMOE_READS_NO_TOKENS;
    if (not is_backward) {
        const int most_reads = p->is_gated ? kMostReadsOfGated : kMostReads;
        return forward_tiles(p) <= most_reads ? FLASHMOE_READS_TOKENS : FLASHMOE_READS_NO_TOKENS;
    }
    if (kHasReplicas) return FLASHMOE_READS_NO_TOKENS;
    return forward_tiles(p) <= kMostReadsOfGrads ? FLASHMOE_READS_TOKENS : FLASHMOE_COPIES_TOKENS;
}

// True if a forward on one of several ranks can leave rows of its own out of the copies. In each
// expert own rows come first, unless rows are in the order of ranks. Dispatch warps then have less
// to copy, and others' rows come earlier.
inline bool reads_own_tokens(const FlashMoEProblem* p) {
    if (is_in_fp8(p) or kHasReplicas or shape_of(p).is_rank_invariant()) return false;
    return p->num_ranks > 1 and forward_tiles(p) <= kMostReads;
}

// The rows of an expert, on average and with all tokens.
inline int64_t mean_rows(const FlashMoEProblem* p) {
    return int64_t(p->num_ranks) * p->max_tokens * p->topk / p->num_experts;
}

// True if a forward has narrow tiles: of a rank that is alone, if its experts have a block of rows
// or less, on average and with all tokens. There a cluster multiplies two or three wide tiles, and
// would wait between the products for their finishers: narrow ones take 6 to 10 % less. With 256
// rows they take 1 to 16 % more, since they read more for each product. Where tiles gather their
// rows, twice as many would. A box of weights has gate or up rows for a wide tile. There is one
// such kernel, of the form that training has most often: bfloat16, with weights K-major.
inline bool has_narrow_tiles(const FlashMoEProblem* p) {
    if (kIsFp8 or kHasReplicas or is_in_fp8(p)) return false;
    if (p->dtype != FLASHMOE_BFLOAT16 or p->is_transposed) return false;
    if (p->num_ranks > 1 or p->is_gated or reads_tokens(p, false)) return false;
    return mean_rows(p) <= BLOCK_M;
}

// The columns of a forward's tiles.
inline int forward_columns(const FlashMoEProblem* p) {
    return has_narrow_tiles(p) ? kNarrowColumns : BLOCK_N;
}

inline int64_t placement_bytes(const FlashMoEProblem* p) {
    return PlacementSmem::bytes(shape_of(p), p->num_ctas);
}

// Refuses null, and a struct of another version of this interface.
template <class Struct>
int check_struct(const Struct* given, const char* name) {
    if (given != nullptr and given->struct_size == sizeof(Struct)) return FLASHMOE_OK;
    return fail(FLASHMOE_BAD_ARGUMENT, "%s: struct_size is %u, wanted %zu", name,
                given ? given->struct_size : 0, sizeof(Struct));
}

// Checks the settings that a gated expert may have beyond its activation.
inline int check_glu(const FlashMoEProblem* p) {
    const int block = p->glu_interleave;
    const bool is_block = block == 1 or (block >= 8 and (block & (block - 1)) == 0);
    if (block != 0 and (not is_block or p->intermediate % block or not p->is_gated)) {
        return fail(FLASHMOE_BAD_ARGUMENT,
                    "glu_interleave %d of intermediate %d, is_gated %d: wanted 0, or of gated "
                    "experts 1 or a power of two from 8 on that divides intermediate",
                    block, p->intermediate, p->is_gated);
    }
    if (p->is_split and (not p->is_gated or block != 0 or p->is_transposed)) {
        return fail(FLASHMOE_BAD_ARGUMENT,
                    "is_split with is_gated %d, glu_interleave %d, is_transposed %d: wanted gated "
                    "experts, 0 and 0",
                    p->is_gated, block, p->is_transposed);
    }
    if (not std::isfinite(p->clamp_value) or p->clamp_value < 0 or
        not std::isfinite(p->linear_offset)) {
        return fail(
            FLASHMOE_BAD_ARGUMENT,
            "clamp_value %g, linear_offset %g: wanted finite numbers, and no negative clamp",
            p->clamp_value, p->linear_offset);
    }
    const bool has_terms = p->activation == FLASHMOE_SILU or p->activation == FLASHMOE_QUICK_GELU;
    if ((p->clamp_value != 0 or p->linear_offset != 0) and not(has_terms and p->is_gated)) {
        return fail(
            FLASHMOE_BAD_ARGUMENT,
            "clamp_value %g, linear_offset %g with activation %d, is_gated %d: wanted both 0, "
            "or gated SiLU (0) or quick GELU (5)",
            p->clamp_value, p->linear_offset, p->activation, p->is_gated);
    }
    return FLASHMOE_OK;
}

// Checks the settings that a layer may have beyond the experts that each rank owns.
inline int check_slots(const FlashMoEProblem* p) {
    if (not kHasReplicas) return FLASHMOE_OK;
    if (p->replica_policy != FLASHMOE_BALANCE and p->replica_policy != FLASHMOE_POPULAR) {
        return fail(FLASHMOE_BAD_ARGUMENT, "replica_policy %d: wanted 0 or 1", p->replica_policy);
    }
    const Shape s = shape_of(p);
    const int most = std::min(kMaxSpareSlots, s.num_local_experts());
    if (p->spare_slots < 0 or p->spare_slots > most) {
        return fail(FLASHMOE_BAD_ARGUMENT, "spare_slots %d: wanted 0 to %d", p->spare_slots, most);
    }
    // A record has the rows of all slots, and who is in the spare ones.
    if (s.num_local_slots() + p->spare_slots + Record::kReplicaWords > kMaxLocalExperts and
        p->spare_slots > 0) {
        return fail(FLASHMOE_BAD_ARGUMENT,
                    "%d experts a rank and spare_slots %d: wanted at most %d experts and twice the "
                    "slots together",
                    s.num_local_experts(), p->spare_slots,
                    kMaxLocalExperts - Record::kReplicaWords);
    }
    if (p->heap_experts < 0 or p->heap_experts > kMaxLocalExperts * kMaxRanks or
        p->heap_slot_elements < 0 or p->heap_slot_elements > kMaxSlotElements or
        (p->spare_slots > 0 and (p->heap_experts < p->num_experts or
                                 p->heap_slot_elements < p->spare_slots * s.expert_elements()))) {
        return fail(FLASHMOE_BAD_ARGUMENT,
                    "a heap for %d experts and %lld elements of weights in spare slots: wanted %d "
                    "and %lld, or more up to %d and 2^48, or 0 without spare slots",
                    p->heap_experts, (long long)p->heap_slot_elements, p->num_experts,
                    (long long)(p->spare_slots * s.expert_elements()),
                    kMaxLocalExperts * kMaxRanks);
    }
    if (p->spare_slots > 0 and not AttemptResult::fit(s, p->num_ctas)) {
        return fail(FLASHMOE_BAD_ARGUMENT,
                    "spare_slots %d with %d experts on %d CTAs: wanted fewer, since their plan has "
                    "no room in the workspace",
                    p->spare_slots, p->num_experts, p->num_ctas);
    }
    return FLASHMOE_OK;
}

// Checks what experts compute with.
inline int check_experts(const FlashMoEProblem* p) {
    if (p->experts == FLASHMOE_AS_GIVEN) return FLASHMOE_OK;
    if (p->experts != FLASHMOE_FP8 and p->experts != FLASHMOE_FP8_DGRAD) {
        return fail(FLASHMOE_BAD_ARGUMENT, "experts %d: wanted 0, FP8 (1) or FP8 dgrad (2)",
                    p->experts);
    }
    if (p->dtype != FLASHMOE_BFLOAT16 or p->hidden % kScaleBlock or p->intermediate % kScaleBlock) {
        return fail(
            FLASHMOE_BAD_ARGUMENT,
            "FP8 experts with dtype %d, hidden %d, intermediate %d: wanted bfloat16 (1) and "
            "multiples of %d",
            p->dtype, p->hidden, p->intermediate, kScaleBlock);
    }
    if (p->is_transposed or p->spare_slots != 0 or p->heap_experts != 0 or
        p->heap_slot_elements != 0 or p->clamp_value != 0 or p->linear_offset != 0) {
        return fail(FLASHMOE_BAD_ARGUMENT,
                    "FP8 experts with is_transposed %d, spare_slots %d, heap_experts %d, "
                    "heap_slot_elements %lld, clamp_value %g, linear_offset %g: wanted 0 of each",
                    p->is_transposed, p->spare_slots, p->heap_experts,
                    (long long)p->heap_slot_elements, p->clamp_value, p->linear_offset);
    }
    if (p->is_gated and p->glu_interleave != 0 and p->glu_interleave % kScaleBlock) {
        return fail(FLASHMOE_BAD_ARGUMENT,
                    "FP8 experts with glu_interleave %d: wanted 0 or a multiple of %d, since a "
                    "scale is of gate or of up rows",
                    p->glu_interleave, kScaleBlock);
    }
    return FLASHMOE_OK;
}

// Checks what a layer whose bits do not depend on the number of ranks may have.
inline int check_rank_invariance(const FlashMoEProblem* p) {
    if (not p->rank_invariant) return FLASHMOE_OK;
    if (not protocol::can_share_tree(p->num_ranks, p->num_experts)) {
        return fail(FLASHMOE_BAD_ARGUMENT,
                    "rank_invariant with %d experts on %d ranks: wanted a multiple of %d experts "
                    "on 1, 2, 4 or 8 ranks",
                    p->num_experts, p->num_ranks, protocol::kTreeLeaves);
    }
    if (is_in_fp8(p) or p->spare_slots != 0 or p->heap_experts != 0 or p->heap_slot_elements != 0) {
        return fail(FLASHMOE_BAD_ARGUMENT,
                    "rank_invariant with experts %d, spare_slots %d, heap_experts %d, "
                    "heap_slot_elements %lld: wanted 0 of each",
                    p->experts, p->spare_slots, p->heap_experts, (long long)p->heap_slot_elements);
    }
    return FLASHMOE_OK;
}

inline int check_problem(const FlashMoEProblem* p) {
    FLASHMOE_TRY(check_struct(p, "problem"));
    if (p->num_ranks < 1 or p->num_ranks > kMaxRanks or p->rank < 0 or p->rank >= p->num_ranks) {
        return fail(FLASHMOE_BAD_ARGUMENT, "rank %d of %d: wanted 1 to %d ranks", p->rank,
                    p->num_ranks, kMaxRanks);
    }
    for (const int width : {p->hidden, p->intermediate}) {
        if (width < 64 or width > kMaxWidth or width % 64) {
            return fail(FLASHMOE_BAD_ARGUMENT,
                        "hidden %d, intermediate %d: wanted positive multiples of 64, at most %d",
                        p->hidden, p->intermediate, kMaxWidth);
        }
    }
    if (p->num_experts < 1 or p->num_experts % p->num_ranks or
        p->num_experts / p->num_ranks > kMaxLocalExperts) {
        return fail(FLASHMOE_BAD_ARGUMENT,
                    "%d experts on %d ranks: wanted a multiple of the ranks, at most %d a rank",
                    p->num_experts, p->num_ranks, kMaxLocalExperts);
    }
    if (p->topk < 1 or p->topk > kMaxTopk or p->topk > p->num_experts) {
        return fail(FLASHMOE_BAD_ARGUMENT, "topk %d of %d experts: wanted 1 to %d", p->topk,
                    p->num_experts, kMaxTopk);
    }
    if (p->max_tokens < 1 or p->max_tokens > kMaxTokens) {
        return fail(FLASHMOE_BAD_ARGUMENT, "max_tokens %d: wanted 1 to 2^24", p->max_tokens);
    }
    if (p->dtype != FLASHMOE_BFLOAT16 and p->dtype != FLASHMOE_FLOAT16) {
        return fail(FLASHMOE_BAD_ARGUMENT, "dtype %d: wanted bfloat16 (1) or float16 (2)",
                    p->dtype);
    }
    if (p->activation < 0 or p->activation > FLASHMOE_QUICK_GELU) {
        return fail(FLASHMOE_BAD_ARGUMENT, "activation %d is unknown", p->activation);
    }
    FLASHMOE_TRY(check_glu(p));
    if (p->num_ctas < kClusterSize or p->num_ctas > kMaxCtas or p->num_ctas % kClusterSize) {
        return fail(FLASHMOE_BAD_ARGUMENT, "num_ctas %d: wanted a multiple of %d, at most %d",
                    p->num_ctas, kClusterSize, kMaxCtas);
    }
    if (p->heap_tokens < p->max_tokens or p->heap_tokens > kMaxTokens) {
        return fail(FLASHMOE_BAD_ARGUMENT, "heap_tokens %d: wanted max_tokens = %d to 2^24",
                    p->heap_tokens, p->max_tokens);
    }
    if (p->heap_topk < p->topk or p->heap_topk > kMaxTopk) {
        return fail(FLASHMOE_BAD_ARGUMENT, "heap_topk %d: wanted topk = %d to %d", p->heap_topk,
                    p->topk, kMaxTopk);
    }
    if (p->timeout_ns < 1 or p->timeout_ns > kMaxTimeoutNs) {
        return fail(FLASHMOE_BAD_ARGUMENT, "timeout_ns %llu: wanted 1 to 2^62",
                    (unsigned long long)p->timeout_ns);
    }
    FLASHMOE_TRY(check_slots(p));
    FLASHMOE_TRY(check_experts(p));
    FLASHMOE_TRY(check_rank_invariance(p));
    const Shape s = shape_of(p);
    if (placement_bytes(p) > kMaxPlacementBytes) {
        return fail(
            FLASHMOE_BAD_ARGUMENT,
            "%d tokens of %d ranks for %d experts on %d CTAs: the plan of one CTA takes %lld "
            "bytes of shared memory, it has %d",
            p->max_tokens, p->num_ranks, p->num_experts, p->num_ctas, (long long)placement_bytes(p),
            kMaxPlacementBytes);
    }
    // Tokens are shared out by chunks.
    const int chunk_tokens = 32 / chunk_lanes(p->num_ranks);
    const int cta_tokens =
        ceil_div(ceil_div(p->max_tokens, chunk_tokens), p->num_ctas) * chunk_tokens;
    if (cta_tokens > kMaxCtaTokens) {
        return fail(FLASHMOE_BAD_ARGUMENT,
                    "max_tokens %d on %d CTAs: one has to reduce %d of them, its shared memory has "
                    "room for %d",
                    p->max_tokens, p->num_ctas, cta_tokens, kMaxCtaTokens);
    }
    if (s.max_row_blocks() * BLOCK_M > INT32_MAX / 2) {
        return fail(FLASHMOE_BAD_ARGUMENT, "%d tokens of %d ranks make too many rows for one rank",
                    p->max_tokens, p->num_ranks);
    }
    // Tickets count tiles in 32 bits, of the layer and of the weights' gradients; every CTA takes
    // one more than there are.
    const int64_t across = ceil_div(p->hidden, forward_columns(p));
    const int64_t pass =
        s.max_row_blocks() *
        (std::max(forward_tiles(p, forward_columns(p)), backward_tiles(p)) + across);
    const int64_t weight_grads =
        s.num_local_slots() * across *
        (ceil_div(s.fc1_rows(), BLOCK_N) + ceil_div(p->intermediate, BLOCK_N));
    if (pass + weight_grads > INT32_MAX - kMaxCtas) {
        return fail(FLASHMOE_BAD_ARGUMENT,
                    "a pass of %lld tiles, weight gradients of %lld: wanted fewer than 2^31",
                    (long long)pass, (long long)weight_grads);
    }
    return FLASHMOE_OK;
}

// Checks the address of memory that the call reads or writes if `is_used`.
inline int check_pointer(const void* pointer, bool is_used, const char* name, int alignment = 16) {
    if (is_used and (pointer == nullptr or uintptr_t(pointer) % alignment)) {
        return fail(FLASHMOE_BAD_ARGUMENT, "%s is at %p: wanted a %d-byte aligned address", name,
                    pointer, alignment);
    }
    return FLASHMOE_OK;
}

constexpr int kCopiesAlignment = 256;

inline int check_dtype(const FlashMoEProblem* p, int dtype, const char* name) {
    if (dtype != FLASHMOE_FLOAT32 and dtype != p->dtype) {
        return fail(FLASHMOE_BAD_ARGUMENT, "%s %d: wanted float32 (0) or the problem's dtype, %d",
                    name, dtype, p->dtype);
    }
    return FLASHMOE_OK;
}

inline int size_of(int dtype) { return dtype == FLASHMOE_FLOAT32 ? 4 : 2; }

inline int check_group(const FlashMoEProblem* p, const FlashMoEGroup* group) {
    FLASHMOE_TRY(check_problem(p));
    FLASHMOE_TRY(check_struct(group, "group"));
    for (int rank = 0; rank < p->num_ranks; ++rank) {
        FLASHMOE_TRY(check_pointer(group->heaps[rank], true, "a rank's heap"));
    }
    FLASHMOE_TRY(check_pointer(group->workspace, true, "workspace"));
    FLASHMOE_TRY(check_pointer(group->mailbox, true, "mailbox"));
    if (not(group->link_bytes_per_s >= 0) or group->least_replica_rows < 0) {  // or it is no number
        return fail(FLASHMOE_BAD_ARGUMENT,
                    "link_bytes_per_s %g, least_replica_rows %d: wanted neither below 0",
                    group->link_bytes_per_s, group->least_replica_rows);
    }
    return FLASHMOE_OK;
}

inline int check_tokens(const FlashMoEProblem* p, int num_tokens) {
    if (num_tokens < 0 or num_tokens > p->max_tokens) {
        return fail(FLASHMOE_BAD_ARGUMENT, "%d tokens: wanted 0 to max_tokens = %d", num_tokens,
                    p->max_tokens);
    }
    return FLASHMOE_OK;
}

inline int check_router(const FlashMoEInput* input) {
    FLASHMOE_TRY(check_pointer(input->router_weight, true, "router_weight"));
    FLASHMOE_TRY(check_pointer(input->logits, input->num_tokens > 0, "logits"));
    if (input->score < 0 or input->score > FLASHMOE_SIGMOID) {
        return fail(FLASHMOE_BAD_ARGUMENT, "score %d is unknown", input->score);
    }
    if (input->probs_dtype != FLASHMOE_FLOAT32) {
        return fail(FLASHMOE_BAD_ARGUMENT, "probs_dtype %d: wanted float32 (0) of a router",
                    input->probs_dtype);
    }
    if (not std::isfinite(input->scaling_factor)) {
        return fail(FLASHMOE_BAD_ARGUMENT, "scaling_factor %f: wanted a finite number",
                    input->scaling_factor);
    }
    return FLASHMOE_OK;
}

inline int check_indices(const FlashMoEProblem* p, const FlashMoEInput* input) {
    if (input->router_weight != nullptr) {
        return fail(FLASHMOE_BAD_ARGUMENT, "topk_idx beside a router: wanted one of them");
    }
    if (input->index_bytes != 4 and input->index_bytes != 8) {
        return fail(FLASHMOE_BAD_ARGUMENT, "index_bytes %d: wanted 4 or 8, or 0 with routing_map",
                    input->index_bytes);
    }
    if (input->num_choices < 0 or input->num_choices > p->topk) {
        return fail(FLASHMOE_BAD_ARGUMENT, "num_choices %d: wanted 0 to topk = %d",
                    input->num_choices, p->topk);
    }
    const bool is_read = input->num_tokens > 0 and input->num_choices > 0;
    return check_pointer(input->topk_idx, is_read, "topk_idx", input->index_bytes);
}

inline int check_input(const FlashMoEProblem* p, const FlashMoEInput* input) {
    FLASHMOE_TRY(check_struct(input, "input"));
    FLASHMOE_TRY(check_tokens(p, input->num_tokens));
    FLASHMOE_TRY(check_dtype(p, input->probs_dtype, "probs_dtype"));
    if (input->is_settled and p->spare_slots == 0) {
        return fail(FLASHMOE_BAD_ARGUMENT, "is_settled with spare_slots 0: wanted slots or 0");
    }
    const bool has_tokens = input->num_tokens > 0;
    if (input->refusal != nullptr and has_tokens) {
        return fail(FLASHMOE_BAD_ARGUMENT, "%d tokens of a call that is refused: wanted none",
                    input->num_tokens);
    }
    FLASHMOE_TRY(check_pointer(input->x, has_tokens, "x"));
    FLASHMOE_TRY(check_pointer(input->first_plan, input->first_plan != nullptr, "first_plan"));
    const bool has_map = input->index_bytes == 0;
    const bool has_probs = has_tokens and (has_map or input->num_choices > 0);
    FLASHMOE_TRY(check_pointer(input->probs, has_probs, "probs", size_of(input->probs_dtype)));
    FLASHMOE_TRY(check_pointer(input->routing_map, has_tokens and has_map, "routing_map", 1));
    if (not has_map) FLASHMOE_TRY(check_indices(p, input));
    return input->router_weight == nullptr ? int(FLASHMOE_OK) : check_router(input);
}

// Checks the inputs of every pass.
inline int check_launch(const FlashMoEProblem* p, const FlashMoELaunch* launch) {
    FLASHMOE_TRY(check_struct(launch, "launch"));
    FLASHMOE_TRY(check_tokens(p, launch->num_tokens));
    const Shape s = shape_of(p);
    if (launch->num_row_blocks < 0 or launch->num_row_blocks > s.max_row_blocks()) {
        return fail(FLASHMOE_BAD_ARGUMENT, "%d row blocks: wanted 0 to %lld",
                    launch->num_row_blocks, (long long)s.max_row_blocks());
    }
    return check_pointer(launch->plan, true, "plan");
}

// Checks the buffer of received rows, which some launches may lack.
inline int check_rows(const FlashMoELaunch* launch, bool may_lack) {
    const bool is_used = launch->num_row_blocks > 0 and not(may_lack and launch->rows == nullptr);
    return check_pointer(launch->rows, is_used, "rows", 128);
}

// Checks what else a pass of the layer reads and writes.
inline int check_pass(const FlashMoEProblem* p, const FlashMoELaunch* launch, bool is_backward) {
    FLASHMOE_TRY(check_launch(p, launch));
    FLASHMOE_TRY(
        check_pointer(launch->weight_copies, is_in_fp8(p), "weight_copies", kCopiesAlignment));
    const int most = is_in_fp8(p) ? 1 : 0;
    if (launch->copies_are_current < 0 or launch->copies_are_current > most) {
        return fail(FLASHMOE_BAD_ARGUMENT, "copies_are_current %d: wanted %s",
                    launch->copies_are_current, most ? "0 or 1" : "0, without experts in FP8");
    }
    if (is_in_fp8(p) and launch->biases != nullptr) {
        return fail(FLASHMOE_BAD_ARGUMENT, "biases of FP8 experts: wanted NULL");
    }
    const bool may_have_no_rows = is_backward or reads_tokens(p, false) == FLASHMOE_READS_TOKENS;
    FLASHMOE_TRY(check_rows(launch, may_have_no_rows));
    const bool has_tokens = launch->num_tokens > 0, has_rows = launch->num_row_blocks > 0;
    // A forward may keep no pre-activations, a backward needs them.
    const bool has_preact = has_rows and (is_backward or launch->preact != nullptr);
    FLASHMOE_TRY(check_pointer(launch->preact, has_preact, "preact", 128));
    FLASHMOE_TRY(check_pointer(launch->scratch, has_rows, "scratch", 128));
    FLASHMOE_TRY(check_pointer(launch->weight_maps, true, "weight_maps", alignof(CUtensorMap)));
    FLASHMOE_TRY(
        check_pointer(launch->biases, launch->biases != nullptr, "biases", alignof(void*)));
    FLASHMOE_TRY(check_pointer(launch->out, has_tokens, "out"));
    const FlashMoETokens reads = is_backward ? reads_tokens(p, true) : FLASHMOE_READS_NO_TOKENS;
    if (launch->x != nullptr and reads == FLASHMOE_READS_NO_TOKENS) {
        return fail(FLASHMOE_BAD_ARGUMENT,
                    "x at %p of a launch that does not read tokens: wanted NULL", launch->x);
    }
    const bool needs_rows = has_rows and reads == FLASHMOE_COPIES_TOKENS;
    if (launch->x != nullptr and launch->rows == nullptr and needs_rows) {
        return fail(FLASHMOE_BAD_ARGUMENT,
                    "x at %p of a backward that copies tokens, without rows: wanted "
                    "a buffer for them",
                    launch->x);
    }
    FLASHMOE_TRY(check_pointer(launch->x, launch->x != nullptr, "x"));
    if (not is_backward) return FLASHMOE_OK;
    FLASHMOE_TRY(check_dtype(p, launch->grad_probs_dtype, "grad_probs_dtype"));
    if (launch->grad_columns != p->num_experts and
        (launch->grad_columns < 0 or launch->grad_columns > p->topk)) {
        return fail(FLASHMOE_BAD_ARGUMENT,
                    "grad_columns %d: wanted num_experts = %d or, with indices, 0 to topk = %d",
                    launch->grad_columns, p->num_experts, p->topk);
    }
    return check_pointer(launch->grad_probs, has_tokens and launch->grad_columns > 0, "grad_probs");
}

}  // namespace flashmoe
