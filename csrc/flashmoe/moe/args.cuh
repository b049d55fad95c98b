// Everything the fused launch reads, passed by value. Tokens and weights are of one 16-bit type.
#pragma once

#include <cuda.h>
#include <cute/arch/copy_sm90_desc.hpp>

#include "flashmoe/comm/heap.cuh"
#include "flashmoe/comm/wait.cuh"
#include "flashmoe/moe/plan.cuh"
#include "flashmoe/moe/record.cuh"
#include "flashmoe/moe/workspace.cuh"
#include "flashmoe/tile/activation.cuh"

namespace flashmoe {

// Mirrors FlashMoEScore.
enum class Score : int { kSoftmaxOfChosen, kSoftmax, kSigmoid };

// The fused router, which computes the routing before it is published. If the routing is given,
// `weight` is null.
struct Router {
    const char* weight;    // [expert][hidden], of the tokens' type
    float* logits;         // [token][expert]
    float* probs;          // [token][expert]: LayerArgs::probs
    uint8_t* routing_map;  // [token][expert]: LayerArgs::routing_map
    Dtype dtype;
    Score score;
    float scaling_factor;
};

using protocol::RowBound;

// The bound of a rank whose host sizes its buffers by the plan's counts.
constexpr uint32_t kCounted = RowBound::blocks(~0u);

// Routing by indices. If it is given as a map, `indices` is null.
struct Choices {
    const void* indices;  // [token][choice]: global expert, or -1
    int per_token;        // at most topk
    bool are_long;        // int64 instead of int32

    __device__ __forceinline__ int64_t at(int64_t i) const {
        return are_long ? static_cast<const int64_t*>(indices)[i]
                        : int64_t(static_cast<const int32_t*>(indices)[i]);
    }
};

// How GEMM0 gets at the rows of its tokens. A rank that is alone has all of them at home, and so a
// choice. A plan and all launches along it make one choice where that is kFirstCopied: then rows
// lie in the order of their tiles. A rank of several has a choice for its own rows, in a launch
// whose rows no backward reads.
enum class RowAccess : int {
    kCopied,       // in copies; of the first tiles' tokens all warps copy all rows
    kFirstCopied,  // in copies; of these tokens all warps copy what the first tiles read alone
    kInPlaceUntilCopied,  // where tokens have them, until a block's copies are complete
    kInPlace,             // where tokens have them; nothing is dispatched
    kOwnInPlace,  // a block of own rows alone where tokens have them, any other block in copies
};

// Forwards that may mix their products (LayerArgs::is_mixed), and gather blocks without pads by
// less code. With narrow tiles experts have few rows: they do neither.
constexpr bool kMayMix = not kIsFp8 and not kHasReplicas and BLOCK_N == kWideColumns;

using CacheHint = cute::TMA::CacheHintSm90;

struct LayerArgs {
    Shape shape;
    Heap heap;
    Plan plan;
    Workspace workspace;
    Watchdog watchdog;
    // This rank's inputs.
    int num_tokens;
    const char* x;               // [token][hidden]; in the backward dY
    const void* probs;           // [token][expert] or, with indices, [token][choice], and
    const uint8_t* routing_map;  // [token][expert]; null if the plan exists already
    Dtype probs_dtype;
    Choices choices;
    Router router;
    uint32_t row_bound;    // RowBound: blocks that the row buffers hold, or kCounted
    const Fault* refusal;  // pinned: why the host refuses this call, or null
    RowAccess row_access;
    const PlanHeader* first_plan;  // a backward, and a forward that runs again for one, look here
                                   // for ranks without it; null in other launches

    int num_n_tiles[2];  // tiles along N of GEMM0 and GEMM1
    int num_k_blocks[2];
    int group_units;         // row units that the schedule advances by, about
    int first_units;         // whose own rows all warps copy before there are products
    int early_units;         // units of own rows that come first, as far as there are any
    int lag;                 // distance of GEMM1 to GEMM0, in its steps
    int rows_per_ticket;     // rows that a dispatch warp takes at a time
    int rows_per_unit;       // that a warp delivers at a time
    bool finishers_combine;  // while GEMM1's outputs are not there yet; not in a tree's order
    bool is_mixed;           // TileOrder::is_mixed; forward
    int least_group;         // units of a group that is cut at experts' ends, and the most of a
    int most_group;          // part of one (protocol::cut_groups); 0 where groups are not cut so
    Activation activation;
    SwishTerms swish;              // read where that is kSwish
    const void* const* biases[2];  // device: fc1's and fc2's by local slot, or null; forward

    CacheHint weights_hint;          // how long the L2 is to keep them
    const CUtensorMap* weight_maps;  // device: fc1 of every local slot (Shape::num_fc1), then fc2
    FLASHMOE_SCALE_FIELD(const float* const*, weight_scales);  // device: of the same matrices
    char* rows;            // [row], Shape::token_bytes() each, filled by dispatch
    char* act;             // [row], operand_row_bytes(intermediate) each: fc2's input
    char* dpre;            // [row][fc1_rows]; backward
    char* result;          // [row][hidden], read by combine
    char* preact;          // [row][fc1_rows]: fc1's outputs, or null
    float* dprob_partial;  // [row][GEMM0 tile]; backward
    char* out;             // [token][hidden]
    void* grad_probs;      // as probs; backward
    int grad_columns;      // of a token: all experts or, with indices, its choices
    Dtype grad_probs_dtype;

