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
    int group_units;
    int lag;        // 1 or more: what GEMM1 reads is finished while the steps between are computed
    bool is_mixed;  // a step's tickets of both products alternate
    int num_n_tiles[2];

    FLASHMOE_PROTOCOL int num_tickets() const {
        return num_units * (num_n_tiles[0] + num_n_tiles[1]);
    }
    FLASHMOE_PROTOCOL TilePlace at(int ticket) const {
        if (ticket >= num_tickets()) return {TilePlace::kNone, 0, 0};
        // As if all groups were whole; the steps at the end have fewer tickets.
        const int first = lag * group_units * num_n_tiles[0];
        int step = ticket < first
                       ? ticket / (group_units * num_n_tiles[0])
                       : lag + (ticket - first) / (group_units * (num_n_tiles[0] + num_n_tiles[1]));
        while (tickets_before(step + 1) <= ticket) ++step;
        const int in_step = tickets_before(step + 1) - tickets_before(step);
        ticket -= tickets_before(step);
        const int gemm0 = (units_before(step + 1) - units_before(step)) * num_n_tiles[0];
        if (is_mixed) {
            const int gemm1 = in_step - gemm0;
            const int before = ticket * gemm1 / in_step;  // GEMM1's share of the tickets so far
            if ((ticket + 1) * gemm1 / in_step > before) return in_group(1, step - lag, before);
            return in_group(0, step, ticket - before);
        }
        if (ticket < gemm0) return in_group(0, step, ticket);
        return in_group(1, step - lag, ticket - gemm0);
    }

 private:
    FLASHMOE_PROTOCOL int units_before(int group) const {
        const int units = group < 0 ? 0 : group * group_units;
        return units < num_units ? units : num_units;
    }
    FLASHMOE_PROTOCOL int tickets_before(int step) const {
        return units_before(step) * num_n_tiles[0] + units_before(step - lag) * num_n_tiles[1];
    }
    FLASHMOE_PROTOCOL TilePlace in_group(int gemm, int group, int index) const {
        const int count = units_before(group + 1) - units_before(group);
        return {gemm, group * group_units + index % count, index / count};
    }
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
