// Combine: the rows of a token on this rank are summed here, in float32 and in a fixed order, and
// one row goes to the token's rank; that rank sums the shares of all ranks in rank order. A row
// that is the only one of its token here has gone there straight from GEMM1. Routing weights were
// applied before fc2, so both are plain sums, and repeatable bit by bit.
#pragma once

#include "flashmoe/moe/args.cuh"
#include "flashmoe/tile/handover.cuh"
#include "flashmoe/tile/pipeline.cuh"

namespace flashmoe {

constexpr int kCombineRows = 16;  // rows looked at per ticket

template <class T>
__device__ __forceinline__ void add8(float (&sum)[8], const uint4& loaded) {
    float values[8];
    unpack8<T>(loaded, values);
#pragma unroll
    for (int c = 0; c < 8; ++c) sum[c] += values[c];
}

// Sums `count` rows of `chunks` 16-byte chunks into `target`; row i starts at source(i). Per lane,
// kUnroll chunks of two rows are in flight. Scope: one warp.
template <class T, int kUnroll, class Source>
__device__ __forceinline__ void sum_rows(char* target, int chunks, int count, Source source) {
    // The loops are uniform over the warp, since source() may shuffle.
    for (int first = 0; first < chunks; first += 32 * kUnroll) {
        const int base = first + int(threadIdx.x % 32);
        float sum[kUnroll][8] = {};
        for (int i = 0; i < count; i += 2) {
            const uint4* row = reinterpret_cast<const uint4*>(source(i));
            const bool has_next = i + 1 < count;
            const uint4* next = reinterpret_cast<const uint4*>(source(has_next ? i + 1 : i));
            uint4 loaded[kUnroll], loaded_next[kUnroll];
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                const bool inside = base + u * 32 < chunks;
                loaded[u] = inside ? row[base + u * 32] : uint4{};
                loaded_next[u] = inside and has_next ? next[base + u * 32] : uint4{};
            }
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                add8<T>(sum[u], loaded[u]);
                add8<T>(sum[u], loaded_next[u]);
            }
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            if (base + u * 32 >= chunks) continue;
            reinterpret_cast<uint4*>(target)[base + u * 32] = pack8<T>(sum[u]);
        }
    }
}

// The gradient of a route's probability, from the partial sums of its row's tiles.
__device__ __forceinline__ float sum_dprob(const float* partial, int num_tiles) {
    float sum = 0.0f;
    for (int tile = 0; tile < num_tiles; ++tile) sum += partial[tile];
    return sum;
}

