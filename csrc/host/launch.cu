// The bodies of the C interface's launches: arguments are checked, device structs are filled, and
// kernels go to the stream. Nothing here waits, except flashmoe_await_plan for the plan, and
// flashmoe_clear_fault and flashmoe_read_counters for the stream.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>
#include <tuple>

#include "flashmoe/kernel/bias_grad.cuh"
#include "flashmoe/kernel/entry.h"
#include "flashmoe/kernel/gather.cuh"
#include "flashmoe/kernel/plan.cuh"
#include "flashmoe/moe/args.cuh"
#include "host/error.h"
#include "host/tensor_map.h"

namespace flashmoe {
namespace {

static_assert(sizeof(Fault) == sizeof(FlashMoEFault));
static_assert(sizeof(Totals) == sizeof(FlashMoECounters));
static_assert(sizeof(Record) == sizeof(FlashMoERecord) and kNumRecords == FLASHMOE_NUM_RECORDS);
static_assert(kNumSpans == FLASHMOE_NUM_SPANS and kMaxLocalExperts == FLASHMOE_MAX_LOCAL_EXPERTS);
static_assert(int(Dtype::kBFloat16) == FLASHMOE_BFLOAT16 and
              int(Dtype::kFloat16) == FLASHMOE_FLOAT16);
static_assert(kMaxRanks == FLASHMOE_MAX_RANKS and kMaxTopk == FLASHMOE_MAX_TOPK);
static_assert(kFaultTimeout == FLASHMOE_PEER_TIMEOUT and kFaultRouting == FLASHMOE_BAD_ROUTING and
              kFaultRows == FLASHMOE_TOO_MANY_ROWS);

// In pinned host memory: written by the device, read by the host without synchronization.
struct Mailbox {
    Fault fault;
    PlanReport report;
    Record records[kNumRecords];
};

Shape shape_of(const FlashMoEProblem* p) {
    return {p->rank,          p->num_ranks,           p->hidden,
            p->intermediate,  p->num_experts,         p->topk,
            p->max_tokens,    p->heap_tokens,         p->heap_topk,
            p->is_gated != 0, p->skip_zero_probs != 0};
}

constexpr int kMaxPlacementBytes = kPlanSmemBytes - int(sizeof(RowCopySmem));
constexpr int kMaxWidth = 1 << 20;              // of hidden and intermediate
constexpr uint64_t kMaxTimeoutNs = 1ull << 62;  // deadlines are sums of signed nanoseconds

int forward_tiles(const FlashMoEProblem* p) {
    // Half of a gated tile's columns are `up`.
    return ceil_div(p->intermediate, p->is_gated ? BLOCK_N / 2 : BLOCK_N);
}

int backward_tiles(const FlashMoEProblem* p) { return ceil_div(p->intermediate, BLOCK_N); }

int64_t placement_bytes(const FlashMoEProblem* p) {
    return PlacementSmem::bytes(shape_of(p), p->num_ctas);
}

int check_problem(const FlashMoEProblem* p) {
    if (p == nullptr or p->struct_size != sizeof(FlashMoEProblem)) {
        return fail(FLASHMOE_BAD_ARGUMENT, "problem: struct_size is %u, wanted %zu",
                    p ? p->struct_size : 0, sizeof(FlashMoEProblem));
    }
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
                    "%d experts on %d ranks: wanted a multiple of the ranks, at most 512 a rank",
                    p->num_experts, p->num_ranks);
    }
    if (p->topk < 1 or p->topk > kMaxTopk or p->topk > p->num_experts) {
        return fail(FLASHMOE_BAD_ARGUMENT, "topk %d of %d experts: wanted 1 to %d", p->topk,
                    p->num_experts, kMaxTopk);
    }
    if (p->max_tokens < 1 or p->max_tokens > (1 << 24)) {
        return fail(FLASHMOE_BAD_ARGUMENT, "max_tokens %d: wanted 1 to 2^24", p->max_tokens);
    }
    if (p->dtype != FLASHMOE_BFLOAT16 and p->dtype != FLASHMOE_FLOAT16) {
        return fail(FLASHMOE_BAD_ARGUMENT, "dtype %d: wanted bfloat16 (1) or float16 (2)",
                    p->dtype);
    }
    if (p->activation < 0 or p->activation > FLASHMOE_SQUARED_RELU) {
        return fail(FLASHMOE_BAD_ARGUMENT, "activation %d is unknown", p->activation);
    }
    if (p->num_ctas < kClusterSize or p->num_ctas > kMaxCtas or p->num_ctas % kClusterSize) {
        return fail(FLASHMOE_BAD_ARGUMENT, "num_ctas %d: wanted a multiple of %d, at most %d",
                    p->num_ctas, kClusterSize, kMaxCtas);
    }
    if (p->heap_tokens < p->max_tokens or p->heap_tokens > (1 << 24)) {
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
    const int64_t across = ceil_div(p->hidden, BLOCK_N);
    const int64_t pass =
        s.max_row_blocks() * (std::max(forward_tiles(p), backward_tiles(p)) + across);
    const int64_t weight_grads =
        s.num_local_experts() * across *
        (ceil_div(s.fc1_rows(), BLOCK_N) + ceil_div(p->intermediate, BLOCK_N));
    if (pass + weight_grads > INT32_MAX - kMaxCtas) {
        return fail(FLASHMOE_BAD_ARGUMENT,
                    "a pass of %lld tiles, weight gradients of %lld: wanted fewer than 2^31",
                    (long long)pass, (long long)weight_grads);
    }
    return FLASHMOE_OK;
}

int check_group_struct(const FlashMoEGroup* group) {
    if (group == nullptr or group->struct_size != sizeof(FlashMoEGroup)) {
        return fail(FLASHMOE_BAD_ARGUMENT, "group: struct_size is %u, wanted %zu",
                    group ? group->struct_size : 0, sizeof(FlashMoEGroup));
    }
    return FLASHMOE_OK;
}

// Of memory that the call reads or writes if `is_used`.
int check_pointer(const void* pointer, bool is_used, const char* name, int alignment = 16) {
    if (is_used and (pointer == nullptr or uintptr_t(pointer) % alignment)) {
        return fail(FLASHMOE_BAD_ARGUMENT, "%s is at %p: wanted a %d-byte aligned address", name,
                    pointer, alignment);
    }
    return FLASHMOE_OK;
}

int check_dtype(const FlashMoEProblem* p, int dtype, const char* name) {
    if (dtype != FLASHMOE_FLOAT32 and dtype != p->dtype) {
        return fail(FLASHMOE_BAD_ARGUMENT, "%s %d: wanted float32 (0) or the problem's dtype, %d",
                    name, dtype, p->dtype);
    }
    return FLASHMOE_OK;
}

int size_of(int dtype) { return dtype == FLASHMOE_FLOAT32 ? 4 : 2; }

int check_group(const FlashMoEProblem* p, const FlashMoEGroup* group) {
    FLASHMOE_TRY(check_problem(p));
    FLASHMOE_TRY(check_group_struct(group));
    for (int rank = 0; rank < p->num_ranks; ++rank) {
        FLASHMOE_TRY(check_pointer(group->heaps[rank], true, "a rank's heap"));
    }
    FLASHMOE_TRY(check_pointer(group->workspace, true, "workspace"));
    return check_pointer(group->mailbox, true, "mailbox");
}

int check_tokens(const FlashMoEProblem* p, int num_tokens) {
    if (num_tokens < 0 or num_tokens > p->max_tokens) {
        return fail(FLASHMOE_BAD_ARGUMENT, "%d tokens: wanted 0 to max_tokens = %d", num_tokens,
                    p->max_tokens);
    }
    return FLASHMOE_OK;
}

Heap heap_of(const Shape& s, const FlashMoEGroup* group) {
    Heap heap{heap_layout(s), {},       s.num_ranks, s.heap_tokens,
              s.heap_topk,    s.hidden, s.topk,      s.max_slots()};
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
    using Select = KernelEntry (*)(bool);
    constexpr Select kInstances[2][2][2] = {
        {{forward_bf16, forward_bf16_transposed}, {forward_fp16, forward_fp16_transposed}},
        {{backward_bf16, backward_bf16_transposed}, {backward_fp16, backward_fp16_transposed}},
    };
    const bool is_fp16 = p->dtype == FLASHMOE_FLOAT16;
    return kInstances[is_backward][is_fp16][p->is_transposed != 0](p->is_gated != 0);
}

KernelEntry bias_grad_entry_of(const FlashMoEProblem* p, bool into_float32) {
    return p->dtype == FLASHMOE_FLOAT16 ? bias_grad_fp16(into_float32)
                                        : bias_grad_bf16(into_float32);
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
    FLASHMOE_TRY(check_cuda(
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes),
        what));
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
    if (group->counts) args.records = static_cast<Mailbox*>(group->mailbox)->records;
    args.x = static_cast<const char*>(x);
    args.num_tokens = num_tokens;
    return args;
}

