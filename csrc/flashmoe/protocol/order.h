// The order of tiles, a total order: GEMM1 of a group of row units follows GEMM0 of the next group,
// so that its inputs are old tickets, and results leave while later rows still arrive. Within a
// group the unit moves fastest: neighbouring clusters read the same weights.
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

struct TileOrder {
    int num_units;
    int group_units;
    int num_n_tiles[2];

    FLASHMOE_PROTOCOL int num_tickets() const {
        return num_units * (num_n_tiles[0] + num_n_tiles[1]);
    }
    FLASHMOE_PROTOCOL TilePlace at(int ticket) const {
        if (ticket >= num_tickets()) return {TilePlace::kNone, 0, 0};
        const int num_groups = (num_units + group_units - 1) / group_units;
        const int first = units_of(0) * num_n_tiles[0];
        if (ticket < first) return in_group(0, 0, ticket);
        ticket -= first;
        // Then couples (GEMM0 of group g, GEMM1 of group g - 1), and GEMM1 of the last group.
        const int couple = group_units * (num_n_tiles[0] + num_n_tiles[1]);
        const int last = num_groups > 2 ? num_groups - 2 : 0;
        const int group = (ticket / couple < last ? ticket / couple : last) + 1;
        ticket -= (group - 1) * couple;
        if (group < num_groups) {
            const int gemm0 = units_of(group) * num_n_tiles[0];
            if (ticket < gemm0) return in_group(0, group, ticket);
            ticket -= gemm0;
            const int gemm1 = units_of(group - 1) * num_n_tiles[1];
            if (ticket < gemm1) return in_group(1, group - 1, ticket);
            ticket -= gemm1;
        }
        return in_group(1, num_groups - 1, ticket);
    }

 private:
    FLASHMOE_PROTOCOL int units_of(int group) const {
        const int left = num_units - group * group_units;
        return left < group_units ? left : group_units;
    }
    FLASHMOE_PROTOCOL TilePlace in_group(int gemm, int group, int index) const {
        const int count = units_of(group);
        return {gemm, group * group_units + index % count, index / count};
    }
};

}  // namespace flashmoe::protocol
