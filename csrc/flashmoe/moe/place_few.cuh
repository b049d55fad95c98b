// The plan of a rank that is alone and has few tokens, whose routing is a map. Each CTA counts all
// routes for itself, so that no barrier of the grid stands between the counts and the places; rows
// are those of place.cuh. Before the one barrier that is left, each CTA knows the rows of some
// tokens, and may copy these.
#pragma once

#include "flashmoe/moe/place.cuh"

namespace flashmoe {

// True if a launch plans so. Every CTA reads the whole map, once, and no CTA has more than a chunk
// to place.
__device__ __forceinline__ bool plans_few(const LayerArgs& args) {
    constexpr int64_t kMostMapBytes = 64 * 1024;
    const Shape& s = args.shape;
    if (kIsFp8 or not has_own_routes(args) or args.choices.indices != nullptr) return false;
    return not s.is_rank_invariant() and s.chunks_per_rank() <= int(gridDim.x) and
           int64_t(s.max_tokens) * s.num_experts <= kMostMapBytes;
}

// The same where all warps copy all rows, and make all pads, before they wait for the others'
// plans: where the grid's warps have at most three rows each.
__device__ __forceinline__ bool copies_with_plan(const LayerArgs& args) {
    constexpr int kMostRounds = 3;
    if (args.routing_map == nullptr or args.rows == nullptr) return false;
    if (args.row_access != RowAccess::kFirstCopied) return false;
    const int num_warps = int(gridDim.x * blockDim.x / 32);
    return plans_few(args) and args.num_tokens * args.shape.topk <= kMostRounds * num_warps;
}

// A token's routes by ascending expert, as its row of the map has them. Scope: one thread.
class RoutesOfMap {
 public:
    // `selected`: those among the first kLaneExperts experts, a bit each; none of no token.
    __device__ __forceinline__ RoutesOfMap(const LayerArgs& args, int token, uint32_t selected)
        : args_(args), token_(token), left_(selected) {}
    __device__ __forceinline__ static uint32_t first_selected(const LayerArgs& args, int token) {
        return token >= 0 ? selected_experts(args, token, 0) : 0;
    }
    // The next expert, or -1 past the last.
    __device__ __forceinline__ int next() {
        while (left_ == 0) {
            first_ += kLaneExperts;
            if (token_ < 0 or first_ >= args_.shape.num_experts) return -1;
            left_ = selected_experts(args_, token_, first_);
        }
        const int expert = first_ + __ffs(left_) - 1;
        left_ &= left_ - 1;
        return expert;
    }

 private:
    const LayerArgs& args_;
    int token_, first_ = 0;
    uint32_t left_;
};

// The chunk that a CTA places, together with some others. The first of them describes its rows.
struct FewShare {
    int chunk, part, parts;

    __device__ __forceinline__ explicit FewShare(const Shape& s) {
        const int chunks = max(1, s.chunks_per_rank());
        chunk = int(blockIdx.x) % chunks;
        part = int(blockIdx.x) / chunks;
        parts = int(gridDim.x) / chunks;
    }
    __device__ __forceinline__ bool has_rows() const { return part < parts; }
};

// Counts the routes of all tokens, and makes of each chunk's counts the place of its first row
// among its expert's. Scope: the planners of a CTA.
__device__ __forceinline__ void count_few(const LayerArgs& args, const PlacementSmem& smem) {
    const Shape& s = args.shape;
    const int num_slots = s.num_local_slots();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_warps = Planners::size() / 32;
    constexpr int kAtOnce = 3;  // chunks whose loads are on their way together
    const auto token_of = [&](int chunk) {
        const int token = chunk * 32 + lane;
        return token < args.num_tokens ? token : -1;
    };
#pragma unroll 1
    for (int first = warp; first < smem.num_chunks; first += kAtOnce * num_warps) {
        uint32_t selected[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            selected[i] = RoutesOfMap::first_selected(args, token_of(first + i * num_warps));
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int chunk = first + i * num_warps;
            RoutesOfMap routes(args, token_of(chunk), selected[i]);
#pragma unroll 1
            for (int expert = routes.next(); expert >= 0; expert = routes.next()) {
                atomicAdd_block(smem.counts + chunk * num_slots + expert, 1u);
            }
        }
    }
    Planners::sync();
#pragma unroll 1
    for (int expert = warp; expert < num_slots; expert += num_warps) {
        uint32_t rows = 0;
#pragma unroll 1
        for (int first = 0; first < smem.num_chunks; first += 32) {
            const int chunk = first + lane;
            uint32_t* count = smem.counts + chunk * num_slots + expert;
            const uint32_t own = chunk < smem.num_chunks ? *count : 0;
            uint32_t up_to = own;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const uint32_t before = __shfl_up_sync(~0u, up_to, step);
                if (lane >= step) up_to += before;
            }
            if (chunk < smem.num_chunks) *count = rows + up_to - own;
            rows += __shfl_sync(~0u, up_to, 31);
        }
        if (lane == 0) {
            smem.expert_rows[expert] = int(rows);
            smem.expert_own[expert] = early_units(args, int(rows));
        }
    }
    Planners::sync();
}

