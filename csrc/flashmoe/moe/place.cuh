// Decides which route gets which row. Routing is walked in chunks of 32 tokens, one warp each, one
// token per lane. The own rank's chunks come first, since their rows need no link, then those of
// all others, interleaved, so that not all ranks pull from one at once. A row is the expert's
// segment + rows of earlier chunks + rank within the chunk: a function of the routing alone, the
// same at every run. If a layer is rank-invariant, chunks come in the order of ranks, and rows in
// that of tokens within a chunk, too.
#pragma once

#include "flashmoe/comm/grid.cuh"
#include "flashmoe/moe/publish.cuh"
#include "flashmoe/moe/replicas.cuh"
#include "flashmoe/protocol/tree.h"

namespace flashmoe {

struct Chunk {
    int src_rank;
    int token;  // this lane's token, or -1 past the source's last
};

__device__ __forceinline__ Chunk chunk_at(const Shape& s, const int* num_tokens, int index) {
    const int per_rank = s.chunks_per_rank();
    int src, chunk;
    if (s.is_rank_invariant()) {
        src = index / per_rank, chunk = index % per_rank;
    } else {
        const int behind = index - per_rank, others = max(1, s.num_ranks - 1);
        const int away = behind < 0 ? 0 : 1 + behind % others;
        src = (s.rank + away) % s.num_ranks, chunk = behind < 0 ? index : behind / others;
    }
    const int token = chunk * 32 + int(threadIdx.x % 32);
    return {src, token < num_tokens[src] ? token : -1};
}

// Values that a loop that is not unrolled reads some turns ahead, since its loads take longer than
// a turn.
template <class T>
struct Ahead {
    static constexpr int kTurns = 4;
    T values[kTurns];

