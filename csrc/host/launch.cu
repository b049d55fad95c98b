// The bodies of the C interface's launches: arguments are checked, device structs are filled, and
// kernels go to the stream. Nothing here waits.
#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "flashmoe/kernel/add_replicas.cuh"
#include "flashmoe/kernel/bias_grad.cuh"
#include "flashmoe/kernel/entry.h"
#include "flashmoe/kernel/gather.cuh"
#include "flashmoe/kernel/plan_kernel.cuh"
#include "flashmoe/moe/args.cuh"
#include "flashmoe/moe/deliver.cuh"
#include "host/calls.h"
#include "host/check.h"
#include "host/copies.h"
#include "host/mailbox.h"
#include "host/tables.h"
#include "host/tensor_map.h"

namespace flashmoe {
namespace {

Heap heap_of(const Shape& s, const FlashMoEGroup* group) {
    Heap heap{heap_layout(s), {},       s.num_ranks, s.heap_tokens,
              s.heap_topk,    s.hidden, s.topk,      s.max_slots()};
    FLASHMOE_SET_SLOT_FIELD(heap.heap_experts, s.heap_experts);
    FLASHMOE_SET_SLOT_FIELD(heap.expert_elements, s.expert_elements());
    for (int rank = 0; rank < s.num_ranks; ++rank) {
        heap.base[rank] = static_cast<char*>(group->heaps[rank]);
    }
    return heap;
}

Workspace workspace_of(const Shape& s, const FlashMoEGroup* group) {
    Workspace workspace{};
    Workspace::at(group->workspace, s, &workspace);
    return workspace;
}

Trace trace_of([[maybe_unused]] const FlashMoEGroup* group) {
#ifdef FLASHMOE_TRACE
    return {static_cast<TraceWarp*>(group->trace)};
#else
    return {};
#endif
}

Watchdog watchdog_of(const FlashMoEProblem* p, const FlashMoEGroup* group) {
    const Workspace workspace = workspace_of(shape_of(p), group);
    const Heap heap = heap_of(shape_of(p), group);
    Watchdog watchdog{&static_cast<Mailbox*>(group->mailbox)->fault,
                      workspace.raised,
                      p->timeout_ns,
                      workspace.epoch,
                      p->rank,
                      p->num_ranks,
                      {},
                      trace_of(group)};
    for (int rank = 0; rank < p->num_ranks; ++rank) watchdog.gave_up[rank] = heap.gave_up(rank);
    return watchdog;
}

KernelEntry entry_of(const FlashMoEProblem* p, bool is_backward) {
    const bool is_gated = p->is_gated != 0;
    if constexpr (kIsFp8) {
        if (not is_backward) return forward_fp8(is_gated);
        return has_fp8_dgrad(p) ? backward_fp8(is_gated) : KernelEntry{};
    }
    if constexpr (not kHasReplicas) {
        if (has_fp8_dgrad(p)) return is_backward ? weight_grads_entry() : KernelEntry{};
        if (is_in_fp8(p)) return is_backward ? backward_of_fp8(is_gated) : KernelEntry{};
    }
    const bool is_fp16 = p->dtype == FLASHMOE_FLOAT16, is_transposed = p->is_transposed != 0;
    if (not is_backward and has_narrow_tiles(p)) return kernel_entries::narrow_forward_bf16();
    using Select = KernelEntry (*)(bool);
    static constexpr Select kEntries[2][2][2] = {
        {{forward_bf16, forward_bf16_transposed}, {backward_bf16, backward_bf16_transposed}},
        {{forward_fp16, forward_fp16_transposed}, {backward_fp16, backward_fp16_transposed}}};
    return kEntries[is_fp16][is_backward][is_transposed](is_gated);
}

KernelEntry bias_grad_entry_of(const FlashMoEProblem* p, bool into_float32) {
    if constexpr (kIsFp8) return {};
    return p->dtype == FLASHMOE_FLOAT16 ? bias_grad_fp16(into_float32)
                                        : bias_grad_bf16(into_float32);
}

KernelEntry add_replicas_entry_of([[maybe_unused]] const FlashMoEProblem* p,
                                  [[maybe_unused]] bool into_float32) {
    if constexpr (kHasReplicas) {
        return p->dtype == FLASHMOE_FLOAT16 ? add_replicas_fp16(into_float32)
                                            : add_replicas_bf16(into_float32);
    }
    return {};
}

KernelEntry settle_entry_of([[maybe_unused]] const FlashMoEProblem* p) {
    if constexpr (kHasReplicas) return settle_entry(shape_of(p));
    return {};
}

// In FP8 there are launches ahead of the layer's.
KernelEntry copy_weights_entry_of([[maybe_unused]] const FlashMoEProblem* p) {
    if constexpr (not kHasReplicas) {
        const bool is_turned = not kIsFp8 and has_fp8_dgrad(p);  // in FP8's own kernels
        if (is_in_fp8(p) and not is_turned) return copy_weights_entry();
    }
    return {};
}

KernelEntry read_rows_entry_of([[maybe_unused]] const FlashMoEProblem* p) {
    if constexpr (not kIsFp8 and not kHasReplicas) {
        if (is_in_fp8(p)) return read_rows_entry();
    }
    return {};
}

KernelEntry turn_weights_entry_of([[maybe_unused]] const FlashMoEProblem* p) {
    if constexpr (kIsFp8) {
        if (has_fp8_dgrad(p)) return turn_weights_entry();
    }
    return {};
}

KernelEntry quantize_grads_entry_of([[maybe_unused]] const FlashMoEProblem* p) {
    if constexpr (kIsFp8) {
        if (has_fp8_dgrad(p)) return quantize_grads_entry();
    }
    return {};
}

// Lets a kernel have more shared memory than any may have unasked. It asks once for each kernel and
// context, since that takes the host as long as a part of a launch. A context's number is not given
// to another one later, also after a reset.
int allow_smem(const void* function, int smem_bytes, const char* what) {
    static decltype(&cuCtxGetId) get_id = nullptr;
    thread_local std::map<std::pair<unsigned long long, const void*>, int> allowed;
    unsigned long long context = 0;
    // A thread that has used no GPU so far has no context.
    const bool is_known = find_in_driver("cuCtxGetId", &get_id) == FLASHMOE_OK and
                          get_id(nullptr, &context) == CUDA_SUCCESS;
    if (is_known and allowed[{context, function}] >= smem_bytes) return FLASHMOE_OK;
    FLASHMOE_TRY(check_cuda(
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes),
        what));
    if (is_known) allowed[{context, function}] = smem_bytes;
    return FLASHMOE_OK;
}

// Cooperative, so that a grid that cannot be resident as a whole fails instead of hanging.
template <class... Args>
int launch(const void* function,
           int num_ctas,
           int num_threads,
           int smem_bytes,
           void* stream,
           const char* what,
           const Args&... args) {
    FLASHMOE_TRY(allow_smem(function, smem_bytes, what));
    cudaLaunchAttribute cooperative{};
    cooperative.id = cudaLaunchAttributeCooperative;
    cooperative.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = num_ctas;
    config.blockDim = num_threads;
    config.dynamicSmemBytes = smem_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &cooperative;
    config.numAttrs = 1;
    void* arguments[] = {const_cast<Args*>(&args)...};
    return check_cuda(cudaLaunchKernelExC(&config, function, arguments), what);
}

// True if a backward reads rows of dY where tokens have them: GEMM0 does, and fc2's gradient, in as
// many tiles. Transposed weights make them the operand that a pair of tiles shares there, which
// threads cannot copy. Kernels with spare slots have no registers for it.
bool gathers_grads(const FlashMoEProblem* p) {
    return not kHasReplicas and p->num_ranks == 1 and not has_fp8_dgrad(p) and
           p->is_transposed == 0 and 2 * backward_tiles(p) <= kMostReads;
}

// True of a rank that is alone if its experts' products are so short that they would wait for rows
// which dispatch warps copy one after another.
bool waits_for_copies(const FlashMoEProblem* p) {
    constexpr int kNarrow = 1024;
    return p->num_ranks == 1 and p->intermediate <= kNarrow;
}

// How a rank that is alone gets at its rows, but for a pass that gathers all of them. To gather a
// stage takes longer than TMA does, so experts whose products are short gain by it, as they would
// wait for copies; rows in FP8 have scales and are not gathered, so all warps copy more of them
// (LayerArgs::first_units). With wide ones the first tiles gain by rows that come before any other
// is copied.
RowAccess row_access(const FlashMoEProblem* p) {
    if (p->num_ranks > 1) return RowAccess::kCopied;
    if (not waits_for_copies(p)) return RowAccess::kFirstCopied;
    return kIsFp8 ? RowAccess::kCopied : RowAccess::kInPlaceUntilCopied;
}

// Where experts are narrow, products wait for rows: enough of them per ticket give each of a
// dispatch warp's lanes a token. Else few, so that the next tile's rows are the next to come,
// unless no tile waits for them.
int rows_per_ticket(const FlashMoEProblem* p) {
    constexpr int kNarrow = 512;
    const bool are_many = p->intermediate <= kNarrow or waits_for_copies(p);
    return are_many ? kMostRowsPerTicket : kDispatchLanes;
}

// The layer, its memory, and what this rank brings to it.
template <class Args>
Args layer_args(const FlashMoEProblem* p,
                const FlashMoEGroup* group,
                const void* plan,
                const void* x,
                int num_tokens) {
    Args args{};
    args.shape = shape_of(p);
    args.heap = heap_of(args.shape, group);
    args.plan = Plan::at(const_cast<void*>(plan), args.shape);
    args.workspace = workspace_of(args.shape, group);
    args.watchdog = watchdog_of(p, group);
    if (group->counters) args.records = static_cast<Mailbox*>(group->mailbox)->records;
    args.x = static_cast<const char*>(x);
    args.num_tokens = num_tokens;
    args.row_access = row_access(p);
    args.rows_per_ticket = rows_per_ticket(p);
    FLASHMOE_SET_SLOT_FIELD(args.first_spare, args.shape.num_local_experts());
    FLASHMOE_SET_SLOT_FIELD(args.keeps_rows_local, p->replica_policy == FLASHMOE_POPULAR);
    FLASHMOE_SET_SLOT_FIELD(args.least_replica_rows, group->least_replica_rows);
    return args;
}

// The rows that a pass needs for itself.
struct ScratchRows {
    char* act;
    char* result;
    // A backward alone has received dY, unless it reads that in place, the gradient of fc1's
    // output, and partial sums.
    char* rows;
    char* dpre;
    float* dprob_partial;
    char* read;         // rows of a forward in FP8, in 16 bits
    char* dpre_in_fp8;  // if gradients of tokens are computed in FP8; rows of dY then are, too
    uint64_t bytes;
};

// Lays buffers out one after another. Block sizes are multiples of 128 bytes.
class Layout {
 public:
    explicit Layout(void* base) : base_(static_cast<char*>(base)) {}
    char* take(uint64_t bytes) {
        char* at = base_ + bytes_;
        bytes_ += bytes;
        return at;
    }
    uint64_t bytes() const { return bytes_; }

