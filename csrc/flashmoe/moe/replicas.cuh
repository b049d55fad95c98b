// Replicas of hot experts: every rank plans them from the routes that each rank has to each expert,
// which travel with the routes, and all come to the same placement.
#pragma once

#include "flashmoe/comm/grid.cuh"
#include "flashmoe/moe/args.cuh"
#include "flashmoe/placement/balance.h"
#include "flashmoe/placement/popular.h"
#include "flashmoe/placement/settled.h"

namespace flashmoe {

// A CTA's planners as a team: its warps are the groups.
struct PlannerTeam {
    static constexpr int kLanes = 32;
    __device__ __forceinline__ static int index() { return int(threadIdx.x); }
    __device__ __forceinline__ static int size() { return Planners::size(); }
    __device__ __forceinline__ static int group() { return index() / kLanes; }
    __device__ __forceinline__ static int num_groups() { return size() / kLanes; }
    __device__ __forceinline__ static int lane() { return index() % kLanes; }
    __device__ __forceinline__ static void sync() { Planners::sync(); }
    __device__ __forceinline__ static int sum(int value) { return __reduce_add_sync(~0u, value); }
    __device__ __forceinline__ static int max(int value) { return __reduce_max_sync(~0u, value); }
    __device__ __forceinline__ static int min(int value) { return __reduce_min_sync(~0u, value); }
    __device__ __forceinline__ static int count(bool is_true) {
        return __popc(__ballot_sync(~0u, is_true));
    }
    __device__ __forceinline__ static int before(bool is_true) {
        return __popc(__ballot_sync(~0u, is_true) & ((1u << lane()) - 1));
    }
};

using PlacementAttempt = placement::Attempt<PlannerTeam>;
static_assert(placement::kMaxRanks == kMaxRanks and placement::kMaxSlots == kMaxSpareSlots);

// The shared memory in which a CTA plans replicas.
struct ReplicaSmem {
    placement::Loads* loads;
    int* counts;        // [source rank][expert]: routes
    int* rows;          // [rank][expert]
    uint16_t* slot_of;  // [source rank][expert], where `rows` was, or null without spare slots
    uint8_t* sources;   // [rank][expert]: a bit for each source rank
    int* hosts;         // [rank][spare slot], where replicas are settled
    uint8_t* holders;   // [expert]

    __host__ __device__ static int64_t words_of_sources(const Shape& s) {
        return ceil_div<int64_t>(int64_t(s.num_ranks) * s.num_experts, 4);
    }
    __host__ __device__ static int64_t words(const Shape& s) {
        if (s.spare_slots == 0) return 0;
        return int64_t(sizeof(placement::Loads) / 4) + 2 * int64_t(s.num_ranks) * s.num_experts +
               words_of_sources(s) + s.num_ranks * s.spare_slots + ceil_div(s.num_experts, 4);
    }
    __device__ ReplicaSmem(const Shape& s, void* smem) {
        loads = static_cast<placement::Loads*>(smem);
        counts = reinterpret_cast<int*>(loads + 1);
        rows = counts + s.num_ranks * s.num_experts;
        slot_of = s.spare_slots > 0 ? reinterpret_cast<uint16_t*>(rows) : nullptr;
        sources = reinterpret_cast<uint8_t*>(rows + s.num_ranks * s.num_experts);
        hosts = reinterpret_cast<int*>(sources + 4 * words_of_sources(s));
        holders = reinterpret_cast<uint8_t*>(hosts + s.num_ranks * s.spare_slots);
    }
};

// A CTA's result of its attempts for the other CTAs, which follows the counts of experts to be
// placed.
struct AttemptResult {
    int32_t most;
    int32_t is_good;

