// Time stamps from inside a kernel, only in a library built with FLASHMOE_TRACE: what each warp did
// or waited for, from when to when, in cycles of its SM.
#pragma once

#include "flashmoe/ptx/ld_st.cuh"

namespace flashmoe {

constexpr int kTraceWarps = 12;     // warps of a CTA
constexpr int kTraceEvents = 1024;  // most events of a warp; later ones are dropped and counted

struct TraceEvent {
    uint32_t kind;
    int32_t index;
    int64_t begin, end;
};

struct TraceWarp {
    uint64_t nanoseconds;  // one moment by both clocks
    int64_t cycles;
    uint32_t count;
    uint32_t sm;
    TraceEvent event[kTraceEvents];
};

struct Trace {
#ifdef FLASHMOE_TRACE
    TraceWarp* warps;

    __device__ __forceinline__ static uint32_t& count() {
        __shared__ uint32_t counts[kTraceWarps];
        return counts[threadIdx.x / 32];
    }
    // Scope: a warp, before its first event.
    __device__ __forceinline__ void open() const {
        if (warps == nullptr or threadIdx.x % 32 != 0) return;
        count() = 0;
        TraceWarp& warp = warps[blockIdx.x * kTraceWarps + threadIdx.x / 32];
        warp.nanoseconds = ptx::globaltimer_ns();
        warp.cycles = clock64();
        asm volatile("mov.u32 %0, %smid;" : "=r"(warp.sm));
    }
    __device__ __forceinline__ void close() const {
        if (warps == nullptr or threadIdx.x % 32 != 0) return;
        warps[blockIdx.x * kTraceWarps + threadIdx.x / 32].count = count();
    }
    __device__ __forceinline__ static int64_t now() { return clock64(); }
    __device__ __forceinline__ void add(uint32_t kind, int32_t index, int64_t begin) const {
        if (warps == nullptr or threadIdx.x % 32 != 0) return;
        const uint32_t at = count()++;
        if (at >= kTraceEvents) return;
        warps[blockIdx.x * kTraceWarps + threadIdx.x / 32].event[at] = {kind, index, begin,
                                                                        clock64()};
    }
#else
    __device__ __forceinline__ void open() const {}
    __device__ __forceinline__ void close() const {}
    __device__ __forceinline__ static int64_t now() { return 0; }
    __device__ __forceinline__ void add(uint32_t, int32_t, int64_t) const {}
#endif
};

}  // namespace flashmoe
