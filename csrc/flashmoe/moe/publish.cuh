// A rank's messages to its peers at the start of a launch: its routing, and that its rows are in
// place.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "flashmoe/comm/grid.cuh"
#include "flashmoe/moe/choices.cuh"
#include "flashmoe/moe/replicas.cuh"
#include "flashmoe/moe/router.cuh"
#include "flashmoe/tile/pipeline.cuh"
#include "flashmoe/tile/quantize.cuh"

namespace flashmoe {

// How a warp reads the routing map: some lanes to a token, each with its share of the experts, and
// as many tokens at a time as that leaves room for.
constexpr int kLaneExperts = 16;

__device__ __forceinline__ int lanes_per_token(const Shape& s) {
    return min(32, power_of_two(ceil_div(s.num_experts, kLaneExperts)));
}

// The experts from `first` on, a bit each, that are selected for the token.
__device__ __forceinline__ uint32_t selected_experts(const LayerArgs& args, int token, int first) {
    const Shape& s = args.shape;
    const int64_t at = int64_t(token) * s.num_experts + first;
    const uint8_t* map = args.routing_map + at;
    uint32_t selected = 0;
    if (s.num_experts % 4 == 0 and reinterpret_cast<uintptr_t>(map) % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kLaneExperts; i += 4) {
            if (first + i >= s.num_experts) break;
            const uint32_t word = *reinterpret_cast<const uint32_t*>(map + i);
            // The lowest bit of each byte that is not zero; the product takes byte j's to bit 28 +
            // j.
            selected |= (__vcmpne4(word, 0) & 0x01010101u) * 0x10204080u >> 28 << i;
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < min(kLaneExperts, s.num_experts - first); ++i) {
            if (map[i] != 0) selected |= 1u << i;
        }
    }
    if (not s.skip_zero_probs) return selected;
    uint32_t kept = selected;
#pragma unroll 1
    for (uint32_t left = selected; left; left &= left - 1) {
        const int i = __ffs(left) - 1;
        if (load_as_float(args.probs, args.probs_dtype, at + i) == 0.0f) kept &= ~(1u << i);
    }
    return kept;
}

// Turns `count` rows of the routing map into at most topk routes each, and sends them to every
// rank, a lane for each route. `count` is at most the tokens that a warp has lanes for. Scope: one
// warp.
__device__ __forceinline__ void publish_tokens(
    const LayerArgs& args, uint32_t epoch, uint32_t* counts, int first_token, int count) {
    const Shape& s = args.shape;
    const int width = lanes_per_token(s), lane = int(threadIdx.x) % 32, nth = lane % width;
    const bool is_here = lane / width < count;
    const int token = first_token + lane / width;
    const auto send = [&](int k, Route route) {
        send_route(args, epoch, counts, token, k, route, route.expert);
    };
    int num_routes = 0;  // found for the token so far
#pragma unroll 1
    for (int base = 0; base < s.num_experts; base += width * kLaneExperts) {
        const int first = base + nth * kLaneExperts;
        const uint32_t selected = is_here ? selected_experts(args, token, first) : 0;
        int up_to = __popc(selected);  // this lane's
#pragma unroll 1
        for (int step = 1; step < width; step *= 2) {
            const int before = __shfl_up_sync(~0u, up_to, step, width);
            if (nth >= step) up_to += before;
        }
        const int found = __shfl_sync(~0u, up_to, width - 1, width);
#pragma unroll 1
        for (int each = 0; each < s.topk; each += width) {
            const int wanted = each + nth;
            int from = 0;  // the lane that has found it
#pragma unroll 1
            for (int step = width / 2; step > 0; step /= 2) {
                const bool is_behind = __shfl_sync(~0u, up_to, from + step - 1, width) <= wanted;
                if (is_behind) from += step;
            }
            uint32_t left = __shfl_sync(~0u, selected, from, width);
            int passed = __shfl_sync(~0u, up_to, from, width) - __popc(left);
            const int k = num_routes + wanted;
            if (wanted >= found or k >= s.topk) continue;
#pragma unroll 1
            for (; passed < wanted; ++passed) left &= left - 1;
            const int expert = base + from * kLaneExperts + __ffs(left) - 1;
            const int64_t at = int64_t(token) * s.num_experts + expert;
            const Route route{expert, load_as_float(args.probs, args.probs_dtype, at)};
            if (isnan(route.prob)) {
                args.watchdog.raise(kFaultRouting, Wait::kRouting, -1, token, 0, route.expert);
            }
            send(k, route);
        }
        num_routes += found;
    }
    if (not is_here) return;
    if (num_routes > s.topk and nth == 0) {
        args.watchdog.raise(kFaultRouting, Wait::kRouting, -1, token, s.topk, num_routes);
    }
#pragma unroll 1
    for (int k = num_routes + nth; k < s.topk; k += width) send(k, {-1, 0.0f});
}

