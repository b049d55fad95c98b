// The bodies of the C interface's calls that read what launches have left: plans, faults, counters
// and records, and gradients that are complete. Only flashmoe_await_plan waits for the plan, and
// flashmoe_clear_fault and flashmoe_read_counters for the stream.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "host/check.h"
#include "host/driver.h"
#include "host/mailbox.h"

namespace flashmoe {
namespace {

// The checksum that a record has if all of its words are one launch's.
uint32_t checksum_of(const FlashMoERecord* record) {
    const int num_counts = std::clamp(record->num_counts, 0, kMaxLocalExperts);
    uint32_t sum = 0;
    for (int i = 0; i < Record::kFrontWords + num_counts; ++i) {
        uint32_t word;
        memcpy(&word, reinterpret_cast<const char*>(record) + 4 * i, sizeof(word));
        if (i != Record::kChecksumWord) sum += Record::checksum_of(uint32_t(i), word);
    }
    return sum;
}

}  // namespace
}  // namespace flashmoe

using namespace flashmoe;

extern "C" {

int flashmoe_await_plan(const FlashMoEProblem* problem,
                        const FlashMoEGroup* group,
                        int32_t* num_row_blocks,
                        int32_t* num_rows,
                        uint32_t* unfollowed,
                        int32_t* is_heard_late) {
    FLASHMOE_TRY(check_group(problem, group));
    for (const void* output :
         {static_cast<const void*>(num_row_blocks), static_cast<const void*>(num_rows),
          static_cast<const void*>(unfollowed), static_cast<const void*>(is_heard_late)}) {
        FLASHMOE_TRY(check_pointer(output, true, "an output of flashmoe_await_plan", 4));
    }
    const volatile Mailbox* mailbox = static_cast<Mailbox*>(group->mailbox);
    // All that the device wrote earlier is there then, also on processors with a weak memory order.
    const auto has_come = [&] {
        return __atomic_load_n(&mailbox->report.epoch, __ATOMIC_ACQUIRE) != 0;
    };
    // The device bounds its own waits; this bound is for a device that stands still. Work that is
    // ahead on the stream is not counted: it may be a collective that waits for ranks of another
    // group.
    using Clock = std::chrono::steady_clock;
    const auto stream = static_cast<cudaStream_t>(group->stream);
    const auto limit = std::chrono::nanoseconds(problem->timeout_ns) + std::chrono::seconds(30);
    auto deadline = Clock::now() + limit;
    for (uint64_t spin = 1; not has_come(); ++spin) {
        if (spin % 4096 != 0) continue;
        const cudaError_t state = cudaStreamQuery(stream);
        if (state != cudaSuccess and state != cudaErrorNotReady) {
            return check_cuda(state, "waiting for the plan");
        }
        if (state == cudaSuccess and not has_come()) {
            return fail(FLASHMOE_CUDA_ERROR, "the stream is idle but the plan never ran");
        }
        if (not mailbox->report.has_begun) {
            deadline = Clock::now() + limit;
        } else if (Clock::now() > deadline) {
            return fail(FLASHMOE_PEER_TIMEOUT, "the plan did not finish in time");
        }
        std::this_thread::yield();
    }
    *is_heard_late = mailbox->report.is_heard_late;
    // Another thread's fault may come later than the report, but not after the plan's end.
    const bool has_failed = mailbox->report.num_row_blocks < 0;
    while (has_failed and mailbox->fault.code == 0 and
           cudaStreamQuery(stream) == cudaErrorNotReady and Clock::now() < deadline) {
        std::this_thread::yield();
    }
    if (mailbox->fault.code != 0) {
        return fail(int(mailbox->fault.code), "the plan failed");
    }
    if (has_failed) return fail(FLASHMOE_PEER_TIMEOUT, "the plan failed and left no fault");
    *num_row_blocks = mailbox->report.num_row_blocks;
    *num_rows = mailbox->report.num_rows;
    *unfollowed = mailbox->report.unfollowed;
    return FLASHMOE_OK;
}

int flashmoe_await_fc2_grads(const FlashMoEGroup* group, uint64_t number, void* stream) {
    FLASHMOE_TRY(check_struct(group, "group"));
    FLASHMOE_TRY(check_pointer(group->workspace, true, "workspace"));
    static decltype(&cuStreamWaitValue64) wait = nullptr;
    FLASHMOE_TRY(find_in_driver("cuStreamWaitValue64", &wait));
    const char* word = static_cast<char*>(group->workspace) + Workspace::kFc2GradsOffset;
    const CUresult result = wait(static_cast<CUstream>(stream), reinterpret_cast<CUdeviceptr>(word),
                                 number, CU_STREAM_WAIT_VALUE_GEQ);
    if (result == CUDA_SUCCESS) return FLASHMOE_OK;
    return fail(FLASHMOE_CUDA_ERROR, "cuStreamWaitValue64: error %d", int(result));
}

int flashmoe_read_fault(const FlashMoEGroup* group, FlashMoEFault* fault) {
    FLASHMOE_TRY(check_struct(group, "group"));
    FLASHMOE_TRY(check_pointer(group->mailbox, true, "mailbox"));
    if (fault == nullptr) return fail(FLASHMOE_BAD_ARGUMENT, "fault is null");
    const Fault& seen = static_cast<Mailbox*>(group->mailbox)->fault;
    memcpy(fault, &seen, sizeof(*fault));
    return FLASHMOE_OK;
}

int flashmoe_clear_fault(const FlashMoEGroup* group) {
    FLASHMOE_TRY(check_struct(group, "group"));
    FLASHMOE_TRY(check_pointer(group->mailbox, true, "mailbox"));
    FLASHMOE_TRY(check_pointer(group->workspace, true, "workspace"));
    const auto stream = static_cast<cudaStream_t>(group->stream);
    FLASHMOE_TRY(check_cuda(cudaStreamSynchronize(stream), "clearing a fault"));
    // The fault is cleared before the device's word, so that the next fault of a launch is
    // reported.
    static_cast<Mailbox*>(group->mailbox)->fault = Fault{};
    FLASHMOE_TRY(check_cuda(cudaMemsetAsync(group->workspace, 0, sizeof(uint32_t), stream),
                            "clearing a fault"));
    return check_cuda(cudaStreamSynchronize(stream), "clearing a fault");
}

int flashmoe_read_counters(const FlashMoEGroup* group, FlashMoECounters* counters) {
    FLASHMOE_TRY(check_struct(group, "group"));
    FLASHMOE_TRY(check_pointer(group->workspace, true, "workspace"));
    if (counters == nullptr) return fail(FLASHMOE_BAD_ARGUMENT, "counters is null");
    const auto stream = static_cast<cudaStream_t>(group->stream);
    const void* totals = static_cast<char*>(group->workspace) + Workspace::kTotalsOffset;
    FLASHMOE_TRY(check_cuda(
        cudaMemcpyAsync(counters, totals, sizeof(*counters), cudaMemcpyDeviceToHost, stream),
        "reading counters"));
    return check_cuda(cudaStreamSynchronize(stream), "reading counters");
}

int flashmoe_read_record(const FlashMoEGroup* group, uint64_t sequence, FlashMoERecord* record) {
    FLASHMOE_TRY(check_struct(group, "group"));
    FLASHMOE_TRY(check_pointer(group->mailbox, true, "mailbox"));
    if (record == nullptr) return fail(FLASHMOE_BAD_ARGUMENT, "record is null");
    const Record& slot = static_cast<Mailbox*>(group->mailbox)->records[sequence % kNumRecords];
    memcpy(record, &slot, sizeof(*record));
    if (record->sequence < sequence or record->checksum != checksum_of(record)) {
        record->sequence = 0;
    }
    return FLASHMOE_OK;
}

}  // extern "C"