// What a pass needs for itself.
struct ScratchRows {
    char* act;
    char* result;
    // Of a backward: received dY, the gradient of fc1's output, and partial sums.
    char* rows;
    char* dpre;
    float* dprob_partial;
    uint64_t bytes;
};

// Lays buffers out behind one another. Block sizes are multiples of 128 bytes.
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
    scratch.act = layout.take(rows * p->intermediate * 2);
    scratch.result = layout.take(rows * p->hidden * 2);
    if (is_backward) {
        scratch.rows = layout.take(rows * p->hidden * 2);
        scratch.dpre = layout.take(rows * shape_of(p).fc1_rows() * 2);
        scratch.dprob_partial =
            reinterpret_cast<float*>(layout.take(rows * backward_tiles(p) * sizeof(float)));
    }
    scratch.bytes = layout.bytes();
    return scratch;
}

int check_gate(const FlashMoEInput* input) {
    FLASHMOE_TRY(check_pointer(input->gate_weight, true, "gate_weight"));
    FLASHMOE_TRY(check_pointer(input->logits, input->num_tokens > 0, "logits"));
    if (input->score < 0 or input->score > FLASHMOE_SIGMOID) {
        return fail(FLASHMOE_BAD_ARGUMENT, "score %d is unknown", input->score);
    }
    if (input->probs_dtype != FLASHMOE_FLOAT32) {
        return fail(FLASHMOE_BAD_ARGUMENT, "probs_dtype %d: wanted float32 (0) of a gate",
                    input->probs_dtype);
    }
    if (not std::isfinite(input->scaling_factor)) {
        return fail(FLASHMOE_BAD_ARGUMENT, "scaling_factor %f: wanted a finite number",
                    input->scaling_factor);
    }
    return FLASHMOE_OK;
}

