// The loader: one thread that takes tickets, tells the processors, and streams operands by TMA. It
// is also the paper's subscriber: the only one that waits for rows to arrive.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "flashmoe/actor/scheduler.cuh"
#include "flashmoe/moe/args.cuh"
#include "flashmoe/tile/mainloop.cuh"
#include "flashmoe/tile/pipeline.cuh"

namespace flashmoe {

__device__ __forceinline__ void load_box(
    const void* map, Barrier& full, uint8_t* box, int column, int row) {
    cute::SM90_TMA_LOAD_2D::copy(map, reinterpret_cast<uint64_t*>(&full),
                                 uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL), box, column,
                                 row);
}

// Hands a tile to the processors. Scope: the loader thread.
__device__ __forceinline__ void announce_tile(const Watchdog& watchdog,
                                              TileMailbox& mailbox,
                                              RingCursor<kTileSlots>& slot,
                                              const TileInfo& tile) {
    wait_barrier(watchdog, Role::kLoaderTile, mailbox.empty[slot.index()], slot.parity() ^ 1);
    mailbox.tile[slot.index()] = tile;
    mailbox.full[slot.index()].arrive();
    slot.advance();
}

// Takes the announced tile. Scope: all threads of a processor warpgroup.
__device__ __forceinline__ TileInfo take_tile(const Watchdog& watchdog,
                                              TileMailbox& mailbox,
                                              RingCursor<kTileSlots>& slot) {
    wait_barrier(watchdog, Role::kProcessorTile, mailbox.full[slot.index()], slot.parity());
    TileInfo tile{};
    if (threadIdx.x % 32 == 0) {  // the lane that reads is the lane that gives the slot back
        tile = mailbox.tile[slot.index()];
        mailbox.empty[slot.index()].arrive();
    }
    slot.advance();
    return {__shfl_sync(~0u, tile.gemm, 0), __shfl_sync(~0u, tile.block, 0),
            __shfl_sync(~0u, tile.m, 0), __shfl_sync(~0u, tile.n, 0)};
}

// Streams one tile's stages: B of the first stages goes ahead, then `await_a`, then the rest.
template <class Ring, class LoadA, class LoadB, class AwaitA>
__device__ __forceinline__ void stream_tile(const Watchdog& watchdog,
                                            Ring& ring,
                                            RingCursor<Ring::kNumStages>& cursor,
                                            int num_k_blocks,
                                            LoadA load_a,
                                            LoadB load_b,
                                            AwaitA await_a) {
    const int ahead = min(num_k_blocks, Ring::kNumStages);
    auto open_stage = [&] {
        wait_barrier(watchdog, Role::kLoaderStage, ring.empty[cursor.index()], cursor.parity() ^ 1);
        ring.full[cursor.index()].arrive_and_expect_tx(sizeof(ring.stage[0]));
    };
    RingCursor<Ring::kNumStages> trailing = cursor;
    for (int k = 0; k < ahead; ++k) {
        open_stage();
        load_b(ring.stage[cursor.index()], ring.full[cursor.index()], k);
        cursor.advance();
    }
    await_a();
    for (int k = 0; k < ahead; ++k) {
        load_a(ring.stage[trailing.index()], ring.full[trailing.index()], k);
        trailing.advance();
    }
    for (int k = ahead; k < num_k_blocks; ++k) {
        open_stage();
        load_b(ring.stage[cursor.index()], ring.full[cursor.index()], k);
        load_a(ring.stage[cursor.index()], ring.full[cursor.index()], k);
        cursor.advance();
    }
}

// The first weight row (K-major) or column (MN-major) of each 64-wide box of B.
template <class Pass>
__device__ __forceinline__ int box_of_b(const Shape& shape, int gemm, int n, int box) {
    if (Pass::kGatedForward and gemm == 0) {
        // Half gate, half up: the accumulator then holds both in one thread.
        const int half = Pass::BLOCK_N / kBoxDim / 2;
        return n * (Pass::BLOCK_N / 2) + box % half * kBoxDim + box / half * shape.intermediate;
    }
    return n * Pass::BLOCK_N + box * kBoxDim;
}

// Scope: one thread.
template <class Pass, class Ring>
__device__ __forceinline__ void load_tiles(const LayerArgs& args,
                                           Ring& ring,
                                           TileMailbox& mailbox) {
    const TileOrder order{
        args.num_row_blocks, args.group_blocks, {args.num_n_tiles[0], args.num_n_tiles[1]}};
    const int num_local_experts = args.shape.num_local_experts();
    RingCursor<Ring::kNumStages> cursor;
    RingCursor<kTileSlots> slot;
    for (;;) {
        const TileInfo tile = order.tile(int(atomicAdd(&args.workspace.tickets->tile, 1u)));
        announce_tile(args.watchdog, mailbox, slot, tile);
        if (tile.gemm == TileInfo::kNoTile) return;

        const int expert = args.plan.block_expert[tile.block];
        const int matrix = Pass::kWeightOfGemm0 ^ tile.gemm;
        const CUtensorMap* weights = args.weight_maps + matrix * num_local_experts + expert;
        stream_tile(
            args.watchdog, ring, cursor, args.num_k_blocks[tile.gemm],
            [&](auto& stage, Barrier& full, int k) {
                for (int box = 0; box < kABoxes; ++box) {
                    load_box(&args.load_map[tile.gemm], full, stage.a[box], k * BLOCK_K,
                             tile.block * BLOCK_M + box * kBoxDim);
                }
            },
            [&](auto& stage, Barrier& full, int k) {
                for (int box = 0; box < stage.kBBoxes; ++box) {
                    const int n = box_of_b<Pass>(args.shape, tile.gemm, tile.n, box);
                    const bool k_major = Pass::kMajorB == Major::K;
                    load_box(weights, full, stage.b[box], k_major ? k * BLOCK_K : n,
                             k_major ? n : k * BLOCK_K);
                }
            },
            [&] {
                if (tile.gemm == 0) {
                    wait_count(args.watchdog, Role::kLoaderRows, tile.block,
                               args.workspace.rows_ready + tile.block, BLOCK_M);
                } else {
                    wait_count(args.watchdog, Role::kLoaderAct, tile.block,
                               args.workspace.act_ready + tile.block,
                               uint32_t(kNumProcessors * args.num_n_tiles[0]));
                }
                ptx::fence_proxy_async_global();
            });
    }
}

}  // namespace flashmoe