    __host__ __device__ static int64_t words(const Shape& s) {
        return align_up<int64_t>(sizeof(AttemptResult) / 4 + ReplicaSmem::words_of_sources(s), 4);
    }
    // True if all attempts have room there.
    __host__ __device__ static bool fit(const Shape& s, int num_ctas) {
        const int64_t counts = align_up<int64_t>(int64_t(s.num_local_slots()) * num_ctas, 4);
        return counts + placement::kNumPreferences * words(s) <= Workspace::kCtaCounts;
    }
    __device__ static AttemptResult* at(const LayerArgs& args, int number) {
        const Shape& s = args.shape;
        const int64_t counts = align_up<int64_t>(int64_t(s.num_local_slots()) * gridDim.x, 4);
        uint32_t* words_of = args.workspace.cta_counts + counts + number * words(s);
        return reinterpret_cast<AttemptResult*>(words_of);
    }
    __device__ uint32_t* sources() { return reinterpret_cast<uint32_t*>(this + 1); }
};

// Adds what a CTA has counted of this rank's routes. Scope: the planners of the grid.
__device__ __forceinline__ void add_route_counts(const LayerArgs& args, const uint32_t* counts) {
    Planners::sync();
#pragma unroll 1
    for (int expert = threadIdx.x; expert < args.shape.num_experts; expert += Planners::size()) {
        if (counts[expert] > 0) atomicAdd(args.workspace.route_counts + expert, counts[expert]);
    }
}
// Sends all of them to every rank. Scope: the planners of a CTA.
__device__ __forceinline__ void send_route_counts(const LayerArgs& args,
                                                  uint32_t epoch,
                                                  const uint32_t* counts) {
    const Shape& s = args.shape;
#pragma unroll 1
    for (int expert = threadIdx.x; expert < s.num_experts; expert += Planners::size()) {
        const uint32_t count = counts[expert];
#pragma unroll 1
        for (int rank = 0; rank < s.num_ranks; ++rank) {
            args.heap.route_counts(rank, epoch, s.rank)[expert] = count;
        }
    }
}

// The outcome of planning replicas.
enum class Placed {
    kNot,      // some CTA cannot go on
    kAtHome,   // there are no replicas, hence no tables
    kBySlots,  // a table names the slots
};

// Counts this rank's own routes, and how many of them stay on it. Scope: one warp.
__device__ __forceinline__ void count_own_routes(const LayerArgs& args,
                                                 const ReplicaSmem& smem,
                                                 Placed placed) {
    const Shape& s = args.shape;
    const int own = s.rank * s.num_experts;
    int stay = 0, all = 0;
#pragma unroll 1
    for (int expert = int(threadIdx.x % 32); expert < s.num_experts; expert += 32) {
        const int count = smem.counts[own + expert];
        all += count;
        const bool is_home = uint32_t(expert - s.first_expert()) < uint32_t(s.num_local_experts());
        const bool stays =
            placed == Placed::kAtHome ? is_home : smem.sources[own + expert] >> s.rank & 1;
        if (stays) stay += count;
    }
    stay = __reduce_add_sync(~0u, stay);
    all = __reduce_add_sync(~0u, all);
    if (threadIdx.x % 32 == 0) args.plan.own_routes[0] = stay, args.plan.own_routes[1] = all;
}

// Takes the best of the results that attempts have left for the grid. False if some CTA cannot go
// on. Scope: the planners of the grid.
__device__ __forceinline__ bool take_best(const LayerArgs& args,
                                          const ReplicaSmem& smem,
                                          bool may_go_on) {
    if (not grid_barrier(args.watchdog, &args.workspace.tickets->barrier[2], may_go_on)) {
        return false;
    }
    // The best of those up to the first good one, where the host would have ended.
    const int lane = int(threadIdx.x % 32);
    AttemptResult result{INT32_MAX, false};
    if (lane < placement::kNumPreferences) result = *AttemptResult::at(args, lane);
    const uint32_t good = __ballot_sync(~0u, result.is_good);
    const bool counts = good == 0 or lane < __ffs(good);
    const int least = __reduce_min_sync(~0u, counts ? result.most : INT32_MAX);
    const int best = __ffs(__ballot_sync(~0u, counts and result.most == least)) - 1;
    auto* sources = reinterpret_cast<uint32_t*>(smem.sources);
#pragma unroll 1
    for (int i = threadIdx.x; i < int(ReplicaSmem::words_of_sources(args.shape));
         i += Planners::size()) {
        sources[i] = AttemptResult::at(args, best)->sources()[i];
    }
    Planners::sync();
    return true;
}

// Attempts one placement after the other: the first one, which settles the most common routings, in
// every CTA, and where it is not good all others, each CTA its share. Routes of a source to an
// expert are at `routes`, and `stride` lies between sources. Scope: the planners of the grid.
__device__ __forceinline__ Placed balance(
    const LayerArgs& args, const ReplicaSmem& smem, bool may_go_on, const int* routes, int stride) {
    const Shape& s = args.shape;
    PlacementAttempt attempt{smem.counts, s.num_ranks,  s.num_experts, smem.sources,
                             smem.rows,   smem.holders, smem.loads,    args.least_replica_rows};
    const auto* sources = reinterpret_cast<const uint32_t*>(smem.sources);
    const int* hosts = args.uses_settled ? smem.hosts : nullptr;
    int number = 0;
    bool is_first = true;
#pragma unroll 1
    while (may_go_on and number < placement::kNumPreferences) {
        attempt.begin(s.spare_slots, hosts, placement::preference(number),
                      is_first ? routes : smem.counts, is_first ? stride : s.num_experts);
        const bool is_good = attempt.run();
        if (is_first and is_good) return attempt.is_laid_out ? Placed::kBySlots : Placed::kAtHome;
        if (not is_first or blockIdx.x == 0) {
            AttemptResult* result = AttemptResult::at(args, number);
            if (threadIdx.x == 0) *result = {int32_t(attempt.most), is_good};
#pragma unroll 1
            for (int i = threadIdx.x; i < int(ReplicaSmem::words_of_sources(s));
                 i += Planners::size()) {
                result->sources()[i] = sources[i];
            }
        }
        number = is_first and blockIdx.x > 0 ? int(blockIdx.x) : number + int(gridDim.x);
        is_first = false;
        Planners::sync();
    }
    return take_best(args, smem, may_go_on) ? Placed::kBySlots : Placed::kNot;
}

// Plans which rank computes an expert for each rank's tokens. Scope: the planners of the grid, once
// all ranks' routes have come.
__device__ __forceinline__ Placed plan_replicas(const LayerArgs& args,
                                                uint32_t epoch,
                                                const ReplicaSmem& smem,
                                                bool may_go_on) {
    const Shape& s = args.shape;
    const auto* routes = reinterpret_cast<const int*>(args.heap.route_counts(s.rank, epoch, 0));
    const int stride = int(args.heap.heap_experts);
    const int num_hosts = s.num_ranks * s.spare_slots;
    Placed placed = Placed::kBySlots;
    if (args.uses_settled) {
#pragma unroll 1
        for (int i = threadIdx.x; i < num_hosts; i += Planners::size()) {
            smem.hosts[i] = args.workspace.settled->hosts[i];
        }
        Planners::sync();
    }
    if (args.keeps_rows_local) {
        if (not may_go_on) return Placed::kNot;  // all learn of it at their barrier
#pragma unroll 1
        for (int expert = threadIdx.x; expert < s.num_experts; expert += Planners::size()) {
#pragma unroll
            for (int src = 0; src < kMaxRanks; ++src) {
                if (src >= s.num_ranks) break;
                smem.counts[src * s.num_experts + expert] = routes[src * stride + expert];
            }
        }
        Planners::sync();
        if (args.uses_settled) {
            placement::use_own_replicas<PlannerTeam>(smem.hosts, s.num_ranks, s.num_experts,
                                                     s.spare_slots, smem.sources);
        } else {
            placement::popular<PlannerTeam>(smem.counts, s.num_ranks, s.num_experts, s.spare_slots,
                                            smem.sources, smem.rows, smem.holders, smem.loads,
                                            placement::EqualLinks{});
        }
    } else {
        placed = balance(args, smem, may_go_on, routes, stride);
    }
    int* hosts = blockIdx.x == 0 ? args.plan.hosts : nullptr;
    if (placed == Placed::kBySlots) {
        placement::number_slots<PlannerTeam>(smem.sources, s.num_ranks, s.num_experts,
                                             s.spare_slots, args.uses_settled ? nullptr : hosts,
                                             smem.slot_of);
        if (args.uses_settled) {
            placement::keep_slots<PlannerTeam>(smem.hosts, smem.counts, smem.sources, s.num_ranks,
                                               s.num_experts, s.spare_slots, hosts, smem.slot_of);
        }
    } else if (placed == Placed::kAtHome and hosts != nullptr) {
#pragma unroll 1
        for (int i = threadIdx.x; i < num_hosts; i += Planners::size()) hosts[i] = -1;
    }
    // By the warp that has the fewest chunks.
    if (placed != Placed::kNot and blockIdx.x == 0 and threadIdx.x >= Planners::size() - 32) {
        count_own_routes(args, smem, placed);
    }
    return placed;
}

}  // namespace flashmoe
