// The device's reports to the host, in pinned memory.
#pragma once

#include "flashmoe/kernel/plan_report.h"
#include "flashmoe/moe/args.cuh"
#include "include/flashmoe.h"

namespace flashmoe {

static_assert(sizeof(Fault) == sizeof(FlashMoEFault));
static_assert(sizeof(Totals) == sizeof(FlashMoECounters) and kNumSpans == FLASHMOE_NUM_SPANS);
static_assert(sizeof(Record) == sizeof(FlashMoERecord) and kNumRecords == FLASHMOE_NUM_RECORDS);
static_assert(kFaultTimeout == FLASHMOE_PEER_TIMEOUT and kFaultRouting == FLASHMOE_BAD_ROUTING and
              kFaultRows == FLASHMOE_TOO_MANY_ROWS and kFaultRefused == FLASHMOE_REFUSED and
              kFaultUnmatched == FLASHMOE_UNMATCHED);
static_assert(kReasonBytes == FLASHMOE_REASON_BYTES);

// Written by the device, read by the host without synchronization; `refusal` the other way round.
struct Mailbox {
    Fault fault;
    Fault refusal;  // why the host refuses the call whose plan is under way
    PlanReport report;
    Record records[kNumRecords];
};

}  // namespace flashmoe
