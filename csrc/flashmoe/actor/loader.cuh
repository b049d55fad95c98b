// The loader: one thread that streams operands by TMA, and a warp with it where rows are gathered.
// The leading CTA's loader also takes the cluster's tickets and announces them. It is the paper's
// subscriber, too: no other warp waits for rows to arrive.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "flashmoe/actor/scheduler.cuh"
#include "flashmoe/moe/args.cuh"
#include "flashmoe/moe/gather.cuh"
#include "flashmoe/moe/weight_grads.cuh"
#include "flashmoe/protocol/queue.h"
#include "flashmoe/protocol/replicas.h"
#include "flashmoe/tile/handover.cuh"
#include "flashmoe/tile/mainloop.cuh"
#include "flashmoe/tile/pipeline.cuh"

namespace flashmoe {

// Loads one operand of stage k. K begins at `first_k`, and box i, of map_of(i), at mn(i) along M or
// N. If both CTAs read the same boxes, each loads every other one for both. `hint` says how long
// the L2 is to keep them.
template <Major kMajor, int kBoxes, class MapOfBox, class BeginOfBox>
__device__ __forceinline__ void load_boxes(MapOfBox map_of,
                                           Barrier& full,
                                           uint8_t (&boxes)[kBoxes][kBoxBytes],
                                           int k,
                                           int first_k,
                                           bool is_shared,
                                           int cta,
                                           BeginOfBox mn,
                                           CacheHint hint = CacheHint::EVICT_NORMAL) {
    auto* arrived = reinterpret_cast<uint64_t*>(&full);
    // The maps' dimensions: 64 columns, rows, blocks of 64 columns.
    const auto row = [&](int box) { return kMajor == Major::K ? mn(box) : first_k + k * BLOCK_K; };
    const auto block = [&](int box) {
        return kMajor == Major::K ? first_k / BLOCK_K + k : mn(box) / BLOCK_K;
    };
    if (is_shared) {
        static_assert(kBoxes <= kClusterSize and kClusterSize == 2);
        const int box = int(uint32_t(k + cta) % kClusterSize);
        if (box >= kBoxes) return;
        cute::SM90_TMA_LOAD_MULTICAST_3D::copy(map_of(box), arrived, (1 << kClusterSize) - 1,
                                               uint64_t(hint), boxes[box], 0, row(box), block(box));
    } else {
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
            cute::SM90_TMA_LOAD_3D::copy(map_of(box), arrived, uint64_t(hint), boxes[box], 0,
                                         row(box), block(box));
        }
    }
}

// A cluster's next ticket of a layer. The first is its number.
__device__ __forceinline__ int claim_tile(const Workspace& workspace) {
    return int(
        protocol::take_after_own<Atomics>(&workspace.tickets->tile, gridDim.x / kClusterSize));
}

// Takes pairs of tiles and streams this CTA's tile of each. A cluster's first ticket is its number,
// so that it waits for no atomic, and `claim` takes another. `pair_of` gives the leading CTA the
// ticket's pair. `stream` loads a tile and calls back twice, with some stages between: at the first
// call the next ticket is claimed, at the second its pair is announced, so that it is known before
// this tile's last stage is free. One thread calls back; elect.sync chooses it. Scope: one warp of
// each CTA.
template <class Claim, class PairOf, class Stream>
__device__ __forceinline__ void load_tiles(
    const Watchdog& watchdog, TileMailbox& mailbox, Claim claim, PairOf pair_of, Stream stream) {
    RingCursor<kTileSlots> slot;
    const int cta = int(ptx::cluster_rank());
    auto next = TileInfo::unknown();  // but for the one thread that takes and announces
    int ticket = int(blockIdx.x) / kClusterSize;
    auto take = [&] {
        if (cta == 0) ticket = claim();
    };
    auto announce = [&] {
        if (cta != 0) return;
        while ((next = pair_of(ticket)).gemm == TileInfo::kSkip) ticket = claim();
        announce_tile(watchdog, mailbox, slot, next);
    };
    if (cute::elect_one_sync()) announce();
    for (;;) {
        if (cta != 0 and cute::elect_one_sync()) {
            wait_barrier<Waiter::kThread>(watchdog, Wait::kLoaderTile, mailbox.full[slot.index()],
                                          slot.parity());
            next = read_tile(mailbox, slot);
            slot.advance();
        }
        const TileInfo pair = next.of_warp();
        if (pair.gemm == TileInfo::kNoTile) return;
        stream(pair.of(cta), take, announce);
        __syncwarp();
    }
}

