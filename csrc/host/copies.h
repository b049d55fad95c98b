// The launches that experts in FP8 need ahead of a pass: they copy what it multiplies, as it reads
// it.
#pragma once

#include "flashmoe/kernel/copies.h"
#include "host/error.h"
#include "host/tables.h"

namespace flashmoe {

// Waits for nothing, so that its CTAs need not be resident together.
template <class Args>
int launch_ahead(const KernelEntry& entry,
                 int num_ctas,
                 const FlashMoEGroup* group,
                 const char* what,
                 const Args& args) {
    void* arguments[] = {const_cast<Args*>(&args)};
    return check_cuda(
        cudaLaunchKernel(entry.function, dim3(unsigned(num_ctas)),
                         dim3(unsigned(entry.num_threads)), arguments, size_t(entry.smem_bytes),
                         static_cast<cudaStream_t>(group->stream)),
        what);
}

// The copies of weights whose addresses are in a table.
inline CopyWeightsArgs copies_of(const Shape& s, const void* weight_maps, void* copies) {
    const char* weights = static_cast<const char*>(weight_maps) + copied_weights_begin(s);
    return {reinterpret_cast<const void* const*>(weights),
            static_cast<char*>(copies),
            {s.num_fc1(), s.num_local_slots()},
            {s.fc1_rows() / (s.is_split ? 2 : 1), s.hidden},
            {s.hidden, s.intermediate},
            s.is_split};
}

// Fills a pass's copies, unless they are current.
inline int launch_copies(const Shape& s, const FlashMoEGroup* group, const FlashMoELaunch* launch) {
    if (launch->copies_are_current) return FLASHMOE_OK;
    const auto copies = copies_of(s, launch->weight_maps, launch->weight_copies);
    return launch_ahead(copy_weights_entry(), copies.num_blocks(), group, "copies of weights",
                        copies);
}

// The transposes that a backward in FP8 multiplies.
inline int launch_turned_copies(const Shape& s,
                                const FlashMoEGroup* group,
                                const FlashMoELaunch* launch) {
    if (launch->copies_are_current) return FLASHMOE_OK;
    const auto copies = copies_of(s, launch->weight_maps, launch->weight_copies);
    return launch_ahead(turn_weights_entry(), copies.num_blocks(), group, "transposes of weights",
                        copies);
}

// Reads rows in FP8 into 16 bits, if there are any.
inline int launch_reads(const Shape& s,
                        int num_ctas,
                        const FlashMoEGroup* group,
                        const FlashMoELaunch* launch,
                        const void* rows,
                        char* read) {
    if (rows == nullptr or launch->num_row_blocks == 0) return FLASHMOE_OK;
    constexpr int kCtasPerSM = 4;
    const ReadRowsArgs args{static_cast<const PlanHeader*>(launch->plan), launch->num_row_blocks,
                            s.hidden, static_cast<const char*>(rows), read};
    return launch_ahead(read_rows_entry(), kCtasPerSM * num_ctas, group, "rows in 16 bits", args);
}

}  // namespace flashmoe