 private:
    char* base_;
    uint64_t bytes_ = 0;
};

ScratchRows scratch_at(const FlashMoEProblem* p, void* base, int num_blocks, bool is_backward) {
    const uint64_t rows = uint64_t(num_blocks) * BLOCK_M;
    Layout layout(base);
    ScratchRows scratch{};
    const int act_bytes =
        is_backward ? p->intermediate * kElementBytes : operand_row_bytes(p->intermediate);
    scratch.act = layout.take(rows * act_bytes);
    scratch.result = layout.take(rows * p->hidden * kElementBytes);
    if (is_backward) {
        const bool in_fp8 = has_fp8_dgrad(p);
        const int row_bytes = in_fp8 ? fp8_row_bytes(p->hidden) : p->hidden * kElementBytes;
        if (not gathers_grads(p)) scratch.rows = layout.take(rows * row_bytes);
        if (in_fp8) scratch.dpre_in_fp8 = layout.take(rows * fp8_row_bytes(shape_of(p).fc1_rows()));
        scratch.dpre = layout.take(rows * shape_of(p).fc1_rows() * kElementBytes);
        scratch.dprob_partial =
            reinterpret_cast<float*>(layout.take(rows * backward_tiles(p) * sizeof(float)));
        if (is_in_fp8(p)) scratch.read = layout.take(rows * p->hidden * kElementBytes);
    }
    scratch.bytes = layout.bytes();
    return scratch;
}

void set_routing(const FlashMoEProblem* p,
                 const FlashMoEInput* input,
                 uint32_t row_block_bound,
                 LayerArgs* args) {
    args->probs = input->probs;
    args->probs_dtype = Dtype(input->probs_dtype);
    FLASHMOE_SET_SLOT_FIELD(args->uses_settled, input->is_settled != 0);
    // Null means that the plan exists; without tokens a framework's pointer may be null, too, and
    // with indices there is no map.
    const bool has_map = input->num_tokens > 0 and input->index_bytes == 0;
    const void* map = has_map ? input->routing_map : args->workspace.raised;
    args->routing_map = static_cast<const uint8_t*>(map);
    if (input->index_bytes != 0) {
        // No choices may be null, too.
        const void* indices = input->num_choices > 0 ? input->topk_idx : args->workspace.raised;
        args->choices = {indices, input->num_choices, input->index_bytes == 8};
    }
    args->row_bound = RowBound::make(row_block_bound, input->has_no_backward != 0);
    if (p->num_ranks > 1) args->first_plan = static_cast<const PlanHeader*>(input->first_plan);
    args->router = {static_cast<const char*>(input->router_weight),
                    static_cast<float*>(input->logits),
                    static_cast<float*>(input->probs),
                    static_cast<uint8_t*>(input->routing_map),
                    Dtype(p->dtype),
                    Score(input->score),
                    input->scaling_factor};
}

// Makes a launch of a backward look for ranks that have none.
void set_own_plan(LayerArgs* args) {
    if (args->shape.num_ranks > 1) args->first_plan = args->plan.header;
}

// Puts why the host refuses its call where the launch finds it; a long reason loses its end.
const Fault* write_refusal(const FlashMoEProblem* p, const char* reason, Mailbox* mailbox) {
    Fault& refusal = mailbox->refusal;
    refusal = {kFaultRefused, uint32_t(Wait::kRouting), p->rank, -1, -1, 0, 0, 0, {}};
    strncpy(refusal.reason, reason, kReasonBytes - 1);
    return &refusal;
}

// The width of GEMM1's input.
int gemm1_input(const FlashMoEProblem* p, bool is_backward) {
    return is_backward ? shape_of(p).fc1_rows() : p->intermediate;
}

// True if an expert has one unit of rows or less, on average and with all tokens: then no cluster
// reads weights that another has read.
bool reads_weights_once(const FlashMoEProblem* p) { return mean_rows(p) <= kClusterSize * BLOCK_M; }

// True if a plan has groups of units that end where experts do.
bool cuts_groups(const FlashMoEProblem* p) {
    const bool may_mix =
        protocol::mixes_products(true, p->hidden / BLOCK_K, p->intermediate / BLOCK_K);
    return kMayMix and
           protocol::cuts_groups(p->num_ranks == 1, is_in_fp8(p), may_mix, mean_rows(p), BLOCK_M);
}

// Sets the groups that end where experts do, and how many of them GEMM1 follows GEMM0.
void set_cut_groups(const FlashMoEProblem* p, int stages_between, LayerArgs* args) {
    const int num_clusters = p->num_ctas / kClusterSize;
    const int in_wave = ceil_div(num_clusters, forward_tiles(p, forward_columns(p)));
    // An expert's last unit may have few rows; so a part may be a unit longer than a step was.
    args->most_group = std::max(8, in_wave) + 1;
    const int units = ceil_div<int>(mean_rows(p) + BLOCK_M, kClusterSize * BLOCK_M);
    args->least_group = std::max(1, units / 2);
    const int in_group = ceil_div(units, ceil_div(units, args->most_group));
    const int64_t of_unit = int64_t(args->num_n_tiles[0]) * args->num_k_blocks[0] +
                            int64_t(args->num_n_tiles[1]) * args->num_k_blocks[1];
    const int64_t needed = int64_t(args->num_k_blocks[0] + stages_between) * num_clusters;
    args->lag =
        int(std::clamp<int64_t>(ceil_div(needed, in_group * of_unit), 1, protocol::kMostLag));
}

// The order of a pass's tiles.
void set_order(const FlashMoEProblem* p, bool is_backward, LayerArgs* args) {
    const int columns = is_backward ? BLOCK_N : forward_columns(p);
    args->num_n_tiles[0] = is_backward ? backward_tiles(p) : forward_tiles(p, columns);
    args->num_n_tiles[1] = ceil_div(p->hidden, columns);
    args->num_k_blocks[0] = p->hidden / BLOCK_K;
    args->num_k_blocks[1] = gemm1_input(p, is_backward) / BLOCK_K;
    // A step is at least a wave of GEMM0 tiles; in FP8 one and a half, where rows come late.
    // Between GEMM0 of a group and its GEMM1, finishers need the time of some tiles: where a step's
    // GEMM1 is shorter, two steps are between.
    constexpr int kFinishersStages = 48;
    const int num_clusters = p->num_ctas / kClusterSize;
    const int least_tiles = kIsFp8 and waits_for_copies(p) ? num_clusters * 3 / 2 : num_clusters;
    args->group_units = std::max(8, ceil_div(least_tiles, args->num_n_tiles[0]));
    // All warps copy the rows of one step or, where the next would wait for its rows, of two.
    args->first_units = (kIsFp8 and waits_for_copies(p) ? 2 : 1) * args->group_units;
    const int64_t stages_between =
        int64_t(args->group_units) * args->num_n_tiles[1] * args->num_k_blocks[1] / num_clusters;
    args->lag = stages_between < kFinishersStages ? 2 : 1;
    // Where units share no weights, steps are smaller, so that a unit's GEMM0 is complete earlier.
    // As many units as before are between that and its GEMM1, and with narrow tiles a step more.
    constexpr int kFewUnits = 4;
    if (p->num_ranks == 1 and not kIsFp8 and reads_weights_once(p)) {
        const bool is_narrow = not is_backward and has_narrow_tiles(p);
        args->lag = ceil_div(args->group_units * args->lag, kFewUnits) + is_narrow;
        args->group_units = kFewUnits;
    } else if (kMayMix and not is_backward and
               protocol::mixes_products(args->preact == nullptr, args->num_k_blocks[0],
                                        args->num_k_blocks[1])) {
        args->is_mixed = true;
        args->lag = 2;  // else GEMM1 would read what the step before has just computed
    }
    if (cuts_groups(p) and protocol::follows_cut_groups(is_backward, args->num_k_blocks[1])) {
        set_cut_groups(p, kFinishersStages, args);
    }
    // Few rows at a time where these are long: the last units would keep some warps while all
    // others are done.
    constexpr int64_t kMostUnitBytes = 64 * 1024;
    const int64_t token_bytes = ceil_div(p->topk, p->num_ranks) * shape_of(p).row_bytes();
    args->rows_per_unit = std::min(32 / power_of_two(p->topk), kMostUnitRows);
    while (args->rows_per_unit > 1 and args->rows_per_unit * token_bytes > kMostUnitBytes) {
        args->rows_per_unit /= 2;
    }
    // A finisher must not sum so much at a time that this takes much longer than a product of
    // GEMM1. Where that product is short, the finisher is late in any case. In FP8 a stage is
    // short, and a finisher has few registers to load with.
    constexpr int64_t kBytesPerStage = kIsFp8 ? 4 * 1024 : 28 * 1024;
    constexpr int kFewStages = 12;
    args->finishers_combine =
        not args->shape.is_rank_invariant() and args->num_k_blocks[1] >= kFewStages and
        args->rows_per_unit * token_bytes <= kBytesPerStage * args->num_k_blocks[1];
    // Fewer rows where units are so few that each still has a warp of its own at the end.
    const int64_t rows = int64_t(args->num_tokens) * p->topk;
    const int num_warps = p->num_ctas * kLayerThreads / 32;
    while (args->rows_per_unit > 1 and 2 * rows <= int64_t(args->rows_per_unit) * num_warps) {
        args->rows_per_unit /= 2;
    }
}

// How many units of own rows a plan puts first, while the others' rows travel: what the schedule
// advances by, or up to three times that where links bring rows later than a GEMM0 of them ends.
void set_early_units(const FlashMoEProblem* p, const FlashMoEGroup* group, LayerArgs* args) {
    constexpr double kFastLink = 200e9, kFlops = 700e12;  // bytes and products of a GPU in a second
    constexpr int kSMs = 132;
    int ratio = 1;
    if (const double link = group->link_bytes_per_s; link > 0 and link < kFastLink) {
        const double flops = kFlops * p->num_ctas / kSMs;
        const double fetch_over_gemm = flops / (link * args->shape.fc1_rows());
        ratio = int(std::clamp(fetch_over_gemm + 0.5, 1.0, 3.0));
    }
    // Where rows are in the order of ranks, no unit has own rows alone.
    const bool are_mixed = args->shape.is_rank_invariant() and p->num_ranks > 1;
    args->early_units = are_mixed ? 0 : ratio * args->group_units;
}

// SiLU keeps a branch of its own, where it has no other terms.
void set_activation(const FlashMoEProblem* p, LayerArgs* args) {
    constexpr float kQuickGelu = 1.702f;
    const bool is_silu = p->activation == FLASHMOE_SILU;
    const bool is_swish = is_silu and (p->clamp_value != 0 or p->linear_offset != 0);
    args->activation = is_swish ? Activation::kSwish : Activation(p->activation);
    args->swish = {is_silu ? 1.0f : kQuickGelu,
                   p->clamp_value != 0 ? p->clamp_value : std::numeric_limits<float>::infinity(),
                   p->linear_offset};
}

// Sets where owners find the weights that they push.
void set_home_weights(const void* weight_maps, LayerArgs* args) {
    const char* begin = static_cast<const char*>(weight_maps) + maps_bytes(args->shape);
    FLASHMOE_SET_SLOT_FIELD(args->home_weights, reinterpret_cast<const void* const*>(begin));
}

void set_biases(const void* biases, LayerArgs* args) {
    if (biases == nullptr) return;
    args->biases[0] = static_cast<const void* const*>(biases);
    args->biases[1] = args->biases[0] + args->shape.num_local_slots();
}

// The buffers of a pass and the order of its tiles.
int set_buffers(const FlashMoEProblem* p,
                const FlashMoELaunch* launch,
                bool is_backward,
                LayerArgs* args) {
    const Shape& s = args->shape;
    args->weight_maps =
        static_cast<const CUtensorMap*>(launch->weight_maps) + (is_backward ? s.num_matrices() : 0);
    if (s.spare_slots > 0) set_home_weights(launch->weight_maps, args);
#ifdef FLASHMOE_IN_FP8
    const char* const table = static_cast<const char*>(launch->weight_maps);
    const uint64_t maps = is_backward ? turned_maps_begin(s) : fp8_maps_begin(s);
    const uint64_t scales = is_backward ? turned_scales_begin(s) : fp8_scales_begin(s);
    args->weight_maps = reinterpret_cast<const CUtensorMap*>(table + maps);
    args->weight_scales = reinterpret_cast<const float* const*>(table + scales);
#endif
    const ScratchRows scratch = scratch_at(p, launch->scratch, launch->num_row_blocks, is_backward);
#ifdef FLASHMOE_IN_FP8
    args->dpre_in_fp8 = scratch.dpre_in_fp8;
#endif
    args->rows = is_backward ? scratch.rows : static_cast<char*>(launch->rows);
    args->preact = static_cast<char*>(launch->preact);
    args->act = scratch.act;
    args->dpre = scratch.dpre;
    args->result = scratch.result;
    args->dprob_partial = scratch.dprob_partial;
    args->out = static_cast<char*>(launch->out);
    args->grad_probs = launch->grad_probs;
    args->grad_columns = launch->grad_columns;
    args->grad_probs_dtype = Dtype(launch->grad_probs_dtype);
    set_activation(p, args);
    args->layer = launch->layer;
    // Weights that are read once would drive rows, activations and results out of the L2.
    args->weights_hint = reads_weights_once(p) ? CacheHint::EVICT_FIRST : CacheHint::EVICT_NORMAL;
    set_order(p, is_backward, args);
    set_biases(launch->biases, args);
    if (launch->num_row_blocks > 0) {
        const int64_t rows = int64_t(launch->num_row_blocks) * BLOCK_M;
        const char* const of_gemm1 = not is_backward ? args->act
                                     : kIsFp8        ? scratch.dpre_in_fp8
                                                     : args->dpre;
        const char* const operands[2] = {args->rows, of_gemm1};
        for (const int gemm : {0, 1}) {
            if (gemm == 0 and args->row_access == RowAccess::kInPlace) continue;
            const int columns = gemm == 0 ? p->hidden : gemm1_input(p, is_backward);
            FLASHMOE_TRY(encode_map(&args->load_map[gemm], BoxKind::kKMajor, operands[gemm], rows,
                                    columns, operand_row_bytes(columns)));
#ifdef FLASHMOE_IN_FP8
            FLASHMOE_TRY(encode_scales(&args->scale_map[gemm], operands[gemm], rows, columns));
#endif
        }
    }
    return FLASHMOE_OK;
}

// Sets where gradients of weights go.
void set_grad_targets(
    const void* grad_table, int grads_dtype, bool accumulate, uint64_t number, BackwardArgs* args) {
    const Shape& s = args->shape;
    WeightGrads& grads = args->weight_grads;
    grads.maps = static_cast<const CUtensorMap*>(grad_table);
    grads.pointers = reinterpret_cast<void* const*>(static_cast<const char*>(grad_table) +
                                                    grad_pointers_begin(s));
    grads.wanted =
        reinterpret_cast<const int*>(static_cast<const char*>(grad_table) + wanted_grads_begin(s));
    grads.dtype = Dtype(grads_dtype);
    grads.accumulate = accumulate;
    grads.number = number;
}

// Sets what their tiles read.
int set_weight_grads(const FlashMoEProblem* p, const FlashMoELaunch* launch, BackwardArgs* args) {
    const Shape& s = args->shape;
    WeightGradProduct(&product)[2] = args->weight_grads.product;
    product[0].num_out = product[1].num_in = s.hidden;
    product[0].num_in = s.intermediate;
    product[1].num_out = s.fc1_rows();
    if (launch->num_row_blocks > 0) {
        const int64_t rows = int64_t(launch->num_row_blocks) * BLOCK_M;
        for (const auto& [map, matrix, columns] :
             {std::tuple{&product[0].left, args->rows, s.hidden},
              {&product[0].right, args->act, s.intermediate},
              {&product[1].left, args->dpre, s.fc1_rows()},
              {&product[1].right, static_cast<char*>(launch->rows), s.hidden}}) {
            if (matrix == nullptr) continue;  // frozen weights, or tokens that are gathered
            FLASHMOE_TRY(encode_map(map, BoxKind::kMnMajor, matrix, rows, columns));
        }
    }
    // A backward that is given x gathers it or, if it is given rows, too, copies it to them.
    args->tokens = static_cast<const char*>(launch->x);
    args->token_copies = launch->x != nullptr ? static_cast<char*>(launch->rows) : nullptr;
    if (p->is_transposed) {
        for (WeightGradProduct& each : product) {
            std::swap(each.left, each.right);
            std::swap(each.num_out, each.num_in);
        }
    } else if (args->tokens != nullptr and not copies_tokens(*args)) {  // as the left operand
        std::swap(product[1].left, product[1].right);
        std::swap(product[1].num_out, product[1].num_in);
        product[1].is_turned = true;
    }
    return FLASHMOE_OK;
}

// The gradients of the own experts' biases, or those in spare slots, which are float32 and written.
int launch_bias_grads(const FlashMoEProblem* p,
                      const FlashMoEGroup* group,
                      const BackwardArgs& backward,
                      bool is_spare) {
    const Shape& s = backward.shape;
    const int first = is_spare ? s.num_local_experts() : 0;
    const int num_slots = is_spare ? s.spare_slots : s.num_local_experts();
    BiasGradArgs args{};
    args.plan = backward.plan;
    args.plan.expert_rows += first;
    args.plan.expert_block += first;
    args.rows[0] = backward.dpre;
    args.is_by_token = backward.row_access == RowAccess::kInPlace;
    args.rows[1] = args.is_by_token ? backward.x : backward.rows;
    args.width[0] = s.fc1_rows();
    args.width[1] = s.hidden;
    args.grads[0] = backward.weight_grads.pointers + s.num_matrices() + first;
    args.grads[1] = args.grads[0] + s.num_local_slots();
    args.accumulate = backward.weight_grads.accumulate and not is_spare;
    args.first_plan = backward.first_plan;
    const bool into_float32 = backward.weight_grads.dtype == Dtype::kFloat32 or is_spare;
    const KernelEntry entry = bias_grad_entry_of(p, into_float32);
    const int widest = std::max(args.width[0], args.width[1]);
    const dim3 grid(unsigned(ceil_div(widest, kBiasGradColumns)), unsigned(num_slots), 2);
    void* arguments[] = {&args};
    return check_cuda(cudaLaunchKernel(entry.function, grid, dim3(unsigned(entry.num_threads)),
                                       arguments, 0, static_cast<cudaStream_t>(group->stream)),
                      "bias gradient launch");
}

// Adds what is in other ranks' spare slots, but fc2's, to the gradients of this rank's experts.
int launch_add_replicas(const FlashMoEProblem* p,
                        const FlashMoEGroup* group,
                        const BackwardArgs& backward) {
    const bool into_float32 = backward.weight_grads.dtype == Dtype::kFloat32;
    const KernelEntry entry = add_replicas_entry_of(p, into_float32);
    return launch(entry.function, p->num_ctas, entry.num_threads, entry.smem_bytes, group->stream,
                  "launch that adds gradients of replicas", backward);
}

}  // namespace

