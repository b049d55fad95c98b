// The processor (Algorithm 2 of the paper): a warpgroup that turns tiles into results. The two of a
// CTA own 64 rows each and drift apart by up to the pipeline's depth, so that one's epilogue runs
// under the other's products.
#pragma once

#include "flashmoe/actor/loader.cuh"
#include "flashmoe/moe/expert.cuh"

namespace flashmoe {

// Takes the announced tile. Scope: all threads of a processor warpgroup.
__device__ __forceinline__ TileInfo take_tile(const Watchdog& watchdog,
                                              TileMailbox& mailbox,
                                              RingCursor<kTileSlots>& slot,
                                              PendingStores& pending) {
    Barrier& full = mailbox.full[slot.index()];
    if (pending.exist() and not __all_sync(~0u, full.try_wait(slot.parity()))) {
        pending.settle();
    }
    wait_barrier(watchdog, Role::kProcessorTile, full, slot.parity());
    int4 tile{};
    if (threadIdx.x % 32 == 0) {  // the lane that reads is the lane that gives the slot back
        reinterpret_cast<TileInfo&>(tile) = read_tile(mailbox, slot);
    }
    slot.advance();
    tile = {__shfl_sync(~0u, tile.x, 0), __shfl_sync(~0u, tile.y, 0), __shfl_sync(~0u, tile.z, 0),
            __shfl_sync(~0u, tile.w, 0)};
    return reinterpret_cast<TileInfo&>(tile).of(int(ptx::cluster_rank()));
}

template <class Pass>
using StagingOf = WarpStaging<Pass::kStagingTiles, Pass::kStagingColumns>[kProcessorWarps];

template <class Pass, class Ring>
__device__ __forceinline__ void process_tiles(
    const LayerArgs& args,
    Ring& ring,
    TileMailbox& mailbox,
    WarpStaging<Pass::kStagingTiles, Pass::kStagingColumns>& staging,
    int warpgroup) {
    using Main = Mainloop<Major::K, Pass::kMajorB>;
    typename Main::Accumulator accumulator;
    TileStore out(staging);
    PendingStores pending(args.workspace.tile_ready, mailbox.pending[threadIdx.x / 32 - 4]);
    RingCursor<Ring::kNumStages> cursor;
    RingCursor<kTileSlots> slot;
    for (;;) {
        const TileInfo tile = take_tile(args.watchdog, mailbox, slot, pending);
        if (tile.gemm == TileInfo::kNoTile) break;
        const int64_t begin = Trace::now();
        Main::run(accumulator, ring, cursor, args.num_k_blocks[tile.gemm], warpgroup, args.watchdog,
                  pending);
        args.watchdog.trace.add(uint32_t(Role::kGemm0) + uint32_t(tile.gemm), tile.m, begin);
        const int64_t end = Trace::now();
        // A single block's last pair may reach past N: its second tile is for nothing.
        if (tile.n >= args.num_n_tiles[tile.gemm]) continue;
        if (tile.gemm == 0) {
            Pass::finish_gemm0(args, tile, warpgroup, accumulator, out);
        } else {
            store_result_tile(args, tile, warpgroup, accumulator, out);
        }
        pending.add(args.workspace.tile_counter(tile.gemm, tile.m));
        args.watchdog.trace.add(uint32_t(Role::kEpilogue0) + uint32_t(tile.gemm), tile.m, end);
    }
    pending.settle();
}

}  // namespace flashmoe
