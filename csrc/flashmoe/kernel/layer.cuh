// Algorithm 1 of the paper: one persistent launch per layer and direction. Each CTA holds every
// actor: a loader thread (the subscriber, taking the scheduler's tickets), a dispatch warp, two
// processor warpgroups that multiply, and a finisher warp for each, which does the rest to their
// outputs; a warp that is done helps to combine. Two CTAs make a cluster, which takes tiles in
// pairs. The backward is the same algorithm with other matrices: dY is dispatched, fc2 and fc1 are
// applied transposed, dX is combined; and the weights' gradients follow as tiles of their own.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/cluster_sm90.hpp>

#include "flashmoe/actor/finisher.cuh"
#include "flashmoe/actor/loader.cuh"
#include "flashmoe/actor/processor.cuh"
#include "flashmoe/kernel/entry.h"
#include "flashmoe/moe/combine.cuh"
#ifdef FLASHMOE_IN_FP8
#include "flashmoe/moe/differentiate_fp8.cuh"
#endif
#include "flashmoe/moe/dispatch.cuh"
#include "flashmoe/moe/expert_sparing.cuh"
#include "flashmoe/moe/plan_layer.cuh"
#include "flashmoe/moe/slot_grads.cuh"
#include "flashmoe/moe/unmatched.cuh"
#include "flashmoe/moe/write_record.cuh"