int sizes(const FlashMoEProblem* problem, FlashMoESizes* sizes) {
    FLASHMOE_TRY(check_problem(problem));
    FLASHMOE_TRY(check_struct(sizes, "sizes"));
    const Shape s = shape_of(problem);
    sizes->max_row_blocks = uint32_t(s.max_row_blocks());
    sizes->heap_bytes = heap_layout(s).bytes;
    sizes->workspace_bytes = Workspace::bytes(s);
    sizes->plan_bytes = plan_layout(s).bytes;
    sizes->mailbox_bytes = sizeof(Mailbox);
    sizes->weight_map_bytes = weight_table_bytes(s);
    sizes->grad_table_bytes = grad_table_bytes(s);
    sizes->row_block_bytes = uint64_t(BLOCK_M) * s.token_bytes();
    sizes->preact_block_bytes = uint64_t(BLOCK_M) * s.fc1_rows() * kElementBytes;
    for (const bool is_backward : {false, true}) {
        sizes->scratch_block_bytes[is_backward] =
            scratch_at(problem, nullptr, 1, is_backward).bytes;
        sizes->reads_tokens[is_backward] = reads_tokens(problem, is_backward);
    }
    // In FP8 the other namespace says what its own kernels need.
    sizes->weight_copy_bytes[0] = sizes->weight_copy_bytes[1] = 0;
    if (is_in_fp8(problem)) {
        const CopyWeightsArgs copies = copies_of(s, nullptr, nullptr);
        sizes->weight_copy_bytes[not kIsFp8] = copies.all_bytes();
        if (kIsFp8 and has_fp8_dgrad(problem)) {
            sizes->weight_copy_bytes[1] = uint64_t(copies.all_turned_bytes());
        }
    }
    return FLASHMOE_OK;
}

