// The processor (Algorithm 2 of the paper): a warpgroup that turns tiles into results. The two of a
// CTA own 64 rows each and drift apart by up to the pipeline's depth, so that one's epilogue runs
// under the other's products.
#pragma once

#include "flashmoe/actor/loader.cuh"
#include "flashmoe/moe/expert.cuh"

namespace flashmoe {

template <class Pass, class Ring>
__device__ __forceinline__ void process_tiles(const LayerArgs& args,
                                              Ring& ring,
                                              TileMailbox& mailbox,
                                              uint8_t (*staging)[kStagingBytes],
                                              int warpgroup) {
    using Main = Mainloop<cute::GMMA::Major::K, Pass::kMajorB, Pass::BLOCK_N>;
    typename Main::Accumulator accumulator;
    TileStore out(staging, warpgroup);
    RingCursor<Ring::kNumStages> cursor;
    RingCursor<kTileSlots> slot;
    for (;;) {
        const TileInfo tile = take_tile(args.watchdog, mailbox, slot);
        if (tile.gemm == TileInfo::kNoTile) return;
        Main::run(accumulator, ring, cursor, args.num_k_blocks[tile.gemm], warpgroup,
                  args.watchdog);
        if (tile.gemm == 0) {
            Pass::finish_gemm0(args, tile, warpgroup, accumulator, out);
        } else {
            store_result_tile<Pass::BLOCK_N>(args, tile, warpgroup, accumulator, out);
        }
    }
}

}  // namespace flashmoe