    template <class At>
    __device__ __forceinline__ explicit Ahead(At at) {
#pragma unroll
        for (int i = 0; i < kTurns; ++i) values[i] = at(i);
    }
    template <class At>
    __device__ __forceinline__ T take(int k, At at) {
        const T value = values[0];
#pragma unroll
        for (int i = 1; i < kTurns; ++i) values[i - 1] = values[i];
        values[kTurns - 1] = at(k + kTurns);
        return value;
    }
};

// The place of this lane's route among those to its local slot, if that is not below 0, as `counts`
// has counted them; routes of one slot follow one another by lane. Scope: one warp.
__device__ __forceinline__ uint32_t take_place(uint32_t* counts, int local) {
    const uint32_t lanes_below = (1u << (threadIdx.x % 32)) - 1;
    const bool is_ours = local >= 0;
    const uint32_t same = __match_any_sync(~0u, local);
    const uint32_t before = is_ours ? counts[local] : 0;
    __syncwarp();
    if (is_ours and (same & lanes_below) == 0) counts[local] = before + __popc(same);
    __syncwarp();
    return before + __popc(same & lanes_below);
}

// Walks the routes of a chunk's tokens, one lane per token. The first walk counts them: routes to
// local slots in `counts`, routes to any slot in `selections`. The second walk gives rows to the
// routes to local slots, and describes them: `counts[e]` is then the chunk's first row for slot e.
// `slot_of` names the source's slot of each expert; null where experts are at home. Scope: one
// warp.
__device__ __forceinline__ void walk_chunk(const LayerArgs& args,
                                           uint32_t epoch,
                                           Chunk chunk,
                                           const uint16_t* slot_of,
                                           uint32_t* counts,
                                           uint32_t* selections,
                                           bool is_placing) {
    const Shape& s = args.shape;
    const Plan& plan = args.plan;
    const bool is_token = chunk.token >= 0;
    const Route* routes =
        is_token ? args.heap.routes(s.rank, epoch, chunk.src_rank, chunk.token) : nullptr;
    int32_t* rows = is_token ? plan.rows_of(chunk.src_rank, chunk.token) : nullptr;
    const auto route_at = [&](int k) {
        return is_token and k < s.topk ? routes[k] : Route{-1, 0.0f};
    };
    uint32_t ranks = 0;  // that compute for the token
    int first_row = INT32_MAX, last_row = -1;
    Ahead<Route> next(route_at);
#pragma unroll 1
    for (int k = 0; k < s.topk; ++k) {
        const Route route = next.take(k, route_at);
        const bool is_route = route.expert >= 0;
        int slot = route.expert;
        if (is_route) slot = slot_of != nullptr ? slot_of[slot] : s.home_slot(slot);
        const int local = slot - s.first_slot();
        const bool is_ours = is_route and local >= 0 and local < s.num_local_slots();
        const uint32_t place = take_place(counts, is_ours ? local : -1);
        if (not is_placing) {
            if (is_route) atomicAdd(selections + slot, 1u);
            continue;
        }
        if (is_route) ranks |= 1u << s.rank_of_slot(slot);
        int row = -1;
        if (is_ours) {
            row = int(place);
            plan.row_prob[row] = route.prob;
            first_row = min(first_row, row);
            last_row = max(last_row, row);
        }
        if (is_token) rows[k] = row;
    }
    if (not is_placing or not is_token) return;
    const uint8_t result_slot = uint8_t(__popc(protocol::slots_before(ranks, s.rank)));
    const bool is_at_home = is_home(ranks, chunk.src_rank);
    const auto row_at = [&](int k) { return k < s.topk ? rows[k] : -1; };
    Ahead<int32_t> row_of(row_at);
#pragma unroll 1
    for (int k = 0; k < s.topk; ++k) {
        const int row = row_of.take(k, row_at);
        if (row < 0) continue;
        const uint8_t flags = (row == first_row ? RowMeta::kOwner : 0) |
                              (row == last_row ? RowMeta::kLast : 0) |
                              (is_at_home ? RowMeta::kHome : 0);
        plan.row_meta[row] = {chunk.token, uint8_t(chunk.src_rank), result_slot, flags, 0};
    }
    if (chunk.src_rank == s.rank) plan.own_ranks[chunk.token] = ranks;
}

// The second walk where rows of an expert are in the order of their tokens, however these are
// divided into chunks: one lane per route, and as many tokens at a time as that leaves room for.
// Scope: one warp.
__device__ __forceinline__ void place_by_token(const LayerArgs& args,
                                               uint32_t epoch,
                                               Chunk chunk,
                                               uint32_t* counts) {
    const Shape& s = args.shape;
    const Plan& plan = args.plan;
    const int width = power_of_two(s.topk), k = int(threadIdx.x) % 32 % width;
#pragma unroll 1
    for (int first = 0; first < 32; first += 32 / width) {
        const int nth = int(threadIdx.x) % 32 / width;
        const int token = __shfl_sync(~0u, chunk.token, first + nth);
        const bool is_here = token >= 0 and k < s.topk;
        Route route{-1, 0.0f};
        if (is_here) route = args.heap.routes(s.rank, epoch, chunk.src_rank, token)[k];
        const bool is_route = route.expert >= 0;
        const int local = route.expert - s.first_slot();
        const bool is_ours = is_route and local >= 0 and local < s.num_local_slots();
        const int row = int(take_place(counts, is_ours ? local : -1));
        uint32_t ranks = is_route ? 1u << s.rank_of_slot(route.expert) : 0;
        int first_row = is_ours ? row : INT32_MAX, last_row = is_ours ? row : -1;
#pragma unroll 1
        for (int step = width / 2; step > 0; step /= 2) {  // over the token's lanes
            ranks |= __shfl_xor_sync(~0u, ranks, step);
            first_row = min(first_row, __shfl_xor_sync(~0u, first_row, step));
            last_row = max(last_row, __shfl_xor_sync(~0u, last_row, step));
        }
        if (not is_here) continue;
        plan.rows_of(chunk.src_rank, token)[k] = is_ours ? row : -1;
        if (chunk.src_rank == s.rank and k == 0) plan.own_ranks[token] = ranks;
        if (not is_ours) continue;
        const uint8_t flags = (row == first_row ? RowMeta::kOwner : 0) |
                              (row == last_row ? RowMeta::kLast : 0) |
                              (is_home(ranks, chunk.src_rank) ? RowMeta::kHome : 0);
        plan.row_prob[row] = route.prob;
        plan.row_meta[row] = {token, uint8_t(chunk.src_rank),
                              uint8_t(__popc(protocol::slots_before(ranks, s.rank))), flags,
                              uint8_t(protocol::leaf_of(local, s.num_experts))};
    }
}

// One CTA's share of the placement, in the shared memory that the pipeline takes over later.
struct PlacementSmem {
    ReplicaSmem replicas;
    uint32_t* counts;       // [chunk of this CTA][local slot]: rows, then the first one's place
    uint32_t* selections;   // [slot]: routes of this CTA's chunks to it
    uint32_t* base;         // [local slot]: rows of earlier CTAs' chunks
    int32_t* expert_rows;   // [local slot]
    int32_t* expert_block;  // [local slot + 1]
    int32_t* expert_unit;   // [local slot + 1]
    int32_t* expert_own;    // [local slot + 1]: units of the own rank's rows before
    int32_t* token_rows;    // [lane][topk]: where few tokens are planned, the rows of a chunk
    int first_chunk;
    int num_chunks;