// Loads the stages of a tile, and takes and announces the next one in time. `load` is called for
// each stage.
template <int kNumStages, class Load, class Take, class Announce>
__device__ __forceinline__ void load_stages(int num_k_blocks,
                                            Load load,
                                            Take take,
                                            Announce announce) {
    constexpr int kTakenAhead = 4;  // stages that an atomic's way to the L2 and back takes at most
    const int near = max(0, num_k_blocks - kNumStages), far = max(0, near - kTakenAhead);
    int k = 0;
    for (; k < far; ++k) load(k);
    take();
    for (; k < near; ++k) load(k);
    announce();
    for (; k < num_k_blocks; ++k) load(k);
}

// Streams one tile's stages by TMA. Only the first stage's B goes ahead of `await_a`: the other
// stages are free only once the previous tile's last products are done, and A would have to wait
// for that. Scope: one thread.
template <class Ring, class LoadA, class LoadB, class AwaitA, class Take, class Announce>
__device__ __forceinline__ void stream_tile(const Watchdog& watchdog,
                                            const Ring& ring,
                                            RingCursor<Ring::kNumStages>& cursor,
                                            int num_k_blocks,
                                            LoadA load_a,
                                            LoadB load_b,
                                            AwaitA await_a,
                                            Take take,
                                            Announce announce) {
    load_stages<Ring::kNumStages>(
        num_k_blocks,
        [&](int k) {
            Barrier& full = ring.full[cursor.index()];
            Barrier& empty = ring.empty[cursor.index()];
            auto& stage = ring.stage[cursor.index()];
            wait_barrier<Waiter::kThread>(watchdog, Wait::kLoaderStage, empty, cursor.parity() ^ 1);
            full.arrive_and_expect_tx(kStageBytes);
            ptx::delay_point();
            load_b(stage, full, k);
            if (k == 0) await_a();
            load_a(stage, full, k);
            cursor.advance();
        },
        take, announce);
}

// Streams one tile's stages: TMA loads B, and this warp's threads copy A. The stage's barrier
// tracks both, so that the warp waits for neither. In PTX's words: the copies of a lane happen
// before the arrive-on that `cp.async.mbarrier.arrive` makes; a processor's wait on the phase
// synchronizes with all arrivals; the processor's `fence.proxy.async` orders what the generic proxy
// wrote before the reads of wgmma; its arrival at `empty` follows those reads, and this warp waits
// for that before TMA or a copy writes the same room again. `advance` is called once a stage is on
// its way. Scope: one warp.
template <class Ring, class LoadB, class Gather, class Advance, class Take, class Announce>
__device__ __forceinline__ void stream_gathered_tile(const Watchdog& watchdog,
                                                     const Ring& ring,
                                                     RingCursor<Ring::kNumStages>& cursor,
                                                     int num_k_blocks,
                                                     LoadB load_b,
                                                     Gather gather,
                                                     Advance advance,
                                                     Take take,
                                                     Announce announce) {
    const auto by_one = [](auto& act) {
        return [&act] {
            if (cute::elect_one_sync()) act();
            __syncwarp();
        };
    };
    load_stages<Ring::kNumStages>(
        num_k_blocks,
        [&](int k) {
            Barrier& full = ring.full[cursor.index()];
            Barrier& empty = ring.empty[cursor.index()];
            auto& stage = ring.stage[cursor.index()];
            wait_barrier<Waiter::kWarp>(watchdog, Wait::kLoaderStage, empty, cursor.parity() ^ 1);
            if (cute::elect_one_sync()) {
                full.expect_transaction(sizeof(stage.b));
                ptx::delay_point();
                load_b(stage, full, k);
            }
            __syncwarp();
            ptx::delay_point();
            gather(stage, k);
            ptx::delay_point();
            ptx::arrive_with_copies(uint32_t(__cvta_generic_to_shared(&full)));
            __syncwarp();
            // The arrival that the barrier counts on comes last: no phase ends before all lanes
            // have added theirs.
            if (cute::elect_one_sync()) {
                ptx::delay_point();
                full.arrive();
            }
            __syncwarp();
            cursor.advance();
            advance();
        },
        by_one(take), by_one(announce));
}

// The first weight row (K-major) or column (MN-major) of each box of B.
template <class Pass>
__device__ __forceinline__ int begin_of_b(const Shape& shape, int gemm, int n, int box) {
    if (Pass::kGatedForward and gemm == 0) {
        // The gate and up rows of 128 columns: half gate, half up, or both in blocks.
        static_assert(not Pass::kGatedForward or BLOCK_N == 2 * kBoxRows);
        return shape.glu.gate(n * kBoxRows) + box * shape.glu.half;
    }
    return n * BLOCK_N + box * kBoxRows;
}

