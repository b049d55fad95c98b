// The matrix product of one warpgroup where operands are E4M3 with scales: 64 x BLOCK_N outputs in
// registers. Tensor cores add E4M3 products with fewer bits than float32 has, and each 128 of K
// have scales of their own. So a stage's sums are taken apart, half the columns at a time, and are
// promoted: multiplied with both operands' scales and added in float32.
#pragma once

#include "flashmoe/tile/mainloop.cuh"

namespace flashmoe {

struct PromotedMainloop : Mainloop<__nv_fp8_e4m3, Major::K, Major::K> {
    static constexpr int kColumns = kBoxRows;  // a half's, which have one scale
    using HalfMma = decltype(cute::make_tiled_mma(
        cute::SM90::GMMA::ss_op_selector<
            T,
            T,
            float,
            cute::Shape<cute::Int<64>, cute::Int<kColumns>, cute::Int<BLOCK_K>>,
            Major::K,
            Major::K>()));
    using LayoutHalfB = typename OperandLayout<T, Major::K, kColumns>::Type;

    // As Mainloop::run. Scales are loaded ahead of the products, the rows' last. A warp's loads
    // come in order, so all of them have come when its first half is promoted; and the second
    // half's products need all four warps, so that one warp can tell that all have read the stage.
    template <bool kIsCopied, class Ring>
    __device__ __forceinline__ static void run(Accumulator& accumulator,
                                               const Ring& ring,
                                               RingCursor<Ring::kNumStages>& cursor,
                                               int num_k_blocks,
                                               int warpgroup,
                                               uint32_t& waited,
                                               const Watchdog& watchdog) {
        using namespace cute;
        static_assert(not kIsCopied);
        HalfMma mma;
        const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
        auto thread_mma = mma.get_slice(thread);
        auto part = partition_fragment_C(HalfMma{}, cute::Shape<Int<64>, Int<kColumns>>{});
        clear(accumulator);
        for (int k_block = 0; k_block < num_k_blocks; ++k_block) {
            await_stage(watchdog, ring.full[cursor.index()], cursor.parity(), waited);
            auto& stage = ring.stage[cursor.index()];
            const auto& scales = ring.scales[cursor.index()];
            const int at = k_block % kScalesAtOnce;
            const float scale_b[2] = {ptx::ld_shared(&scales.b[0][at]),
                                      ptx::ld_shared(&scales.b[1][at])};
            const float scale_a[2] = {ptx::ld_shared(&scales.a[warpgroup * 64 + row][at]),
                                      ptx::ld_shared(&scales.a[warpgroup * 64 + row + 8][at])};
            auto a = make_tensor(
                make_smem_ptr(reinterpret_cast<T*>(stage.a) + warpgroup * 64 * BLOCK_K), LayoutA{});
            auto fragment_a = thread_mma.make_fragment_A(thread_mma.partition_A(a));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                auto b =
                    make_tensor(make_smem_ptr(reinterpret_cast<T*>(stage.b[half])), LayoutHalfB{});
                auto fragment_b = thread_mma.make_fragment_B(thread_mma.partition_B(b));
                mma.accumulate_ = GMMA::ScaleOut::Zero;
                warpgroup_fence_operand(part);
                warpgroup_arrive();
                CUTE_UNROLL
                for (int k = 0; k < size<2>(fragment_a); ++k) {
                    gemm(mma, fragment_a(_, _, k), fragment_b(_, _, k), part);
                    mma.accumulate_ = GMMA::ScaleOut::One;
                }
                warpgroup_commit_batch();
                warpgroup_wait<0>();
                warpgroup_fence_operand(part);
                if (half == 1) release(ring.empty[cursor.index()]);
                const float scale[2] = {scale_a[0] * scale_b[half], scale_a[1] * scale_b[half]};
#pragma unroll
                for (int i = 0; i < size(part); ++i) {
                    auto& sum = accumulator(half * size(part) + i);
                    sum = fmaf(part(i), scale[i / 2 % 2], sum);
                }
            }
            cursor.advance();
        }
    }
};

}  // namespace flashmoe