namespace flashmoe {

// Weights are [out, in] unless kTransposed; wgmma reads either way, without a copy.
template <class T, bool kGated, bool kTransposed>
struct ForwardPass {
    using Element = T;
    using Args = LayerArgs;
    static constexpr bool kIsBackward = false, kGatedForward = kGated, kHasBias = not kIsFp8;
    static constexpr bool kHasWeightGrads = false, kHasTree = kMayBeRankInvariant;
    static constexpr Major kMajorB = kTransposed ? Major::MN : Major::K;
    static constexpr int kWeightOfGemm0 = 0;  // fc1, then fc2
    using FinishGemm0 =
        std::conditional_t<kIsFp8, ActivateRowsSparing<T, kGated>, ActivateRows<T, kGated>>;
};

// In FP8 weights are copied as their transposes, since wgmma reads E4M3 along K alone; and
// gradients of weights, which are of 16-bit operands, are a launch of their own
// (weight_grads_kernel.cuh).
template <class T, bool kGated, bool kTransposed>
struct BackwardPass {
    using Element = T;
    using Args = BackwardArgs;
    static constexpr bool kIsBackward = true, kGatedForward = false, kHasBias = false;
    static constexpr bool kHasWeightGrads = not kIsFp8, kHasTree = kMayBeRankInvariant;
    static constexpr Major kMajorB = kTransposed or kIsFp8 ? Major::K : Major::MN;
    static constexpr int kWeightOfGemm0 = 1;  // fc2, then fc1
    // Tokens that are gathered for fc1's gradient are the left operand. Each CTA of a pair reads
    // its own, while both share the right one, and threads of one CTA cannot copy to both. Unless
    // weights are transposed, the product is then the transpose of the gradient.
    static constexpr bool kTurnsGrads = not kTransposed and not kHasReplicas;
#ifdef FLASHMOE_IN_FP8
    using FinishGemm0 = DifferentiateInFp8<T, kGated>;
#else
    using FinishGemm0 = std::conditional_t<kHasReplicas,
                                           DifferentiateRowsSparing<T, kGated>,
                                           DifferentiateRows<T, kGated>>;
#endif
};

// The backward of a forward in FP8: it multiplies 16-bit copies of the forward's operands.
template <class T, bool kGated>
struct BackwardPassOfFp8 : BackwardPass<T, kGated, false> {
    static constexpr bool kHasTree = false;
    using FinishGemm0 = DifferentiateRowsSparing<T, kGated, true>;
};

// Shared memory is full: the launch asks for the large buffers, and the small ones lie in the
// kilobyte that static memory is padded to anyway.
struct LayerBuffers {
    Stage stages[kStages];
    alignas(RowCopySmem) AllOutputs outputs;
    DispatchPieces pieces;
    FLASHMOE_SCALE_FIELD(StageScales, scales[kStages]);
};
struct LayerWords {
    StageBarriers<kStages> stages;
    HandoverBarriers outputs;
    DispatchBarriers pieces;
    CombineSmem combine;
    TileMailbox mailbox;
};
static_assert(sizeof(LayerBuffers) + kStaticSmemBytes <= kSmemBytes);
// A launch plans in the same memory.
constexpr int kLayerSmemBytes =
    sizeof(LayerBuffers) < size_t(kPlanSmemBytes) ? kPlanSmemBytes : int(sizeof(LayerBuffers));

// The ring in a CTA's shared memory; `place` says how the addresses of its parts are kept.
template <class Place>
__device__ __forceinline__ StageRing<kStages> ring_of(LayerBuffers& buffers,
                                                      LayerWords& words,
                                                      Place place) {
#ifdef FLASHMOE_IN_FP8
    return {place(buffers.stages), place(words.stages.full), place(words.stages.empty),
            place(buffers.scales)};
#else
    return {place(buffers.stages), place(words.stages.full), place(words.stages.empty)};
#endif
}

// The tail: every warp, once its own part is done, delivers rows and reduces tokens until none is
// left. The more warps share it, the shorter it is. With kInTree the layer is rank-invariant.
template <class Pass, int kSums, bool kInTree>
__device__ __forceinline__ void combine(const LayerArgs& args, CombineSmem& smem) {
    using T = typename Pass::Element;
    int64_t begin = Trace::now();
    while (deliver_some<T, Pass::kIsBackward, kSums, kInTree>(args, smem, Deliver::kAwaited) !=
           Progress::kFinished) {
    }
    args.watchdog.trace.add(event_of(Span::kDeliver), kWhole, begin);

    begin = Trace::now();
    reduce_results<T, Pass::kIsBackward, kSums, kInTree>(args, smem);
    args.watchdog.trace.add(event_of(Span::kReduce), kWhole, begin);
}

// Combines without waiting while tiles are computed. After 10,000 idle polls (5 ms) it leaves the
// rest to `combine`, whose waits have a bound. Scope: one warp.
template <class Pass>
__device__ __forceinline__ void combine_meanwhile(const LayerArgs& args, CombineSmem& smem) {
    const int64_t begin = Trace::now();
    int chunk = 0;
    for (int idle = 0; idle < 10000;) {
        const Progress progress =
            combine_some<typename Pass::Element, Pass::kIsBackward, kCommSums>(args, smem, chunk,
                                                                               false);
        if (progress == Progress::kFinished) break;
        idle = progress == Progress::kSome ? 0 : idle + 1;
        if (idle > 0) __nanosleep(500);
    }
    args.watchdog.trace.add(event_of(Span::kDeliver), kMeanwhile, begin);
}

// Plans, unless flashmoe_plan already has. False on every CTA if the layer cannot go on.
template <class Pass>
__device__ __forceinline__ bool open_layer(const LayerArgs& args, void* smem) {
    if (const uint32_t ranks = unmatched_ranks(args)) {
        raise_unmatched(args, ranks);
        if (not Pass::kIsBackward and Planners::has_me()) leave_no_rows(args, ranks);
        return false;
    }
    if (Pass::kIsBackward or args.routing_map == nullptr) return true;
    return plan_layer(args, current_epoch(args.workspace), smem);
}

// Fills a pass's outputs, if they cannot be right, with NaN, since it may be that no caller looks
// at the fault. Scope: a CTA.
template <class Pass>
__device__ __forceinline__ void spoil_outputs(const typename Pass::Args& args) {
    bool is_void = *static_cast<volatile uint32_t*>(args.workspace.raised) != 0;
    if (threadIdx.x == 0) is_void |= args.watchdog.raise_if_given_up();
    if (not __syncthreads_or(is_void)) return;
    fill_with_nan(args.out, int64_t(args.num_tokens) * args.shape.row_bytes());
    if constexpr (Pass::kIsBackward) {
        const int64_t probs = int64_t(args.num_tokens) * args.grad_columns;
        for (int64_t i = threadIdx.x; i < probs; i += blockDim.x) {
            store_float(args.grad_probs, args.grad_probs_dtype, i, __int_as_float(~0));
        }
        if (unmatched_ranks(args) != 0) spoil_weight_grads(args);
    }
}

template <class Pass>
__global__ __cluster_dims__(kClusterSize) __launch_bounds__(kLayerThreads, 1)  //
    void layer_kernel(const __grid_constant__ typename Pass::Args args) {
    extern __shared__ __align__(1024) uint8_t smem_bytes[];
    auto& buffers = *reinterpret_cast<LayerBuffers*>(smem_bytes);
    __shared__ __align__(16) uint8_t words_bytes[sizeof(LayerWords)];
    auto& words = *reinterpret_cast<LayerWords*>(words_bytes);
    const auto ring = ring_of(buffers, words, [](auto& place) -> auto& { return place; });
    const Handover handover{buffers.outputs, words.outputs.full, words.outputs.empty};
    args.watchdog.trace.open();
    open_counters(args.records != nullptr);
    begin_record(args);
    // From the last warp on, which does not plan.
    for (int i = kLayerThreads - 1 - int(threadIdx.x); i < args.shape.num_matrices();
         i += kLayerThreads) {
        ptx::acquire_tensor_map(args.weight_maps + i);
        if constexpr (Pass::kHasWeightGrads) ptx::acquire_tensor_map(args.weight_grads.maps + i);
    }
    if (threadIdx.x == kLayerThreads - 1) {  // the last warp does not plan
        init_barriers(ring, words.mailbox, kNumProcessors * (kProcessorWarps + 1));
        init_barriers(handover);
        words.combine = {};
        for (Barrier& arrived : words.pieces) arrived.init(1);
        cutlass::arch::fence_barrier_init();
    }
    if (threadIdx.x == 0) begin_span(Span::kPlan);
    const bool goes_on = open_layer<Pass>(args, smem_bytes);
    if (goes_on) copy_first_rows(args);
    if (threadIdx.x == 0) end_span(Span::kPlan);
    if (goes_on) {
        ptx::fence_proxy_async_shared();
        __syncthreads();       // whole warps, where lanes had different rows to copy
        cute::cluster_sync();  // is counted by warps

        // Sums in a tree are for warps that communicate: processors have no registers for them.
        const auto in_tree = [&] { return Pass::kHasTree and args.shape.is_rank_invariant(); };
        // Uniform by construction: only then does ptxas give each branch the registers that it asks
        // for.
        const int warpgroup = __shfl_sync(~0u, int(threadIdx.x / 128), 0);
        if (warpgroup > 0) {
            cutlass::arch::warpgroup_reg_alloc<kProcessorRegisters>();
            process_tiles<Pass>(args, ring, words.mailbox, handover, warpgroup - 1);
            if (not in_tree()) combine<Pass, kProcessorSums, false>(args, words.combine);
        } else {
            cutlass::arch::warpgroup_reg_dealloc<kCommRegisters>();
            const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);
            if (warp == 0) {
                const auto kept = ring_of(
                    buffers, words, [](auto& place) -> auto& { return ptx::keep_address(place); });
                load_layer<Pass>(args, kept, words.mailbox);
            } else if (warp == 1) {
                [[maybe_unused]] const uint32_t parity =
                    dispatch<true>(args, buffers.pieces, words.pieces, num_first_places(args));
                if constexpr (Pass::kHasWeightGrads) {
                    if (copies_tokens(args)) {
                        copy_tokens(args, buffers.pieces, words.pieces, parity);
                    }
                }
                if (not in_tree()) combine_meanwhile<Pass>(args, words.combine);
            } else {
                finish_tiles<Pass>(args, words.mailbox, handover, words.combine, warp - 2);
            }
            if (in_tree()) {
                combine<Pass, kCommSums, Pass::kHasTree>(args, words.combine);
            } else {
                combine<Pass, kCommSums, false>(args, words.combine);
            }
            if constexpr (kHasReplicas and Pass::kIsBackward) {
                add_fc2_replicas<typename Pass::Element>(args);
            }
        }
        args.watchdog.trace.close();
    }
    close_counters(args.workspace.totals);
    // The other CTA may still write to this one's shared memory. The counters' sums travel
    // meanwhile.
    if (goes_on) cute::cluster_sync();
    leave(args.workspace, [&] {
        if constexpr (Pass::kIsBackward and not Pass::kHasWeightGrads) {
            spoil_outputs<Pass>(args);  // the record is of the launch that follows, too
        } else {
            write_record(args, Pass::kIsBackward, [&] { spoil_outputs<Pass>(args); });
        }
        if constexpr (Pass::kHasWeightGrads) {
            if (threadIdx.x == 0) tell_fc2_grads(args);  // unless that is done
        }
        return unmatched_ranks(args) == 0;
    });
}

template <class Pass>
KernelEntry entry_of() {
    return {reinterpret_cast<const void*>(&layer_kernel<Pass>), kLayerThreads, kLayerSmemBytes};
}

template <class T, bool kTransposed>
KernelEntry forward_entry(bool is_gated) {
    return is_gated ? entry_of<ForwardPass<T, true, kTransposed>>()
                    : entry_of<ForwardPass<T, false, kTransposed>>();
}

template <class T, bool kTransposed>
KernelEntry backward_entry(bool is_gated) {
    return is_gated ? entry_of<BackwardPass<T, true, kTransposed>>()
                    : entry_of<BackwardPass<T, false, kTransposed>>();
}

}  // namespace flashmoe
