// Counters of where a launch's time went and of the bytes that it moved. Each CTA counts in shared
// memory and adds its counts to the totals when it leaves, unless its arguments turn counting off.
// A busy CTA touches a counter a few times per tile, at most.
#pragma once

#include "flashmoe/base/shape.cuh"
#include "flashmoe/comm/kinds.cuh"
#include "flashmoe/ptx/ld_st.cuh"

namespace flashmoe {

// Sums over threads, CTAs and launches.
template <class Word>
struct CounterSet {
    Word nanoseconds[kNumSpans];     // by Span: waited, or busy; of one lane per warp
    Word rows_pulled[kMaxRanks];     // by peer, dispatch of both directions
    Word results_pushed[kMaxRanks];  // by peer, combine of both directions
    Word pad_rows_pulled;            // among them
    Word pad_rows_made;              // written into this rank's own buffers

    static constexpr int kWords = kNumSpans + 2 * kMaxRanks + 2;
};

// The mirror of FlashMoECounters.
struct Totals : CounterSet<unsigned long long> {
    unsigned long long rows_pulled_in_fp8[kMaxRanks];  // among rows_pulled
};
static_assert(sizeof(Totals) == (Totals::kWords + kMaxRanks) * 8);

__device__ __forceinline__ CounterSet<uint32_t>& counters() {
    __shared__ CounterSet<uint32_t> of_cta;
    return of_cta;
}

__device__ __forceinline__ bool& is_counting() {
    __shared__ bool of_cta;
    return of_cta;
}

// Scope: the active threads of a warp; one of them counts.
__device__ __forceinline__ void count_time(Span span, uint32_t nanoseconds) {
    if (not is_counting() or int(threadIdx.x % 32) != __ffs(__activemask()) - 1) return;
    atomicAdd_block(&counters().nanoseconds[uint32_t(span)], nanoseconds);
}
// A span is subtracted at its begin and added at its end, modulo 2^32, and so takes no register.
__device__ __forceinline__ void begin_span(Span span) {
    count_time(span, -uint32_t(ptx::globaltimer_ns()));
}
__device__ __forceinline__ void end_span(Span span) {
    count_time(span, uint32_t(ptx::globaltimer_ns()));
}

// Scope: a CTA, before it counts.
__device__ __forceinline__ void open_counters(bool counts) {
    if (threadIdx.x == 0) is_counting() = counts;
    static_assert(sizeof(CounterSet<uint32_t>) == CounterSet<uint32_t>::kWords * 4);
    for (int i = threadIdx.x; i < CounterSet<uint32_t>::kWords; i += blockDim.x) {
        reinterpret_cast<uint32_t*>(&counters())[i] = 0;
    }
    __syncthreads();
}

// Adds a CTA's counts to the totals. All rows that a launch in FP8 pulls are in FP8. Scope: a CTA,
// after its last count.
__device__ __forceinline__ void close_counters(Totals* totals) {
    __syncthreads();
    if (not is_counting()) return;
    for (int i = threadIdx.x; i < Totals::kWords; i += blockDim.x) {
        const uint32_t count = reinterpret_cast<uint32_t*>(&counters())[i];
        if (count != 0) {
            atomicAdd(reinterpret_cast<unsigned long long*>(totals) + i, (unsigned long long)count);
            if constexpr (kIsFp8) {
                const int peer = i - kNumSpans;
                if (peer < 0 or peer >= kMaxRanks) continue;
                atomicAdd(totals->rows_pulled_in_fp8 + peer, (unsigned long long)count);
            }
        }
    }
}

}  // namespace flashmoe
