// Who gets which row. Routing is walked in chunks of 32 tokens, one warp each, one token per lane;
// chunks of all sources are interleaved, own rank first, so that no rank is pulled from by all
// others at once. Row = expert's segment + rows of earlier chunks + rank within the chunk: a
// function of the routing alone, hence the same at every run.
#pragma once

#include "flashmoe/comm/heap.cuh"
#include "flashmoe/moe/plan.cuh"

namespace flashmoe {

struct Chunk {
    int src_rank;
    int token;  // this lane's token, or -1 past the source's last
};

__device__ __forceinline__ Chunk chunk_at(const Shape& s, const int* num_tokens, int index) {
    const int src = (s.rank + index % s.num_ranks) % s.num_ranks;
    const int token = index / s.num_ranks * 32 + int(threadIdx.x % 32);
    return {src, token < num_tokens[src] ? token : -1};
}

// Calls visit(k, local_expert, rank_in_chunk, route) for every route of this lane's token to an
// expert of this rank, counting into `counts`. Scope: one warp; all lanes stay together.
template <class Visit>
__device__ __forceinline__ void walk_chunk(
    const Shape& s, const Heap& heap, uint32_t epoch, Chunk chunk, uint32_t* counts, Visit visit) {
    const uint32_t lanes_below = (1u << (threadIdx.x % 32)) - 1;
    for (int k = 0; k < s.topk; ++k) {
        Route route{-1, 0.0f};
        if (chunk.token >= 0) route = heap.routes(s.rank, epoch, chunk.src_rank, chunk.token)[k];
        const int expert = route.expert - s.first_expert();
        const bool ours = route.expert >= 0 and expert >= 0 and expert < s.num_local_experts();
        const uint32_t same = __match_any_sync(~0u, ours ? expert : -1);
        const uint32_t before = ours ? counts[expert] : 0;
        __syncwarp();
        if (ours and (same & lanes_below) == 0) counts[expert] = before + __popc(same);
        __syncwarp();
        if (ours) visit(k, expert, before + __popc(same & lanes_below), route);
    }
}

// Exclusive prefix sum over one expert's chunk counts, in place; returns the total. Scope: a warp.
__device__ __forceinline__ uint32_t scan_chunks(uint32_t* counts, int num_chunks) {
    const int lane = threadIdx.x % 32;
    uint32_t carry = 0;
    for (int base = 0; base < num_chunks; base += 32) {
        const int chunk = base + lane;
        const uint32_t count = chunk < num_chunks ? counts[chunk] : 0;
        uint32_t sum = count;
        for (int step = 1; step < 32; step *= 2) {
            const uint32_t below = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += below;
        }
        if (chunk < num_chunks) counts[chunk] = carry + sum - count;
        carry += __shfl_sync(~0u, sum, 31);
    }
    return carry;
}

// Marks the rows of this lane's token: first, last, and which result slot is ours.
__device__ __forceinline__ void describe_rows(
    const Shape& s, const Heap& heap, const Plan& plan, uint32_t epoch, Chunk chunk) {
    if (chunk.token < 0) return;
    const Route* routes = heap.routes(s.rank, epoch, chunk.src_rank, chunk.token);
    const int32_t* rows = plan.rows_of(chunk.src_rank, chunk.token);
    int first = INT32_MAX, last = -1;
    uint32_t ranks = 0;
    for (int k = 0; k < s.topk; ++k) {
        if (routes[k].expert >= 0) ranks |= 1u << (routes[k].expert / s.num_local_experts());
        if (rows[k] >= 0) {
            first = min(first, rows[k]);
            last = max(last, rows[k]);
        }
    }
    const uint8_t slot = uint8_t(__popc(ranks & ((1u << s.rank) - 1)));
    for (int k = 0; k < s.topk; ++k) {
        if (const int row = rows[k]; row >= 0) {
            const uint8_t flags =
                (row == first ? RowMeta::kOwner : 0) | (row == last ? RowMeta::kLast : 0);
            plan.row_meta[row] = {chunk.token, uint8_t(chunk.src_rank), slot, flags, 0};
        }
    }
    if (chunk.src_rank == s.rank) plan.own_ranks[chunk.token] = ranks;
}

}  // namespace flashmoe
