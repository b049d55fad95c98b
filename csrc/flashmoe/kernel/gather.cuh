// Dispatch alone: pulls the rows of a forward again, along its plan, for a backward whose forward
// kept its pre-activations only. No results come back that would show a rank that its rows have
// been read, so a second signal says so: the launch takes two epochs.
#pragma once

#include "flashmoe/moe/dispatch.cuh"
#include "flashmoe/moe/publish.cuh"
#include "flashmoe/moe/unmatched.cuh"

namespace flashmoe {

constexpr int kGatherWarps = 4;

union GatherSmem {
    RowCopySmem copied;
    DispatchPieces pieces[kGatherWarps];
};

__global__ __launch_bounds__(kGatherWarps * 32, 1)  //
    void gather_kernel(const __grid_constant__ LayerArgs args) {
    extern __shared__ __align__(1024) uint8_t smem_bytes[];
    auto& smem = *reinterpret_cast<GatherSmem*>(smem_bytes);
    __shared__ uint64_t barrier_words[kGatherWarps][kDispatchLanes];
    auto& barriers = reinterpret_cast<DispatchBarriers(&)[kGatherWarps]>(barrier_words);
    if (const uint32_t ranks = unmatched_ranks(args)) return raise_unmatched(args, ranks);
    args.watchdog.trace.open();
    open_counters(args.records != nullptr);
    const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);
    const uint32_t epoch = current_epoch(args.workspace), taken = protocol::next_epoch(epoch);
    if (threadIdx.x % 32 == 0) {
        for (Barrier& arrived : barriers[warp]) arrived.init(1);
        cutlass::arch::fence_barrier_init();
    }
    if constexpr (kIsFp8) {
        quantize_tokens(args, int(blockDim.x));
        __syncthreads();
        if (threadIdx.x == 0) {
            tell_rows(args, &args.workspace.tickets->rows_published, epoch);
        }
        await_published_rows(args, epoch);  // this rank's, too
    } else if (threadIdx.x == 0) {
        publish_rows(args, epoch, smem.copied);
    }
    __syncthreads();
    dispatch<false>(args, smem.pieces[warp], barriers[warp], 0);
    __syncthreads();
    if (threadIdx.x == 0) tell_rows(args, &args.workspace.tickets->rows_taken, taken);
    if (warp == 0) await_published_rows(args, taken);
    args.watchdog.trace.close();
    close_counters(args.workspace.totals);
    leave(args.workspace, [&] {
        if (threadIdx.x == 0) *args.workspace.epoch = protocol::ended_epoch(epoch);
        return true;
    });
}

}  // namespace flashmoe
