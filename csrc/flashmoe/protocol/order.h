// The order of tiles, a total order, in steps: GEMM0 of one group of row units, then GEMM1 of the
// group `lag` steps before. So GEMM1's inputs are old tickets, results leave while later rows still
// arrive, and what runs at one time is one product, whose operands clusters share in the L2: both
// mixed took a tenth longer where weights are large. Within a group the unit moves fastest:
// neighbouring clusters read the same weights.
//
// Where GEMM1 is short (mixes_products), the tickets of both products alternate within a step. A
// finisher takes as long to store a tile of few stages as processors to compute it, so that they
// would wait for it while all multiprocessors store at once.
//
// Where experts have several units of rows, a group is one of them, or an even part of it
// (cut_groups). A group that had the end of one expert and the beginning of another would read the
// weights of both, and its neighbours would read them once more, after other products have driven
// them out of the L2.
//
// A tile waits only for rows, or for tiles with smaller tickets, so that no wait is circular.
#pragma once

#include "flashmoe/protocol/atomics.h"

namespace flashmoe::protocol {

// A pair of tiles: `unit` of the plan, and `n` along N.
struct TilePlace {
    int gemm;  // 0 or 1; kNone past the last ticket
    int unit;
    int n;

    static constexpr int kNone = -1;
};

// True if a pass mixes its products, by the stages of a tile of each. Where GEMM0 has many, its
// weights are large, and a forward that keeps pre-activations stores more for GEMM0 than for GEMM1:
// there a mixed order takes longer.
FLASHMOE_PROTOCOL_CONST bool mixes_products(bool keeps_nothing,
                                            int gemm0_stages,
                                            int gemm1_stages) {
    constexpr int kMostStages[2] = {32, 4};
    return keeps_nothing and gemm0_stages <= kMostStages[0] and gemm1_stages <= kMostStages[1];
}

struct TileOrder {
    int num_units;
    int group_units;  // that a group has, unless it is the last one or an expert ends there
    int lag;        // 1 or more: what GEMM1 reads is finished while the steps between are computed
    bool is_mixed;  // a step's tickets of both products alternate
    int num_n_tiles[2];

    FLASHMOE_PROTOCOL int num_tickets() const {
        return num_units * (num_n_tiles[0] + num_n_tiles[1]);
    }
    // How many units come before a group, where all groups have the same number of them.
    FLASHMOE_PROTOCOL int units_before(int group) const {
        const int units = group * group_units;
        return units < num_units ? units : num_units;
    }
};

// Most steps that GEMM1 may be after GEMM0: past the last group, a table of groups has as many
// ends.
constexpr int kMostLag = 8;

// True if groups end where experts do: on a rank that is alone, if experts have many rows, so that
// two groups would read their weights. Where they have few, kMostLag groups have fewer stages than
// finishers take until GEMM1 needs their results. A forward in FP8 writes no table of groups, and
// where products are mixed, steps are long.
FLASHMOE_PROTOCOL_CONST bool cuts_groups(
    bool is_alone, bool is_in_fp8, bool may_mix, int64_t mean_rows, int block_rows) {
    constexpr int kFewBlocks = 4;
    return is_alone and not is_in_fp8 and not may_mix and mean_rows > kFewBlocks * block_rows;
}

// True if a pass takes its tiles by the groups of the plan's table, if that has any. A backward's
// finishers take longer than a forward's. Where its GEMM1 has few stages, products of such groups
// wait for them and for rooms, for as long as their weights' second read takes.
FLASHMOE_PROTOCOL_CONST bool follows_cut_groups(bool is_backward, int gemm1_stages) {
    constexpr int kFewStages = 16;
    return not is_backward or gemm1_stages > kFewStages;
}

// Cuts the units of experts, which follow one another, into groups: of whole experts, as many as it
// takes until there are `least` units, and in even parts where these are more than `most`. Calls
// put(group, unit) for each group's first unit, and for kMostLag + 1 more, which have no units.
// `end_of` gives the number of units up to an expert's end.
template <class EndOf, class Put>
FLASHMOE_PROTOCOL void cut_groups(int num_experts, int least, int most, EndOf end_of, Put put) {
    int group = 0, begin = 0;
    for (int expert = 0; expert < num_experts; ++expert) {
        const int units = end_of(expert) - begin;
        if (units == 0 or (units < least and expert + 1 < num_experts)) continue;
        if (units <= most) {  // no division, which takes a lone thread longer than all else here
            put(group++, begin);
        } else {
            const int parts = (units + most - 1) / most;
            for (int part = 0; part < parts; ++part) put(group++, begin + units * part / parts);
        }
        begin += units;
    }
    for (int i = 0; i <= kMostLag; ++i) put(group + i, begin);
}

// The places of tickets that ascend. `units_before` gives the number of units before a group, which
// is 1 or more, and all units past the last one.
template <class UnitsBefore>
class TileWalk {
 public:
    FLASHMOE_PROTOCOL TileWalk(const TileOrder& order, UnitsBefore units_before)
        : order_(order), units_before_(units_before), ends_{before(1), before(1 - order.lag)} {}

    FLASHMOE_PROTOCOL TilePlace at(int ticket) {
        if (ticket >= order_.num_tickets()) return {TilePlace::kNone, 0, 0};
        while (ticket - first_ >= tickets_of(0) + tickets_of(1)) {
            first_ += tickets_of(0) + tickets_of(1);
            ++step_;
            begins_[0] = ends_[0], begins_[1] = ends_[1];
            ends_[0] = before(step_ + 1), ends_[1] = before(step_ + 1 - order_.lag);
        }
        ticket -= first_;
        const int gemm0 = tickets_of(0);
        if (order_.is_mixed) {
            const int gemm1 = tickets_of(1), in_step = gemm0 + gemm1;
            const int before = ticket * gemm1 / in_step;  // GEMM1's share of the tickets so far
            if ((ticket + 1) * gemm1 / in_step > before) return in_group(1, before);
            return in_group(0, ticket - before);
        }
        return ticket < gemm0 ? in_group(0, ticket) : in_group(1, ticket - gemm0);
    }

 private:
    FLASHMOE_PROTOCOL int before(int group) const { return group <= 0 ? 0 : units_before_(group); }
    FLASHMOE_PROTOCOL int tickets_of(int gemm) const {
        return (ends_[gemm] - begins_[gemm]) * order_.num_n_tiles[gemm];
    }
    FLASHMOE_PROTOCOL TilePlace in_group(int gemm, int index) const {
        const int count = ends_[gemm] - begins_[gemm];
        return {gemm, begins_[gemm] + index % count, index / count};
    }

    TileOrder order_;
    UnitsBefore units_before_;
    int step_ = 0, first_ = 0;          // the step of the last ticket, and its first ticket
    int begins_[2] = {0, 0}, ends_[2];  // the units of its group of each product
};

// The pairs of tiles of one expert's weight gradient, in bands of kBand along M and all of N: what
// is computed at the same time is about square, and reads the fewest columns of both operands.
struct BandOrder {
    int num_m, num_n;

    static constexpr int kBand = 8;

    struct Place {
        int m, n;
    };
    FLASHMOE_PROTOCOL Place at(int index) const {
        const int band = index / (kBand * num_n) * kBand, left = num_m - band;
        const int width = left < kBand ? left : kBand;
        index -= band * num_n;
        return {band + index % width, index / width};
    }
};

}  // namespace flashmoe::protocol
