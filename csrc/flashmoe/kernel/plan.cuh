// The planning launch: publishes this rank's routing and rows to its peers, reads theirs, and
// places every row that the local experts will receive. The backward's opening launch publishes dY
// the same way, along the plan of its forward.
#pragma once

#include <cooperative_groups.h>
#include <cuda_bf16.h>

#include "flashmoe/comm/wait.cuh"
#include "flashmoe/moe/place.cuh"

namespace flashmoe {

constexpr int kPlanThreads = 512;
constexpr int kPlanWarps = kPlanThreads / 32;

// What the host reads after a plan; after the fault record in the mailbox.
struct PlanReport {
    uint32_t epoch;  // written last
    int32_t num_row_blocks;
    int32_t num_rows;
};

struct OpenArgs {
    Shape shape;
    Heap heap;
    Plan plan;
    Workspace workspace;
    Watchdog watchdog;
    uint32_t epoch;
    int num_tokens;
    const char* rows;   // [token][hidden] bf16: x, or dY
    const void* probs;  // [token][expert]
    bool probs_is_bf16;
    const uint8_t* routing_map;  // [token][expert]
    volatile PlanReport* report;
};

__device__ __forceinline__ void zero_counters(const Workspace& workspace) {
    uint32_t* words = reinterpret_cast<uint32_t*>(workspace.tickets);
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < workspace.num_zeroed;
         i += int64_t(gridDim.x) * blockDim.x) {
        words[i] = 0;
    }
}

__device__ __forceinline__ void copy_rows(const OpenArgs& args) {
    const int64_t chunks = int64_t(args.num_tokens) * args.shape.hidden * 2 / sizeof(uint4);
    const uint4* from = reinterpret_cast<const uint4*>(args.rows);
    uint4* to = reinterpret_cast<uint4*>(args.heap.row(args.shape.rank, 0));
    const int64_t step = int64_t(gridDim.x) * blockDim.x;
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + 3 * step < chunks; i += 4 * step) {
        const uint4 a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
        to[i] = a, to[i + step] = b, to[i + 2 * step] = c, to[i + 3 * step] = d;
    }
    for (; i < chunks; i += step) to[i] = from[i];
}

// Turns the rows of the routing map into lists of at most topk routes, and sends them to every
// rank. One warp per token.
__device__ __forceinline__ void publish_routes(const OpenArgs& args) {
    const Shape& s = args.shape;
    const int lane = threadIdx.x % 32;
    const int num_warps = gridDim.x * kPlanWarps;
    for (int token = blockIdx.x * kPlanWarps + threadIdx.x / 32; token < args.num_tokens;
         token += num_warps) {
        int count = 0;
        for (int base = 0; base < s.num_experts; base += 32) {
            const int expert = base + lane;
            const int64_t at = int64_t(token) * s.num_experts + expert;
            bool selected = expert < s.num_experts and args.routing_map[at] != 0;
            float prob = 0.0f;
            if (selected) {
                prob = args.probs_is_bf16
                           ? __bfloat162float(static_cast<const __nv_bfloat16*>(args.probs)[at])
                           : static_cast<const float*>(args.probs)[at];
                if (isnan(prob)) {
                    args.watchdog.raise(kFaultRouting, Role::kRouting, -1, token, 0, expert);
                }
                selected = not(s.skip_zero_probs and prob == 0.0f);
            }
            const uint32_t mask = __ballot_sync(~0u, selected);
            const int k = count + __popc(mask & ((1u << lane) - 1));
            if (selected and k < s.topk) {
                for (int rank = 0; rank < s.num_ranks; ++rank) {
                    args.heap.routes(rank, args.epoch, s.rank, token)[k] = {expert, prob};
                }
                args.plan.own_experts[int64_t(token) * s.topk + k] = expert;
            }
            count += __popc(mask);
        }
        if (count > s.topk and lane == 0) {
            args.watchdog.raise(kFaultRouting, Role::kRouting, -1, token, s.topk, count);
        }
        if (const int k = count + lane; k < s.topk) {
            for (int rank = 0; rank < s.num_ranks; ++rank) {
                args.heap.routes(rank, args.epoch, s.rank, token)[k] = {-1, 0.0f};
            }
            args.plan.own_experts[int64_t(token) * s.topk + k] = -1;
        }
    }
}

// Tells every rank that this rank's rows are in place. Scope: the grid, after a grid barrier.
__device__ __forceinline__ void signal_rows(const OpenArgs& args) {
    if (blockIdx.x == 0 and threadIdx.x < args.shape.num_ranks) {
        ptx::fence_acq_rel_sys();
        ptx::st_release_sys(args.heap.row_signal(threadIdx.x, args.shape.rank), args.epoch);
    }
}