int check_input(const FlashMoEProblem* p, const FlashMoEInput* input) {
    if (input == nullptr or input->struct_size != sizeof(FlashMoEInput)) {
        return fail(FLASHMOE_BAD_ARGUMENT, "input: struct_size is %u, wanted %zu",
                    input ? input->struct_size : 0, sizeof(FlashMoEInput));
    }
    FLASHMOE_TRY(check_tokens(p, input->num_tokens));
    FLASHMOE_TRY(check_dtype(p, input->probs_dtype, "probs_dtype"));
    const bool has_tokens = input->num_tokens > 0;
    FLASHMOE_TRY(check_pointer(input->x, has_tokens, "x"));
    FLASHMOE_TRY(check_pointer(input->probs, has_tokens, "probs", size_of(input->probs_dtype)));
    FLASHMOE_TRY(check_pointer(input->routing_map, has_tokens, "routing_map", 1));
    return input->gate_weight == nullptr ? int(FLASHMOE_OK) : check_gate(input);
}

void set_routing(const FlashMoEProblem* p,
                 const FlashMoEInput* input,
                 int row_block_bound,
                 LayerArgs* args) {
    args->probs = input->probs;
    args->probs_dtype = Dtype(input->probs_dtype);
    // Null means that the plan exists; without tokens a framework's pointer may be null, too.
    const void* map = input->num_tokens > 0 ? input->routing_map : args->workspace.raised;
    args->routing_map = static_cast<const uint8_t*>(map);
    args->row_block_bound = row_block_bound;
    args->gate = {static_cast<const char*>(input->gate_weight),
                  static_cast<float*>(input->logits),
                  static_cast<float*>(input->probs),
                  static_cast<uint8_t*>(input->routing_map),
                  Dtype(p->dtype),
                  Score(input->score),
                  input->scaling_factor};
}

// What every pass reads.
int check_launch(const FlashMoEProblem* p, const FlashMoELaunch* launch) {
    if (launch == nullptr or launch->struct_size != sizeof(FlashMoELaunch)) {
        return fail(FLASHMOE_BAD_ARGUMENT, "launch: struct_size is %u, wanted %zu",
                    launch ? launch->struct_size : 0, sizeof(FlashMoELaunch));
    }
    FLASHMOE_TRY(check_tokens(p, launch->num_tokens));
    const Shape s = shape_of(p);
    if (launch->num_row_blocks < 0 or launch->num_row_blocks > s.max_row_blocks()) {
        return fail(FLASHMOE_BAD_ARGUMENT, "%d row blocks: wanted 0 to %lld",
                    launch->num_row_blocks, (long long)s.max_row_blocks());
    }
    const bool has_rows = launch->num_row_blocks > 0;
    FLASHMOE_TRY(check_pointer(launch->plan, true, "plan"));
    return check_pointer(launch->rows, has_rows, "rows", 128);
}

