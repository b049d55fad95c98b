// The finisher's part of the weights' gradients.
#pragma once

#include "flashmoe/moe/turned_grads.cuh"
#include "flashmoe/moe/weight_grads.cuh"

namespace flashmoe {

// Sends the half of a tile that processors leave to it, in pieces over half the time of the next
// tile, whose loads would have to wait for all that an SM sends at once. Scope: a finisher.
template <class Pass>
__device__ __forceinline__ void finish_weight_grad(const BackwardArgs& args,
                                                   const TileInfo& tile,
                                                   const Handover& handover,
                                                   RingCursor<1>& handover_cursor,
                                                   int processor,
                                                   CountedGrads& counted) {
    constexpr int kPieces = kProcessorWarps * kHalfBlocks;
    constexpr unsigned kBlockNs = 650;  // the time in which a block of K is multiplied
    const int num_k_blocks = weight_grad_k_blocks(args.plan, tile);
    if (num_k_blocks == 0) return;
    const bool is_fc1 = tile.gemm == kFc1WeightGrad;
    const bool counts_fc2 = not counted.fc2 and is_fc1;
    const bool counts_slots =
        kHasReplicas and not counted.in_slots and (is_fc1 or tile.expert < args.first_spare);
    if (counts_fc2 or counts_slots) ptx::bulk_wait_complete();  // the last counted tile
    GiveBack give_back;
#pragma unroll 1
    for (int warp = 0; warp < kProcessorWarps; ++warp) {
        const WarpRoom room(handover, processor, warp);
        wait_barrier<Waiter::kWarp>(args.watchdog, Wait::kFinisherRows, room.full,
                                    handover_cursor.parity());
        const int of_tile = processor * kProcessorWarps + warp;
        const unsigned pause_ns = num_k_blocks * kBlockNs / 2 / kPieces;
        const GradRows grad(args, tile, of_tile);
        if (is_turned<Pass>(args, tile)) {
            finish_turned(args, TurnedGrad(args, tile, of_tile), room.outputs, pause_ns);
        } else if (leave_rounded(args, kHasReplicas and grad.are_spare(args))) {
            send_rounded(grad, room.outputs);
        } else if (args.weight_grads.dtype == Dtype::kFloat32 or
                   (kHasReplicas and grad.are_spare(args))) {
            send_half(args, grad, room.outputs, 1, pause_ns);
        }
        give_back.follow(room.empty);
    }
    if (counts_slots) count_slot_grads(args);
    if (counts_fc2) count_fc2_grads(args);
    counted.in_slots |= counts_slots;
    counted.fc2 |= counts_fc2;
    give_back.finish();
    handover_cursor.advance();
}

}  // namespace flashmoe
