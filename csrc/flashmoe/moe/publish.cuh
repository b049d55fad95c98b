// What a rank tells its peers at the start of a launch: its routing, and that its rows are in
// place.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "flashmoe/comm/grid.cuh"
#include "flashmoe/moe/gate.cuh"
#include "flashmoe/tile/pipeline.cuh"

namespace flashmoe {

// Turns a token's row of the routing map into at most topk routes, and sends them to every rank.
// Scope: one warp.
__device__ __forceinline__ void publish_token(const LayerArgs& args, uint32_t epoch, int token) {
    const Shape& s = args.shape;
    const int lane = threadIdx.x % 32;
    int count = 0;
    for (int base = 0; base < s.num_experts; base += 32) {
        const int expert = base + lane;
        const int64_t at = int64_t(token) * s.num_experts + expert;
        bool selected = expert < s.num_experts and args.routing_map[at] != 0;
        float prob = 0.0f;
        if (selected) {
            prob = load_as_float(args.probs, args.probs_dtype, at);
            if (isnan(prob)) {
                args.watchdog.raise(kFaultRouting, Role::kRouting, -1, token, 0, expert);
            }
            selected = not(s.skip_zero_probs and prob == 0.0f);
        }
        const uint32_t mask = __ballot_sync(~0u, selected);
        const int k = count + __popc(mask & ((1u << lane) - 1));
        if (selected and k < s.topk) {
            for (int rank = 0; rank < s.num_ranks; ++rank) {
                args.heap.routes(rank, epoch, s.rank, token)[k] = {expert, prob};
            }
            args.plan.own_experts[int64_t(token) * s.topk + k] = expert;
        }
        count += __popc(mask);
    }
    if (count > s.topk and lane == 0) {
        args.watchdog.raise(kFaultRouting, Role::kRouting, -1, token, s.topk, count);
    }
    if (const int k = count + lane; k < s.topk) {
        for (int rank = 0; rank < s.num_ranks; ++rank) {
            args.heap.routes(rank, epoch, s.rank, token)[k] = {-1, 0.0f};
        }
        args.plan.own_experts[int64_t(token) * s.topk + k] = -1;
    }
}

// Sends every token's routes to every rank, behind the gate if there is one: a warp takes one token
// at a time, or as many as the gate does. Scope: the grid.
__device__ __forceinline__ void publish_routes(const LayerArgs& args, uint32_t epoch) {
    const Shape& s = args.shape;
    const bool is_gated = args.gate.weight != nullptr;
    const int warps_per_cta = blockDim.x / 32, share = is_gated ? kGateTokens : 1;
    const int step = int(gridDim.x) * warps_per_cta * share;
    int first = (int(blockIdx.x) * warps_per_cta + int(threadIdx.x) / 32) * share;
    for (; first < args.num_tokens; first += step) {
        if (is_gated) gate_tokens(args, first);
        const int end = min(first + share, args.num_tokens);
        for (int token = first; token < end; ++token) publish_token(args, epoch, token);
    }
    last_arrival(&args.workspace.tickets->routes_published, [&] {
        const bool refused = Atomics::load(args.workspace.raised) != 0;
        protocol::publish_routes<Atomics>(
            s.num_ranks, uint32_t(args.row_block_bound),
            RouteSignal::make(epoch, args.num_tokens, refused),
            [&](int rank) { return args.heap.row_bound(rank, epoch, s.rank); },
            [&](int rank) { return args.heap.route_signal(rank, epoch, s.rank); });
    });
}

// Tells all ranks that this one's rows are in place, or with the epoch after that that it has read
// those of others. Scope: the grid.
__device__ __forceinline__ void tell_rows(const LayerArgs& args,
                                          uint32_t* arrivals,
                                          uint32_t epoch) {
    const Shape& s = args.shape;
    last_arrival(arrivals, [&] {
        protocol::publish_rows<Atomics>(
            s.num_ranks, epoch, [&](int rank) { return args.heap.row_signal(rank, s.rank); });
    });
}

// Copies x to where peers pull it from while the CTA plans: by bulk copies, in as large steps as
// there is shared memory to spare. Scope: one thread of each CTA.
class RowCopy {
 public:
    __device__ __forceinline__
    RowCopy(const LayerArgs& args, uint8_t* buffer, uint32_t buffer_bytes, Barrier& loaded)
        : loaded_(&loaded), buffer_(buffer), buffer_bytes_(buffer_bytes / kPiece * kPiece) {
        const Shape& s = args.shape;
        // This rank's own rows are read where they are.
        const int64_t bytes = s.num_ranks > 1 ? int64_t(args.num_tokens) * s.hidden * 2 : 0;
        const int64_t share = align_up<int64_t>(ceil_div<int64_t>(bytes, gridDim.x), kPiece);
        const int64_t first = min(int64_t(blockIdx.x) * share, bytes);
        from_ = args.x + first;
        to_ = args.heap.row(s.rank, 0) + first;
        left_ = min(share, bytes - first);
    }
    __device__ __forceinline__ void begin(const Watchdog& watchdog) {
        loaded_->init(1);
        cutlass::arch::fence_barrier_init();
        advance(watchdog);
    }
    // Begins the next step, for which the last one should have had time.
    __device__ __forceinline__ void advance(const Watchdog& watchdog) {
        if (step_bytes_ > 0) {
            wait_barrier<Waiter::kThread>(watchdog, Role::kDispatchCopy, *loaded_, parity_);
            parity_ ^= 1;
            for_pieces([&](uint32_t at, uint32_t bytes) {
                cute::SM90_BULK_COPY_S2G::copy(buffer_ + at, to_ + at, int32_t(bytes));
            });
            cute::tma_store_arrive();
            from_ += step_bytes_, to_ += step_bytes_, left_ -= step_bytes_;
            step_bytes_ = 0;
        } else if (left_ > 0) {
            cute::tma_store_wait<0>();  // the buffer has been read
            step_bytes_ = uint32_t(min(left_, int64_t(buffer_bytes_)));
            loaded_->arrive_and_expect_tx(step_bytes_);
            for_pieces([&](uint32_t at, uint32_t bytes) {
                cute::SM90_BULK_COPY_G2S::copy(from_ + at, reinterpret_cast<uint64_t*>(loaded_),
                                               buffer_ + at, int32_t(bytes));
            });
        }
    }
    __device__ __forceinline__ void finish(const Watchdog& watchdog) {
        while (left_ > 0) advance(watchdog);
        ptx::bulk_wait_complete();
    }