// What a pass of the layer reads and writes beside that.
int check_pass(const FlashMoEProblem* p, const FlashMoELaunch* launch, bool is_backward) {
    FLASHMOE_TRY(check_launch(p, launch));
    const bool has_tokens = launch->num_tokens > 0, has_rows = launch->num_row_blocks > 0;
    // A forward may keep no pre-activations, a backward needs them.
    const bool has_preact = has_rows and (is_backward or launch->preact != nullptr);
    FLASHMOE_TRY(check_pointer(launch->preact, has_preact, "preact", 128));
    FLASHMOE_TRY(check_pointer(launch->scratch, has_rows, "scratch", 128));
    FLASHMOE_TRY(check_pointer(launch->weight_maps, true, "weight_maps", alignof(CUtensorMap)));
    FLASHMOE_TRY(
        check_pointer(launch->biases, launch->biases != nullptr, "biases", alignof(void*)));
    FLASHMOE_TRY(check_pointer(launch->out, has_tokens, "out"));
    if (not is_backward) return FLASHMOE_OK;
    FLASHMOE_TRY(check_dtype(p, launch->grad_probs_dtype, "grad_probs_dtype"));
    return check_pointer(launch->grad_probs, has_tokens, "grad_probs");
}

// The width of GEMM1's input.
int gemm1_input(const FlashMoEProblem* p, bool is_backward) {
    return is_backward ? shape_of(p).fc1_rows() : p->intermediate;
}

// The order of a pass's tiles.
void set_order(const FlashMoEProblem* p, bool is_backward, LayerArgs* args) {
    args->num_n_tiles[0] = is_backward ? backward_tiles(p) : forward_tiles(p);
    args->num_n_tiles[1] = ceil_div(p->hidden, BLOCK_N);
    args->num_k_blocks[0] = p->hidden / BLOCK_K;
    args->num_k_blocks[1] = gemm1_input(p, is_backward) / BLOCK_K;
    // A step is at least a wave of GEMM0 tiles. Between GEMM0 of a group and its GEMM1, finishers
    // need the time of some tiles: where a step's GEMM1 is shorter, two steps are between.
    constexpr int kFinishersStages = 48;
    const int num_clusters = p->num_ctas / kClusterSize;
    args->group_units = std::max(8, ceil_div(num_clusters, args->num_n_tiles[0]));
    const int64_t stages_between =
        int64_t(args->group_units) * args->num_n_tiles[1] * args->num_k_blocks[1] / num_clusters;
    args->lag = stages_between < kFinishersStages ? 2 : 1;
}

// The buffers of a pass and the order of its tiles.
int set_buffers(const FlashMoEProblem* p,
                const FlashMoELaunch* launch,
                bool is_backward,
                LayerArgs* args) {
    const Shape& s = args->shape;
    args->weight_maps = static_cast<const CUtensorMap*>(launch->weight_maps) +
                        (is_backward ? 2 * s.num_local_experts() : 0);
    const ScratchRows scratch = scratch_at(p, launch->scratch, launch->num_row_blocks, is_backward);
    args->rows = is_backward ? scratch.rows : static_cast<char*>(launch->rows);
    args->preact = static_cast<char*>(launch->preact);
    args->act = scratch.act;
    args->dpre = scratch.dpre;
    args->result = scratch.result;
    args->dprob_partial = scratch.dprob_partial;
    args->out = static_cast<char*>(launch->out);
    args->grad_probs = launch->grad_probs;
    args->grad_probs_dtype = Dtype(launch->grad_probs_dtype);
    args->activation = Activation(p->activation);
    args->layer = launch->layer;
    set_order(p, is_backward, args);
    if (launch->biases != nullptr) {
        args->biases[0] = static_cast<const void* const*>(launch->biases);
        args->biases[1] = args->biases[0] + s.num_local_experts();
    }
    if (launch->num_row_blocks > 0) {
        const int64_t rows = int64_t(launch->num_row_blocks) * BLOCK_M;
        FLASHMOE_TRY(encode_map(&args->load_map[0], BoxKind::kKMajor, args->rows, rows, p->hidden));
        FLASHMOE_TRY(encode_map(&args->load_map[1], BoxKind::kKMajor,
                                is_backward ? args->dpre : args->act, rows,
                                gemm1_input(p, is_backward)));
    }
    return FLASHMOE_OK;
}