// Loads the scales of stage k's operands. Scope: one thread.
template <class Pass, class Scales>
__device__ __forceinline__ void load_scales(const typename Pass::Args& args,
                                            const TileInfo& tile,
                                            int matrix,
                                            int to_up,
                                            Barrier& full,
                                            Scales& scales,
                                            int k) {
    auto* arrived = reinterpret_cast<uint64_t*>(&full);
    const int first = k / kScalesAtOnce * kScalesAtOnce;
    cute::SM90_TMA_LOAD_2D::copy(&args.scale_map[tile.gemm], arrived,
                                 uint64_t(CacheHint::EVICT_NORMAL), scales.a, first,
                                 tile.m * BLOCK_M);
    const int of_gemm0 = Pass::kIsBackward ? args.shape.intermediate : args.shape.fc1_rows();
    const int num_rows = tile.gemm == 0 ? of_gemm0 : args.shape.hidden;
    const int width = align_up(args.num_k_blocks[tile.gemm], kScalesAtOnce);
#pragma unroll
    for (int box = 0; box < BLOCK_N / kBoxRows; ++box) {
        const bool is_up = to_up != 0 and box == 1;
        const int row = begin_of_b<Pass>(args.shape, tile.gemm, tile.n, to_up != 0 ? 0 : box);
        // The last tile's second half may be past N: its values are zeros.
        const int row_block = min(row, num_rows - kBoxRows) / kBoxRows;
        const float* of_matrix = args.weight_scales[matrix + (is_up ? to_up : 0)];
        cute::SM90_BULK_COPY_G2S::copy(of_matrix + row_block * width + first, arrived,
                                       scales.b[box], sizeof(scales.b[box]));
    }
}

// Loads stage k of the right operand of a weight's gradient.
__device__ __forceinline__ void load_right(const WeightGradProduct& product,
                                           const TileInfo& tile,
                                           int first_row,
                                           int cta,
                                           Stage& stage,
                                           Barrier& full,
                                           int k) {
    load_boxes<Major::MN>([&](int) { return &product.right; }, full, stage.b, k, first_row, true,
                          cta, [&](int box) { return tile.n * BLOCK_N + box * kBoxRows; });
}

// A tile of a weight's gradient: rows of the expert are K of both operands. Scope: one thread.
template <class Ring, class Take, class Announce>
__device__ __forceinline__ void stream_weight_grad(const BackwardArgs& args,
                                                   const Ring& ring,
                                                   RingCursor<Ring::kNumStages>& cursor,
                                                   const TileInfo& tile,
                                                   Take take,
                                                   Announce announce) {
    const WeightGradProduct& product = product_of(args, tile);
    const int first_row = args.plan.expert_block[tile.expert] * BLOCK_M;
    const int cta = int(ptx::cluster_rank());
    stream_tile(
        args.watchdog, ring, cursor, weight_grad_k_blocks(args.plan, tile),
        [&](auto& stage, Barrier& full, int k) {
            load_boxes<Major::MN>([&](int) { return &product.left; }, full, stage.a, k, first_row,
                                  false, cta, [&](int) { return tile.m * BLOCK_M; });
        },
        [&](auto& stage, Barrier& full, int k) {
            load_right(product, tile, first_row, cta, stage, full, k);
        },
        [] {}, take, announce);
}

// The same where tokens are read in place of copied rows. Scope: one warp.
template <class Ring, class Take, class Announce>
__device__ __forceinline__ void stream_gathered_grad(const BackwardArgs& args,
                                                     const Ring& ring,
                                                     RingCursor<Ring::kNumStages>& cursor,
                                                     const TileInfo& tile,
                                                     const char* tokens,
                                                     Take take,
                                                     Announce announce) {
    const WeightGradProduct& product = product_of(args, tile);
    const int first_row = args.plan.expert_block[tile.expert] * BLOCK_M;
    const int num_k_blocks = weight_grad_k_blocks(args.plan, tile);
    const int cta = int(ptx::cluster_rank());
    GatheredSlabs slabs(args.plan, first_row, num_k_blocks, tokens, tile.m * BLOCK_M,
                        args.shape.hidden);
    stream_gathered_tile(
        args.watchdog, ring, cursor, num_k_blocks,
        [&](auto& stage, Barrier& full, int k) {
            load_right(product, tile, first_row, cta, stage, full, k);
        },
        [&](auto& stage, int) { gather_box(slabs, stage.a[0]); }, [&] { slabs.advance(); }, take,
        announce);
}

