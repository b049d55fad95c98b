// The matrix product of one warpgroup: 64 x BLOCK_N outputs in registers, operands from the ring.
#pragma once

#include <cutlass/numeric_types.h>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "flashmoe/tile/pipeline.cuh"

namespace flashmoe {

using cute::GMMA::Major;
using Bf16 = cutlass::bfloat16_t;

// Shared-memory layouts of what the TMA boxes (64 x 64, 128-byte swizzle) leave behind. K-major
// boxes stack along the rows; MN-major boxes hold 64 rows of K each and follow one another along M
// or N, hence K before M/N in the tiling order.
template <Major kMajor, int kRows>
struct OperandLayout;

template <int kRows>
struct OperandLayout<Major::K, kRows> {
    using Type = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Bf16>{},
                                              cute::Shape<cute::Int<kRows>, cute::Int<BLOCK_K>>{}));
};

template <int kRows>
struct OperandLayout<Major::MN, kRows> {
    using Type = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Bf16>{},
                                              cute::Shape<cute::Int<kRows>, cute::Int<BLOCK_K>>{},
                                              cute::Step<cute::_2, cute::_1>{}));
};

template <Major kMajorA, Major kMajorB, int BLOCK_N>
struct Mainloop {
    using Mma = decltype(cute::make_tiled_mma(
        cute::SM90::GMMA::ss_op_selector<
            Bf16,
            Bf16,
            float,
            cute::Shape<cute::Int<64>, cute::Int<BLOCK_N>, cute::Int<BLOCK_K>>,
            kMajorA,
            kMajorB>()));
    using LayoutA = typename OperandLayout<kMajorA, 64>::Type;
    using LayoutB = typename OperandLayout<kMajorB, BLOCK_N>::Type;
    // Thread t of the warpgroup holds, at [4 j + 2 i + c], the output of row 16 (t / 32) + (t % 32)
    // / 4 + 8 i and column 8 j + 2 (t % 4) + c.
    using Accumulator = decltype(cute::partition_fragment_C(
        Mma{}, cute::Shape<cute::Int<64>, cute::Int<BLOCK_N>>{}));

    // Scope: all 128 threads of one warpgroup. Releases each stage once its products are done.
    template <class Ring>
    __device__ __forceinline__ static void run(Accumulator& accumulator,
                                               Ring& ring,
                                               RingCursor<Ring::kNumStages>& cursor,
                                               int num_k_blocks,
                                               int warpgroup,
                                               const Watchdog& watchdog) {
        using namespace cute;
        Mma mma;
        mma.accumulate_ = GMMA::ScaleOut::Zero;
        const int thread = threadIdx.x % 128;
        auto thread_mma = mma.get_slice(thread);
        Barrier* previous = nullptr;

        for (int k_block = 0; k_block < num_k_blocks; ++k_block) {
            wait_barrier(watchdog, Role::kProcessorStage, ring.full[cursor.index()],
                         cursor.parity());
            auto& stage = ring.stage[cursor.index()];
            auto a =
                make_tensor(make_smem_ptr(reinterpret_cast<Bf16*>(stage.a[warpgroup])), LayoutA{});
            auto b = make_tensor(make_smem_ptr(reinterpret_cast<Bf16*>(stage.b)), LayoutB{});
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
            warpgroup_wait<1>();  // the previous stage's products are done
            warpgroup_fence_operand(accumulator);
            if (previous != nullptr and thread == 0) previous->arrive();
            previous = &ring.empty[cursor.index()];
            cursor.advance();
        }
        warpgroup_wait<0>();
        warpgroup_fence_operand(accumulator);
        if (previous != nullptr and thread == 0) previous->arrive();
    }
};

}  // namespace flashmoe
