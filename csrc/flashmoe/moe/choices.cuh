// Routing by indices: every token names its experts. It becomes the same routes, in the same order,
// as the map of the same choices does.
#pragma once

#include "flashmoe/moe/args.cuh"
#include "flashmoe/tile/element.cuh"

namespace flashmoe {

// Sends a token's kth route to every rank, and notes which column of the probabilities it is of.
// `counts`, by expert, is null where the number of routes is not needed.
__device__ __forceinline__ void send_route(const LayerArgs& args,
                                           uint32_t epoch,
                                           uint32_t* counts,
                                           int token,
                                           int k,
                                           Route route,
                                           int column) {
    const Shape& s = args.shape;
    if (counts != nullptr and route.expert >= 0) atomicAdd_block(counts + route.expert, 1u);
#pragma unroll 1
    for (int rank = 0; rank < s.num_ranks; ++rank) {
        args.heap.routes(rank, epoch, s.rank, token)[k] = route;
    }
    args.plan.own_columns[int64_t(token) * s.topk + k] = column;
}

// How a warp reads choices: a lane for each choice of a token, and as many tokens as that leaves
// room for.
__device__ __forceinline__ int lanes_per_choice(const Choices& choices) {
    return power_of_two(choices.per_token);
}

// Turns `count` rows of indices into routes, and sends them to every rank. A token's routes are in
// the order of experts, whatever the order of its indices. `count` is at most the tokens that a
// warp has lanes for. Scope: one warp.
__device__ __forceinline__ void publish_choices(
    const LayerArgs& args, uint32_t epoch, uint32_t* counts, int first_token, int count) {
    const Shape& s = args.shape;
    const Choices& choices = args.choices;
    const int width = lanes_per_choice(choices), lane = int(threadIdx.x) % 32, nth = lane % width;
    const bool is_here = lane / width < count;
    const int token = first_token + lane / width;
    Route route{-1, 0.0f};
    bool is_sent = false;
    if (is_here and nth < choices.per_token) {
        const int64_t at = int64_t(token) * choices.per_token + nth;
        const int64_t expert = choices.at(at);
        if (expert < -1 or expert >= s.num_experts) {
            const int shown = int(min(max(expert, int64_t(INT32_MIN)), int64_t(INT32_MAX)));
            args.watchdog.raise(kFaultRouting, Wait::kRouting, nth, token, s.num_experts, shown);
        } else if (expert >= 0) {
            route = {int(expert), load_as_float(args.probs, args.probs_dtype, at)};
            is_sent = not s.skip_zero_probs or route.prob != 0.0f;
            if (isnan(route.prob)) {
                args.watchdog.raise(kFaultRouting, Wait::kRouting, -1, token, 0, route.expert);
            }
        }
    }
    int place = 0, num_routes = 0;
    bool repeats = false;
#pragma unroll 1
    for (int other = 0; other < width; ++other) {
        const int expert = __shfl_sync(~0u, route.expert, other, width);
        const bool is_route = __shfl_sync(~0u, int(is_sent), other, width) != 0;
        // An expert that is named twice is refused, but leaves no gap before that.
        const bool is_again = expert == route.expert and other < nth;
        place += is_route and (expert < route.expert or is_again);
        repeats |= is_again and expert >= 0;
        num_routes += is_route;
    }
    if (not is_here) return;
    if (repeats) {
        args.watchdog.raise(kFaultRouting, Wait::kRouting, nth, token, s.num_experts, route.expert);
    }
    if (is_sent) send_route(args, epoch, counts, token, place, route, nth);
#pragma unroll 1
    for (int k = num_routes + nth; k < s.topk; k += width) {
        send_route(args, epoch, counts, token, k, {-1, 0.0f}, -1);
    }
}

}  // namespace flashmoe
