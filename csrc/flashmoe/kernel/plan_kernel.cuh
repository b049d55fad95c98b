// The plan as a launch of its own, for a host that sizes its buffers by the plan's counts.
#pragma once

#include "flashmoe/kernel/plan_report.h"
#include "flashmoe/moe/plan_layer.cuh"
#include "flashmoe/moe/unmatched.cuh"

namespace flashmoe {

// Ends a plan that belongs to a backward which the ranks of the mask do not have.
__device__ __forceinline__ void leave_unmatched_plan(const LayerArgs& args,
                                                     uint32_t epoch,
                                                     uint32_t ranks,
                                                     volatile PlanReport* report) {
    raise_unmatched(args, ranks);
    if (Planners::has_me()) leave_no_rows(args, ranks);
    if (blockIdx.x == 0 and threadIdx.x == 0) {
        report->num_row_blocks = -1;
        __threadfence_system();
        report->epoch = epoch;
    }
}

__global__ __launch_bounds__(kPlanThreads, 1)  //
    void plan_kernel(const __grid_constant__ LayerArgs args, volatile PlanReport* report) {
    extern __shared__ __align__(128) uint8_t smem[];
    if (blockIdx.x == 0 and threadIdx.x == 0) report->has_begun = 1;
    open_counters(args.records != nullptr);
    const uint32_t epoch = current_epoch(args.workspace);
    if (const uint32_t ranks = unmatched_ranks(args)) {
        return leave_unmatched_plan(args, epoch, ranks, report);
    }
    const bool go_on = plan_layer(args, epoch, smem);
    if (blockIdx.x == 0 and threadIdx.x == 0) {
        // Otherwise the host would learn of it only from the layer, and would have launched the
        // rest in vain.
        if (not go_on) args.watchdog.raise_if_given_up();
        report->num_row_blocks = go_on ? args.plan.header->num_row_blocks : -1;
        report->num_rows = go_on ? args.plan.header->num_rows : 0;
        report->unfollowed = go_on ? args.plan.header->unfollowed : 0;
        report->is_heard_late = not go_on and is_heard_late(args, epoch);
        __threadfence_system();
        report->epoch = epoch;
    }
    leave(args.workspace, [&] { return not go_on; });
}

}  // namespace flashmoe
