// The plan of a launch, from the routing on.
#pragma once

#include "flashmoe/moe/place_few.cuh"

namespace flashmoe {

// From the routing map to the plan: exchanges the routing with all ranks and places the rows that
// this rank's experts receive. The last warp copies this rank's rows meanwhile, to where its peers
// find them. False on every rank if one cannot go on; the host then finds a fault. Scope: the grid.
__device__ __forceinline__ bool plan_layer(const LayerArgs& args, uint32_t epoch, void* smem_base) {
    __shared__ int num_tokens[kMaxRanks];
    bool goes_on = false;
    if (not Planners::has_me()) {
        // Copying waits for the routes, since the fence after them would wait for copies, too.
        ptx::barrier_sync(kRoutesPublished, int(blockDim.x));
        if (not kIsFp8 and threadIdx.x % 32 == 0) {
            const int64_t used = PlacementSmem::bytes(args.shape, int(gridDim.x));
            publish_rows(args, epoch,
                         *reinterpret_cast<RowCopySmem*>(static_cast<char*>(smem_base) + used));
        }
    } else if (plans_few(args)) {
        ptx::barrier_arrive(kRoutesPublished, int(blockDim.x));
        goes_on = plan_few(args, epoch, smem_base);
        if (not goes_on) leave_no_rows(args, unfollowed_ranks(args, epoch));
    } else {
        const PlacementSmem smem(args.shape, smem_base);
        int64_t begin = Trace::now();
        const auto traced = [&](int step) {
            args.watchdog.trace.add(event_of(Span::kPlan), step, begin);
            begin = Trace::now();
        };
        const bool has_slots = args.shape.spare_slots > 0;
        if (has_slots) smem.clear(args.shape);
        publish_routes(args, epoch, has_slots ? smem.selections : nullptr);
        ptx::barrier_arrive(kRoutesPublished, int(blockDim.x));
        if constexpr (kIsFp8) {
            // While the others' routes travel. The grid's barriers follow, so that this rank's
            // tokens are there for all of its CTAs once the plan is.
            quantize_tokens(args, Planners::size());
            Planners::sync();
            if (threadIdx.x == 0) {
                tell_rows(args, &args.workspace.tickets->rows_published, epoch);
            }
        }
        traced(0);
        smem.clear(args.shape);
        Placed placed = Placed::kAtHome;
        // Routes are counted, then placed. In one loop, since what a launch does once takes as long
        // as its instructions take to come, and the second round finds those of the first.
#pragma unroll 1
        for (int round = 0; round < 2; ++round) {
            const bool is_placing = round == 1;
            bool may_go_on;
            if (not is_placing) {
                may_go_on = has_own_routes(args) ? take_own_routes(args, num_tokens)
                                                 : await_routes(args, epoch, num_tokens);
                if (has_slots) placed = plan_replicas(args, epoch, smem.replicas, may_go_on);
                if (placed == Placed::kNot) break;
            } else {
                const bool is_alone = not kHasReplicas and args.shape.num_ranks == 1;
                may_go_on = is_alone or rows_fit(args, epoch);
                place_experts(args, epoch, smem);
                if (is_alone) {
                    const int num_slots = args.shape.num_local_slots();
                    may_go_on = own_rows_fit(args, uint32_t(smem.expert_block[num_slots]));
                }
                place_units(args, smem);
            }
            walk_chunks(args, epoch, smem, num_tokens, placed == Placed::kBySlots, is_placing);
            if (not is_placing) share_counts(args, smem);
            traced(1 + 2 * round);
            goes_on =
                grid_barrier(args.watchdog, &args.workspace.tickets->barrier[round], may_go_on);
            traced(2 + 2 * round);
            if (not goes_on) break;
        }
        if (not goes_on) leave_no_rows(args, unfollowed_ranks(args, epoch));
    }
    return __syncthreads_or(goes_on);
}

}  // namespace flashmoe
