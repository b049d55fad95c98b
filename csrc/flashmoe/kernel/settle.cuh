// Replicas ahead of a forward: every rank sends the routing that it expects, all settle on the same
// replicas, and owners push their weights, while other kernels run on other streams. The forward,
// which is the group's next launch, plans from its own routing which tokens use them.
#pragma once

#include <algorithm>

#include "flashmoe/kernel/entry.h"
#include "flashmoe/moe/dispatch.cuh"
#include "flashmoe/moe/place.cuh"

namespace flashmoe {

constexpr int kSettleWarps = 9;

struct SettleSmem {
    DispatchPieces pieces[kSettleWarps];
};

// Sends all ranks how many routes to each expert this one expects, receives theirs, and plans.
// False on every CTA if some CTA cannot go on; no replica is settled on then. Scope: the planners
// of the grid.
__device__ __forceinline__ bool settle_replicas(const LayerArgs& args,
                                                uint32_t epoch,
                                                const uint32_t* route_counts,
                                                const ReplicaSmem& smem) {
    __shared__ int num_tokens[kMaxRanks];  // none
    const Shape& s = args.shape;
    if (blockIdx.x == 0) {
        send_route_counts(args, epoch, route_counts);
        Planners::sync();
        if (threadIdx.x == 0) {
            Atomics::fence<protocol::Scope::kSystem>();
            protocol::publish_routes<Atomics>(
                s.num_ranks, RouteSignal::make(epoch, 0, false),
                [&](int rank) { return args.heap.route_signal(rank, epoch, s.rank); });
        }
    }
    const bool may_go_on = await_routes(args, epoch, num_tokens);
    const bool is_planned = plan_replicas(args, epoch, smem, may_go_on) != Placed::kNot;
    // Every CTA pushes to the holders in `hosts`, which the first CTA has written.
    if (grid_barrier(args.watchdog, &args.workspace.tickets->barrier[0], is_planned)) return true;
    const int num_hosts = blockIdx.x == 0 ? s.num_ranks * s.spare_slots : 0;
    for (int i = threadIdx.x; i < num_hosts; i += Planners::size()) args.plan.hosts[i] = -1;
    return false;
}

// `route_counts` has this rank's routes by expert. The plan has nothing but `hosts`, that of the
// workspace.
__global__ __launch_bounds__(kSettleWarps * 32, 1)  //
    void settle_kernel(const __grid_constant__ LayerArgs args, const uint32_t* route_counts) {
    extern __shared__ __align__(1024) uint8_t smem_bytes[];
    auto& smem = *reinterpret_cast<SettleSmem*>(smem_bytes);
    __shared__ uint64_t barrier_words[kSettleWarps][kDispatchLanes];
    auto& barriers = reinterpret_cast<DispatchBarriers(&)[kSettleWarps]>(barrier_words);
    args.watchdog.trace.open();
    open_counters(args.records != nullptr);
    const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);
    const uint32_t epoch = current_epoch(args.workspace);
    bool goes_on = false;
    if (Planners::has_me()) {
        goes_on = settle_replicas(args, epoch, route_counts, ReplicaSmem(args.shape, smem_bytes));
    } else if (threadIdx.x % 32 == 0) {
        for (DispatchBarriers& each : barriers) {
            for (Barrier& arrived : each) arrived.init(1);
        }
        cutlass::arch::fence_barrier_init();
        // There are no rows, but this rank is done with the launch before.
        tell_rows(args, &args.workspace.tickets->rows_published, epoch);
    }
    ptx::fence_proxy_async_shared();
    if (__syncthreads_or(goes_on)) {
        await_published_rows(args, epoch);
        uint32_t parity = 0;
        bool has_pushes = args.home_weights != nullptr;
        while (has_pushes)
            has_pushes = push_weights(args, smem.pieces[warp], barriers[warp], parity);
    }
    args.watchdog.trace.close();
    close_counters(args.workspace.totals);
    leave(args.workspace, [&] {
        if (threadIdx.x == 0) args.workspace.settled->epoch = epoch;
        return true;
    });
}

inline KernelEntry entry_of_settle(const Shape& shape) {
    const int planned = int(ReplicaSmem::words(shape) * sizeof(uint32_t));
    return {reinterpret_cast<const void*>(&settle_kernel), kSettleWarps * 32,
            std::max(planned, int(sizeof(SettleSmem)))};
}

}  // namespace flashmoe
