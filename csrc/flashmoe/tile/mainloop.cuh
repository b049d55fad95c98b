// The matrix product of one warpgroup: 64 x BLOCK_N outputs in registers, operands from the ring.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "flashmoe/comm/grid.cuh"
#include "flashmoe/tile/element.cuh"
#include "flashmoe/tile/pipeline.cuh"

namespace flashmoe {

using cute::GMMA::Major;

// Shared-memory layouts that the TMA boxes write (128-byte swizzle). K-major boxes stack along the
// rows; MN-major ones are blocks of 64 rows of K that follow one another along M or N, hence K
// before M/N in the tiling order.
template <class T, Major kMajor, int kRows>
struct OperandLayout;

template <class T, int kRows>
struct OperandLayout<T, Major::K, kRows> {
    using Type = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<T>{},
                                              cute::Shape<cute::Int<kRows>, cute::Int<BLOCK_K>>{}));
};

template <class T, int kRows>
struct OperandLayout<T, Major::MN, kRows> {
    using Type = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<T>{},
                                              cute::Shape<cute::Int<kRows>, cute::Int<BLOCK_K>>{},
                                              cute::Step<cute::_2, cute::_1>{}));
};

template <class Element, Major kMajorA, Major kMajorB>
struct Mainloop {
    using T = typename CutlassElement<Element>::Type;
    using Mma = decltype(cute::make_tiled_mma(
        cute::SM90::GMMA::ss_op_selector<
            T,
            T,
            float,
            cute::Shape<cute::Int<64>, cute::Int<BLOCK_N>, cute::Int<BLOCK_K>>,
            kMajorA,
            kMajorB>()));
    using LayoutA = typename OperandLayout<T, kMajorA, 64>::Type;
    using LayoutB = typename OperandLayout<T, kMajorB, BLOCK_N>::Type;
    // Thread t of the warpgroup holds, at [4 j + 2 i + c], the output of row 16 (t / 32) + (t % 32)
    // / 4 + 8 i and column 8 j + 2 (t % 4) + c.
    using Accumulator = decltype(cute::partition_fragment_C(
        Mma{}, cute::Shape<cute::Int<64>, cute::Int<BLOCK_N>>{}));

    // Multiplies stages and releases each, to both CTAs that may fill it, once its products are
    // done. If threads may have copied A, and not only TMA, each stage has a fence before products
    // read it. Scope: all 128 threads of one warpgroup.
    template <bool kIsCopied, class Ring>
    __device__ __forceinline__ static void run(Accumulator& accumulator,
                                               const Ring& ring,
                                               RingCursor<Ring::kNumStages>& cursor,
                                               int num_k_blocks,
                                               int warpgroup,
                                               uint32_t& waited,
                                               const Watchdog& watchdog) {
        using namespace cute;
        Mma mma;
        mma.accumulate_ = GMMA::ScaleOut::Zero;
        const int thread = threadIdx.x % 128;
        auto thread_mma = mma.get_slice(thread);
        for (int k_block = 0; k_block < num_k_blocks; ++k_block) {
            await_stage(watchdog, ring.full[cursor.index()], cursor.parity(), waited);
            if constexpr (kIsCopied) ptx::fence_proxy_async_shared();
            auto& stage = ring.stage[cursor.index()];
            auto a = make_tensor(
                make_smem_ptr(reinterpret_cast<T*>(stage.a) + warpgroup * 64 * BLOCK_K), LayoutA{});
            auto b = make_tensor(make_smem_ptr(reinterpret_cast<T*>(stage.b)), LayoutB{});
            auto fragment_a = thread_mma.make_fragment_A(thread_mma.partition_A(a));
            auto fragment_b = thread_mma.make_fragment_B(thread_mma.partition_B(b));

            warpgroup_fence_operand(accumulator);
            warpgroup_arrive();
            CUTE_UNROLL
            for (int k = 0; k < size<2>(fragment_a); ++k) {
                gemm(mma, fragment_a(_, _, k), fragment_b(_, _, k), accumulator);
                mma.accumulate_ = GMMA::ScaleOut::One;
            }
            warpgroup_commit_batch();
            // Waits for these very products, and not only for those before them: the other
            // warpgroup's keep the tensor cores busy, and the stage is free as early as it can be.
            warpgroup_wait<0>();
            warpgroup_fence_operand(accumulator);
            release(ring.empty[cursor.index()]);
            cursor.advance();
        }
    }

    // Releases stages that this warpgroup has no use for. Its warps come together at each stage, as
    // they do for products: a warp that looked late, after the others have released the stage and
    // it was filled again, would take the next phase's parity for a stage that has not come yet.
    // Scope: as above.
    template <class Ring>
    __device__ __forceinline__ static void skip(const Ring& ring,
                                                RingCursor<Ring::kNumStages>& cursor,
                                                int num_k_blocks,
                                                int warpgroup,
                                                uint32_t& waited,
                                                const Watchdog& watchdog) {
        for (int k_block = 0; k_block < num_k_blocks; ++k_block) {
            await_stage(watchdog, ring.full[cursor.index()], cursor.parity(), waited);
            ptx::barrier_sync(kProcessorsBarrier + warpgroup, 128);
            release(ring.empty[cursor.index()]);
            cursor.advance();
        }
    }

 protected:
    // Waits for a stage; the time is added to `waited`. Nothing in here may need the whole
    // warpgroup, since its warps do not find the same. A stage that does not come leaves no fault
    // in the midst of the products: its loader waits as well, for rows or for room, and leaves one.
    __device__ __forceinline__ static void await_stage(const Watchdog& watchdog,
                                                       Barrier& full,
                                                       uint32_t parity,
                                                       uint32_t& waited) {
        ptx::delay_point_of_warp();
        if (agreed<Waiter::kWarp>(full.test_wait(parity))) return;
        waited +=
            await_barrier<Waiter::kWarp>(watchdog, Wait::kProcessorStage, full, parity, [] {});
    }
    // One thread arrives at each CTA's barrier.
    __device__ __forceinline__ static void release(Barrier& stage) {
        const int thread = threadIdx.x % 128;
        ptx::delay_point_of_warp();
        if (thread % 32 == 0 and thread / 32 < kClusterSize) stage.arrive(uint32_t(thread / 32));
    }
};

}  // namespace flashmoe