// True if each CTA publishes the routes that it places, so that it has to wait for its own warps
// alone: that is for a rank that is alone and has its routing already. A router's tokens go round
// the CTAs instead, so that few of them keep all CTAs busy; and a plan with spare slots has no
// register for it.
__device__ __forceinline__ bool has_own_routes(const LayerArgs& args) {
    const Shape& s = args.shape;
    return not kHasReplicas and s.num_ranks == 1 and args.router.weight == nullptr;
}

// Sends every token's routes to every rank, after the router has run if there is one. A warp takes
// a share of the tokens at a time: as many as it reads at once or, with a router, as it chooses
// for. With spare slots `counts` has a zero for each expert. Scope: the planners of the grid.
__device__ __forceinline__ void publish_routes(const LayerArgs& args,
                                               uint32_t epoch,
                                               uint32_t* counts) {
    const Shape& s = args.shape;
    if (args.refusal != nullptr and blockIdx.x == 0 and threadIdx.x == 0) {
        args.watchdog.repeat(args.refusal);
    }
    const bool has_router = args.router.weight != nullptr;
    const bool has_indices = args.choices.indices != nullptr;
    const int at_a_time = 32 / (has_indices ? lanes_per_choice(args.choices) : lanes_per_token(s));
    const int share = has_router ? kRouterTokens : at_a_time;
    const int warp = int(threadIdx.x) / 32, num_warps = Planners::size() / 32;
    // The first token of a CTA's nth share. Shares go round the CTAs, so that few tokens are spread
    // over all of them.
    const auto share_at = [&](int nth) { return (nth * int(gridDim.x) + int(blockIdx.x)) * share; };
    if (counts != nullptr) Planners::sync();  // all are zero
    if (has_router) {
        const int parts = ceil_div(s.num_experts, kRouterExperts);
#pragma unroll 1
        for (int i = warp; share_at(i / parts * 2) < args.num_tokens; i += num_warps) {
            const int pair = i / parts * 2, first_expert = i % parts * kRouterExperts;
            if (args.router.dtype == Dtype::kFloat16) {
                compute_logits<__half>(args, share_at(pair), share_at(pair + 1), first_expert);
            } else {
                compute_logits<__nv_bfloat16>(args, share_at(pair), share_at(pair + 1),
                                              first_expert);
            }
        }
        Planners::sync();  // a token's logits are several warps'
    }
    // Or a CTA has all tokens of its chunks, and its shares follow one another.
    const bool is_own = has_own_routes(args);
    const int tokens = 32 * s.chunks_per_cta(int(gridDim.x)), begin = int(blockIdx.x) * tokens;
    const int last = is_own ? min(begin + tokens, args.num_tokens) : args.num_tokens;
    const auto first_of = [&](int nth) { return is_own ? begin + nth * share : share_at(nth); };
#pragma unroll 1
    for (int nth = warp; first_of(nth) < last; nth += num_warps) {
        const int first = first_of(nth), end = min(first + share, last);
        if (has_router) choose_experts(args, first);
#pragma unroll 1
        for (int token = first; token < end; token += at_a_time) {
            const int count = min(at_a_time, end - token);
            if (has_indices) {
                publish_choices(args, epoch, counts, token, count);
            } else {
                publish_tokens(args, epoch, counts, token, count);
            }
        }
    }
    if (blockIdx.x == 0 and threadIdx.x < s.num_ranks) {
        *args.heap.row_block_bound(int(threadIdx.x), epoch, s.rank) = args.row_bound;
    }
    if (is_own) return;
    if (counts != nullptr) add_route_counts(args, counts);
    const auto tell = [&] {
        const bool refused = Atomics::load(args.workspace.raised) != 0;
        if (refused) {
            protocol::give_reasons<Atomics>(s.num_ranks, [&](int rank) {
                Fault::copy(args.watchdog.fault, args.heap.refusal(rank, epoch, s.rank));
            });
        }
        protocol::publish_routes<Atomics>(
            s.num_ranks, RouteSignal::make(epoch, args.num_tokens, refused),
            [&](int rank) { return args.heap.route_signal(rank, epoch, s.rank); });
    };
    uint32_t* arrivals = &args.workspace.tickets->routes_published;
    if (counts == nullptr) {
        last_arrival(arrivals, tell);
    } else {
        bool is_last = false;
        last_arrival(arrivals, [&] { is_last = true; });
        if (Planners::any(is_last)) {
            send_route_counts(args, epoch, args.workspace.route_counts);
            Planners::sync();
            if (threadIdx.x == 0) {
                Atomics::fence<protocol::Scope::kSystem>();
                tell();
            }
        }
    }
}

// Tells all ranks that this one's rows are in place or, with the epoch after that, that it has read
// the others' rows. Scope: one thread of each CTA, once its CTA is done.
__device__ __forceinline__ void tell_rows(const LayerArgs& args,
                                          uint32_t* arrivals,
                                          uint32_t epoch) {
    const Shape& s = args.shape;
    protocol::arrive<Atomics>(arrivals, gridDim.x, [&] {
        protocol::publish_rows<Atomics>(
            s.num_ranks, epoch, [&](int rank) { return args.heap.row_signal(rank, s.rank); });
    });
}

