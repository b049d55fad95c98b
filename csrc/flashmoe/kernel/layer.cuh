// Algorithm 1 of the paper: one persistent launch per layer and direction. Each CTA holds every
// actor: a loader thread (the subscriber, taking the scheduler's tickets), a dispatch warp, two
// combine warps, and two processor warpgroups; whoever has finished helps to combine. The backward
// is the same algorithm with other matrices: dY is dispatched, fc2 and fc1 are applied transposed,
// dX is combined.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "flashmoe/actor/loader.cuh"
#include "flashmoe/actor/processor.cuh"
#include "flashmoe/kernel/entry.h"
#include "flashmoe/moe/combine.cuh"
#include "flashmoe/moe/dispatch.cuh"

namespace flashmoe {

// Weights are [out, in] unless kTransposed; wgmma reads either way, without a copy.
template <Activation kAct, bool kGated, bool kTransposed>
struct ForwardPass {
    static constexpr bool kIsBackward = false;
    static constexpr bool kGatedForward = kGated;
    static constexpr Major kMajorB = kTransposed ? Major::MN : Major::K;
    static constexpr int kWeightOfGemm0 = 0;  // fc1, then fc2
    static constexpr int BLOCK_N = kForwardBlockN, kStages = 4, kStagingTiles = 1;

    template <class... Args>
    __device__ __forceinline__ static void finish_gemm0(Args&&... args) {
        activate_tile<kAct, kGated>(args...);
    }
};

template <Activation kAct, bool kGated, bool kTransposed>
struct BackwardPass {
    static constexpr bool kIsBackward = true;
    static constexpr bool kGatedForward = false;
    static constexpr Major kMajorB = kTransposed ? Major::K : Major::MN;
    static constexpr int kWeightOfGemm0 = 1;  // fc2, then fc1
    // Three outputs leave GEMM0 together, with their derivatives: 256 columns would spill.
    static constexpr int BLOCK_N = 192, kStages = 4, kStagingTiles = 3;

    template <class... Args>
    __device__ __forceinline__ static void finish_gemm0(Args&&... args) {
        differentiate_tile<kAct, kGated, BLOCK_N>(args...);
    }
};

template <class Pass>
struct LayerSmem {
    StageRing<Pass::kStages, Pass::BLOCK_N> ring;
    alignas(1024) uint8_t staging[kNumProcessors][Pass::kStagingTiles][kStagingBytes];
    DispatchSmem dispatch;
    TileMailbox mailbox;
};

constexpr int kLayerThreads = 384;
constexpr int kCommRegisters = 88, kProcessorRegisters = 208;
static_assert(128 * kCommRegisters + 256 * kProcessorRegisters <= 65536);

// Delivers results, then reduces what arrives. Every warp ends here once its own part is done, the
// more of them the shorter the tail.
template <class Pass, int kUnroll>
__device__ __forceinline__ void combine(const LayerArgs& args) {
    deliver_results<Pass::kIsBackward, kUnroll>(
        args.heap, args.plan, args.workspace, args.watchdog, args.shape.rank, args.epoch,
        args.num_row_blocks, uint32_t(kNumProcessors * args.num_n_tiles[1]), args.result,
        args.dprob_partial, args.num_n_tiles[0]);
    reduce_results<Pass::kIsBackward, kUnroll>(args.heap, args.plan, args.workspace, args.watchdog,
                                               args.shape.rank, args.epoch, args.num_tokens,
                                               args.shape.num_experts, args.out, args.grad_probs,
                                               args.grad_probs_is_bf16);
}

template <class Pass>
__global__ __launch_bounds__(kLayerThreads,
                             1) void layer_kernel(const __grid_constant__ LayerArgs args) {
    extern __shared__ __align__(1024) uint8_t smem_bytes[];
    auto& smem = *reinterpret_cast<LayerSmem<Pass>*>(smem_bytes);
    static_assert(sizeof(smem) <= 227 * 1024);
    if (threadIdx.x == 0) {
        init_barriers(smem.ring, smem.mailbox);
        for (Barrier& arrived : smem.dispatch.arrived) arrived.init(1);
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();

    const int warpgroup = threadIdx.x / 128;
    if (warpgroup > 0) {
        cutlass::arch::warpgroup_reg_alloc<kProcessorRegisters>();
        process_tiles<Pass>(args, smem.ring, smem.mailbox, smem.staging[warpgroup - 1],
                            warpgroup - 1);
        combine<Pass, 4>(args);
    } else {
        cutlass::arch::warpgroup_reg_dealloc<kCommRegisters>();
        const int warp = threadIdx.x / 32;
        if (warp == 0) {
            if (threadIdx.x == 0) load_tiles<Pass>(args, smem.ring, smem.mailbox);
            __syncwarp();
        } else if (warp == 1) {
            await_published_rows(args.heap, args.watchdog, args.shape.rank, args.epoch);
            dispatch(args.heap, args.plan, args.workspace, args.watchdog, args.shape.rank,
                     args.num_row_blocks, args.rows, smem.dispatch);
        }
        combine<Pass, 2>(args);
    }
}

template <class Pass>
KernelEntry entry_of() {
    return {reinterpret_cast<const void*>(&layer_kernel<Pass>), kLayerThreads,
            int(sizeof(LayerSmem<Pass>)), Pass::BLOCK_N};
}

template <Activation kAct, bool kTransposed>
KernelEntry layer_entry(bool is_backward, bool is_gated) {
    if (is_backward) {
        return is_gated ? entry_of<BackwardPass<kAct, true, kTransposed>>()
                        : entry_of<BackwardPass<kAct, false, kTransposed>>();
    }
    return is_gated ? entry_of<ForwardPass<kAct, true, kTransposed>>()
                    : entry_of<ForwardPass<kAct, false, kTransposed>>();
}

}  // namespace flashmoe
