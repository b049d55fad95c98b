// The plan's own launch as the host sees it.
#pragma once

#include <cstdint>

namespace flashmoe {

// What the host reads after a plan; after the fault record in the mailbox.
struct PlanReport {
    uint32_t epoch;  // 0 until the plan is there
    int32_t num_row_blocks;
    int32_t num_rows;
    uint32_t has_begun;
};

}  // namespace flashmoe
