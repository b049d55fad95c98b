// Replicas' gradients come home: an expert's owner pulls the gradients that holders have left in
// their spare slots and adds them to its own, by ascending rank of holders. fc2's are added within
// the backward, while tiles of fc1's are multiplied; then a signal lets streams go on that wait for
// fc2's alone.
#pragma once

#include <type_traits>

#include "flashmoe/moe/push.cuh"
#include "flashmoe/moe/weight_grads.cuh"

namespace flashmoe {

constexpr int kPulledFours = 1024;  // groups of four elements that a warp adds for a ticket

// Four elements of a gradient.
template <class Grad>
__device__ __forceinline__ float4 load_four(const Grad* at) {
    if constexpr (std::is_same_v<Grad, float>) {
        return *reinterpret_cast<const float4*>(at);
    } else {
        const uint2 packed = *reinterpret_cast<const uint2*>(at);
        const float2 low = unpack<Grad>(packed.x), high = unpack<Grad>(packed.y);
        return {low.x, low.y, high.x, high.y};
    }
}
template <class Grad>
__device__ __forceinline__ void store_four(Grad* at, float4 value) {
    if constexpr (std::is_same_v<Grad, float>) {
        *reinterpret_cast<float4*>(at) = value;
    } else {
        *reinterpret_cast<uint2*>(at) = {pack<Grad>(value.x, value.y),
                                         pack<Grad>(value.z, value.w)};
    }
}

// Adds floats to a gradient, in groups of four: this thread's are `first` and every `step`-th after
// it. So many loads are under way at a time, since those of a holder take long.
template <int kUnroll, class Grad>
__device__ __forceinline__ void add_fours(
    Grad* to, const float* from, int64_t first, int64_t end, int64_t step) {
    for (; first < end; first += step * kUnroll) {
        float4 sum[kUnroll], more[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const int64_t at = 4 * (first + i * step);
            if (at >= 4 * end) continue;
            more[i] = load_four(from + at);
            sum[i] = load_four(to + at);
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const int64_t at = 4 * (first + i * step);
            if (at >= 4 * end) continue;
            store_four(to + at, {sum[i].x + more[i].x, sum[i].y + more[i].y, sum[i].z + more[i].z,
                                 sum[i].w + more[i].w});
        }
    }
}

// Waits until the ranks that hold this rank's experts have stored their gradients. Scope: a warp.
__device__ __forceinline__ void await_slot_grads(const BackwardArgs& args,
                                                 SlotGrads which,
                                                 uint32_t epoch) {
    const Shape& s = args.shape;
    const int rank = int(threadIdx.x % 32);
    bool is_awaited = false;
    for (int i = 0; i < s.spare_slots and rank < s.num_ranks; ++i) {
        const int expert = args.plan.hosts[rank * s.spare_slots + i];
        is_awaited |= expert >= 0 and expert / s.num_local_experts() == s.rank;
    }
    if (is_awaited) {
        protocol::await_slot_grads<Atomics>(
            args.heap.grads_ready(s.rank, which, rank), epoch, [&](auto load, auto done) {
                wait_for(args.watchdog, {Wait::kReplicaGrads, rank, 0, epoch}, load, done);
            });
    }
    __syncwarp();
}

// Waits until this rank has stored its own fc2 gradients. Scope: a warp.
__device__ __forceinline__ void await_fc2_grads(const BackwardArgs& args) {
    if (threadIdx.x % 32 == 0) {
        const uint32_t target = kNumProcessors * gridDim.x;
        protocol::await<Atomics>(
            &args.workspace.tickets->fc2_grads_stored, target, [&](auto load, auto done) {
                wait_for(args.watchdog, {Wait::kReplicaGrads, args.shape.rank, 0, target}, load,
                         done);
            });
    }
    __syncwarp();
}

// The expert at a place, and where its gradient belongs.
struct PulledExpert {
    const float* from;  // all parts of the slot's gradient
    int local;          // this rank's expert

    __device__ __forceinline__ PulledExpert(const BackwardArgs& args, int place)
        : from(
              args.heap.slot_grads(place / args.shape.spare_slots, place % args.shape.spare_slots)),
          local(args.plan.hosts[place] - args.shape.first_expert()) {}
};

// Adds fc2's gradients of replicas to the own experts', which tiles have stored before, and tells
// the streams that wait for them. An element has one warp, which adds all holders' in their order.
// Scope: warps that have nothing else to do.
template <class T>
__device__ __forceinline__ void add_fc2_replicas(const BackwardArgs& args) {
    const Shape& s = args.shape;
    const int lane = threadIdx.x % 32;
    const int64_t num_fours = part_elements(s, 1) / 4;
    const bool has_replicas = place_of_replica(args, 0) >= 0;
    const int tickets = has_replicas ? int(ceil_div<int64_t>(num_fours, kPulledFours)) : 1;
    bool has_heard = false;  // that all gradients are stored
    for (;;) {
        const int ticket = take_tickets(&args.workspace.tickets->pulled, 1);
        if (ticket >= tickets) return;
        if (not has_heard) {
            await_fc2_grads(args);
            await_slot_grads(args, SlotGrads::kFc2, current_epoch(args.workspace));
            has_heard = true;
        }
        const int64_t first = int64_t(ticket) * kPulledFours;
        const int64_t end = min(first + kPulledFours, num_fours);
#pragma unroll 1
        for (int nth = 0;; ++nth) {
            const int place = place_of_replica(args, nth);
            if (place < 0) break;
            const PulledExpert expert(args, place);
            const float* from = expert.from + part_elements(s, 0);
            void* to = args.weight_grads.pointers[s.num_fc1() + expert.local];
            if (to == nullptr) continue;
            if (args.weight_grads.dtype == Dtype::kFloat32) {
                add_fours<8>(static_cast<float*>(to), from, first + lane, end, 32);
            } else {
                add_fours<8>(static_cast<T*>(to), from, first + lane, end, 32);
            }
        }
        __syncwarp();
        if (lane == 0) {
            protocol::arrive<Atomics>(&args.workspace.tickets->grads_added, uint32_t(tickets),
                                      [&] { tell_fc2_grads(args); });
        }
    }
}

}  // namespace flashmoe
