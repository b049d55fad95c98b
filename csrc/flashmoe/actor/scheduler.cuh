// The order of tiles, a total order: GEMM1 of a group of row units follows GEMM0 of the next group,
// so that its inputs are old tickets, and results leave while later rows still arrive. Within a
// group the unit moves fastest: neighbouring clusters read the same weights.
//
// A unit is what a cluster takes at once: two row blocks of one expert, or an expert's odd last
// block, of which it then takes two neighbouring tiles along N.
#pragma once

#include "flashmoe/moe/plan.cuh"
#include "flashmoe/tile/pipeline.cuh"

namespace flashmoe {

struct TileOrder {
    const RowUnit* units;
    int num_units;
    int group_units;
    int num_n_tiles[2];

    // Pairs of tiles by ticket; past the last one kNoTile. For a single block every other ticket
    // has nothing to do (kSkip).
    __device__ __forceinline__ TileInfo pair(int ticket) const {
        if (ticket >= num_units * (num_n_tiles[0] + num_n_tiles[1])) {
            return TileInfo::nothing(TileInfo::kNoTile);
        }
        const int num_groups = ceil_div(num_units, group_units);
        const int first = units_of(0) * num_n_tiles[0];
        if (ticket < first) return in_group(0, 0, ticket);
        ticket -= first;
        // Then couples (GEMM0 of group g, GEMM1 of group g - 1), and GEMM1 of the last group.
        const int couple = group_units * (num_n_tiles[0] + num_n_tiles[1]);
        const int group = min(ticket / couple, max(num_groups - 2, 0)) + 1;
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
    __device__ __forceinline__ int units_of(int group) const {
        return min(group_units, num_units - group * group_units);
    }
    __device__ __forceinline__ TileInfo in_group(int gemm, int group, int index) const {
        const int count = units_of(group), n = index / count;
        const RowUnit unit = units[group * group_units + index % count];
        const bool is_single = unit.num_blocks == 1;
        if (is_single and n % kClusterSize != 0) return TileInfo::nothing(TileInfo::kSkip);
        return {int16_t(gemm), is_single ? Pair::kAlongN : Pair::kAlongM, unit.expert,
                unit.first_block, n};
    }
};

}  // namespace flashmoe