    // Words that a grid of `num_ctas` needs.
    __host__ __device__ static int64_t words(const Shape& s, int num_ctas) {
        const int64_t local = s.num_local_slots();
        return ReplicaSmem::words(s) + s.chunks_per_cta(num_ctas) * local + s.num_slots() +
               5 * local + 3;
    }
    // Whole lines, since the memory after them belongs to the copy of rows.
    __host__ __device__ static int64_t bytes(const Shape& s, int num_ctas) {
        return align_up<int64_t>(words(s, num_ctas) * int64_t(sizeof(uint32_t)), 128);
    }
    __device__ PlacementSmem(const Shape& s, void* smem)
        : PlacementSmem(s, smem, s.chunks_per_cta(int(gridDim.x)), int(blockIdx.x)) {}
    // With room for `max` chunks, the `nth` so many.
    __device__ PlacementSmem(const Shape& s, void* smem, int max, int nth) : replicas(s, smem) {
        const int local = s.num_local_slots();
        first_chunk = nth * max;
        num_chunks = min(max, s.num_chunks() - first_chunk);  // not above 0 where there are none
        counts = static_cast<uint32_t*>(smem) + ReplicaSmem::words(s);
        selections = counts + int64_t(max) * local;
        base = selections + s.num_slots();
        expert_rows = reinterpret_cast<int32_t*>(base + local);
        expert_block = expert_rows + local;
        expert_unit = expert_block + local + 1;
        expert_own = expert_unit + local + 1;
        token_rows = expert_own + local + 1;
    }
    // Zeroes the counts. Scope: the planners of a CTA.
    __device__ void clear(const Shape& s) const {
#pragma unroll 1
        for (uint32_t* word = counts + threadIdx.x; word < base; word += Planners::size())
            *word = 0;
    }
};

// Waits for the routing of every rank. A peer that does not come, or that refuses its call, is a
// fault on every rank: then it is false, and none goes on. Scope: the planners of a CTA.
__device__ __forceinline__ bool await_routes(const LayerArgs& args,
                                             uint32_t epoch,
                                             int (&num_tokens)[kMaxRanks]) {
    bool is_here = true;
    if (threadIdx.x < args.shape.num_ranks) {
        const uint64_t* signal = args.heap.route_signal(args.shape.rank, epoch, threadIdx.x);
        uint64_t seen = 0;
        is_here = protocol::await_routes<Atomics>(signal, epoch, [&](auto load, auto done) {
            return wait_for(
                args.watchdog, {Wait::kPlanRoutes, int(threadIdx.x), 0, epoch},
                [&] { return seen = load(); }, done);
        });
        if (is_here and RouteSignal::is_refused(seen)) {
            args.watchdog.repeat(args.heap.refusal(args.shape.rank, epoch, threadIdx.x));
            is_here = false;
        }
        num_tokens[threadIdx.x] = is_here ? int(RouteSignal::tokens(seen)) : 0;
    }
    return Planners::all(is_here);
}

// The same where this CTA has written the routes that it places. False if this rank has raised a
// fault, as a thread does that refuses a token's routing: the barrier after the counts tells the
// CTAs that have not seen it. Scope: the planners of a CTA.
__device__ __forceinline__ bool take_own_routes(const LayerArgs& args,
                                                int (&num_tokens)[kMaxRanks]) {
    if (threadIdx.x == 0) num_tokens[args.shape.rank] = args.num_tokens;
    Planners::sync();
    return Atomics::load(args.workspace.raised) == 0;
}

// This CTA's chunks: the same for both walks.
__device__ __forceinline__ void walk_chunks(const LayerArgs& args,
                                            uint32_t epoch,
                                            const PlacementSmem& smem,
                                            const int (&num_tokens)[kMaxRanks],
                                            bool has_table,
                                            bool is_placing) {
    const Shape& s = args.shape;
#pragma unroll 1
    for (int i = int(threadIdx.x / 32); i < smem.num_chunks; i += Planners::size() / 32) {
        const Chunk chunk = chunk_at(s, num_tokens, smem.first_chunk + i);
        uint32_t* counts = smem.counts + i * s.num_local_slots();
        if (is_placing and s.is_rank_invariant()) {
            place_by_token(args, epoch, chunk, counts);
            continue;
        }
        const uint16_t* slot_of =
            has_table ? smem.replicas.slot_of + chunk.src_rank * s.num_experts : nullptr;
        walk_chunk(args, epoch, chunk, slot_of, counts, smem.selections, is_placing);
    }
}

// Adds this CTA's counts to the sums of all CTAs. Scope: the planners of the grid.
__device__ __forceinline__ void share_counts(const LayerArgs& args, const PlacementSmem& smem) {
    const Shape& s = args.shape;
    const int num_slots = s.num_local_slots();
    const int num_own = min(smem.num_chunks, s.chunks_per_rank() - smem.first_chunk);
    Planners::sync();
#pragma unroll 1
    for (int slot = threadIdx.x; slot < s.num_slots(); slot += Planners::size()) {
        if (const uint32_t count = smem.selections[slot]) {
            atomicAdd(args.workspace.selections + slot, count);
        }
    }
#pragma unroll 1
    for (int expert = threadIdx.x; expert < num_slots; expert += Planners::size()) {
        args.workspace.cta_counts[expert * gridDim.x + blockIdx.x] =
            smem.selections[s.first_slot() + expert];
        uint32_t own = 0;
#pragma unroll 1
        for (int i = 0; i < num_own; ++i) {
            own += smem.counts[i * num_slots + expert];
        }
        if (own > 0) atomicAdd(args.workspace.own_selections + expert, own);
    }
}

// After a plan that failed: whether the host of some rank does not wait for its plan, and hence
// learns of the failure late. Scope: a thread, after all routes have come.
__device__ __forceinline__ bool is_heard_late(const LayerArgs& args, uint32_t epoch) {
    bool is_late = false;
#pragma unroll 1
    for (int rank = 0; rank < args.shape.num_ranks; ++rank) {
        const uint32_t word = *args.heap.row_block_bound(args.shape.rank, epoch, rank);
        is_late |= RowBound::blocks(word) != kCounted;
    }
    return is_late;
}

// The ranks that have no backward of this forward, a bit each. Scope: a thread, after all routes
// have come.
__device__ __forceinline__ uint32_t unfollowed_ranks(const LayerArgs& args, uint32_t epoch) {
    uint32_t ranks = 0;
#pragma unroll 1
    for (int rank = 0; rank < args.shape.num_ranks; ++rank) {
        const uint32_t word = *args.heap.row_block_bound(args.shape.rank, epoch, rank);
        ranks |= uint32_t(RowBound::is_unfollowed(word)) << rank;
    }
    return ranks;
}

// Every rank computes every rank's row blocks, so that all agree whether some rank has too many for
// its buffers; false if this warp has found one. Ranks are dealt to the last warps first, since the
// first warps have more experts to place. Scope: a CTA, after all routes are counted.
__device__ __forceinline__ bool rows_fit(const LayerArgs& args, uint32_t epoch) {
    const Shape& s = args.shape;
    const int num_slots = s.num_local_slots(), lane = threadIdx.x % 32;
    const int num_warps = Planners::size() / 32;
    bool fit = true;
#pragma unroll 1
    for (int rank = num_warps - 1 - int(threadIdx.x / 32); rank < s.num_ranks; rank += num_warps) {
        uint32_t blocks = 0;
#pragma unroll 1
        for (int expert = lane; expert < num_slots; expert += 32) {
            blocks +=
                ceil_div<uint32_t>(args.workspace.selections[rank * num_slots + expert], BLOCK_M);
        }
        blocks = __reduce_add_sync(~0u, blocks);
        const uint32_t bound = RowBound::blocks(*args.heap.row_block_bound(s.rank, epoch, rank));
        if (blocks > bound) {
            fit = false;
            if (lane == 0) {
                args.watchdog.raise(kFaultRows, Wait::kRouting, rank, -1, bound, blocks);
            }
        }
    }
    return fit;
}

// The same for a rank that is alone, which has no others to agree with: `blocks` are its own.
// Scope: the planners of a CTA.
__device__ __forceinline__ bool own_rows_fit(const LayerArgs& args, uint32_t blocks) {
    const uint32_t bound = RowBound::blocks(args.row_bound);
    if (blocks <= bound) return true;
    if (threadIdx.x == 0) {
        args.watchdog.raise(kFaultRows, Wait::kRouting, args.shape.rank, -1, bound, blocks);
    }
    return false;
}

// How many of an expert's units hold the own rank's `rows`, and at most a few others: all units of
// a rank that is alone, where its rows are to lie in the order of their tiles.
__device__ __forceinline__ int early_units(const LayerArgs& args, int rows) {
    constexpr int kFewRows = 64;
    if (args.row_access == RowAccess::kFirstCopied) return ceil_div(rows, kClusterSize * BLOCK_M);
    return (rows + kFewRows) / (kClusterSize * BLOCK_M);
}

// The place of an expert's unit in the order. The first take the own rank's rows, as far as there
// are any: while these are computed, the others' rows travel. All other units follow expert by
// expert.
__device__ __forceinline__ int place_of_unit(
    const PlacementSmem& smem, int num_slots, int most_early, int expert, int unit) {
    const auto early_before = [&](int e) { return min(smem.expert_own[e], most_early); };
    const int before = early_before(expert), early = early_before(expert + 1) - before;
    if (unit < early) return before + unit;
    return early_before(num_slots) + smem.expert_unit[expert] - before + unit - early;
}

// Lays experts out one after another, given their rows and early units. Scope: the planners of a
// CTA; every CTA does it for itself.
__device__ __forceinline__ void lay_out_experts(const LayerArgs& args,
                                                uint32_t epoch,
                                                const PlacementSmem& smem) {
    const Shape& s = args.shape;
    const int num_slots = s.num_local_slots();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0) {
        int block = 0, unit = 0, own = 0, rows = 0;
        const bool has_rank = blockIdx.x == 0 and lane < s.num_ranks;
        const uint32_t bound = has_rank ? *args.heap.row_block_bound(s.rank, epoch, lane) : 0;
#pragma unroll 1
        for (int first = 0; first < num_slots; first += 32) {
            const int expert = first + lane;
            const int own_rows = expert < num_slots ? smem.expert_rows[expert] : 0;
            const int own_blocks = ceil_div(own_rows, BLOCK_M);
            const int own_units = ceil_div(own_blocks, kClusterSize);
            const int own_early = expert < num_slots ? smem.expert_own[expert] : 0;
            int blocks = own_blocks, units = own_units, early = own_early;
            for (int step = 1; step < 32; step *= 2) {
                const int more_blocks = __shfl_up_sync(~0u, blocks, step);
                const int more_units = __shfl_up_sync(~0u, units, step);
                const int more_early = __shfl_up_sync(~0u, early, step);
                if (lane >= step) blocks += more_blocks, units += more_units, early += more_early;
            }
            if (expert < num_slots) {
                smem.expert_block[expert] = block + blocks - own_blocks;
                smem.expert_unit[expert] = unit + units - own_units;
                smem.expert_own[expert] = own + early - own_early;
            }
            block += __shfl_sync(~0u, blocks, 31);
            unit += __shfl_sync(~0u, units, 31);
            own += __shfl_sync(~0u, early, 31);
            rows += __reduce_add_sync(~0u, own_rows);
        }
        const uint32_t unfollowed = __ballot_sync(~0u, RowBound::is_unfollowed(bound));
        if (lane == 0) {
            smem.expert_block[num_slots] = block;
            smem.expert_unit[num_slots] = unit;
            smem.expert_own[num_slots] = own;
            if (blockIdx.x == 0) *args.plan.header = {block, unit, rows, unfollowed};
        }
    }
    Planners::sync();
}

