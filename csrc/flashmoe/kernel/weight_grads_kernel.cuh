// Gradients of weights as a launch of their own, which follows a backward in FP8: they multiply
// 16-bit operands, in stages of half as much K. The actors are those of a layer's launch; nothing
// is exchanged, and there is one record of both launches.
#pragma once

#include "flashmoe/kernel/layer.cuh"

namespace flashmoe {

struct WeightGradsPass : BackwardPass<__nv_bfloat16, false, false> {
    static constexpr bool kTurnsGrads = false;
};

// Scope: one warp of each CTA.
template <class Ring>
__device__ __forceinline__ void load_weight_grads(const BackwardArgs& args,
                                                  const Ring& ring,
                                                  TileMailbox& mailbox) {
    RingCursor<Ring::kNumStages> cursor;
    load_tiles(
        args.watchdog, mailbox, [&] { return claim_tile(args.workspace); },
        [&](int ticket) { return weight_grad_pair(args, ticket); },
        [&](const TileInfo& tile, auto take, auto announce) {
            if (auto own = cursor; cute::elect_one_sync()) {
                stream_weight_grad(args, ring, own, tile, take, announce);
            }
            cursor.advance(weight_grad_k_blocks(args.plan, tile));
        });
}

// Scope: one warp for each processor.
__device__ __forceinline__ void finish_weight_grads(const BackwardArgs& args,
                                                    TileMailbox& mailbox,
                                                    const Handover& handover,
                                                    int processor) {
    RingCursor<kTileSlots> slot;
    RingCursor<1> handover_cursor;
    CountedGrads counted;
    uint32_t waited = 0;
    begin_span(Span::kFinish);
    open_rooms(handover, processor);
    for (;;) {
        const TileInfo tile = take_tile(args.watchdog, Wait::kFinisherTile, mailbox, slot, waited);
        if (tile.gemm == TileInfo::kNoTile) break;
        finish_weight_grad<WeightGradsPass>(args, tile, handover, handover_cursor, processor,
                                            counted);
    }
    ptx::bulk_wait_complete();
    end_span(Span::kFinish);
}

__global__ __cluster_dims__(kClusterSize) __launch_bounds__(kLayerThreads, 1)  //
    void weight_grads_kernel(const __grid_constant__ BackwardArgs args) {
    extern __shared__ __align__(1024) uint8_t smem_bytes[];
    auto& buffers = *reinterpret_cast<LayerBuffers*>(smem_bytes);
    __shared__ __align__(16) uint8_t words_bytes[sizeof(LayerWords)];
    auto& words = *reinterpret_cast<LayerWords*>(words_bytes);
    const auto ring = ring_of(buffers, words, [](auto& place) -> auto& { return place; });
    const Handover handover{buffers.outputs, words.outputs.full, words.outputs.empty};
    args.watchdog.trace.open();
    open_counters(args.records != nullptr);
    for (int i = threadIdx.x; i < args.shape.num_matrices(); i += blockDim.x) {
        ptx::acquire_tensor_map(args.weight_grads.maps + i);
    }
    if (threadIdx.x == 0) {
        init_barriers(ring, words.mailbox, kNumProcessors * (kProcessorWarps + 1));
        init_barriers(handover);
        cutlass::arch::fence_barrier_init();
    }
    const bool goes_on = unmatched_ranks(args) == 0;  // else the launch before has said so
    if (goes_on) {
        ptx::fence_proxy_async_shared();
        __syncthreads();
        cute::cluster_sync();
        const int warpgroup = __shfl_sync(~0u, int(threadIdx.x / 128), 0);
        if (warpgroup > 0) {
            cutlass::arch::warpgroup_reg_alloc<kProcessorRegisters>();
            process_tiles<WeightGradsPass>(args, ring, words.mailbox, handover, warpgroup - 1);
        } else {
            cutlass::arch::warpgroup_reg_dealloc<kCommRegisters>();
            const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);
            if (warp == 0) {
                const auto kept = ring_of(
                    buffers, words, [](auto& place) -> auto& { return ptx::keep_address(place); });
                load_weight_grads(args, kept, words.mailbox);
            } else if (warp > 1) {
                finish_weight_grads(args, words.mailbox, handover, warp - 2);
            }
        }
        args.watchdog.trace.close();
    }
    close_counters(args.workspace.totals);
    if (goes_on) cute::cluster_sync();
    leave(args.workspace, [&] {
        write_record<true>(args, true, [] {});
        if (threadIdx.x == 0) tell_fc2_grads(args);  // unless that is done
        return false;
    });
}

}  // namespace flashmoe