// A table of gradients: TMA descriptors of both matrices of every expert, then where these are,
// then both biases.
uint64_t grad_pointers_begin(const Shape& s) {
    return 2 * sizeof(CUtensorMap) * s.num_local_experts();
}
uint64_t grad_table_bytes(const Shape& s) {
    return grad_pointers_begin(s) + 4 * sizeof(void*) * s.num_local_experts();
}

// What the tiles of the weights' gradients read and write.
int set_weight_grads(const FlashMoEProblem* p,
                     const FlashMoELaunch* launch,
                     const void* grad_table,
                     int grads_dtype,
                     bool accumulate,
                     BackwardArgs* args) {
    const Shape& s = args->shape;
    auto& [product, maps, pointers, dtype, adds] = args->weight_grads;
    maps = static_cast<const CUtensorMap*>(grad_table);
    pointers = reinterpret_cast<void* const*>(static_cast<const char*>(grad_table) +
                                              grad_pointers_begin(s));
    dtype = Dtype(grads_dtype);
    adds = accumulate;
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
            FLASHMOE_TRY(encode_map(map, BoxKind::kMnMajor, matrix, rows, columns));
        }
    }
    if (p->is_transposed) {
        for (WeightGradProduct& each : product) {
            std::swap(each.left, each.right);
            std::swap(each.num_out, each.num_in);
        }
    }
    return FLASHMOE_OK;
}

int launch_bias_grads(const FlashMoEProblem* p,
                      const FlashMoEGroup* group,
                      const BackwardArgs& backward) {
    const Shape& s = backward.shape;
    BiasGradArgs args{};
    args.plan = backward.plan;
    args.rows[0] = backward.dpre;
    args.rows[1] = backward.rows;
    args.width[0] = s.fc1_rows();
    args.width[1] = s.hidden;
    args.grads[0] = backward.weight_grads.pointers + 2 * s.num_local_experts();
    args.grads[1] = args.grads[0] + s.num_local_experts();
    args.accumulate = backward.weight_grads.accumulate;
    const KernelEntry entry = bias_grad_entry_of(p, backward.weight_grads.dtype == Dtype::kFloat32);
    const int widest = std::max(args.width[0], args.width[1]);
    const dim3 grid(unsigned(ceil_div(widest, kBiasGradColumns)), unsigned(s.num_local_experts()),
                    2);
    void* arguments[] = {&args};
    return check_cuda(cudaLaunchKernel(entry.function, grid, dim3(unsigned(entry.num_threads)),
                                       arguments, 0, static_cast<cudaStream_t>(group->stream)),
                      "bias gradient launch");
}

// That of all words that a launch has written, if none is of another one.
uint32_t checksum_of(const FlashMoERecord* record) {
    const int num_experts = std::clamp(record->num_experts, 0, kMaxLocalExperts);
    uint32_t sum = 0;
    for (int i = 0; i < Record::kFrontWords + num_experts; ++i) {
        uint32_t word;
        memcpy(&word, reinterpret_cast<const char*>(record) + 4 * i, sizeof(word));
        if (i != Record::kChecksumWord) sum += Record::checksum_of(uint32_t(i), word);
    }
    return sum;
}

}  // namespace
}  // namespace flashmoe

using namespace flashmoe;