// Delivers the results of all rows here. Scope: one warp; any number of warps share the work.
template <class T, bool kIsBackward, int kUnroll>
__device__ __forceinline__ void deliver_results(const LayerArgs& args) {
    const Heap& heap = args.heap;
    const Plan& plan = args.plan;
    const Workspace& workspace = args.workspace;
    const int rank = args.shape.rank;
    const uint32_t block_target = uint32_t(kNumProcessors * args.num_n_tiles[1]);
    const int lane = threadIdx.x % 32;
    const int64_t row_bytes = heap.hidden * 2;
    const int num_rows = plan.header->num_row_blocks * BLOCK_M;
    const int width = power_of_two(plan.topk);
    const uint32_t width_mask = width == 32 ? ~0u : (1u << width) - 1;
    for (;;) {
        const int first = take_tickets(&workspace.tickets->combine, kCombineRows);
        if (first >= num_rows) break;

        RowMeta meta{};
        if (lane < kCombineRows) meta = plan.row_meta[first + lane];
        uint32_t todo = __ballot_sync(~0u, lane < kCombineRows and meta.is_last());
        while (todo != 0) {
            // As many tokens as have room for their routes in a warp: what is to be known of them
            // is loaded, and waited for, at once.
            const int count = min(__popc(todo), 32 / width);
            const int nth = min(lane / width, count - 1), k = lane % width;
            const int at = int(__fns(todo, 0, nth + 1));
            const int src_rank = __shfl_sync(~0u, int(meta.src_rank), at);
            const int token = __shfl_sync(~0u, meta.token, at);
            const int slot = __shfl_sync(~0u, int(meta.slot), at);
            int row = -1;
            if (lane / width < count and k < plan.topk) row = plan.rows_of(src_rank, token)[k];
            if (row >= 0) {
                wait_count(args.watchdog, Role::kCombineResult, row / BLOCK_M,
                           workspace.tile_ready + workspace.tile_counter(1, row / BLOCK_M),
                           block_target);
            }
            __syncwarp();
            const uint32_t all_routes = __ballot_sync(~0u, row >= 0);
            for (int i = 0; i < count; ++i, todo &= todo - 1) {
                const int base = i * width;
                const uint32_t routes = all_routes & (width_mask << base);
                if (__popc(routes) == 1) continue;  // its finishers have sent it
                char* target =
                    heap.result(__shfl_sync(~0u, src_rank, base), __shfl_sync(~0u, token, base),
                                __shfl_sync(~0u, slot, base));
                sum_rows<T, kUnroll>(target, int(row_bytes / 16), __popc(routes), [&](int n) {
                    const int from = int(__fns(routes, 0, n + 1));
                    return args.result + __shfl_sync(~0u, row, from) * row_bytes;
                });
            }
            if constexpr (kIsBackward) {
                if (row >= 0) {
                    heap.dprobs(src_rank, token)[k] =
                        sum_dprob(args.dprob_partial + int64_t(row) * args.num_n_tiles[0],
                                  args.num_n_tiles[0]);
                }
            }
        }
        __syncwarp();
        if (lane < kCombineRows and meta.is_last()) {
            ptx::fence_acq_rel_sys();
            ptx::st_relaxed_sys(heap.result_signal(meta.src_rank, meta.token, rank),
                                current_epoch(workspace));
            atomicAdd_block(&counters().results_pushed[meta.src_rank], 1u);
        }
    }
}

__device__ __forceinline__ void scatter_dprobs(const LayerArgs& args, int token) {
    const int lane = threadIdx.x % 32, num_experts = args.shape.num_experts;
    const int topk = args.plan.topk;
    const int64_t row = int64_t(token) * num_experts;
    for (int expert = lane; expert < num_experts; expert += 32) {
        store_float(args.grad_probs, args.grad_probs_dtype, row + expert, 0.0f);
    }
    __syncwarp();
    if (lane >= topk) return;
    const int expert = args.plan.own_experts[int64_t(token) * topk + lane];
    if (expert >= 0) {
        store_float(args.grad_probs, args.grad_probs_dtype, row + expert,
                    args.heap.dprobs(args.shape.rank, token)[lane]);
    }
}

// A chunk of tokens is one line of result signals: as many tokens as have room in a warp with a
// lane for every rank. Each CTA reduces its own chunks, in whatever order they become complete.
struct ReduceChunks {
    int width;  // lanes of a token
    int num_tokens;

    __device__ explicit ReduceChunks(const LayerArgs& args)
        : width(power_of_two(args.shape.num_ranks)), num_tokens(args.num_tokens) {}

    __device__ __forceinline__ int tokens_per_chunk() const { return 32 / width; }
    __device__ __forceinline__ int count() const {
        return ceil_div(num_tokens, tokens_per_chunk());
    }
};

template <class T, bool kIsBackward, int kUnroll>
__device__ __forceinline__ void reduce_token(const LayerArgs& args, int token, int num_shares) {
    const Heap& heap = args.heap;
    const int rank = args.shape.rank;
    const int64_t row_bytes = heap.hidden * 2;
    sum_rows<T, kUnroll>(args.out + token * row_bytes, int(row_bytes / 16), num_shares,
                         [&](int slot) { return heap.result(rank, token, slot); });
    if constexpr (kIsBackward) scatter_dprobs(args, token);
}