// Weight gradients read what finishers have made of GEMM0 in all blocks. The rows, which they read
// as well, were there before, unless GEMM0 has read them elsewhere; and if no copies are made, they
// are read where GEMM0 has read them.
__device__ __forceinline__ void await_differentiated(const BackwardArgs& args) {
    const uint32_t target =
        uint32_t(kNumProcessors * args.num_n_tiles[0]) * uint32_t(args.plan.header->num_row_blocks);
    protocol::await_for_tma<Atomics>(
        &args.workspace.tickets->differentiated, target, [&](auto load, auto done) {
            wait_for(args.watchdog, {Wait::kLoaderAct, -1, -1, target}, load, done);
        });
    if (args.row_access != RowAccess::kInPlaceUntilCopied) return;
    protocol::await_for_tma<Atomics>(
        &args.workspace.tickets->dispatched, gridDim.x, [&](auto load, auto done) {
            wait_for(args.watchdog, {Wait::kLoaderRows, -1, -1, gridDim.x}, load, done);
        });
}

// fc1's gradients read all copies of x, where the launch makes them.
__device__ __forceinline__ void await_token_copies(const BackwardArgs& args) {
    if (not copies_tokens(args)) return;
    protocol::await_for_tma<Atomics>(
        &args.workspace.tickets->tokens_copied, gridDim.x, [&](auto load, auto done) {
            wait_for(args.watchdog, {Wait::kLoaderRows, -1, -1, gridDim.x}, load, done);
        });
}

// Waits for the weights in a spare slot, before B is loaded. Scope: one thread.
__device__ __forceinline__ void await_replica(const LayerArgs& args, int slot) {
    const int spare_slot = slot - args.first_spare;
    const Workspace& workspace = args.workspace;
    const uint32_t epoch = args.uses_settled ? workspace.settled->epoch : current_epoch(workspace);
    protocol::await_weights<Atomics>(
        args.heap.weights_ready(args.shape.rank, spare_slot), epoch, [&](auto load, auto done) {
            wait_for(args.watchdog, {Wait::kLoaderWeights, -1, spare_slot, epoch}, load, done);
        });
}

