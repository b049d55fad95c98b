// The loader: one thread that streams operands by TMA. The leading CTA's also takes the cluster's
// tickets and announces them. It is the paper's subscriber, too: the only one that waits for rows
// to arrive.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "flashmoe/actor/scheduler.cuh"
#include "flashmoe/moe/args.cuh"
#include "flashmoe/moe/weight_grads.cuh"
#include "flashmoe/protocol/queue.h"
#include "flashmoe/tile/handover.cuh"
#include "flashmoe/tile/mainloop.cuh"
#include "flashmoe/tile/pipeline.cuh"

namespace flashmoe {

// Loads one operand of stage k, whose K begins at `first_k`; box i begins at mn(i). If both CTAs
// read the same boxes, each loads every other one for both.
template <Major kMajor, int kBoxes, class BeginOfBox>
__device__ __forceinline__ void load_boxes(const void* map,
                                           Barrier& full,
                                           uint8_t (&boxes)[kBoxes][kBoxBytes],
                                           int k,
                                           int first_k,
                                           bool is_shared,
                                           BeginOfBox mn) {
    constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    auto* arrived = reinterpret_cast<uint64_t*>(&full);
    const int cta = int(ptx::cluster_rank());
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
        // The maps' dimensions: 64 columns, rows, blocks of 64 columns.
        const int row = kMajor == Major::K ? mn(box) : first_k + k * BLOCK_K;
        const int block = kMajor == Major::K ? first_k / BLOCK_K + k : mn(box) / BLOCK_K;
        if (not is_shared) {
            cute::SM90_TMA_LOAD_3D::copy(map, arrived, kHint, boxes[box], 0, row, block);
        } else if ((box + k) % kClusterSize == cta) {
            cute::SM90_TMA_LOAD_MULTICAST_3D::copy(map, arrived, (1 << kClusterSize) - 1, kHint,
                                                   boxes[box], 0, row, block);
        }
    }
}

// Takes pairs of tiles and streams this CTA's one, in two kinds of step: `next_ticket` gives the
// leading CTA the pair of a ticket, `stream` loads a tile and calls back once most of it is loaded.
// The next pair is fetched then, so that it is known before this one's last stage is free. Scope:
// one thread of each CTA.
template <class NextTicket, class Stream>
__device__ __forceinline__ void load_tiles(const Watchdog& watchdog,
                                           TileMailbox& mailbox,
                                           NextTicket next_ticket,
                                           Stream stream) {
    RingCursor<kTileSlots> slot;
    const int cta = int(ptx::cluster_rank());
    TileInfo next;
    auto take = [&] {
        do next = next_ticket();
        while (next.gemm == TileInfo::kSkip);
        announce_tile(watchdog, mailbox, slot, next);
    };
    if (cta == 0) take();
    for (;;) {
        if (cta != 0) {
            wait_barrier(watchdog, Role::kLoaderTile, mailbox.full[slot.index()], slot.parity());
            next = read_tile(mailbox, slot);
            slot.advance();
        }
        if (next.gemm == TileInfo::kNoTile) return;
        stream(next.of(cta), [&] {
            if (cta == 0) take();
        });
    }
}

// Streams one tile's stages: B of the first stages goes ahead, then `await_a`, then the rest.
template <class Ring, class LoadA, class LoadB, class AwaitA, class NearEnd>
__device__ __forceinline__ void stream_tile(const Watchdog& watchdog,
                                            Ring& ring,
                                            RingCursor<Ring::kNumStages>& cursor,
                                            int num_k_blocks,
                                            LoadA load_a,
                                            LoadB load_b,
                                            AwaitA await_a,
                                            NearEnd near_end) {
    const int ahead = min(num_k_blocks, Ring::kNumStages);
    const int near = max(ahead, num_k_blocks - Ring::kNumStages);
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
    for (int k = ahead; k < near; ++k) {
        open_stage();
        load_b(ring.stage[cursor.index()], ring.full[cursor.index()], k);
        load_a(ring.stage[cursor.index()], ring.full[cursor.index()], k);
        cursor.advance();
    }
    near_end();
    for (int k = near; k < num_k_blocks; ++k) {
        open_stage();
        load_b(ring.stage[cursor.index()], ring.full[cursor.index()], k);
        load_a(ring.stage[cursor.index()], ring.full[cursor.index()], k);
        cursor.advance();
    }
}

// The first weight row (K-major) or column (MN-major) of each box of B.
template <class Pass>
__device__ __forceinline__ int begin_of_b(const Shape& shape, int gemm, int n, int box) {
    if (Pass::kGatedForward and gemm == 0) {
        // Half gate, half up: the accumulator then holds both in one thread.
        static_assert(BLOCK_N == 2 * kBoxRows);
        return n * kBoxRows + box * shape.intermediate;
    }
    return n * BLOCK_N + box * kBoxRows;
}