// Quantizes this rank's tokens into its heap, where its peers and itself find them. Half a warp
// takes some blocks of values at a time. Scope: `num_threads` threads of each CTA, the first ones.
__device__ __forceinline__ void quantize_tokens(const LayerArgs& args, int num_threads) {
    constexpr int kAtOnce = 4;
    const int per_token = args.shape.hidden / kScaleBlock, row_bytes = args.shape.token_bytes();
    const int64_t blocks = int64_t(args.num_tokens) * per_token;
    const int nth = int(threadIdx.x) / kScaleLanes, lane = threadIdx.x % kScaleLanes;
    const uint32_t lanes = 0xFFFFu << (threadIdx.x % 32 / kScaleLanes * kScaleLanes);
    const auto* x = reinterpret_cast<const uint4*>(args.x);
    const int64_t step = int64_t(num_threads / kScaleLanes) * gridDim.x;
    char* rows = args.heap.row(args.shape.rank, 0);
#pragma unroll 1
    for (int64_t at = int64_t(nth) * gridDim.x + blockIdx.x; at * kAtOnce < blocks; at += step) {
        uint4 loaded[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int64_t block = at * kAtOnce + i;
            loaded[i] = block < blocks ? x[block * kScaleLanes + lane] : uint4{};
        }
        // One division: the blocks after the first are the token's, or the next tokens'.
        int token = int(at * kAtOnce / per_token), of_token = int(at * kAtOnce % per_token);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            char* row = rows + int64_t(token) * row_bytes;
            quantize8(loaded[i], lanes, at * kAtOnce + i < blocks,
                      reinterpret_cast<uint2*>(row + of_token * kScaleBlock) + lane,
                      reinterpret_cast<float*>(row + args.shape.hidden) + of_token);
            if (++of_token == per_token) of_token = 0, ++token;
        }
    }
}

// Shared memory on the way of a CTA's share of x to the heap.
constexpr int kCopySlots = 8;
constexpr int kCopyAhead = 4;  // slots that are being loaded, while the others are being stored
struct alignas(128) RowCopySmem {
    uint8_t slot[kCopySlots][8192];
};

// Copies x, or dY, to where peers pull it from, and tells them. A rank reads its own rows where
// they are; its signal also says that it is done with the previous launch. One thread does it with
// bulk copies: the others have no time for it, and more copies in flight would hold up what they
// load. Scope: one thread of each CTA.
__device__ __forceinline__ void publish_rows(const LayerArgs& args,
                                             uint32_t epoch,
                                             RowCopySmem& smem) {
    __shared__ uint64_t loaded_words[kCopySlots];
    auto& loaded = reinterpret_cast<Barrier(&)[kCopySlots]>(loaded_words);
    constexpr int64_t kPiece = sizeof(smem.slot[0]);
    const Shape& s = args.shape;
    const int64_t bytes = s.num_ranks > 1 ? int64_t(args.num_tokens) * s.hidden * kElementBytes : 0;
    const int64_t share = align_up<int64_t>(ceil_div<int64_t>(bytes, gridDim.x), kPiece);
    const int64_t first = min(int64_t(blockIdx.x) * share, bytes);
    const int64_t size = min(share, bytes - first);
    const int num_pieces = int(ceil_div(size, kPiece));
    const char* from = args.x + first;
    char* to = args.heap.row(s.rank, 0) + first;
    const int64_t begin = Trace::now();
    for (Barrier& each : loaded) each.init(1);
    cutlass::arch::fence_barrier_init();

    const auto bytes_of = [&](int piece) { return int32_t(min(kPiece, size - piece * kPiece)); };
    for (int piece = 0; piece < num_pieces + kCopyAhead; ++piece) {
        if (piece < num_pieces) {
            // The slot's last store has been read out, since only the last few may be under way.
            cute::tma_store_wait<kCopySlots - kCopyAhead - 1>();
            Barrier& arrived = loaded[piece % kCopySlots];
            arrived.arrive_and_expect_tx(bytes_of(piece));
            cute::SM90_BULK_COPY_G2S::copy(from + piece * kPiece,
                                           reinterpret_cast<uint64_t*>(&arrived),
                                           smem.slot[piece % kCopySlots], bytes_of(piece));
        }
        if (const int ready = piece - kCopyAhead; ready >= 0) {
            wait_barrier<Waiter::kThread>(args.watchdog, Wait::kDispatchCopy,
                                          loaded[ready % kCopySlots], ready / kCopySlots % 2);
            cute::SM90_BULK_COPY_S2G::copy(smem.slot[ready % kCopySlots], to + ready * kPiece,
                                           bytes_of(ready));
            cute::tma_store_arrive();
        }
    }
    ptx::bulk_wait_complete();
    args.watchdog.trace.add(event_of(Wait::kDispatchCopy), kNoPart, begin);
    tell_rows(args, &args.workspace.tickets->rows_published, epoch);
}

}  // namespace flashmoe