int preload(const FlashMoEProblem* problem) {
    FLASHMOE_TRY(check_problem(problem));
    const void* const kernels[] = {
        reinterpret_cast<const void*>(&plan_kernel),
        reinterpret_cast<const void*>(&gather_kernel),
        entry_of(problem, false).function,
        entry_of(problem, true).function,  // in FP8 null
        bias_grad_entry_of(problem, true).function,
        bias_grad_entry_of(problem, false).function,
        add_replicas_entry_of(problem, true).function,
        add_replicas_entry_of(problem, false).function,
        settle_entry_of(problem).function,
        copy_weights_entry_of(problem).function,
        read_rows_entry_of(problem).function,
        turn_weights_entry_of(problem).function,
        quantize_grads_entry_of(problem).function,
    };
    for (const void* kernel : kernels) {
        if (kernel == nullptr) continue;  // one for replicas, or for FP8, that there is no need of
        cudaFuncAttributes attributes;
        FLASHMOE_TRY(check_cuda(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel"));
    }
    return FLASHMOE_OK;
}

int plan(const FlashMoEProblem* problem,
         const FlashMoEGroup* group,
         const FlashMoEInput* input,
         void* plan) {
    FLASHMOE_TRY(check_group(problem, group));
    FLASHMOE_TRY(check_input(problem, input));
    FLASHMOE_TRY(check_pointer(plan, true, "plan"));
    auto args = layer_args<LayerArgs>(problem, group, plan, input->x, input->num_tokens);
    set_routing(problem, input, kCounted, &args);
    set_order(problem, false, &args);
    set_early_units(problem, group, &args);
    auto* mailbox = static_cast<Mailbox*>(group->mailbox);
    if (input->refusal != nullptr) args.refusal = write_refusal(problem, input->refusal, mailbox);
    PlanReport* report = &mailbox->report;
    *report = {};
    return launch(reinterpret_cast<const void*>(&plan_kernel), problem->num_ctas, kPlanThreads,
                  kPlanSmemBytes, group->stream, "plan launch", args, report);
}

int forward(const FlashMoEProblem* problem,
            const FlashMoEGroup* group,
            const FlashMoEInput* input,
            const FlashMoELaunch* launch_args,
            int32_t is_planned) {
    FLASHMOE_TRY(check_group(problem, group));
    FLASHMOE_TRY(check_input(problem, input));
    FLASHMOE_TRY(check_pass(problem, launch_args, false));
    if (input->refusal != nullptr) {
        return fail(FLASHMOE_BAD_ARGUMENT, "a forward with a refusal: wanted flashmoe_plan alone");
    }
    if (launch_args->num_tokens != input->num_tokens) {
        return fail(FLASHMOE_BAD_ARGUMENT, "out is for %d tokens, wanted the input's %d",
                    launch_args->num_tokens, input->num_tokens);
    }
    auto args =
        layer_args<LayerArgs>(problem, group, launch_args->plan, input->x, input->num_tokens);
    if (not is_planned) {
        set_routing(problem, input, uint32_t(launch_args->num_row_blocks), &args);
    }
    if (launch_args->rows == nullptr and reads_tokens(problem, false)) {
        args.row_access = RowAccess::kInPlace;
    } else if (launch_args->preact == nullptr and reads_own_tokens(problem)) {
        args.row_access = RowAccess::kOwnInPlace;
    }
    FLASHMOE_TRY(set_buffers(problem, launch_args, false, &args));
    if (input->is_settled) {  // replicas have their weights, also where the plan exists
        FLASHMOE_SET_SLOT_FIELD(args.uses_settled, true);
        FLASHMOE_SET_SLOT_FIELD(args.home_weights, nullptr);
    }
    set_early_units(problem, group, &args);
    if constexpr (kIsFp8) FLASHMOE_TRY(launch_copies(args.shape, group, launch_args));
    const KernelEntry entry = entry_of(problem, false);
    return launch(entry.function, problem->num_ctas, entry.num_threads, entry.smem_bytes,
                  group->stream, "forward launch", args);
}

int settle(const FlashMoEProblem* problem,
           const FlashMoEGroup* group,
           const uint32_t* route_counts,
           const void* weight_maps,
           const void* biases) {
    FLASHMOE_TRY(check_group(problem, group));
    if (problem->spare_slots == 0) {
        return fail(FLASHMOE_BAD_ARGUMENT, "spare_slots 0: wanted slots for replicas to settle on");
    }
    FLASHMOE_TRY(check_pointer(route_counts, true, "route_counts"));
    FLASHMOE_TRY(
        check_pointer(weight_maps, weight_maps != nullptr, "weight_maps", alignof(CUtensorMap)));
    FLASHMOE_TRY(check_pointer(biases, biases != nullptr, "biases", alignof(void*)));
    auto args = layer_args<LayerArgs>(problem, group, nullptr, nullptr, 0);
    if (weight_maps != nullptr) set_home_weights(weight_maps, &args);
    set_biases(biases, &args);
    FLASHMOE_SET_SLOT_FIELD(args.plan.hosts, args.workspace.settled->hosts);
    FLASHMOE_SET_SLOT_FIELD(args.plan.own_routes, args.workspace.settled->own_routes);
    const KernelEntry entry = settle_entry_of(problem);
    return launch(entry.function, std::min(kSettleCtas, problem->num_ctas), entry.num_threads,
                  entry.smem_bytes, group->stream, "launch that settles on replicas", args,
                  route_counts);
}

int gather(const FlashMoEProblem* problem,
           const FlashMoEGroup* group,
           const FlashMoELaunch* launch_args,
           const void* x) {
    FLASHMOE_TRY(check_group(problem, group));
    FLASHMOE_TRY(check_launch(problem, launch_args));
    FLASHMOE_TRY(check_rows(launch_args, false));
    FLASHMOE_TRY(check_pointer(x, launch_args->num_tokens > 0, "x"));
    auto args =
        layer_args<LayerArgs>(problem, group, launch_args->plan, x, launch_args->num_tokens);
    args.rows = static_cast<char*>(launch_args->rows);
    set_own_plan(&args);
    return launch(reinterpret_cast<const void*>(&gather_kernel), problem->num_ctas,
                  kGatherWarps * 32, int(sizeof(GatherSmem)), group->stream, "gather launch", args);
}

int backward(const FlashMoEProblem* problem,
             const FlashMoEGroup* group,
             const FlashMoELaunch* launch_args,
             const void* grad_out,
             const void* grad_table,
             int32_t grads_dtype,
             int32_t accumulate,
             uint64_t number) {
    FLASHMOE_TRY(check_group(problem, group));
    FLASHMOE_TRY(check_pass(problem, launch_args, true));
    FLASHMOE_TRY(check_pointer(grad_out, launch_args->num_tokens > 0, "grad_out"));
    FLASHMOE_TRY(check_pointer(grad_table, true, "grad_table", alignof(CUtensorMap)));
    FLASHMOE_TRY(check_dtype(problem, grads_dtype, "grads_dtype"));
    auto args = layer_args<BackwardArgs>(problem, group, launch_args->plan, grad_out,
                                         launch_args->num_tokens);
    set_own_plan(&args);
    if (gathers_grads(problem)) args.row_access = RowAccess::kInPlace;
    FLASHMOE_TRY(set_buffers(problem, launch_args, true, &args));
    FlashMoELaunch as_read = *launch_args;
    if constexpr (kIsFp8) {  // gradients of weights follow, and tell of themselves
        number = 0;
        FLASHMOE_TRY(launch_turned_copies(args.shape, group, launch_args));
        FLASHMOE_TRY(launch_ahead(quantize_grads_entry(), kQuantizeCtas, group, "dY in FP8", args));
    } else if constexpr (not kHasReplicas) {
        if (is_in_fp8(problem)) {
            const ScratchRows scratch =
                scratch_at(problem, launch_args->scratch, launch_args->num_row_blocks, true);
            const auto read = [&](const void* rows, char* into) {
                return launch_reads(args.shape, problem->num_ctas, group, launch_args, rows, into);
            };
            if (has_fp8_dgrad(problem)) {
                args.rows = scratch.result;  // which the launch before has done with
                FLASHMOE_TRY(read(scratch.rows, args.rows));
            } else {
                FLASHMOE_TRY(launch_copies(args.shape, group, launch_args));
            }
            FLASHMOE_TRY(read(launch_args->rows, scratch.read));
            if (as_read.rows != nullptr) as_read.rows = scratch.read;
        }
    }
    set_grad_targets(grad_table, grads_dtype, accumulate != 0, number, &args);
    if constexpr (not kIsFp8) FLASHMOE_TRY(set_weight_grads(problem, &as_read, &args));
    const KernelEntry entry = entry_of(problem, true);
    FLASHMOE_TRY(launch(entry.function, problem->num_ctas, entry.num_threads, entry.smem_bytes,
                        group->stream, "backward launch", args));
    const bool has_slots = problem->spare_slots > 0;
    if (launch_args->biases != nullptr) {
        FLASHMOE_TRY(launch_bias_grads(problem, group, args, false));
        if (has_slots) FLASHMOE_TRY(launch_bias_grads(problem, group, args, true));
    }
    return has_slots ? launch_add_replicas(problem, group, args) : int(FLASHMOE_OK);
}

int backward_rows(const FlashMoEProblem* problem,
                  const FlashMoELaunch* launch_args,
                  FlashMoEBackwardRows* rows) {
    FLASHMOE_TRY(check_problem(problem));
    FLASHMOE_TRY(check_launch(problem, launch_args));
    FLASHMOE_TRY(check_pointer(launch_args->scratch, launch_args->num_row_blocks > 0, "scratch"));
    FLASHMOE_TRY(check_struct(rows, "rows"));
    const ScratchRows scratch =
        scratch_at(problem, launch_args->scratch, launch_args->num_row_blocks, true);
    const Plan plan = Plan::at(const_cast<void*>(launch_args->plan), shape_of(problem));
    rows->grad_out = has_fp8_dgrad(problem) ? scratch.result : scratch.rows;
    rows->grad_preact = scratch.dpre;
    rows->act = scratch.act;
    rows->x = scratch.read;
    rows->expert_rows = plan.expert_rows;
    rows->expert_block = plan.expert_block;
    rows->row_tokens = reinterpret_cast<const int32_t*>(plan.row_meta);
    return FLASHMOE_OK;
}

}  // namespace flashmoe
