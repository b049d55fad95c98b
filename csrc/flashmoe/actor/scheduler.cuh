// From tickets to tiles, in the order of protocol/order.h.
//
// A unit is what a cluster takes at once: two row blocks of one expert, or an expert's odd last
// block. From an odd last block it takes two neighbouring tiles along N.
#pragma once

#include "flashmoe/moe/plan.cuh"
#include "flashmoe/protocol/order.h"
#include "flashmoe/tile/pipeline.cuh"

namespace flashmoe {

constexpr int kLateWaves = 2;  // pairs for each cluster at the end of a layer

template <class UnitsBefore>
struct TileSchedule {
    const RowUnit* units;
    protocol::TileOrder order;
    protocol::TileWalk<UnitsBefore> walk;

    // A ticket's pair of tiles, or kNoTile past the last one. Tickets ascend. A single block takes
    // two tiles along N at a time, so that every other ticket has nothing to do (kSkip).
    __device__ __forceinline__ TileInfo pair(int ticket) {
        const protocol::TilePlace place = walk.at(ticket);
        if (place.gemm == protocol::TilePlace::kNone) return TileInfo::nothing(TileInfo::kNoTile);
        const RowUnit unit = units[place.unit];
        const bool is_single = unit.num_blocks() == 1;
        if (is_single and place.n % kClusterSize != 0) return TileInfo::nothing(TileInfo::kSkip);
        const int left = order.num_tickets() - ticket;
        const bool is_late = left <= kLateWaves * int(gridDim.x) / kClusterSize;
        return {int16_t(place.gemm),     unit.expert, is_single ? Pair::kAlongN : Pair::kAlongM,
                int8_t(unit.num_halves), is_late,     false,
                unit.first_block,        place.n};
    }
};

}  // namespace flashmoe
