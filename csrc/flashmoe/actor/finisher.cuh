// The finisher: a warp that makes results of what one processor hands over, under its next
// products, and tells whoever waits for them.
#pragma once

#include "flashmoe/moe/expert.cuh"
#include "flashmoe/tile/handover.cuh"

namespace flashmoe {

template <class Pass>
__device__ __forceinline__ void finish_tiles(const LayerArgs& args,
                                             TileMailbox& mailbox,
                                             Handover& handover,
                                             int processor) {
    RingCursor<kTileSlots> slot;
    RingCursor<1> handed;
    begin_span(uint32_t(Role::kFinish));
    for (;;) {
        const TileInfo tile = take_tile(args.watchdog, Role::kFinisherTile, mailbox, slot);
        if (tile.gemm == TileInfo::kNoTile) break;
        if (tile.n >= args.num_n_tiles[tile.gemm]) continue;
#pragma unroll 1
        for (int warp = 0; warp < kProcessorWarps; ++warp) {
            wait_barrier(args.watchdog, Role::kFinisherRows, handover.full[processor][warp],
                         handed.parity());
            const int64_t begin = Trace::now();
            const HandedOver outputs(handover.outputs[processor][warp]);
            const int row = tile.m * BLOCK_M + (processor * kProcessorWarps + warp) * kWarpRows;
            if (tile.gemm == 0) {
                Pass::finish_gemm0(args, tile, row, outputs);
            } else {
                store_results(args, tile, row, outputs);
            }
            __syncwarp();
            if (threadIdx.x % 32 == 0) handover.empty[processor][warp].arrive();
            args.watchdog.trace.add(uint32_t(Role::kEpilogue0) + uint32_t(tile.gemm), tile.m,
                                    begin);
        }
        handed.advance();
        if (threadIdx.x % 32 == 0) {
            ptx::red_release_gpu(
                args.workspace.tile_ready + args.workspace.tile_counter(tile.gemm, tile.m), 1);
        }
    }
    end_span(uint32_t(Role::kFinish));
}

}  // namespace flashmoe
