// Algorithm 1 of the paper: one persistent launch per layer and direction. Each CTA holds every
// actor: a loader thread (the subscriber, taking the scheduler's tickets), a dispatch warp, two
// combine warps, and two processor warpgroups; whoever has finished helps to combine. Two CTAs make
// a cluster, which takes tiles in pairs. The backward is the same algorithm with other matrices: dY
// is dispatched, fc2 and fc1 are applied transposed, dX is combined.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/cluster_sm90.hpp>

#include "flashmoe/actor/loader.cuh"
#include "flashmoe/actor/processor.cuh"
#include "flashmoe/kernel/entry.h"
#include "flashmoe/moe/combine.cuh"
#include "flashmoe/moe/dispatch.cuh"
#include "flashmoe/moe/place.cuh"

namespace flashmoe {

// Weights are [out, in] unless kTransposed; wgmma reads either way, without a copy.
template <Activation kAct, bool kGated, bool kTransposed>
struct ForwardPass {
    static constexpr bool kIsBackward = false;
    static constexpr bool kGatedForward = kGated;
    static constexpr Major kMajorB = kTransposed ? Major::MN : Major::K;
    static constexpr int kWeightOfGemm0 = 0;  // fc1, then fc2
    static constexpr int kStagingTiles = 1, kStagingColumns = 64, kDispatchPiece = 4096;
    static constexpr int kProcessorRegisters = 208;

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
    // Three outputs leave GEMM0 together.
    static constexpr int kStagingTiles = 3, kStagingColumns = 32, kDispatchPiece = 2048;
    static constexpr int kProcessorRegisters = kGated ? 216 : 208;

    template <class... Args>
    __device__ __forceinline__ static void finish_gemm0(Args&&... args) {
        differentiate_tile<kAct, kGated>(args...);
    }
};

template <class Pass>
struct LayerSmem {
    StageRing<4> ring;
    StagingOf<Pass> staging;
    DispatchSmem<Pass::kDispatchPiece> dispatch;
    TileMailbox mailbox;
};

constexpr int kLayerThreads = 384;
// A launch gets the same registers for every thread, and setmaxnreg only moves them about: to ask
// for more than that waits for ever.
constexpr int kLaunchRegisters = 65536 / kLayerThreads / 8 * 8;
static_assert(kLaunchRegisters == 168);

// Delivers results and reduces what arrives. Every warp ends here once its own part is done, the
// more of them the shorter the tail. One warp begins to reduce at once: what is complete need not
// wait for the rest.
template <class Pass, int kUnroll>
__device__ __forceinline__ void combine(const LayerArgs& args, bool reduces_first) {
#pragma unroll 1
    for (int step = 0; step < 2; ++step) {
        const int64_t begin = Trace::now();
        if ((step == 0) == reduces_first) {
            reduce_results<Pass::kIsBackward, kUnroll>(args, reduces_first);
            args.watchdog.trace.add(uint32_t(Role::kReduce), 0, begin);
        } else {
            deliver_results<Pass::kIsBackward, kUnroll>(args);
            args.watchdog.trace.add(uint32_t(Role::kDeliver), 0, begin);
        }
    }
}

// Publishes what this rank brings, and plans unless that is done. False if the layer cannot go on:
// its output is then made unusable, since nobody may be waiting for the fault.
template <class Pass>
__device__ __forceinline__ bool open_layer(const LayerArgs& args, uint32_t epoch, void* smem) {
    if constexpr (Pass::kIsBackward) {
        publish_rows(args, epoch);
    } else if (args.routing_map != nullptr and not plan_layer(args, epoch, smem)) {
        const int64_t chunks = int64_t(args.num_tokens) * args.shape.hidden / 8;
        for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < chunks;
             i += int64_t(gridDim.x) * blockDim.x) {
            reinterpret_cast<uint4*>(args.out)[i] = {~0u, ~0u, ~0u, ~0u};  // NaN
        }
        return false;
    }
    return true;
}

template <class Pass>
__global__ __cluster_dims__(kClusterSize) __launch_bounds__(kLayerThreads, 1)  //
    void layer_kernel(const __grid_constant__ LayerArgs args) {
    constexpr int kCommRegisters = 3 * kLaunchRegisters - 2 * Pass::kProcessorRegisters;
    extern __shared__ __align__(1024) uint8_t smem_bytes[];
    auto& smem = *reinterpret_cast<LayerSmem<Pass>*>(smem_bytes);
    static_assert(sizeof(smem) <= 227 * 1024);
    args.watchdog.trace.open();
    const uint32_t epoch = current_epoch(args.workspace);
    if (not open_layer<Pass>(args, epoch, smem_bytes)) {
        leave(args.workspace, true);
        return;
    }
    ptx::fence_proxy_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
        init_barriers(smem.ring, smem.mailbox);
        for (Barrier& arrived : smem.dispatch.arrived) arrived.init(1);
        cutlass::arch::fence_barrier_init();
    }
    cute::cluster_sync();

    // Uniform by construction: only then does ptxas give each branch the registers it asks for.
    if (__shfl_sync(~0u, int(threadIdx.x / 128), 0) > 0) {
        cutlass::arch::warpgroup_reg_alloc<Pass::kProcessorRegisters>();
        const int warp = int(ptx::thread_index() / 32) - 4;
        process_tiles<Pass>(args, smem.ring, smem.mailbox, smem.staging[warp], warp / 4);
        combine<Pass, 4>(args, false);
    } else {
        cutlass::arch::warpgroup_reg_dealloc<kCommRegisters>();
        const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);
        if (warp == 0) {
            if (cute::elect_one_sync()) load_layer<Pass>(args, smem.ring, smem.mailbox);
            __syncwarp();
        } else if (warp == 1) {
            await_published_rows(args, current_epoch(args.workspace));
            const int64_t begin = Trace::now();
            dispatch(args, smem.dispatch);
            args.watchdog.trace.add(uint32_t(Role::kDispatch), 0, begin);
        }
        combine<Pass, Pass::kIsBackward ? 1 : 2>(args, warp == 3);
    }
    args.watchdog.trace.close();
    cute::cluster_sync();  // the other CTA may still write to this one's shared memory
    leave(args.workspace, true);
}

template <class Pass>
KernelEntry entry_of() {
    return {reinterpret_cast<const void*>(&layer_kernel<Pass>), kLayerThreads,
            int(sizeof(LayerSmem<Pass>))};
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
