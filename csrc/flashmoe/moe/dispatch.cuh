// Dispatch: pulls every token row that this rank's experts need, once over the link, and fans it
// out to all rows of that token (the paper's packets, one row each). Pad rows are made here, in
// place; none ever crosses a link.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "flashmoe/moe/place_few.cuh"
#include "flashmoe/moe/push.cuh"
#include "flashmoe/tile/pipeline.cuh"

namespace flashmoe {

constexpr int kMostRowsPerTicket = 32;  // a lane looks at each

// Waits until every rank's rows are in place, also those of ranks that sent nothing: the signal is
// the proof that the peer has finished with the previous launch. Scope: one warp.
__device__ __forceinline__ void await_published_rows(const LayerArgs& args, uint32_t epoch) {
    const Heap& heap = args.heap;
    protocol::await_rows<Atomics>(
        heap.num_ranks, epoch, [&](int src) { return heap.row_signal(args.shape.rank, src); },
        [&](int src, auto load, auto done) {
            wait_for(args.watchdog, {Wait::kDispatchRows, src, 0, epoch}, load, done);
        });
}

// Copies one row, piece by piece, to some rows: `for_each` calls back with each of them. If they
// are read late, the L2 keeps other things in their place. Scope: one thread with its own piece of
// shared memory; up to kDispatchLanes threads of a warp do this at once.
template <bool kAreReadLate, class ForEach>
__device__ __forceinline__ void copy_row(const Watchdog& watchdog,
                                         const char* source,
                                         char* rows,
                                         int row_bytes,
                                         uint8_t (&piece)[kDispatchPiece],
                                         Barrier& arrived,
                                         uint32_t& parity,
                                         ForEach for_each) {
    for (int offset = 0; offset < row_bytes; offset += kDispatchPiece) {
        const int bytes = min(kDispatchPiece, row_bytes - offset);
        cute::tma_store_wait<0>();  // the previous piece has left shared memory
        arrived.arrive_and_expect_tx(bytes);
        cute::SM90_BULK_COPY_G2S::copy(source + offset, reinterpret_cast<uint64_t*>(&arrived),
                                       piece, bytes);
        wait_barrier<Waiter::kThread>(watchdog, Wait::kDispatchCopy, arrived, parity);
        parity ^= 1;
        for_each([&](int row) {
            char* const to = rows + int64_t(row) * row_bytes + offset;
            if constexpr (kAreReadLate) {
                ptx::bulk_store_evict_first(piece, to, bytes);
            } else {
                cute::SM90_BULK_COPY_S2G::copy(piece, to, bytes);
            }
        });
        cute::tma_store_arrive();
    }
}

// Copies one row to those of its token's rows that are among `num_rows` rows from `first_row` on,
// and counts them. Scope: as above.
__device__ __forceinline__ void fetch_row(const LayerArgs& args,
                                          RowMeta meta,
                                          int first_row,
                                          uint32_t num_rows,
                                          uint8_t (&piece)[kDispatchPiece],
                                          Barrier& arrived,
                                          uint32_t& parity) {
    const Heap& heap = args.heap;
    const Plan& plan = args.plan;
    const int row_bytes = heap.token_bytes();
    const char* source = meta.src_rank == args.shape.rank
                             ? own_tokens(args) + int64_t(meta.token) * row_bytes
                             : heap.row(meta.src_rank, meta.token);
    const int32_t* token_rows = plan.rows_of(meta.src_rank, meta.token);
    const auto for_each = [&](auto act) {
        for (int k = 0; k < plan.topk; ++k) {
            if (const int row = token_rows[k]; uint32_t(row - first_row) < num_rows) act(row);
        }
    };
    copy_row<false>(args.watchdog, source, args.rows, row_bytes, piece, arrived, parity, for_each);
    protocol::publish_copies<Atomics>([&](auto count) {
        for_each([&](int row) { count(args.workspace.rows_ready + row / BLOCK_M); });
    });
}

// The number of places that the first tiles read. This rank's own rows among them are not
// dispatched: all warps copy them, since none has anything else to do until they are there.
__device__ __forceinline__ int num_first_places(const LayerArgs& args) {
    if (reads_in_place(args)) return 0;
    return min(args.plan.header->num_units, args.first_units) * kClusterSize * BLOCK_M;
}

// The row after those of the first `num_places`, where rows lie in the order of their tiles.
__device__ __forceinline__ int row_behind(const Plan& plan, int num_places) {
    const int unit = num_places / (kClusterSize * BLOCK_M);
    return BLOCK_M * (unit < plan.header->num_units ? plan.units[unit].first_block
                                                    : plan.header->num_row_blocks);
}

// Copies the own rows of the first tiles, and all other rows of their tokens unless these are left
// to dispatch. Half a warp takes a row, so that the grid takes as many rows at a time as there are.
// Scope: the grid.
__device__ __forceinline__ void copy_first_rows(const LayerArgs& args) {
    if (copies_with_plan(args)) return;  // that is done
    constexpr int kLanes = 16, kUnroll = 16;
    const int64_t begin = Trace::now();
    const Plan& plan = args.plan;
    const int lane = threadIdx.x % kLanes, rank = args.shape.rank;
    const int chunks = kIsFp8 ? args.shape.token_bytes() / 16 : args.shape.hidden / 8;
    const uint32_t lanes = 0xFFFFu << (threadIdx.x % 32 / kLanes * kLanes);
    const int places = num_first_places(args), step = int(blockDim.x / kLanes * gridDim.x);
    // Rows that are copied apart lie in the order of places, but for places that have none.
    const bool is_apart = args.row_access == RowAccess::kFirstCopied;
    const int count = is_apart ? row_behind(plan, places) : places;
    for (int i = int(threadIdx.x / kLanes * gridDim.x + blockIdx.x); i < count; i += step) {
        const int row = is_apart ? i : plan.row_at(i);
        const RowMeta meta = row >= 0 ? plan.row_meta[row] : RowMeta{};
        const bool is_copied = is_apart ? row >= 0 and not meta.is_pad() : meta.is_owner();
        if (not is_copied or meta.src_rank != rank) continue;
        const auto* source =
            reinterpret_cast<const uint4*>(own_tokens(args)) + int64_t(meta.token) * chunks;
        const int32_t* token_rows = plan.rows_of(rank, meta.token);
        for (int first = lane; first < chunks; first += kLanes * kUnroll) {
            uint4 loaded[kUnroll];
#pragma unroll
            for (int i = 0; i < kUnroll; ++i) {
                if (first + i * kLanes < chunks) loaded[i] = source[first + i * kLanes];
            }
            for (int k = 0; k < (is_apart ? 1 : plan.topk); ++k) {
                const int64_t to = is_apart ? row : token_rows[k];
                if (to < 0) continue;
                auto* target = reinterpret_cast<uint4*>(args.rows) + to * chunks;
#pragma unroll
                for (int i = 0; i < kUnroll; ++i) {
                    if (first + i * kLanes < chunks) target[first + i * kLanes] = loaded[i];
                }
            }
        }
        int to = lane < plan.topk ? token_rows[lane] : -1;
        if (is_apart) to = lane == 0 ? row : -1;
        __syncwarp(lanes);
        if (to >= 0) protocol::publish<Atomics>(args.workspace.rows_ready + to / BLOCK_M);
        if (lane == 0 and not is_apart) atomicAdd_block(&counters().rows_pulled[rank], 1u);
    }
    __syncwarp();
    args.watchdog.trace.add(event_of(Span::kDispatch), kFirstRows, begin);
}

// Shares out the rows of some lanes, a bit each, over the first kDispatchLanes lanes, and takes
// them out of `left`. The lane whose row this one gets, or below 0.
__device__ __forceinline__ int share_out(uint32_t& left, int lane) {
    if (left >> kDispatchLanes == 0) {  // to each its own
        const bool is_mine = left >> lane & 1;
        left = 0;
        return is_mine ? lane : -1;
    }
    int from = -1;
    for (int i = 0; i < kDispatchLanes and left != 0; ++i, left &= left - 1) {
        if (lane == i) from = __ffs(left) - 1;
    }
    return from;
}

// Dispatches rows in the order in which they are computed. This rank's own rows come first, since
// no peer is awaited for them; those in the first `num_copied` places have been copied, and with
// RowAccess::kCopied all rows of their tokens. With RowAccess::kOwnInPlace an own row is copied
// alone, if other ranks' rows are in its block. Weights of replicas are pushed in between, once
// every rank has left the launch before. Returns the parity of this lane's next copy. Scope: one
// warp.
template <bool kPushes>
__device__ __forceinline__ uint32_t
dispatch(const LayerArgs& args, DispatchPieces& pieces, DispatchBarriers& arrived, int num_copied) {
    int64_t begin = Trace::now();
    begin_span(Span::kDispatch);
    bool has_heard = false;  // that every peer's rows are in place
    auto hear = [&] {
        args.watchdog.trace.add(event_of(Span::kDispatch), kWhole, begin);
        end_span(Span::kDispatch);
        await_published_rows(args, current_epoch(args.workspace));
        has_heard = true;
        begin = Trace::now();
        begin_span(Span::kDispatch);
    };
    const Plan& plan = args.plan;
    const Workspace& workspace = args.workspace;
    const int lane = threadIdx.x % 32;
    const int row_bytes = args.shape.token_bytes();
    if constexpr (kIsFp8) ptx::fence_proxy_async_global();  // threads have written this rank's
    uint32_t parity = 0;
    bool has_pushes = kPushes and kHasReplicas and args.home_weights != nullptr;
    int pad_rows_pulled = 0, pad_rows_made = 0;
    int first_row = 0;  // that is left to copy
    const bool has_rows = args.row_access != RowAccess::kInPlace and not copies_with_plan(args);
    if (args.row_access == RowAccess::kFirstCopied) {
        first_row = row_behind(plan, num_copied);
        num_copied = 0;
    }
    while (has_rows) {
        const int place = take_tickets(&workspace.tickets->dispatch, args.rows_per_ticket);
        if (place >= plan.num_places()) break;
        const int first = plan.row_at(place);
        if (first < 0) continue;

        RowMeta meta{};
        if (lane < args.rows_per_ticket) meta = plan.row_meta[first + lane];
        const bool is_mixed = reads_own_in_place(args) and not is_block_own(args, first / BLOCK_M);
        const bool is_own = meta.src_rank == args.shape.rank;
        if (not has_heard and __any_sync(~0u, meta.is_owner() and not is_own)) hear();
        bool is_fetched = meta.is_owner() and not(is_own and place < num_copied);
        if (reads_own_in_place(args) and is_own) {
            is_fetched = is_mixed and lane < args.rows_per_ticket and not meta.is_pad();
        }
        for (uint32_t left = __ballot_sync(~0u, is_fetched); left != 0;) {
            const int from = share_out(left, lane);
            const RowMeta fetched = shuffled(meta, max(from, 0));
            if (from >= 0) {
                const bool is_apart =
                    reads_own_in_place(args) and fetched.src_rank == args.shape.rank;
                fetch_row(args, fetched, is_apart ? first + from : first_row,
                          is_apart ? 1 : INT32_MAX, pieces[lane], arrived[lane], parity);
                if (not is_apart) atomicAdd_block(&counters().rows_pulled[fetched.src_rank], 1u);
                pad_rows_pulled += fetched.is_pad();
            }
            __syncwarp();
        }

        // Zeros, because weight gradients sum over pad rows too.
        for (uint32_t pads = __ballot_sync(~0u, meta.is_pad()); pads; pads &= pads - 1) {
            const int row = first + __ffs(pads) - 1;
            uint4* target = reinterpret_cast<uint4*>(args.rows + int64_t(row) * row_bytes);
            for (int i = lane; i < row_bytes / 16; i += 32) target[i] = uint4{};
            __syncwarp();
            if (lane == 0) protocol::publish<Atomics>(workspace.rows_ready + row / BLOCK_M);
            pad_rows_made += lane == 0;
        }
        if constexpr (kPushes) {
            if (has_pushes and has_heard) {
                has_pushes = push_weights(args, pieces, arrived, parity);
            }
        }
    }
    if (args.row_access == RowAccess::kInPlaceUntilCopied and lane == 0) {
        protocol::publish<Atomics>(&workspace.tickets->dispatched);
    }
    if (not has_heard) hear();
    if constexpr (kPushes) {
        while (has_pushes) has_pushes = push_weights(args, pieces, arrived, parity);
    }
    if (pad_rows_pulled) atomicAdd_block(&counters().pad_rows_pulled, uint32_t(pad_rows_pulled));
    if (pad_rows_made) atomicAdd_block(&counters().pad_rows_made, uint32_t(pad_rows_made));
    args.watchdog.trace.add(event_of(Span::kDispatch), kWhole, begin);
    end_span(Span::kDispatch);
    return parity;
}

// The number of tokens that a warp copies at a time: as few as are copied in half of the time that
// the products ahead of fc1's gradients take. A token's products are in proportion to the columns
// that it meets, topk * intermediate, and to the hidden size, as its copies are. With 2,048 columns
// one token at a time takes as long as these products.
__device__ __forceinline__ int tokens_at_a_time(const BackwardArgs& args) {
    constexpr int kColumnsOfOne = 4096;
    const int columns = args.plan.topk * args.shape.intermediate;
    return min(kDispatchLanes, ceil_div(kColumnsOfOne, columns));
}

// Copies x, of a forward that kept no rows, to the rows that fc1's gradients read. Each CTA has an
// even share of the tokens, and of the experts' pads, and copies few tokens at a time: nothing
// waits for the copies before the other products are done, and these wait for more the faster
// copies are made. With spare slots no backward does so (reads_tokens in host/check.h), and their
// kernels have no register for more than one token. Scope: one warp, after it has dispatched dY.
__device__ __forceinline__ void copy_tokens(const BackwardArgs& args,
                                            DispatchPieces& pieces,
                                            DispatchBarriers& arrived,
                                            uint32_t parity) {
    const int64_t begin = Trace::now();
    begin_span(Span::kDispatch);
    const Plan& plan = args.plan;
    const int lane = threadIdx.x % 32, row_bytes = args.shape.row_bytes();
    const int num_lanes = kHasReplicas ? 1 : tokens_at_a_time(args);
    const int step = int(gridDim.x) * num_lanes;
    for (int first = int(blockIdx.x) * num_lanes; first < args.num_tokens; first += step) {
        const int token = kHasReplicas ? first : first + lane;
        if (kHasReplicas ? lane == 0 : lane < num_lanes and token < args.num_tokens) {
            const int32_t* token_rows = plan.rows_of(args.shape.rank, token);
            copy_row<true>(args.watchdog, args.tokens + int64_t(token) * row_bytes,
                           args.token_copies, row_bytes, pieces[lane], arrived[lane], parity,
                           [&](auto copy_to) {
                               for (int k = 0; k < plan.topk; ++k) {
                                   if (const int row = token_rows[k]; row >= 0) copy_to(row);
                               }
                           });
        }
        __syncwarp();
    }
    // Zeros, because the gradients sum over pad rows too.
    for (int slot = int(blockIdx.x); slot < args.shape.num_local_slots(); slot += int(gridDim.x)) {
        const int first_row = plan.expert_block[slot] * BLOCK_M, num_rows = plan.expert_rows[slot];
        for (int row = num_rows; row < align_up(num_rows, BLOCK_M); ++row) {
            auto* to = args.token_copies + int64_t(first_row + row) * row_bytes;
            for (int i = lane; i < row_bytes / 16; i += 32) {
                reinterpret_cast<uint4*>(to)[i] = uint4{};
            }
        }
    }
    protocol::complete_copies<Atomics>();
    if (lane == 0) protocol::publish<Atomics>(&args.workspace.tickets->tokens_copied);
    args.watchdog.trace.add(event_of(Span::kDispatch), kWhole, begin);
    end_span(Span::kDispatch);
}

}  // namespace flashmoe
