// The finisher: a warp that turns the sums of one processor into results, while that processor
// computes its next products, and signals to all that wait for the results.
#pragma once

#include "flashmoe/actor/finish_weight_grad.cuh"
#include "flashmoe/moe/combine.cuh"
#include "flashmoe/moe/expert.cuh"
#include "flashmoe/moe/publish.cuh"
#include "flashmoe/tile/handover.cuh"

namespace flashmoe {

// A backward's finishers have nothing to do until there are outputs. So the first of them copies dY
// to where peers pull it from, through the rooms of both; a forward copies x while the others plan.
// Scope: the finishers.
__device__ __forceinline__ void publish_grads(const LayerArgs& args,
                                              const Handover& handover,
                                              int processor) {
    // No backward has narrow tiles.
    static_assert(BLOCK_N == kNarrowColumns or sizeof(RowCopySmem) <= sizeof(AllOutputs));
    if (processor == 0 and threadIdx.x % 32 == 0) {
        const uint32_t epoch = current_epoch(args.workspace);
        if constexpr (kIsFp8) {  // a launch ahead has put them there
            tell_rows(args, &args.workspace.tickets->rows_published, epoch);
        } else {
            publish_rows(args, epoch, reinterpret_cast<RowCopySmem&>(handover.outputs));
        }
    }
    ptx::barrier_sync(kGradsPublished, kNumProcessors * 32);
}

template <class Pass>
__device__ __forceinline__ void finish_tiles(const typename Pass::Args& args,
                                             TileMailbox& mailbox,
                                             const Handover& handover,
                                             CombineSmem& combine,
                                             int processor) {
    RingCursor<kTileSlots> slot;
    RingCursor<1> handover_cursor;
    int chunk = 0;
    [[maybe_unused]] CountedGrads counted;
    begin_span(Span::kFinish);
    if constexpr (Pass::kIsBackward) publish_grads(args, handover, processor);
    open_rooms(handover, processor);
    for (;;) {
        [[maybe_unused]] uint32_t waited = 0;
        const TileInfo tile = take_tile(args.watchdog, Wait::kFinisherTile, mailbox, slot, waited);
        if (tile.gemm == TileInfo::kNoTile) break;
        if constexpr (Pass::kHasWeightGrads) {
            if (is_weight_grad(tile)) {
                finish_weight_grad<Pass>(args, tile, handover, handover_cursor, processor, counted);
                continue;
            }
        }
        if (tile.n >= args.num_n_tiles[tile.gemm]) continue;
        const int first_row = tile.m * BLOCK_M + processor * kProcessorWarps * kWarpRows;
        const RowFacts facts(args.plan, first_row);
        const auto finish = [&](auto& finish_rows, auto give_back) {
#pragma unroll 1
            for (int warp = 0; warp < kProcessorWarps; ++warp) {
                const WarpRoom room(handover, processor, warp);
                wait_barrier<Waiter::kWarp>(args.watchdog, Wait::kFinisherRows, room.full,
                                            handover_cursor.parity());
                const int64_t begin = Trace::now();
                const OutputsView outputs(room.outputs);
                finish_rows(WarpRows{first_row + warp * kWarpRows, warp, outputs, facts});
                give_back(room.empty);
                args.watchdog.trace.add(event_of(Span::kEpilogue0, tile.gemm), tile.m, begin);
            }
        };
        const auto finish_a_room_late = [&](auto& finish_rows) {
            GiveBack give_back;
            finish(finish_rows, [&](Barrier& empty) { give_back.follow(empty); });
            give_back.finish();
        };
        if (tile.gemm == 0) {  // no copy reads its rows
            typename Pass::FinishGemm0 finish_rows(args, tile, first_row);
            if constexpr (kHasReplicas) {  // a register less than without it
                finish_a_room_late(finish_rows);
            } else {
                finish(finish_rows, [](Barrier& empty) {
                    ptx::delay_point_of_warp();
                    empty.arrive();
                });
            }
        } else {
            // A tile takes its processor longer than its finisher, so there is time to combine. But
            // a finisher that combines may be late for the outputs: it does not before GEMM0's,
            // since GEMM1 waits for them, nor before a forward's last tiles, which nothing follows.
            if (args.finishers_combine and (Pass::kIsBackward or not tile.is_late)) {
                const Barrier& full = handover.full[processor][0];
                while (not agreed<Waiter::kWarp>(full.test_wait(handover_cursor.parity())) and
                       combine_some<typename Pass::Element, Pass::kIsBackward, kCommSums>(
                           args, combine, chunk, true) == Progress::kSome) {
                }
            }
            const auto store = [&](const WarpRows& rows) { store_results(args, tile, rows); };
            finish_a_room_late(store);
        }
        handover_cursor.advance();
        protocol::complete_copies<Atomics>();
        if (threadIdx.x % 32 == 0) {
            protocol::publish<Atomics>(args.workspace.tile_ready +
                                       args.workspace.tile_counter(tile.gemm, tile.m));
            if (Pass::kHasWeightGrads and tile.gemm == 0) {
                protocol::publish<Atomics>(&args.workspace.tickets->differentiated);
            }
        }
    }
    if constexpr (Pass::kHasWeightGrads) {
        ptx::bulk_wait_complete();  // weight gradients: no wait in this launch is for them
        if constexpr (kHasReplicas) {
            // But owners of replicas wait for fc2's, and this GPU's warps that add them, also for
            // those of this finisher's processor.
            ptx::barrier_sync(kProcessorEnds + processor, (kProcessorWarps + 1) * 32);
            if (not counted.in_slots) count_slot_grads(args);
            if (not counted.fc2) count_fc2_grads(args);
        }
    }
    end_span(Span::kFinish);
}

}  // namespace flashmoe