// A tile of a weight's gradient: rows of the expert are K of both operands.
template <class Ring, class NearEnd>
__device__ __forceinline__ void stream_weight_grad(const BackwardArgs& args,
                                                   Ring& ring,
                                                   RingCursor<Ring::kNumStages>& cursor,
                                                   const TileInfo& tile,
                                                   NearEnd near_end) {
    const WeightGradProduct& product = product_of(args, tile);
    const int first_row = args.plan.expert_block[tile.expert] * BLOCK_M;
    stream_tile(
        args.watchdog, ring, cursor, weight_grad_k_blocks(args.plan, tile),
        [&](auto& stage, Barrier& full, int k) {
            load_boxes<Major::MN>(&product.left, full, stage.a, k, first_row, false,
                                  [&](int) { return tile.m * BLOCK_M; });
        },
        [&](auto& stage, Barrier& full, int k) {
            load_boxes<Major::MN>(&product.right, full, stage.b, k, first_row, true,
                                  [&](int box) { return tile.n * BLOCK_N + box * kBoxRows; });
        },
        [] {}, near_end);
}

// Weight gradients read what finishers have left of GEMM0 in all blocks, and rows, which were there
// before.
__device__ __forceinline__ void await_differentiated(const BackwardArgs& args) {
    const uint32_t target =
        uint32_t(kNumProcessors * args.num_n_tiles[0]) * uint32_t(args.plan.header->num_row_blocks);
    protocol::await_for_tma<Atomics>(
        &args.workspace.tickets->differentiated, target, [&](auto load, auto done) {
            wait_for(args.watchdog, {Role::kLoaderAct, -1, -1, target}, load, done);
        });
}

// The layer's tiles. Scope: one thread of each CTA.
template <class Pass, class Ring>
__device__ __forceinline__ void load_layer(const typename Pass::Args& args,
                                           Ring& ring,
                                           TileMailbox& mailbox) {
    const TileOrder order{args.plan.units,
                          {args.plan.header->num_units,
                           args.group_units,
                           {args.num_n_tiles[0], args.num_n_tiles[1]}}};
    RingCursor<Ring::kNumStages> cursor;
    bool is_differentiated = false;
    load_tiles(
        args.watchdog, mailbox,
        [&] {
            const int ticket = int(protocol::take<Atomics>(&args.workspace.tickets->tile, 1));
            if constexpr (Pass::kIsBackward) {
                const int behind = ticket - order.order.num_tickets();
                if (behind >= 0) return weight_grad_pair(args, behind);
            }
            return order.pair(ticket);
        },
        [&](const TileInfo& tile, auto near_end) {
            if constexpr (Pass::kIsBackward) {
                if (is_weight_grad(tile)) {
                    if (not is_differentiated) await_differentiated(args);
                    is_differentiated = true;
                    stream_weight_grad(args, ring, cursor, tile, near_end);
                    return;
                }
            }
            const int matrix = Pass::kWeightOfGemm0 ^ tile.gemm;
            const CUtensorMap* weights =
                args.weight_maps + matrix * args.shape.num_local_experts() + tile.expert;
            stream_tile(
                args.watchdog, ring, cursor, args.num_k_blocks[tile.gemm],
                [&](auto& stage, Barrier& full, int k) {
                    load_boxes<Major::K>(&args.load_map[tile.gemm], full, stage.a, k, 0,
                                         tile.pair == Pair::kAlongN,
                                         [&](int) { return tile.m * BLOCK_M; });
                },
                [&](auto& stage, Barrier& full, int k) {
                    load_boxes<Pass::kMajorB>(
                        weights, full, stage.b, k, 0, tile.pair == Pair::kAlongM, [&](int box) {
                            return begin_of_b<Pass>(args.shape, tile.gemm, tile.n, box);
                        });
                },
                [&] {
                    const Workspace& workspace = args.workspace;
                    const uint32_t* counter =
                        tile.gemm == 0 ? workspace.rows_ready + tile.m
                                       : workspace.tile_ready + workspace.tile_counter(0, tile.m);
                    const uint32_t target =
                        tile.gemm == 0 ? BLOCK_M : uint32_t(kNumProcessors * args.num_n_tiles[0]);
                    const Role role = tile.gemm == 0 ? Role::kLoaderRows : Role::kLoaderAct;
                    protocol::await_for_tma<Atomics>(counter, target, [&](auto load, auto done) {
                        wait_for(args.watchdog, {role, -1, tile.m, target}, load, done);
                    });
                },
                near_end);
        });
}

}  // namespace flashmoe