__global__ __launch_bounds__(kPlanThreads,
                             1) void plan_kernel(const __grid_constant__ OpenArgs args) {
    extern __shared__ uint32_t smem[];
    __shared__ int num_tokens[kMaxRanks];
    __shared__ bool all_routes_here;
    const auto grid = cooperative_groups::this_grid();
    const Shape& s = args.shape;
    const int num_experts = s.num_local_experts(), num_chunks = s.num_chunks();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_warp = blockIdx.x * kPlanWarps + warp, num_warps = gridDim.x * kPlanWarps;

    zero_counters(args.workspace);
    publish_routes(args);
    grid.sync();
    if (blockIdx.x == 0 and threadIdx.x < s.num_ranks) {
        ptx::fence_acq_rel_sys();
        ptx::st_release_sys(
            args.heap.route_signal(threadIdx.x, args.epoch, s.rank),
            RouteSignal::make(args.epoch, args.num_tokens, *args.workspace.raised != 0));
    }
    copy_rows(args);

    // A peer that never comes, or that refuses its routing, is a fault on every rank, so that no
    // rank launches the layer; its tokens then count as none.
    if (threadIdx.x == 0) all_routes_here = true;
    __syncthreads();
    if (threadIdx.x < s.num_ranks) {
        const uint64_t* signal = args.heap.route_signal(s.rank, args.epoch, threadIdx.x);
        bool here = wait_for(
            args.watchdog, Role::kPlanRoutes, threadIdx.x, 0, args.epoch,
            [=] { return ptx::ld_acquire_sys(signal); },
            [&](uint64_t seen) { return uint32_t(seen) == args.epoch; });
        if (here and RouteSignal::is_refused(*signal)) {
            args.watchdog.raise(kFaultRouting, Role::kRouting, threadIdx.x, -1, 0, 0);
            here = false;
        }
        num_tokens[threadIdx.x] = here ? int(RouteSignal::tokens(*signal)) : 0;
        if (not here) all_routes_here = false;
    }
    __syncthreads();

    uint32_t* counts = smem + warp * num_experts;
    for (int chunk = first_warp; chunk < num_chunks; chunk += num_warps) {
        for (int expert = lane; expert < num_experts; expert += 32) counts[expert] = 0;
        __syncwarp();
        walk_chunk(s, args.heap, args.epoch, chunk_at(s, num_tokens, chunk), counts,
                   [](int, int, uint32_t, Route) {});
        for (int expert = lane; expert < num_experts; expert += 32) {
            args.workspace.chunk_counts[int64_t(expert) * num_chunks + chunk] = counts[expert];
        }
        __syncwarp();
    }
    grid.sync();
    signal_rows(args);
    for (int expert = first_warp; expert < num_experts; expert += num_warps) {
        const uint32_t rows =
            scan_chunks(args.workspace.chunk_counts + int64_t(expert) * num_chunks, num_chunks);
        if (lane == 0) args.plan.expert_rows[expert] = int(rows);
    }
    grid.sync();

    // Every CTA computes the experts' first blocks for itself.
    int32_t* expert_block = reinterpret_cast<int32_t*>(smem + kPlanWarps * num_experts);
    if (threadIdx.x == 0) {
        int block = 0, total = 0;
        for (int expert = 0; expert < num_experts; ++expert) {
            expert_block[expert] = block;
            block += ceil_div(args.plan.expert_rows[expert], BLOCK_M);
            total += args.plan.expert_rows[expert];
        }
        expert_block[num_experts] = block;
        if (blockIdx.x == 0) {
            *args.plan.header = {block, total};
            args.report->num_row_blocks = block;
            args.report->num_rows = total;
        }
    }
    __syncthreads();

    for (int chunk = first_warp; chunk < num_chunks; chunk += num_warps) {
        for (int expert = lane; expert < num_experts; expert += 32) {
            counts[expert] = args.workspace.chunk_counts[int64_t(expert) * num_chunks + chunk] +
                             uint32_t(expert_block[expert]) * BLOCK_M;
        }
        __syncwarp();
        const Chunk here = chunk_at(s, num_tokens, chunk);
        int32_t* rows = here.token < 0 ? nullptr : args.plan.rows_of(here.src_rank, here.token);
        if (rows != nullptr) {
            for (int k = 0; k < s.topk; ++k) rows[k] = -1;
        }
        walk_chunk(s, args.heap, args.epoch, here, counts,
                   [&](int k, int, uint32_t row, Route route) {
                       rows[k] = int(row);
                       args.plan.row_prob[row] = route.prob;
                   });
        describe_rows(s, args.heap, args.plan, args.epoch, here);
        __syncwarp();
    }

    // Pad rows, and the tables by block.
    for (int expert = blockIdx.x; expert < num_experts; expert += gridDim.x) {
        const int first = expert_block[expert] * BLOCK_M;
        const int end = expert_block[expert + 1] * BLOCK_M;
        for (int row = first + args.plan.expert_rows[expert] + int(threadIdx.x); row < end;
             row += kPlanThreads) {
            args.plan.row_meta[row] = {-1, 0, 0, RowMeta::kPad, 0};
            args.plan.row_prob[row] = 0.0f;
        }
        for (int block = expert_block[expert] + int(threadIdx.x); block < expert_block[expert + 1];
             block += kPlanThreads) {
            args.plan.block_expert[block] = expert;
        }
        if (threadIdx.x == 0) args.plan.expert_block[expert] = expert_block[expert];
    }
    if (blockIdx.x == 0 and threadIdx.x == 0) {
        args.plan.expert_block[num_experts] = expert_block[num_experts];
        if (not all_routes_here) args.report->num_rows = args.report->num_row_blocks = 0;
        __threadfence_system();
        args.report->epoch = args.epoch;
    }
}

// Opens a backward: dY takes the place of x in the heap, along the plan of the forward.
__global__ __launch_bounds__(kPlanThreads,
                             1) void publish_kernel(const __grid_constant__ OpenArgs args) {
    zero_counters(args.workspace);
    copy_rows(args);
    cooperative_groups::this_grid().sync();
    signal_rows(args);
}

}  // namespace flashmoe
