// The processor (Algorithm 2 of the paper): a warpgroup that does nothing but matrix products. Each
// of a CTA's two processors owns 64 rows of a tile.
#pragma once

#include "flashmoe/actor/loader.cuh"
#include "flashmoe/moe/turned_grads.cuh"
#include "flashmoe/tile/handover.cuh"
#ifdef FLASHMOE_IN_FP8
#include "flashmoe/tile/promoted.cuh"
#endif

namespace flashmoe {

// fc1's bias, or fc2's times the routing weight, is added before the product is rounded.
template <class Pass, class Accumulator>
__device__ __forceinline__ void add_bias(const LayerArgs& args,
                                         const TileInfo& tile,
                                         int warpgroup,
                                         const void* bias,
                                         Accumulator& accumulator) {
    using T = typename Pass::Element;
    const int thread = threadIdx.x % 128;
    const int row = tile.m * BLOCK_M + warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
    float scale[2] = {1.0f, 1.0f};
    if (tile.gemm == 1) scale[0] = args.plan.row_prob[row], scale[1] = args.plan.row_prob[row + 8];
    const int num_columns = tile.gemm == 0 ? args.shape.fc1_rows() : args.shape.hidden;
    const int begin_of_half[2] = {begin_of_b<Pass>(args.shape, tile.gemm, tile.n, 0),
                                  begin_of_b<Pass>(args.shape, tile.gemm, tile.n, 1)};
#pragma unroll
    for (int j = 0; j < BLOCK_N / 8; ++j) {
        const int in_tile = j * 8 + thread % 4 * 2;
        const int column = begin_of_half[j / (kBoxRows / 8)] + in_tile % kBoxRows;
        float2 value{};
        if (column < num_columns) {
            value =
                unpack<T>(*reinterpret_cast<const uint32_t*>(static_cast<const T*>(bias) + column));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            accumulator(4 * j + 2 * i) += value.x * scale[i];
            accumulator(4 * j + 2 * i + 1) += value.y * scale[i];
        }
    }
}

template <class Pass, class Ring>
__device__ __forceinline__ void process_tiles(const typename Pass::Args& args,
                                              const Ring& ring,
                                              TileMailbox& mailbox,
                                              const Handover& handover,
                                              int warpgroup) {
    using T = typename Pass::Element;
#ifdef FLASHMOE_IN_FP8
    using Main = PromotedMainloop;
#else
    using Main = Mainloop<T, Major::K, Pass::kMajorB>;
#endif
    typename Main::Accumulator accumulator;
    RingCursor<Ring::kNumStages> cursor;
    RingCursor<kTileSlots> slot;
    RingCursor<1> handover_cursor;
    const int warp = int(threadIdx.x / 32) % kProcessorWarps;
    const WarpRoom room(handover, warpgroup, warp);
    TileInfo tile;
    // Counted at the end, since products leave no time for it.
    uint32_t waited = 0;  // for tiles and stages
    uint32_t handover_wait = 0;
    const auto take = [&] {
        tile = take_tile(args.watchdog, Wait::kProcessorTile, mailbox, slot, waited);
        return tile.gemm != TileInfo::kNoTile;
    };
    begin_span(Span::kProcess);
    while (take() and not is_weight_grad(tile)) {
        const int64_t begin = Trace::now();
        const int num_k_blocks = args.num_k_blocks[tile.gemm];
        // Rows that are all pads are zeros: one stage of them gives what all stages would give.
        const int num_multiplied = warpgroup < tile.num_halves ? num_k_blocks : 1;
        if (tile.gemm == 0 and reads_in_place(args)) {
            Main::template run<not kIsFp8>(accumulator, ring, cursor, num_multiplied, warpgroup,
                                           waited, args.watchdog);
        } else {
            Main::template run<false>(accumulator, ring, cursor, num_multiplied, warpgroup, waited,
                                      args.watchdog);
        }
        Main::skip(ring, cursor, num_k_blocks - num_multiplied, warpgroup, waited, args.watchdog);
        args.watchdog.trace.add(event_of(Span::kGemm0, tile.gemm), tile.m, begin);
        // A single block's last pair may reach past N: its second tile is not needed.
        if (tile.n >= args.num_n_tiles[tile.gemm]) continue;
        if constexpr (Pass::kHasBias) {
            if (const void* const* biases = args.biases[tile.gemm]) {
                add_bias<Pass>(args, tile, warpgroup, biases[tile.expert], accumulator);
            }
        }
        give_outputs<T>(args.watchdog, room, handover_cursor, handover_wait, accumulator);
    }
    if constexpr (Pass::kHasWeightGrads) {  // they come last
        // The products are other instructions here, which all warps of a warpgroup must reach
        // together.
        ptx::barrier_sync(kProcessorsBarrier + warpgroup, 128);
        for (bool is_tile = is_weight_grad(tile); is_tile; is_tile = take()) {
            const int64_t begin = Trace::now();
            // Uniform by construction, as ptxas wants the bounds of a main loop.
            const int num_k_blocks = __shfl_sync(~0u, weight_grad_k_blocks(args.plan, tile), 0);
            const int of_tile = warpgroup * kProcessorWarps + warp;
            if (num_k_blocks == 0) {
                if (is_turned<Pass>(args, tile)) {
                    store_no_turned(args, TurnedGrad(args, tile, of_tile));
                } else {
                    store_no_weight_grad(args, GradRows(args, tile, of_tile));
                }
                continue;
            }
            using Grad = Mainloop<T, Major::MN, Major::MN>;
            if (gathered_from(args, tile) != nullptr) {
                Grad::template run<true>(accumulator, ring, cursor, num_k_blocks, warpgroup, waited,
                                         args.watchdog);
            } else {
                Grad::template run<false>(accumulator, ring, cursor, num_k_blocks, warpgroup,
                                          waited, args.watchdog);
            }
            args.watchdog.trace.add(event_of(Span::kWeightGrad), tile.expert, begin);
            if (is_turned<Pass>(args, tile)) {
                handover_wait += wait_barrier<Waiter::kWarp>(
                    args.watchdog, Wait::kProcessorHandover, room.empty, handover_cursor.parity());
                if (leave_rounded(args, false)) {
                    give_turned<T>(room, accumulator);
                } else {
                    store_turned<T>(args, tile, of_tile, room, accumulator);
                }
                handover_cursor.advance();
                continue;
            }
            const GradRows grad(args, tile, of_tile);
            if (leave_rounded(args, kHasReplicas and grad.are_spare(args))) {
                // Ends copies of a spare slot's tile before: its finisher relies on it.
                if constexpr (kHasReplicas) ptx::bulk_wait_complete();
                give_outputs<T>(args.watchdog, room, handover_cursor, handover_wait, accumulator);
                continue;
            }
            handover_wait += wait_barrier<Waiter::kWarp>(args.watchdog, Wait::kProcessorHandover,
                                                         room.empty, handover_cursor.parity());
            const int64_t stored = Trace::now();
            store_weight_grad<T>(args, grad, room, accumulator);
            handover_cursor.advance();
            args.watchdog.trace.add(event_of(Span::kStoreGrad), tile.expert, stored);
        }
        ptx::bulk_wait_complete();  // weight gradients: no wait in this launch is for them
        if constexpr (kHasReplicas) {
            // But its finisher waits for fc2's, where it has had no tile of fc1's.
            ptx::barrier_arrive(kProcessorEnds + warpgroup, (kProcessorWarps + 1) * 32);
        }
    }
    count_time(Span::kStageWait, waited);
    count_time(Span::kHandoverWait, handover_wait);
    end_span(Span::kProcess);
}

}  // namespace flashmoe