extern "C" {

int flashmoe_sizes(const FlashMoEProblem* problem, FlashMoESizes* sizes) {
    FLASHMOE_TRY(check_problem(problem));
    if (sizes == nullptr or sizes->struct_size != sizeof(FlashMoESizes)) {
        return fail(FLASHMOE_BAD_ARGUMENT, "sizes: struct_size is %u, wanted %zu",
                    sizes ? sizes->struct_size : 0, sizeof(FlashMoESizes));
    }
    const Shape s = shape_of(problem);
    sizes->max_row_blocks = uint32_t(s.max_row_blocks());
    sizes->heap_bytes = heap_layout(s).bytes;
    sizes->workspace_bytes = Workspace::bytes(s);
    sizes->plan_bytes = plan_layout(s).bytes;
    sizes->mailbox_bytes = sizeof(Mailbox);
    // Two matrices of every expert, read along their contiguous dimension and across it.
    sizes->weight_map_bytes = 4 * sizeof(CUtensorMap) * s.num_local_experts();
    sizes->grad_table_bytes = grad_table_bytes(s);
    sizes->row_block_bytes = uint64_t(BLOCK_M) * problem->hidden * 2;
    sizes->preact_block_bytes = uint64_t(BLOCK_M) * s.fc1_rows() * 2;
    for (const bool is_backward : {false, true}) {
        sizes->scratch_block_bytes[is_backward] =
            scratch_at(problem, nullptr, 1, is_backward).bytes;
    }
    return FLASHMOE_OK;
}

int flashmoe_preload(const FlashMoEProblem* problem) {
    FLASHMOE_TRY(check_problem(problem));
    const void* const kernels[] = {
        reinterpret_cast<const void*>(&plan_kernel), reinterpret_cast<const void*>(&gather_kernel),
        entry_of(problem, false).function,           entry_of(problem, true).function,
        bias_grad_entry_of(problem, true).function,  bias_grad_entry_of(problem, false).function,
    };
    for (const void* kernel : kernels) {
        cudaFuncAttributes attributes;
        FLASHMOE_TRY(check_cuda(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel"));
    }
    return FLASHMOE_OK;
}

int flashmoe_plan(const FlashMoEProblem* problem,
                  const FlashMoEGroup* group,
                  const FlashMoEInput* input,
                  void* plan) {
    FLASHMOE_TRY(check_group(problem, group));
    FLASHMOE_TRY(check_input(problem, input));
    FLASHMOE_TRY(check_pointer(plan, true, "plan"));
    auto args = layer_args<LayerArgs>(problem, group, plan, input->x, input->num_tokens);
    set_routing(problem, input, int(args.shape.max_row_blocks()), &args);
    set_order(problem, false, &args);
    PlanReport* report = &static_cast<Mailbox*>(group->mailbox)->report;
    *report = {};
    return launch(reinterpret_cast<const void*>(&plan_kernel), problem->num_ctas, kPlanThreads,
                  kPlanSmemBytes, group->stream, "plan launch", args, report);
}

int flashmoe_await_plan(const FlashMoEProblem* problem,
                        const FlashMoEGroup* group,
                        int32_t* num_row_blocks,
                        int32_t* num_rows) {
    FLASHMOE_TRY(check_group(problem, group));
    if (num_row_blocks == nullptr or num_rows == nullptr) {
        return fail(FLASHMOE_BAD_ARGUMENT, "num_row_blocks or num_rows is null");
    }
    const volatile Mailbox* mailbox = static_cast<Mailbox*>(group->mailbox);
    // What the device has written before it is there then, on every processor.
    const auto has_come = [&] {
        return __atomic_load_n(&mailbox->report.epoch, __ATOMIC_ACQUIRE) != 0;
    };
    // The device bounds its own waits; this bound is for one that stands still. What is ahead on
    // the stream is not counted: it may be a collective that waits for ranks of another group.
    using Clock = std::chrono::steady_clock;
    const auto limit = std::chrono::nanoseconds(problem->timeout_ns) + std::chrono::seconds(30);
    auto deadline = Clock::now() + limit;
    for (uint64_t spin = 1; not has_come(); ++spin) {
        if (spin % 4096 != 0) continue;
        const cudaError_t state = cudaStreamQuery(static_cast<cudaStream_t>(group->stream));
        if (state != cudaSuccess and state != cudaErrorNotReady) {
            return check_cuda(state, "waiting for the plan");
        }
        if (state == cudaSuccess and not has_come()) {
            return fail(FLASHMOE_CUDA_ERROR, "the stream is idle but the plan never ran");
        }
        if (not mailbox->report.has_begun) {
            deadline = Clock::now() + limit;
        } else if (Clock::now() > deadline) {
            return fail(FLASHMOE_PEER_TIMEOUT, "the plan did not finish in time");
        }
        std::this_thread::yield();
    }
    if (mailbox->fault.code != 0) {
        return fail(int(mailbox->fault.code), "the plan failed");
    }
    *num_row_blocks = mailbox->report.num_row_blocks;
    *num_rows = mailbox->report.num_rows;
    return FLASHMOE_OK;
}

int flashmoe_read_fault(const FlashMoEGroup* group, FlashMoEFault* fault) {
    FLASHMOE_TRY(check_group_struct(group));
    FLASHMOE_TRY(check_pointer(group->mailbox, true, "mailbox"));
    if (fault == nullptr) return fail(FLASHMOE_BAD_ARGUMENT, "fault is null");
    const Fault& seen = static_cast<Mailbox*>(group->mailbox)->fault;
    *fault = {seen.code,  seen.role,  seen.rank,     seen.peer,
              seen.index, seen.epoch, seen.expected, seen.seen};
    return FLASHMOE_OK;
}

int flashmoe_clear_fault(const FlashMoEGroup* group) {
    FLASHMOE_TRY(check_group_struct(group));
    FLASHMOE_TRY(check_pointer(group->mailbox, true, "mailbox"));
    FLASHMOE_TRY(check_pointer(group->workspace, true, "workspace"));
    const auto stream = static_cast<cudaStream_t>(group->stream);
    FLASHMOE_TRY(check_cuda(cudaStreamSynchronize(stream), "clearing a fault"));
    // Before the device's word: the next fault that a launch finds then is told.
    static_cast<Mailbox*>(group->mailbox)->fault = Fault{};
    FLASHMOE_TRY(check_cuda(cudaMemsetAsync(group->workspace, 0, sizeof(uint32_t), stream),
                            "clearing a fault"));
    return check_cuda(cudaStreamSynchronize(stream), "clearing a fault");
}

int flashmoe_read_counters(const FlashMoEGroup* group, FlashMoECounters* counters) {
    FLASHMOE_TRY(check_group_struct(group));
    FLASHMOE_TRY(check_pointer(group->workspace, true, "workspace"));
    if (counters == nullptr) return fail(FLASHMOE_BAD_ARGUMENT, "counters is null");
    const auto stream = static_cast<cudaStream_t>(group->stream);
    const void* totals = static_cast<char*>(group->workspace) + Workspace::kTotalsOffset;
    FLASHMOE_TRY(check_cuda(
        cudaMemcpyAsync(counters, totals, sizeof(*counters), cudaMemcpyDeviceToHost, stream),
        "reading counters"));
    return check_cuda(cudaStreamSynchronize(stream), "reading counters");
}

int flashmoe_read_record(const FlashMoEGroup* group, uint64_t sequence, FlashMoERecord* record) {
    FLASHMOE_TRY(check_group_struct(group));
    FLASHMOE_TRY(check_pointer(group->mailbox, true, "mailbox"));
    if (record == nullptr) return fail(FLASHMOE_BAD_ARGUMENT, "record is null");
    const Record& slot = static_cast<Mailbox*>(group->mailbox)->records[sequence % kNumRecords];
    memcpy(record, &slot, sizeof(*record));
    if (record->sequence < sequence or record->checksum != checksum_of(record)) {
        record->sequence = 0;
    }
    return FLASHMOE_OK;
}

int flashmoe_encode_weights(const FlashMoEProblem* problem,
                            const void* const* fc1,
                            const void* const* fc2,
                            void* weight_maps) {
    FLASHMOE_TRY(check_problem(problem));
    const Shape s = shape_of(problem);
    const int experts = s.num_local_experts();
    if (fc1 == nullptr or fc2 == nullptr or weight_maps == nullptr) {
        return fail(FLASHMOE_BAD_ARGUMENT, "fc1, fc2 or weight_maps is null");
    }
    for (int expert = 0; expert < experts; ++expert) {
        FLASHMOE_TRY(check_pointer(fc1[expert], true, "an expert's fc1"));
        FLASHMOE_TRY(check_pointer(fc2[expert], true, "an expert's fc2"));
    }
    const bool transposed = problem->is_transposed != 0;
    char* target = static_cast<char*>(weight_maps);
    for (const bool is_backward : {false, true}) {
        const BoxKind kind = transposed == is_backward ? BoxKind::kKMajor : BoxKind::kMnMajor;
        for (const auto& [weights, num_out, num_in] :
             {std::tuple{fc1, s.fc1_rows(), s.hidden}, {fc2, s.hidden, s.intermediate}}) {
            for (int expert = 0; expert < experts; ++expert) {
                alignas(128) CUtensorMap map;
                FLASHMOE_TRY(encode_map(&map, kind, weights[expert], transposed ? num_in : num_out,
                                        transposed ? num_out : num_in));
                memcpy(target, &map, sizeof(map));
                target += sizeof(map);
            }
        }
    }
    return FLASHMOE_OK;
}

int flashmoe_encode_grads(const FlashMoEProblem* problem,
                          void* const* grads,
                          void* const* bias_grads,
                          int32_t grads_dtype,
                          void* grad_table) {
    FLASHMOE_TRY(check_problem(problem));
    FLASHMOE_TRY(check_dtype(problem, grads_dtype, "grads_dtype"));
    if (grads == nullptr or grad_table == nullptr) {
        return fail(FLASHMOE_BAD_ARGUMENT, "grads or grad_table is null");
    }
    const Shape s = shape_of(problem);
    const int experts = s.num_local_experts();
    for (int i = 0; i < 2 * experts; ++i) {
        FLASHMOE_TRY(check_pointer(grads[i], true, "a weight's gradient"));
        if (bias_grads == nullptr) continue;
        FLASHMOE_TRY(check_pointer(bias_grads[i], true, "a bias's gradient", size_of(grads_dtype)));
    }
    memset(grad_table, 0, grad_table_bytes(s));
    char* const pointers = static_cast<char*>(grad_table) + grad_pointers_begin(s);
    for (int i = 0; i < 2 * experts; ++i) {
        memcpy(pointers + i * sizeof(void*), &grads[i], sizeof(void*));
        if (Dtype(grads_dtype) != Dtype::kFloat32) continue;
        int rows = i < experts ? s.fc1_rows() : s.hidden;
        int columns = i < experts ? s.hidden : s.intermediate;
        if (problem->is_transposed) std::swap(rows, columns);
        alignas(128) CUtensorMap map;
        FLASHMOE_TRY(encode_map(&map, BoxKind::kGrad, grads[i], rows, columns));
        memcpy(static_cast<char*>(grad_table) + i * sizeof(map), &map, sizeof(map));
    }
    if (bias_grads != nullptr) {
        memcpy(pointers + 2 * experts * sizeof(void*), bias_grads, 2 * experts * sizeof(void*));
    }
    return FLASHMOE_OK;
}

int flashmoe_forward(const FlashMoEProblem* problem,
                     const FlashMoEGroup* group,
                     const FlashMoEInput* input,
                     const FlashMoELaunch* launch_args,
                     int32_t is_planned) {
    FLASHMOE_TRY(check_group(problem, group));
    FLASHMOE_TRY(check_input(problem, input));
    FLASHMOE_TRY(check_pass(problem, launch_args, false));
    if (launch_args->num_tokens != input->num_tokens) {
        return fail(FLASHMOE_BAD_ARGUMENT, "out is for %d tokens, wanted the input's %d",
                    launch_args->num_tokens, input->num_tokens);
    }
    auto args =
        layer_args<LayerArgs>(problem, group, launch_args->plan, input->x, input->num_tokens);
    if (not is_planned) {
        set_routing(problem, input, launch_args->num_row_blocks, &args);
    }
    FLASHMOE_TRY(set_buffers(problem, launch_args, false, &args));
    const KernelEntry entry = entry_of(problem, false);
    return launch(entry.function, problem->num_ctas, entry.num_threads, entry.smem_bytes,
                  group->stream, "forward launch", args);
}

int flashmoe_gather(const FlashMoEProblem* problem,
                    const FlashMoEGroup* group,
                    const FlashMoELaunch* launch_args,
                    const void* x) {
    FLASHMOE_TRY(check_group(problem, group));
    FLASHMOE_TRY(check_launch(problem, launch_args));
    FLASHMOE_TRY(check_pointer(x, launch_args->num_tokens > 0, "x"));
    auto args =
        layer_args<LayerArgs>(problem, group, launch_args->plan, x, launch_args->num_tokens);
    args.rows = static_cast<char*>(launch_args->rows);
    return launch(reinterpret_cast<const void*>(&gather_kernel), problem->num_ctas,
                  kGatherWarps * 32, int(sizeof(GatherSmem)), group->stream, "gather launch", args);
}

int flashmoe_backward(const FlashMoEProblem* problem,
                      const FlashMoEGroup* group,
                      const FlashMoELaunch* launch_args,
                      const void* grad_out,
                      const void* grad_table,
                      int32_t grads_dtype,
                      int32_t accumulate) {
    FLASHMOE_TRY(check_group(problem, group));
    FLASHMOE_TRY(check_pass(problem, launch_args, true));
    FLASHMOE_TRY(check_pointer(grad_out, launch_args->num_tokens > 0, "grad_out"));
    FLASHMOE_TRY(check_pointer(grad_table, true, "grad_table", alignof(CUtensorMap)));
    FLASHMOE_TRY(check_dtype(problem, grads_dtype, "grads_dtype"));
    auto args = layer_args<BackwardArgs>(problem, group, launch_args->plan, grad_out,
                                         launch_args->num_tokens);
    FLASHMOE_TRY(set_buffers(problem, launch_args, true, &args));
    FLASHMOE_TRY(
        set_weight_grads(problem, launch_args, grad_table, grads_dtype, accumulate != 0, &args));
    const KernelEntry entry = entry_of(problem, true);
    FLASHMOE_TRY(launch(entry.function, problem->num_ctas, entry.num_threads, entry.smem_bytes,
                        group->stream, "backward launch", args));
    return launch_args->biases == nullptr ? FLASHMOE_OK : launch_bias_grads(problem, group, args);
}

}  // extern "C"