// Gives rows to the routes of this CTA's chunk, and describes them if it is the chunk's first CTA.
// A token with more routes than top-k is refused. Scope: one warp.
__device__ __forceinline__ void place_few(const LayerArgs& args,
                                          const PlacementSmem& smem,
                                          const FewShare& share) {
    const Shape& s = args.shape;
    const Plan& plan = args.plan;
    const int num_slots = s.num_local_slots(), lane = threadIdx.x % 32;
    const int nth = share.chunk * 32 + lane, token = nth < args.num_tokens ? nth : -1;
    const bool describes = share.part == 0;
    uint32_t* counts = smem.counts + share.chunk * num_slots;
#pragma unroll 1
    for (int expert = lane; expert < num_slots; expert += 32) {
        counts[expert] += uint32_t(smem.expert_block[expert]) * BLOCK_M;
    }
    __syncwarp();
    RoutesOfMap routes(args, token, RoutesOfMap::first_selected(args, token));
    int first_row = INT32_MAX, last_row = -1;
#pragma unroll 1
    for (int k = 0; k < s.topk; ++k) {
        const int expert = routes.next();
        __syncwarp();
        const uint32_t place = take_place(counts, expert);
        const int row = expert >= 0 ? int(place) : -1;
        smem.token_rows[lane * s.topk + k] = row;
        if (row >= 0) {
            first_row = min(first_row, row);
            last_row = max(last_row, row);
        }
        if (not describes or token < 0) continue;
        const int64_t at = int64_t(token) * s.topk + k;
        plan.own_columns[at] = expert;
        plan.rows_of(s.rank, token)[k] = row;
        if (row < 0) continue;
        const float prob =
            load_as_float(args.probs, args.probs_dtype, int64_t(token) * s.num_experts + expert);
        plan.row_prob[row] = prob;
        if (isnan(prob)) {
            args.watchdog.raise(kFaultRouting, Wait::kRouting, -1, token, 0, expert);
        }
    }
    if (not describes or token < 0) return;
    if (routes.next() >= 0) {
        int num_routes = s.topk + 1;
        while (routes.next() >= 0) ++num_routes;
        args.watchdog.raise(kFaultRouting, Wait::kRouting, -1, token, s.topk, num_routes);
    }
    plan.own_ranks[token] = last_row >= 0 ? 1u << s.rank : 0u;
#pragma unroll 1
    for (int k = 0; k < s.topk; ++k) {
        const int row = smem.token_rows[lane * s.topk + k];
        if (row < 0) continue;
        const uint8_t flags = (row == first_row ? RowMeta::kOwner : 0) |
                              (row == last_row ? RowMeta::kLast : 0) | RowMeta::kHome;
        plan.row_meta[row] = {token, uint8_t(s.rank), 0, flags, 0};
    }
}