// Places the beginning of each local expert's rows. Scope: a CTA; every CTA computes it for itself.
__device__ __forceinline__ void place_experts(const LayerArgs& args,
                                              uint32_t epoch,
                                              const PlacementSmem& smem) {
    const Shape& s = args.shape;
    const int num_slots = s.num_local_slots();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_warps = Planners::size() / 32;
#pragma unroll 1
    for (int expert = warp; expert < num_slots; expert += num_warps) {
        const uint32_t* counts = args.workspace.cta_counts + expert * gridDim.x;
        const uint32_t all = args.workspace.selections[s.first_slot() + expert];
        const int own = int(args.workspace.own_selections[expert]);
        const int early = s.is_spare(expert) ? 0 : early_units(args, own);
        uint32_t before = 0;
#pragma unroll  // so that all loads are on their way at once
        for (uint32_t cta = lane; cta < kMaxCtas; cta += 32) {
            if (cta < blockIdx.x) before += counts[cta];
        }
        before = __reduce_add_sync(~0u, before);
        if (lane == 0) {
            smem.base[expert] = before;
            smem.expert_rows[expert] = int(all);
            smem.expert_own[expert] = early;
        }
    }
    Planners::sync();
    lay_out_experts(args, epoch, smem);
}

// Fills the tables of experts, units and pad rows. Scope: the planners of the grid.
__device__ __forceinline__ void describe_experts(const LayerArgs& args, const PlacementSmem& smem) {
    const Shape& s = args.shape;
    const Plan& plan = args.plan;
    const int num_slots = s.num_local_slots();
    // The last warps begin, since they have no chunks.
    const int thread = Planners::size() - 1 - int(threadIdx.x);
    // The last CTA has no expert to describe, or as few as any.
    if (cuts_groups(args) and blockIdx.x == gridDim.x - 1 and thread == 0) {
        protocol::cut_groups(
            num_slots, args.least_group, args.most_group,
            [&](int expert) { return smem.expert_unit[expert + 1]; },
            [&](int group, int unit) { plan.groups()[group] = unit; });
    }
#pragma unroll 1
    for (int expert = blockIdx.x; expert < num_slots; expert += gridDim.x) {
        const int begin = smem.expert_block[expert], end = smem.expert_block[expert + 1];
#pragma unroll 1
        for (int row = begin * BLOCK_M + smem.expert_rows[expert] + thread; row < end * BLOCK_M;
             row += Planners::size()) {
            plan.row_meta[row] = {-1, 0, 0, RowMeta::kPad, 0};
            plan.row_prob[row] = 0.0f;
        }
#pragma unroll 1
        for (int block = kClusterSize * thread; block < end - begin;
             block += kClusterSize * Planners::size()) {
            const int halves = ceil_div(smem.expert_rows[expert] - block * BLOCK_M, kHalfRows);
            const int place =
                place_of_unit(smem, num_slots, args.early_units, expert, block / kClusterSize);
            plan.units[place] = {begin + block, int16_t(expert),
                                 int16_t(min(halves, kClusterSize * BLOCK_M / kHalfRows))};
        }
        if (thread == 0) {
            plan.expert_rows[expert] = smem.expert_rows[expert];
            plan.expert_block[expert] = begin;
            if (expert == num_slots - 1) plan.expert_block[num_slots] = end;
        }
    }
}