// The layer's tiles. Scope: one warp of each CTA.
template <class Pass, class Ring>
__device__ __forceinline__ void load_layer(const typename Pass::Args& args,
                                           const Ring& ring,
                                           TileMailbox& mailbox) {
    constexpr bool kMayMixHere = kMayMix and not Pass::kIsBackward;
    const protocol::TileOrder order{args.plan.header->num_units,
                                    args.group_units,
                                    args.lag,
                                    kMayMixHere and args.is_mixed,
                                    {args.num_n_tiles[0], args.num_n_tiles[1]}};
    const auto units_before = [&](int group) {
        return cuts_groups(args) ? args.plan.groups()[group] : order.units_before(group);
    };
    TileSchedule<decltype(units_before)> schedule{args.plan.units, order, {order, units_before}};
    RingCursor<Ring::kNumStages> cursor;
    bool is_differentiated = false;
    [[maybe_unused]] bool has_tokens = false;
    load_tiles(
        args.watchdog, mailbox, [&] { return claim_tile(args.workspace); },
        [&](int ticket) {
            if constexpr (Pass::kHasWeightGrads) {
                const int behind = ticket - schedule.order.num_tickets();
                if (behind >= 0) return weight_grad_pair(args, behind);
            }
            TileInfo pair = schedule.pair(ticket);
            if (pair.gemm == 0 and pair.pair == Pair::kAlongN and reads_in_place(args) and
                not reads_own_in_place(args)) {
                pair.is_in_place =
                    not protocol::is_complete<Atomics>(args.workspace.rows_ready + pair.m, BLOCK_M);
            }
            return pair;
        },
        [&](const TileInfo& tile, auto take, auto announce) {
            if constexpr (Pass::kHasWeightGrads) {
                if (is_weight_grad(tile)) {
                    if (not is_differentiated and cute::elect_one_sync()) {
                        await_differentiated(args);
                    }
                    is_differentiated = true;
                    if (tile.gemm == kFc1WeightGrad and not has_tokens and cute::elect_one_sync()) {
                        await_token_copies(args);
                    }
                    has_tokens |= tile.gemm == kFc1WeightGrad;
                    __syncwarp();
                    if (const char* tokens = gathered_from(args, tile)) {
                        stream_gathered_grad(args, ring, cursor, tile, tokens, take, announce);
                        return;
                    }
                    if (auto own = cursor; cute::elect_one_sync()) {
                        stream_weight_grad(args, ring, own, tile, take, announce);
                    }
                    cursor.advance(weight_grad_k_blocks(args.plan, tile));
                    return;
                }
            }
            const int matrix = Pass::kWeightOfGemm0 ^ tile.gemm;
            const int cta = int(ptx::cluster_rank());
            constexpr bool kIsJoined = kIsFp8 and Pass::kIsBackward;  // transposes of split weights
            const auto first_fc2 = [&] {
                return kIsJoined ? args.shape.num_local_slots() : args.shape.num_fc1();
            };
            const CUtensorMap* weights =
                args.weight_maps + (matrix == 0 ? 0 : first_fc2()) + tile.expert;
            // Split weights: a forward's gate and up rows are boxes, and a backward's halves of K.
            const bool is_split = matrix == 0 and args.shape.is_split and not kIsJoined;
            const int to_up = is_split ? args.shape.num_local_slots() : 0;
            const auto load_b = [&](auto& stage, Barrier& full, int k) {
                const CUtensorMap* half = weights;
                if (Pass::kIsBackward and is_split and k >= args.num_k_blocks[1] / 2) {
                    half += to_up;
                    k -= args.num_k_blocks[1] / 2;
                }
                load_boxes<Pass::kMajorB>(
                    [&](int box) { return half + (Pass::kIsBackward ? 0 : box * to_up); }, full,
                    stage.b, k, 0, tile.pair == Pair::kAlongM, cta,
                    [&](int box) {
                        const int of_matrix = not Pass::kIsBackward and is_split ? 0 : box;
                        return begin_of_b<Pass>(args.shape, tile.gemm, tile.n, of_matrix);
                    },
                    args.weights_hint);
            };
            const uint32_t* counter =
                tile.gemm == 0 ? args.workspace.rows_ready + tile.m
                               : args.workspace.tile_ready + args.workspace.tile_counter(0, tile.m);
            const uint32_t target =
                tile.gemm == 0 ? BLOCK_M : uint32_t(kNumProcessors * args.num_n_tiles[0]);
            const bool is_own =
                tile.gemm == 0 and reads_own_in_place(args) and is_block_own(args, tile.m);
            // A look whose way to the L2 and back is over by the time that a stage is free.
            bool is_there = false;
            if (cute::elect_one_sync()) {
                is_there = protocol::is_complete<Atomics>(counter, target);
            }
            __syncwarp();
            if (tile.gemm == 0 and reads_in_place(args)) {
                bool is_in_place = not __any_sync(~0u, is_there);
                if (tile.pair == Pair::kAlongN) is_in_place = tile.is_in_place;
                if (reads_own_in_place(args)) is_in_place = is_own;
                if (is_in_place) {
                    const GatheredRows rows(args.plan, tile.m * BLOCK_M, args.shape.token_bytes());
                    const bool have_pads = not kMayMixHere or rows.have_pads();
                    stream_gathered_tile(
                        args.watchdog, ring, cursor, args.num_k_blocks[0], load_b,
                        [&](auto& stage, int k) {
                            gather_box(rows, have_pads, args.x, k * BLOCK_K, stage.a[0]);
                        },
                        [] {}, take, announce);
                    return;
                }
            }
            if (auto own = cursor; cute::elect_one_sync()) {
                if (kHasReplicas and tile.expert >= args.first_spare)
                    await_replica(args, tile.expert);
                stream_tile(
                    args.watchdog, ring, own, args.num_k_blocks[tile.gemm],
                    [&](auto& stage, Barrier& full, int k) {
                        load_boxes<Major::K>([&](int) { return &args.load_map[tile.gemm]; }, full,
                                             stage.a, k, 0, tile.pair == Pair::kAlongN, cta,
                                             [&](int) { return tile.m * BLOCK_M; });
                        if constexpr (kIsFp8) {
                            load_scales<Pass>(args, tile, int(weights - args.weight_maps), to_up,
                                              full, ring.scales[own.index()], k);
                        }
                    },
                    load_b,
                    [&] {
                        const Wait wait = tile.gemm == 0 ? Wait::kLoaderRows : Wait::kLoaderAct;
                        protocol::await_for_tma<Atomics>(
                            counter, target,
                            [&](auto load, auto done) {
                                wait_for(args.watchdog, {wait, -1, tile.m, target}, load, done);
                            },
                            is_there);
                    },
                    take, announce);
            }
            cursor.advance(args.num_k_blocks[tile.gemm]);
        });
}

}  // namespace flashmoe
