// Brings weights to replicas: an expert's owner pushes them into the spare slots that hold it. That
// depends on the plan alone, never on a tile, so that a tile may wait for it.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "flashmoe/moe/args.cuh"
#include "flashmoe/protocol/replicas.h"
#include "flashmoe/tile/pipeline.cuh"

namespace flashmoe {

constexpr int kDispatchLanes = 8;  // rows, or pieces of weights, in flight of one warp
constexpr int kDispatchPiece = kIsFp8 ? 1152 : 2048;  // bytes that a lane has on its way
constexpr int kPushedPieces = 2;                      // that each lane pushes for a ticket

using DispatchPieces = uint8_t[kDispatchLanes][kDispatchPiece];  // in shared memory, of one warp
using DispatchBarriers = Barrier[kDispatchLanes];

// The parts of an expert in the order in which a slot has them: fc1, fc2 and their biases.
constexpr int kExpertParts = 4;
__device__ __forceinline__ int64_t part_elements(const Shape& s, int part) {
    switch (part) {
        case 0:
            return int64_t(s.fc1_rows()) * s.hidden;
        case 1:
            return int64_t(s.hidden) * s.intermediate;
        case 2:
            return s.fc1_rows();
        default:
            return s.hidden;
    }
}

// The spare slot that holds the nth replica of this rank's experts, counted over all ranks' slots,
// or -1. Scope: one warp.
__device__ __forceinline__ int place_of_replica(const LayerArgs& args, int nth) {
    const Shape& s = args.shape;
    const int num_places = s.num_ranks * s.spare_slots, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int first = 0; first < num_places; first += 32) {
        const int expert = first + lane < num_places ? args.plan.hosts[first + lane] : -1;
        const int local = expert - s.first_expert();
        uint32_t own =
            __ballot_sync(~0u, expert >= 0 and local >= 0 and local < s.num_local_experts());
        const int count = __popc(own);
        if (nth >= count) {
            nth -= count;
            continue;
        }
#pragma unroll 1
        for (; nth > 0; --nth) own &= own - 1;
        return first + __ffs(own) - 1;
    }
    return -1;
}

// Where a part of one of this rank's experts is, `offset` bytes from its begin. Both halves of a
// split fc1 have whole pieces.
__device__ __forceinline__ const char* home_part(const LayerArgs& args,
                                                 int part,
                                                 int expert,
                                                 int64_t offset) {
    const Shape& s = args.shape;
    if (part >= 2) return static_cast<const char*>(args.biases[part - 2][expert]) + offset;
    int matrix = part;
    if (s.is_split) {
        const int64_t half = part_elements(s, 0) * kElementBytes / 2;
        if (part == 1) matrix = 2;
        if (part == 0 and offset >= half) matrix = 1, offset -= half;
    }
    const void* begin = args.home_weights[matrix * s.num_local_experts() + expert];
    return static_cast<const char*>(begin) + offset;
}

// A lane's piece of an expert's weights: where it is, where it belongs, and its bytes.
struct PushedPiece {
    const char* from;
    char* to;
    int bytes;  // 0: there is none
};
__device__ __forceinline__ PushedPiece
pushed_piece(const LayerArgs& args, int host, int spare_slot, int expert, int number) {
    const Shape& s = args.shape;
    char* to = args.heap.slot_weights(host, spare_slot);
#pragma unroll 1
    for (int part = 0; part < kExpertParts; ++part) {
        const int64_t bytes = part_elements(s, part) * kElementBytes;
        const int pieces = int(ceil_div<int64_t>(bytes, kDispatchPiece));
        const bool is_bias = part >= 2;
        if (not is_bias or args.biases[0] != nullptr) {
            if (number < pieces) {
                const int64_t offset = int64_t(number) * kDispatchPiece;
                return {home_part(args, part, expert, offset), to + offset,
                        int(min(int64_t(kDispatchPiece), bytes - offset))};
            }
            number -= pieces;
        }
        to += bytes;
    }
    return {nullptr, nullptr, 0};
}

// Pushes a few pieces of the weights that other ranks have replicas of. False once none is left.
// Scope: one warp, which knows that all ranks have left the launch before.
__device__ __forceinline__ bool push_weights(const LayerArgs& args,
                                             DispatchPieces& pieces,
                                             DispatchBarriers& arrived,
                                             uint32_t& parity) {
    const Shape& s = args.shape;
    const Workspace& workspace = args.workspace;
    const int lane = threadIdx.x % 32;
    int num_pieces = 0;
#pragma unroll 1
    for (int part = 0; part < (args.biases[0] != nullptr ? kExpertParts : 2); ++part) {
        num_pieces +=
            int(ceil_div<int64_t>(part_elements(s, part) * kElementBytes, kDispatchPiece));
    }
    const int tickets = ceil_div(num_pieces, kPushedPieces * kDispatchLanes);
    const int ticket = take_tickets(&workspace.tickets->pushed, 1);
    const int place = place_of_replica(args, ticket / tickets);
    if (place < 0) return false;
    const int host = place / s.spare_slots, spare_slot = place % s.spare_slots;
    const int expert = args.plan.hosts[place] - s.first_expert();
    const int first = ticket % tickets * kPushedPieces * kDispatchLanes + lane;
#pragma unroll 1
    for (int i = 0; i < kPushedPieces and lane < kDispatchLanes; ++i) {
        const PushedPiece piece =
            pushed_piece(args, host, spare_slot, expert, first + i * kDispatchLanes);
        if (piece.bytes == 0) break;
        cute::tma_store_wait<0>();  // the previous piece has left shared memory
        arrived[lane].arrive_and_expect_tx(piece.bytes);
        cute::SM90_BULK_COPY_G2S::copy(piece.from, reinterpret_cast<uint64_t*>(&arrived[lane]),
                                       pieces[lane], piece.bytes);
        wait_barrier<Waiter::kThread>(args.watchdog, Wait::kDispatchCopy, arrived[lane], parity);
        parity ^= 1;
        cute::SM90_BULK_COPY_S2G::copy(pieces[lane], piece.to, piece.bytes);
        cute::tma_store_arrive();
    }
    protocol::complete_copies<Atomics>();
    if (lane == 0) {
        protocol::arrive<Atomics>(workspace.pushes + place, uint32_t(tickets), [&] {
            protocol::publish_weights<Atomics>(args.heap.weights_ready(host, spare_slot),
                                               current_epoch(workspace));
        });
    }
    __syncwarp();
    return true;
}

}  // namespace flashmoe