// Fills the tables of experts, units and pad rows, and makes of each chunk's counts the rows that
// it begins with. Scope: the planners of the grid.
__device__ __forceinline__ void place_units(const LayerArgs& args, const PlacementSmem& smem) {
    const Shape& s = args.shape;
    const int num_slots = s.num_local_slots();
#pragma unroll 1
    for (int expert = threadIdx.x; expert < num_slots; expert += Planners::size()) {
        uint32_t row = uint32_t(smem.expert_block[expert]) * BLOCK_M + smem.base[expert];
#pragma unroll 1
        for (int i = 0; i < smem.num_chunks; ++i) {
            const uint32_t count = smem.counts[i * num_slots + expert];
            smem.counts[i * num_slots + expert] = row;
            row += count;
        }
    }
    Planners::sync();
    describe_experts(args, smem);
}

// Leaves a plan of no rows, on every rank, where planning failed: the host may have launched what
// follows the plan, a backward above all, before it learned of the fault. Ranks that have no
// backward are in its header all the same. Scope: the planners of the grid, which have all stopped.
__device__ __forceinline__ void leave_no_rows(const LayerArgs& args, uint32_t unfollowed) {
    const Plan& plan = args.plan;
    const int first = int(blockIdx.x) * Planners::size() + int(threadIdx.x);
    const int step = int(gridDim.x) * Planners::size(), num_slots = args.shape.num_local_slots();
    const int num_hosts = args.shape.num_ranks * args.shape.spare_slots;
#pragma unroll 1  // by the CTA that may have written them
    for (int i = first; i < num_hosts and blockIdx.x == 0; i += Planners::size()) {
        plan.hosts[i] = -1;
    }
    if (num_hosts > 0 and first < 2) plan.own_routes[first] = 0;
#pragma unroll 1
    for (int i = first; i < args.num_tokens * plan.topk; i += step) plan.own_columns[i] = -1;
#pragma unroll 1
    for (int i = first; i < args.num_tokens; i += step) plan.own_ranks[i] = 0;
#pragma unroll 1
    for (int i = first; i <= num_slots; i += step) {
        plan.expert_block[i] = 0;
        if (i < num_slots) plan.expert_rows[i] = 0;
    }
    if (first == 0) *plan.header = {0, 0, 0, unfollowed};
}

}  // namespace flashmoe