// Copies the rows of a chunk's tokens, shared out over its CTAs, and makes pad rows, shared out
// over the grid. Scope: the planners of the grid.
__device__ __forceinline__ void copy_few(const LayerArgs& args,
                                         const PlacementSmem& smem,
                                         const FewShare& share) {
    constexpr int kUnroll = 8;
    const int64_t begin = Trace::now();
    const Shape& s = args.shape;
    const int chunks = s.hidden / 8, lane = threadIdx.x % 32;
    const int num_warps = Planners::size() / 32, warp = threadIdx.x / 32;
    auto* rows = reinterpret_cast<uint4*>(args.rows);
    // Zeros, since weight gradients sum over pads. The last warps begin, and count them last.
    const int num_slots = s.num_local_slots();
    const int nth = (num_warps - 1 - warp) * int(gridDim.x) + int(blockIdx.x);
    const int per_expert = max(1, num_warps * int(gridDim.x) / num_slots);
    int pads = 0, pad_block = 0;
    if (nth < per_expert * num_slots) {
        const int expert = nth % num_slots;
        const int end = smem.expert_block[expert + 1] * BLOCK_M;
        int row = smem.expert_block[expert] * BLOCK_M + smem.expert_rows[expert] + nth / num_slots;
        pad_block = end / BLOCK_M - 1;
#pragma unroll 1
        for (; row < end; row += per_expert, ++pads) {
            uint4* target = rows + int64_t(row) * chunks;
#pragma unroll 1
            for (int i = lane; i < chunks; i += 32) target[i] = uint4{};
        }
    }
    const int first = 32 * share.part / share.parts, last = 32 * (share.part + 1) / share.parts;
#pragma unroll 1
    for (int i = first + warp; i < last and share.has_rows(); i += num_warps) {
        const int32_t* of_token = smem.token_rows + i * s.topk;
        const int to = lane < s.topk ? of_token[lane] : -1;
        if (__ballot_sync(~0u, to >= 0) == 0) continue;
        const auto* source =
            reinterpret_cast<const uint4*>(args.x) + int64_t(share.chunk * 32 + i) * chunks;
#pragma unroll 1
        for (int at = lane; at < chunks; at += 32 * kUnroll) {
            uint4 loaded[kUnroll];
#pragma unroll
            for (int j = 0; j < kUnroll; ++j) {
                if (at + j * 32 < chunks) loaded[j] = source[at + j * 32];
            }
#pragma unroll 1
            for (int k = 0; k < s.topk; ++k) {
                if (of_token[k] < 0) continue;
                uint4* target = rows + int64_t(of_token[k]) * chunks;
#pragma unroll
                for (int j = 0; j < kUnroll; ++j) {
                    if (at + j * 32 < chunks) target[at + j * 32] = loaded[j];
                }
            }
        }
        __syncwarp();
        if (to >= 0) protocol::publish<Atomics>(args.workspace.rows_ready + to / BLOCK_M);
        if (lane == 0) atomicAdd_block(&counters().rows_pulled[s.rank], 1u);
    }
    __syncwarp();
    if (lane == 0 and pads > 0) {
        protocol::publish<Atomics>(args.workspace.rows_ready + pad_block, uint32_t(pads));
        atomicAdd_block(&counters().pad_rows_made, uint32_t(pads));
    }
    __syncwarp();
    args.watchdog.trace.add(event_of(Span::kDispatch), kFirstRows, begin);
}

// From the routing map to the plan. False if the rank refuses its routing. Scope: the planners of
// the grid.
__device__ __forceinline__ bool plan_few(const LayerArgs& args, uint32_t epoch, void* smem_base) {
    const Shape& s = args.shape;
    const PlacementSmem smem(s, smem_base, s.chunks_per_rank(), 0);
    const FewShare share(s);
    int64_t begin = Trace::now();
    const auto traced = [&](int step) {
        args.watchdog.trace.add(event_of(Span::kPlan), step, begin);
        begin = Trace::now();
    };
    if (blockIdx.x == 0 and threadIdx.x == 0) {
        if (args.refusal != nullptr) args.watchdog.repeat(args.refusal);
        *args.heap.row_block_bound(s.rank, epoch, s.rank) = args.row_bound;
    }
    smem.clear(s);
    Planners::sync();
    count_few(args, smem);
    traced(0);
    lay_out_experts(args, epoch, smem);
    bool may_go_on = own_rows_fit(args, uint32_t(smem.expert_block[s.num_local_slots()]));
    if (may_go_on) {
        if (threadIdx.x < 32 and share.has_rows()) place_few(args, smem, share);
        describe_experts(args, smem);
    }
    Planners::sync();
    may_go_on = may_go_on and Atomics::load(args.workspace.raised) == 0;
    traced(1);
    const bool copies = copies_with_plan(args);
    const bool goes_on =
        grid_barrier(args.watchdog, &args.workspace.tickets->barrier[0], may_go_on, [&] {
            if (copies and may_go_on) copy_few(args, smem, share);
        });
    if (threadIdx.x == 0) {  // the loader's thread, which reads these first
        ptx::prefetch_l1(args.plan.header);
        ptx::prefetch_l1(args.plan.units);
    }
    traced(2);
    return goes_on;
}

}  // namespace flashmoe
