// The report of a plan that is a launch of its own, for the host.
#pragma once

#include <cstdint>

namespace flashmoe {

// Follows the fault in the mailbox.
struct PlanReport {
    uint32_t epoch;          // 0 until the plan is there
    int32_t num_row_blocks;  // -1 if the plan failed
    int32_t num_rows;
    uint32_t has_begun;
    uint32_t unfollowed;    // as in the plan's header
    int32_t is_heard_late;  // the plan failed, and some rank's host does not wait for it
};

}  // namespace flashmoe