    int layer;        // a number that the caller knows the layer by
    Record* records;  // a ring of kNumRecords in pinned host memory, or null

    // Local slots from the first spare one on hold replicas. Where the weights of this rank's own
    // experts are, on the device in the order of their maps, or null if no replica is to get them.
    FLASHMOE_SLOT_FIELD(int, first_spare);
    FLASHMOE_SLOT_FIELD(const void* const*, home_weights);
    FLASHMOE_SLOT_FIELD(bool, keeps_rows_local);   // what replicas are for; else for even loads
    FLASHMOE_SLOT_FIELD(bool, uses_settled);       // the replicas that a launch ahead chose
    FLASHMOE_SLOT_FIELD(int, least_replica_rows);  // an expert is pushed for, with even loads

    CUtensorMap load_map[2];                          // A of each GEMM
    FLASHMOE_SCALE_FIELD(CUtensorMap, scale_map[2]);  // its scales
    // dpre once more, operand_row_bytes(fc1_rows) a row: A of GEMM1 in a backward.
    FLASHMOE_SCALE_FIELD(char*, dpre_in_fp8);
};

// One of the two products of weight gradients, dW = left^T right over an expert's rows.
struct WeightGradProduct {
    CUtensorMap left;   // [row][out], unless that is gathered
    CUtensorMap right;  // [row][in]
    int num_out;        // rows of the weight
    int num_in;         // columns of the weight
    bool is_turned;     // the product is the gradient's transpose, and so are these
};

struct WeightGrads {
    WeightGradProduct product[2];  // fc2, fc1
    const CUtensorMap* maps;       // device, in the order of the weights'; float32 alone
    void* const* pointers;         // device: the same, then those of the biases; null: not wanted
    const int* wanted;  // device: of fc2, then of fc1, the number of slots whose gradient
                        // is wanted, and these slots in the order of their tiles
    Dtype dtype;        // of the own experts': float32, or the tokens'
    bool accumulate;    // whether they are added; those of spare slots are float32, and
                        // written
    uint64_t number;    // this backward's, written to Workspace::fc2_grads; 0: none is written
};

struct BackwardArgs : LayerArgs {
    WeightGrads weight_grads;
    const char* tokens;  // x of a forward that kept no rows, for fc1's gradients; or null
    char* token_copies;  // [row][hidden], where this launch copies x to; null: it is gathered
};

// True if a backward copies x to rows, for fc1's gradients. With spare slots rows are kept, or
// another launch has fetched them.
__host__ __device__ __forceinline__ bool copies_tokens(const BackwardArgs& args) {
    if constexpr (kIsFp8 or kHasReplicas) return false;
    return args.token_copies != nullptr;
}

// True if groups of units are cut at experts' ends, by a table of the plan. Its backward may have
// groups of a fixed number of units all the same (protocol::follows_cut_groups).
__device__ __forceinline__ bool cuts_groups(const LayerArgs& args) {
    return kMayMix and args.most_group > 0;
}

// True if GEMM0 reads rows where tokens have them: as long as they are not copied, or own ones.
__device__ __forceinline__ bool reads_in_place(const LayerArgs& args) {
    if constexpr (kIsFp8) return false;
    return args.row_access >= RowAccess::kInPlaceUntilCopied;
}

// The same of own rows alone, by a rank that is not alone.
__device__ __forceinline__ bool reads_own_in_place(const LayerArgs& args) {
    if constexpr (kIsFp8 or kHasReplicas) return false;
    return args.row_access == RowAccess::kOwnInPlace;
}

// True if all rows of a block are this rank's own. They come first among an expert's rows, and pads
// last, so that the block's last row tells of all.
__device__ __forceinline__ bool is_block_own(const LayerArgs& args, int block) {
    const RowMeta last = args.plan.row_meta[block * BLOCK_M + BLOCK_M - 1];
    return last.src_rank == args.shape.rank and not last.is_pad();
}

// Where this rank finds its own tokens as products read them: where they are given or, in FP8, in
// the own heap, where it has quantized them.
__device__ __forceinline__ const char* own_tokens(const LayerArgs& args) {
    if constexpr (kIsFp8) return args.heap.row(args.shape.rank, 0);
    return args.x;
}

// The place for the sum of a token's rows on this rank. Usually it is a slot of the token's rank,
// which sums the slots of all ranks; if all rows of a token are on its own rank, it is the token's
// result.
__device__ __forceinline__ char* target_of(const LayerArgs& args, const RowMeta& meta) {
    if (meta.is_home()) return args.out + int64_t(meta.token) * args.shape.hidden * kElementBytes;
    return args.heap.result(meta.src_rank, meta.token, meta.slot);
}

}  // namespace flashmoe
