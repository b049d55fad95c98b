// The order of tiles, a total order: GEMM1 of a group of row blocks follows GEMM0 of the next
// group, so that its inputs are old tickets, and results leave while later rows still arrive.
// Within a group the row block moves fastest: neighbouring CTAs read the same weights.
#pragma once

#include "flashmoe/tile/pipeline.cuh"

namespace flashmoe {

struct TileOrder {
    int num_blocks;
    int group_blocks;
    int num_n_tiles[2];

    __device__ __forceinline__ int num_tiles() const {
        return num_blocks * (num_n_tiles[0] + num_n_tiles[1]);
    }

    __device__ __forceinline__ TileInfo tile(int ticket) const {
        if (ticket >= num_tiles()) return {TileInfo::kNoTile, 0, 0, 0};
        const int num_groups = ceil_div(num_blocks, group_blocks);
        const int first = blocks_of(0) * num_n_tiles[0];
        if (ticket < first) return in_group(0, 0, ticket);
        ticket -= first;
        // Then pairs (GEMM0 of group g, GEMM1 of group g - 1), and GEMM1 of the last group.
        const int pair = group_blocks * (num_n_tiles[0] + num_n_tiles[1]);
        const int group = min(ticket / pair, max(num_groups - 2, 0)) + 1;
        ticket -= (group - 1) * pair;
        if (group < num_groups) {
            const int gemm0 = blocks_of(group) * num_n_tiles[0];
            if (ticket < gemm0) return in_group(0, group, ticket);
            ticket -= gemm0;
            const int gemm1 = blocks_of(group - 1) * num_n_tiles[1];
            if (ticket < gemm1) return in_group(1, group - 1, ticket);
            ticket -= gemm1;
        }
        return in_group(1, num_groups - 1, ticket);
    }

 private:
    __device__ __forceinline__ int blocks_of(int group) const {
        return min(group_blocks, num_blocks - group * group_blocks);
    }
    __device__ __forceinline__ TileInfo in_group(int gemm, int group, int index) const {
        const int blocks = blocks_of(group);
        return {gemm, group * group_blocks + index % blocks, 0, index / blocks};
    }
};

}  // namespace flashmoe
