// Combine: the rows of a token on this rank are summed here, in float32 and in a fixed order, and
// one row goes to the token's rank; that rank sums the shares of all ranks in rank order. Routing
// weights were applied before fc2, so both are plain sums, and repeatable bit by bit.
#pragma once

#include "flashmoe/comm/heap.cuh"
#include "flashmoe/comm/wait.cuh"
#include "flashmoe/moe/plan.cuh"
#include "flashmoe/tile/epilogue.cuh"

namespace flashmoe {

constexpr int kCombineRows = 8;  // rows looked at, or tokens reduced, per ticket

__device__ __forceinline__ void add_bf16x8(float (&sum)[8], const uint4& loaded) {
    const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const float2 pair = unpack_bf16(words[w]);
        sum[2 * w] += pair.x;
        sum[2 * w + 1] += pair.y;
    }
}

// Sums `count` rows of `chunks` 16-byte chunks into `target`; row i starts at source(i). Per lane,
// kUnroll chunks of two rows are in flight. Scope: one warp.
template <int kUnroll, class Source>
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
                add_bf16x8(sum[u], loaded[u]);
                add_bf16x8(sum[u], loaded_next[u]);
            }
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            if (base + u * 32 >= chunks) continue;
            reinterpret_cast<uint4*>(target)[base + u * 32] = {
                pack_bf16(sum[u][0], sum[u][1]), pack_bf16(sum[u][2], sum[u][3]),
                pack_bf16(sum[u][4], sum[u][5]), pack_bf16(sum[u][6], sum[u][7])};
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
template <bool kIsBackward, int kUnroll>
__device__ __forceinline__ void deliver_results(const Heap& heap,
                                                const Plan& plan,
                                                const Workspace& workspace,
                                                const Watchdog& watchdog,
                                                int rank,
                                                uint32_t epoch,
                                                int num_row_blocks,
                                                uint32_t block_target,
                                                const char* result,
                                                const float* dprob_partial,
                                                int num_dprob_tiles) {
    const int lane = threadIdx.x % 32;
    const int64_t row_bytes = heap.hidden * 2;
    const int num_rows = num_row_blocks * BLOCK_M;
    int results_pushed = 0;
    for (;;) {
        const int first = take_tickets(&workspace.tickets->combine, kCombineRows);
        if (first >= num_rows) break;

        RowMeta meta{};
        if (lane < kCombineRows) meta = plan.row_meta[first + lane];
        const uint32_t last_rows = __ballot_sync(~0u, lane < kCombineRows and meta.is_last());
        for (uint32_t todo = last_rows; todo; todo &= todo - 1) {
            const RowMeta token = plan.row_meta[first + __ffs(todo) - 1];
            const int row = lane < plan.topk ? plan.rows_of(token.src_rank, token.token)[lane] : -1;
            if (row >= 0) {
                wait_count(watchdog, Role::kCombineResult, row / BLOCK_M,
                           workspace.result_ready + row / BLOCK_M, block_target);
            }
            __syncwarp();
            const uint32_t routes = __ballot_sync(~0u, row >= 0);
            const int nth_row = __shfl_sync(~0u, row, __fns(routes, 0, lane + 1) & 31);
            sum_rows<kUnroll>(heap.result(token.src_rank, token.token, token.slot),
                              int(row_bytes / 16), __popc(routes), [&](int i) {
                                  return result + __shfl_sync(~0u, nth_row, i) * row_bytes;
                              });
            if constexpr (kIsBackward) {
                if (row >= 0) {
                    heap.dprobs(token.src_rank, token.token)[lane] =
                        sum_dprob(dprob_partial + int64_t(row) * num_dprob_tiles, num_dprob_tiles);
                }
            }
        }
        __syncwarp();
        if (lane < kCombineRows and meta.is_last()) {
            ptx::fence_acq_rel_sys();
            ptx::st_relaxed_sys(heap.result_signal(meta.src_rank, meta.token, rank), epoch);
            results_pushed += meta.src_rank != rank;
        }
        __syncwarp();
    }
    if (results_pushed) atomicAdd(&workspace.traffic->results_pushed, results_pushed);
}

template <class T>
__device__ __forceinline__ void scatter_dprobs(
    T* row, int num_experts, int topk, const int32_t* experts, const float* dprobs) {
    const int lane = threadIdx.x % 32;
    for (int expert = lane; expert < num_experts; expert += 32) row[expert] = T(0.0f);
    __syncwarp();
    if (lane < topk and experts[lane] >= 0) row[experts[lane]] = T(dprobs[lane]);
}

// Sums every rank's share of this rank's tokens. Scope: one warp; any number share the work.
template <bool kIsBackward, int kUnroll>
__device__ __forceinline__ void reduce_results(const Heap& heap,
                                               const Plan& plan,
                                               const Workspace& workspace,
                                               const Watchdog& watchdog,
                                               int rank,
                                               uint32_t epoch,
                                               int num_tokens,
                                               int num_experts,
                                               char* out,
                                               void* grad_probs,
                                               bool grad_probs_is_bf16) {
    const int lane = threadIdx.x % 32;
    const int64_t row_bytes = heap.hidden * 2;
    for (;;) {
        const int first = take_tickets(&workspace.tickets->reduce, kCombineRows);
        if (first >= num_tokens) return;
        const int end = min(first + kCombineRows, num_tokens);
        for (int token = first; token < end; ++token) {
            const uint32_t ranks = plan.own_ranks[token];
            if (lane < heap.num_ranks and (ranks >> lane & 1)) {
                const uint32_t* signal = heap.result_signal(rank, token, lane);
                wait_or_trap(
                    watchdog, Role::kReduceResult, lane, token, epoch,
                    [=] { return ptx::ld_acquire_sys(signal); },
                    [=](uint32_t seen) { return seen == epoch; });
            }
            __syncwarp();
            sum_rows<kUnroll>(out + token * row_bytes, int(row_bytes / 16), __popc(ranks),
                              [&](int slot) { return heap.result(rank, token, slot); });
            if constexpr (kIsBackward) {
                const int32_t* experts = plan.own_experts + int64_t(token) * plan.topk;
                const float* dprobs = heap.dprobs(rank, token);
                const int64_t at = int64_t(token) * num_experts;
                if (grad_probs_is_bf16) {
                    scatter_dprobs(static_cast<__nv_bfloat16*>(grad_probs) + at, num_experts,
                                   plan.topk, experts, dprobs);
                } else {
                    scatter_dprobs(static_cast<float*>(grad_probs) + at, num_experts, plan.topk,
                                   experts, dprobs);
                }
            }
        }
    }
}

}  // namespace flashmoe