    static constexpr uint32_t kPiece = 8192;

 private:
    template <class Copy>
    __device__ __forceinline__ void for_pieces(Copy copy) const {
        for (uint32_t at = 0; at < step_bytes_; at += kPiece) {
            copy(at, min(kPiece, step_bytes_ - at));
        }
    }

    Barrier* loaded_;
    uint8_t* buffer_;
    uint32_t buffer_bytes_;
    const char* from_;
    char* to_;
    int64_t left_;
    uint32_t step_bytes_ = 0;  // of the step whose loads are under way
    uint32_t parity_ = 0;
};

// Copies x, or dY, to where peers pull it from. This rank's own rows are read where they are, and
// the signal also tells that this rank is done with the previous launch. Scope: the grid.
__device__ __forceinline__ void publish_rows(const LayerArgs& args, uint32_t epoch) {
    const Shape& s = args.shape;
    if (s.num_ranks > 1) {
        const int64_t chunks = int64_t(args.num_tokens) * s.hidden * 2 / sizeof(uint4);
        const uint4* from = reinterpret_cast<const uint4*>(args.x);
        uint4* to = reinterpret_cast<uint4*>(args.heap.row(s.rank, 0));
        const int64_t step = int64_t(gridDim.x) * blockDim.x;
        int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
        for (; i + 3 * step < chunks; i += 4 * step) {
            const uint4 a = from[i], b = from[i + step], c = from[i + 2 * step],
                        d = from[i + 3 * step];
            to[i] = a, to[i + step] = b, to[i + 2 * step] = c, to[i + 3 * step] = d;
        }
        for (; i < chunks; i += step) to[i] = from[i];
    }
    tell_rows(args, &args.workspace.tickets->rows_published, epoch);
}

}  // namespace flashmoe
