// The placement that keeps rows off slow links, in plain C++ for a launch and for the host.
// flashmoe_megatron/replicas/popular.py is the same program, says what it does and why, and has the
// same results: a change of one is a change of both. A Team is as in balance.h.
#pragma once

#include "flashmoe/placement/balance.h"

namespace flashmoe::placement {

// How near a rank is to an expert's tokens where all links are equal: how many of them it has.
struct EqualLinks {
    FLASHMOE_PLACEMENT int operator()(
        const int* counts, int /*num_ranks*/, int num_experts, int expert, int taker) const {
        return counts[taker * num_experts + expert];
    }
};

// The same by rates, [from][to] and not negative: the sum of all ranks' tokens times their links'.
struct LinksByRate {
    const int* rates;

    FLASHMOE_PLACEMENT int64_t
    operator()(const int* counts, int num_ranks, int num_experts, int expert, int taker) const {
        int64_t sum = 0;
        FLASHMOE_PLACEMENT_LOOP
        for (int source = 0; source < num_ranks; ++source) {
            sum +=
                int64_t(counts[source * num_experts + expert]) * rates[source * num_ranks + taker];
        }
        return sum;
    }
};

// `counts` are [source rank][expert] routes. Writes `sources`, [rank][expert], a bit for each
// source rank whose tokens it computes; `scratch` has as many words, at least two ranks', and
// `in_heads` a byte for each expert.
template <class Team, class Links>
FLASHMOE_PLACEMENT void popular(const int* counts,
                                int num_ranks,
                                int num_experts,
                                int spare_slots,
                                uint8_t* sources,
                                int* scratch,
                                uint8_t* in_heads,
                                Loads* loads,
                                Links links) {
    using Near = decltype(links(counts, 0, 0, 0, 0));
    const int local = num_experts / num_ranks;
    uint8_t* const rank_of = sources;  // [source rank][expert], until the end
    // Each rank's head: experts with together more than half of its routes, in descending order.
    FLASHMOE_PLACEMENT_LOOP
    for (int rank = Team::group(); rank < num_ranks; rank += Team::num_groups()) {
        const int* routes = counts + rank * num_experts;
        int sum = 0, num_held = 0;
        FLASHMOE_PLACEMENT_LOOP
        for (int expert = Team::lane(); expert < num_experts; expert += Team::kLanes) {
            sum += routes[expert];
        }
        sum = Team::sum(sum);
        FLASHMOE_PLACEMENT_LOOP
        for (int expert = Team::lane(); expert < num_experts; expert += Team::kLanes) {
            const int count = routes[expert], home = expert / local;
            int before = 0, foreign_before = 0;
            FLASHMOE_PLACEMENT_LOOP
            for (int other = 0; count > 0 && other < num_experts; ++other) {
                const int more = routes[other];
                if (more < count || (more == count && other >= expert)) continue;
                before += more;
                foreign_before += other / local != rank;
            }
            const bool is_in_head = count > 0 && 2 * before <= sum;
            const bool is_held = is_in_head && home != rank && foreign_before < spare_slots;
            scratch[rank * num_experts + expert] = is_in_head;
            rank_of[rank * num_experts + expert] = uint8_t(is_held ? rank : home);
            num_held += is_held;
        }
        num_held = Team::sum(num_held);
        if (Team::lane() == 0) loads->num_held[rank] = num_held;
    }
    Team::sync();
    FLASHMOE_PLACEMENT_LOOP
    for (int expert = Team::index(); expert < num_experts; expert += Team::size()) {
        bool is_in_head = false;
        FLASHMOE_PLACEMENT_LOOP
        for (int rank = 0; rank < num_ranks; ++rank) {
            is_in_head |= scratch[rank * num_experts + expert] != 0;
        }
        in_heads[expert] = is_in_head;
    }
    FLASHMOE_PLACEMENT_LOOP
    for (int rank = Team::group(); rank < num_ranks; rank += Team::num_groups()) {
        int rows = 0;
        FLASHMOE_PLACEMENT_LOOP
        for (int i = Team::lane(); i < num_ranks * num_experts; i += Team::kLanes) {
            if (rank_of[i] == rank) rows += counts[i];
        }
        rows = Team::sum(rows);
        if (Team::lane() == 0) loads->total[rank] = rows;
    }
    Team::sync();
    // Experts in no rank's head, by ascending routes.
    int* const totals = scratch;
    int* const order = scratch + num_experts;
    FLASHMOE_PLACEMENT_LOOP
    for (int expert = Team::index(); expert < num_experts; expert += Team::size()) {
        int total = 0;
        FLASHMOE_PLACEMENT_LOOP
        for (int rank = 0; rank < num_ranks; ++rank) total += counts[rank * num_experts + expert];
        totals[expert] = in_heads[expert] ? 0 : total;
    }
    Team::sync();
    FLASHMOE_PLACEMENT_LOOP
    for (int expert = Team::index(); expert < num_experts; expert += Team::size()) {
        const int total = totals[expert];
        int place = 0;
        FLASHMOE_PLACEMENT_LOOP
        for (int other = 0; total > 0 && other < num_experts; ++other) {
            const int less = totals[other];
            place += less > 0 && (less < total || (less == total && other < expert));
        }
        if (total > 0) order[place] = expert;
    }
    int num_cold = 0;
    FLASHMOE_PLACEMENT_LOOP
    for (int expert = 0; expert < num_experts; ++expert) num_cold += totals[expert] > 0;
    Team::sync();
    // Each leaves a busy rank for the rank that is nearest to its tokens. Every thread of a group
    // computes the same.
    if (Team::group() == 0) {
        int rows[kMaxRanks], num_held[kMaxRanks];
        int64_t sum = 0;
        FLASHMOE_PLACEMENT_UNROLLED
        for (int rank = 0; rank < kMaxRanks; ++rank) {
            rows[rank] = rank < num_ranks ? loads->total[rank] : 0;
            num_held[rank] = rank < num_ranks ? loads->num_held[rank] : 0;
            sum += rows[rank];
        }
        FLASHMOE_PLACEMENT_LOOP
        for (int i = 0; i < num_cold; ++i) {
            const int expert = order[i], total = totals[expert], owner = expert / local;
            bool is_busy = false;
            FLASHMOE_PLACEMENT_UNROLLED
            for (int rank = 0; rank < kMaxRanks; ++rank) {
                is_busy |= rank == owner && int64_t(rows[rank]) * num_ranks > sum;
            }
            if (!is_busy) continue;
            int taker = -1;
            Near most = -1;
            FLASHMOE_PLACEMENT_UNROLLED
            for (int rank = 0; rank < kMaxRanks; ++rank) {
                const bool may_take = rank < num_ranks && rank != owner &&
                                      num_held[rank] < spare_slots &&
                                      int64_t(rows[rank] + total) * num_ranks <= sum;
                const Near near =
                    may_take ? links(counts, num_ranks, num_experts, expert, rank) : Near(-1);
                if (near > most) most = near, taker = rank;
            }
            if (taker < 0) continue;
            FLASHMOE_PLACEMENT_UNROLLED
            for (int rank = 0; rank < kMaxRanks; ++rank) {
                rows[rank] += rank == taker ? total : rank == owner ? -total : 0;
                num_held[rank] += rank == taker;
            }
            FLASHMOE_PLACEMENT_LOOP
            for (int rank = Team::lane(); rank < num_ranks; rank += Team::kLanes) {
                rank_of[rank * num_experts + expert] = uint8_t(taker);
            }
        }
    }
    Team::sync();
    FLASHMOE_PLACEMENT_LOOP
    for (int expert = Team::index(); expert < num_experts; expert += Team::size()) {
        uint64_t of_ranks = 0;  // a byte for each
        FLASHMOE_PLACEMENT_LOOP
        for (int source = 0; source < num_ranks; ++source) {
            of_ranks |= uint64_t(1) << (rank_of[source * num_experts + expert] * 8 + source);
        }
        FLASHMOE_PLACEMENT_LOOP
        for (int rank = 0; rank < num_ranks; ++rank, of_ranks >>= 8) {
            sources[rank * num_experts + expert] = uint8_t(of_ranks);
        }
    }
    Team::sync();
}

}  // namespace flashmoe::placement
