// Replicas' gradients come home, in a launch behind the backward's: an expert's owner pulls what
// hosts have left in their spare slots and adds it to its own, by ascending rank of hosts. Then
// all gradients of fc2 are complete, and streams that wait for them are told.
#pragma once

#include <type_traits>

#include "flashmoe/comm/wait.cuh"
#include "flashmoe/kernel/entry.h"
#include "flashmoe/moe/push.cuh"
#include "flashmoe/moe/weight_grads.cuh"
#include "flashmoe/protocol/replicas.h"

namespace flashmoe {

struct AddReplicasArgs {
    Shape shape;
    Heap heap;
    Plan plan;
    Workspace workspace;
    Watchdog watchdog;
    void* const* grads;  // device: fc1 of every local slot, then fc2, and their biases
    bool has_biases;
    uint64_t number;  // this backward's, as in WeightGrads
};

constexpr int kAddThreads = 512;

// Adds floats to a gradient. Scope: the grid, of which each thread always has the same elements.
template <class Grad>
__device__ __forceinline__ void add_floats(Grad* to, const float* from, int64_t count) {
    constexpr int kUnroll = 4;
    const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t step = int64_t(gridDim.x) * blockDim.x;
    for (int64_t first = thread; first < count / 4; first += step * kUnroll) {
        float4 more[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const int64_t at = first + i * step;
            if (at < count / 4) more[i] = reinterpret_cast<const float4*>(from)[at];
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const int64_t at = first + i * step;
            if (at >= count / 4) continue;
            if constexpr (std::is_same_v<Grad, float>) {
                float4& sum = reinterpret_cast<float4*>(to)[at];
                sum = {sum.x + more[i].x, sum.y + more[i].y, sum.z + more[i].z, sum.w + more[i].w};
            } else {
                put_rounded<Grad>(reinterpret_cast<char*>(to + 4 * at), more[i], true);
            }
        }
    }
}

template <class Grad>
__global__ __launch_bounds__(kAddThreads)  //
    void add_replicas_kernel(const __grid_constant__ AddReplicasArgs args) {
    const Shape& s = args.shape;
    const uint32_t epoch = *args.workspace.epoch;  // the backward's, which has ended
    const auto is_own = [&](int place) {
        const int expert = args.plan.hosts[place];
        return expert >= 0 and expert / s.num_local_experts() == s.rank;
    };
    if (threadIdx.x < s.num_ranks) {
        const int rank = int(threadIdx.x);
        bool is_awaited = false;
        for (int i = 0; i < s.spare_slots; ++i) is_awaited |= is_own(rank * s.spare_slots + i);
        if (blockIdx.x == 0) {
            protocol::publish_slot_grad<Atomics>(args.heap.grads_ready(rank, s.rank), epoch);
        }
        if (is_awaited) {
            protocol::await_slot_grad<Atomics>(
                args.heap.grads_ready(s.rank, rank), epoch, [&](auto load, auto done) {
                    wait_for(args.watchdog, {Wait::kReplicaGrads, rank, 0, epoch}, load, done);
                });
        }
    }
    __syncthreads();
    for (int place = 0; place < s.num_ranks * s.spare_slots; ++place) {
        if (not is_own(place)) continue;
        const int local = args.plan.hosts[place] - s.first_expert();
        const float* from = args.heap.slot_grads(place / s.spare_slots, place % s.spare_slots);
        const int num_kinds = kExpertParts + s.is_split;  // fc1 has two then
        for (int kind = 0; kind < num_kinds; ++kind) {
            const int part = max(kind - s.is_split, 0);
            const int64_t count = part_elements(s, part) / (part == 0 and s.is_split ? 2 : 1);
            auto* to = static_cast<Grad*>(args.grads[kind * s.num_local_slots() + local]);
            if (part < 2) {
                add_floats(to, from, count);
            } else if (args.has_biases) {  // which may begin at any element
                for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
                     i += int64_t(gridDim.x) * blockDim.x) {
                    to[i] = Grad(float(to[i]) + from[i]);
                }
            }
            from += count;
        }
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    uint32_t* added = &args.workspace.tickets->grads_added;
    protocol::arrive<Atomics>(added, gridDim.x, [&] {
        *added = 0;
        if (args.number != 0) {
            Atomics::store<protocol::Scope::kSystem>(args.workspace.fc2_grads, args.number);
        }
    });
}

template <class T>
KernelEntry add_replicas_entry(bool into_float32) {
    return {into_float32 ? reinterpret_cast<const void*>(&add_replicas_kernel<float>)
                         : reinterpret_cast<const void*>(&add_replicas_kernel<T>),
            kAddThreads, 0};
}

}  // namespace flashmoe