enum class Progress { kNone, kSome, kFinished };

// Sums all ranks' shares of those tokens of a chunk that are complete and not yet taken by another
// warp. With `must_wait` it waits for the first one that is not. Scope: one warp.
template <class T, bool kIsBackward, int kUnroll>
__device__ __forceinline__ Progress
reduce_chunk(const LayerArgs& args, const ReduceChunks& chunks, int chunk, bool must_wait) {
    const uint32_t epoch = current_epoch(args.workspace);  // anew, for want of a register
    const int lane = threadIdx.x % 32, width = chunks.width;
    const int first = chunk * chunks.tokens_per_chunk(), nth = lane / width, src = lane % width;
    const int in_chunk = min(chunks.tokens_per_chunk(), args.num_tokens - first);
    const uint32_t all = in_chunk == 32 ? ~0u : (1u << in_chunk) - 1;
    uint32_t* taken_word = args.workspace.reduced + chunk;
    uint32_t taken = *static_cast<volatile uint32_t*>(taken_word);
    taken = __shfl_sync(~0u, taken, 0);
    if (taken == all) return Progress::kFinished;

    const uint32_t ranks = nth < in_chunk ? args.plan.own_ranks[first + nth] : 0;
    const uint32_t* signal = args.heap.result_signal(args.shape.rank, first + nth, src);
    const bool is_awaited = nth < in_chunk and src < args.shape.num_ranks and (ranks >> src & 1);
    bool is_here = not is_awaited or * static_cast<const volatile uint32_t*>(signal) == epoch;
    if (must_wait) {
        const int next = __ffs(all & ~taken) - 1;
        if (nth == next and is_awaited) {
            wait_for(
                args.watchdog, {Role::kReduceResult, src, first + nth, epoch},
                [=] { return ptx::ld_acquire_sys(signal); },
                [=](uint32_t seen) { return seen == epoch; });
            is_here = true;
        }
        __syncwarp();
    }
    const uint32_t lanes_here = __ballot_sync(~0u, is_here);
    const uint32_t token_lanes = width == 32 ? ~0u : (1u << width) - 1;
    uint32_t ready = __ballot_sync(~0u, (lanes_here >> (nth * width) & token_lanes) == token_lanes);
    // One bit per token, from the first of its lanes.
    uint32_t complete = 0;
    for (int i = 0; i < in_chunk; ++i) complete |= (ready >> (i * width) & 1) << i;
    complete &= ~taken;
    if (complete == 0) return Progress::kNone;
    if (lane == 0) taken = atomicOr(taken_word, complete);
    taken = __shfl_sync(~0u, taken, 0);
    ptx::fence_acq_rel_sys();  // the signals came before what they tell of is read
    __syncwarp();
    for (uint32_t mine = complete & ~taken; mine; mine &= mine - 1) {
        const int i = __ffs(mine) - 1;
        reduce_token<T, kIsBackward, kUnroll>(args, first + i,
                                              __popc(__shfl_sync(~0u, ranks, i * width)));
    }
    return (taken | complete) == all ? Progress::kFinished : Progress::kSome;
}

// Reduces this CTA's tokens until all of them are taken. Scope: one warp; any number share the
// work. What is not there yet is waited for, with a bound.
template <class T, bool kIsBackward, int kUnroll>
__device__ __forceinline__ void reduce_results(const LayerArgs& args) {
    const ReduceChunks chunks(args);
    bool must_wait = false;
    for (;;) {
        bool is_finished = true, moved = false;
        for (int chunk = blockIdx.x; chunk < chunks.count(); chunk += gridDim.x) {
            const Progress progress = reduce_chunk<T, kIsBackward, kUnroll>(
                args, chunks, chunk, must_wait and is_finished);
            is_finished &= progress == Progress::kFinished;
            moved |= progress == Progress::kSome;
        }
        if (is_finished) return;
        must_wait = not moved;
    }
}

}  // namespace flashmoe
