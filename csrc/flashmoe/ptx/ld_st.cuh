// Loads, stores and fences whose order and scope matter, one instruction per function.
#pragma once

#include <cstdint>

#include <cute/arch/copy_sm90_desc.hpp>

#include "flashmoe/base/hopper.cuh"

namespace flashmoe::ptx {

// Every acquire and release passes here, also those of barriers within a cluster, and so do threads
// between the copies that a barrier tracks, and before they tell that these are issued. A library
// built with FLASHMOE_DELAYS waits at one in eight of them, mostly up to 4 us, rarely up to 60 us,
// so that orders that hardly ever come about come about often; in any other library it is nothing.
__device__ __forceinline__ void delay_point() {
#ifdef FLASHMOE_DELAYS
    uint32_t now, sm;
    asm volatile("mov.u32 %0, %clock;" : "=r"(now));
    asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
    uint32_t hash = (now ^ sm * 0x9E3779B9u ^ threadIdx.x * 0x85EBCA6Bu) * 0xC2B2AE35u;
    hash ^= hash >> 16;
    if (hash % 8 == 0) __nanosleep(hash / 8 % 128 == 0 ? hash >> 16 : hash >> 20);
#endif
}

// The same where a warp acquires or releases as one.
__device__ __forceinline__ void delay_point_of_warp() {
#ifdef FLASHMOE_DELAYS
    if (threadIdx.x % 32 == 0) delay_point();
    __syncwarp();
#endif
}

__device__ __forceinline__ uint32_t ld_acquire_gpu(const uint32_t* ptr) {
    delay_point();
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(ptr) : "memory");
    return value;
}

__device__ __forceinline__ uint32_t ld_acquire_sys(const uint32_t* ptr) {
    delay_point();
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(ptr) : "memory");
    return value;
}

__device__ __forceinline__ uint64_t ld_acquire_sys(const uint64_t* ptr) {
    delay_point();
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(ptr) : "memory");
    return value;
}

// Has the line that begins at `ptr`, or around it, come to this SM ahead of a load.
__device__ __forceinline__ void prefetch_l1(const void* ptr) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(__cvta_generic_to_global(ptr)));
}

__device__ __forceinline__ void st_relaxed_sys(uint32_t* ptr, uint32_t value) {
    delay_point();
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(ptr), "r"(value) : "memory");
}

__device__ __forceinline__ void st_relaxed_sys(uint64_t* ptr, uint64_t value) {
    delay_point();
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(ptr), "l"(value) : "memory");
}

__device__ __forceinline__ void red_release_gpu(uint32_t* ptr, uint32_t value) {
    delay_point();
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(ptr), "r"(value) : "memory");
}

__device__ __forceinline__ void fence_acq_rel_sys() {
    delay_point();
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// Orders what this thread has done and seen before its later stores. Unlike a fence that acquires,
// it leaves the L1 as it is.
__device__ __forceinline__ void fence_release_gpu() {
    delay_point();
    asm volatile("fence.release.gpu;" ::: "memory");
}

__device__ __forceinline__ void fence_release_sys() {
    delay_point();
    asm volatile("fence.release.sys;" ::: "memory");
}

// Copies from shared to global memory as cute::SM90_BULK_COPY_S2G does, to lines that the L2 drops
// ahead of others.
__device__ __forceinline__ void bulk_store_evict_first(const void* smem, void* to, int bytes) {
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
        "r"(uint32_t(__cvta_generic_to_shared(smem))), "r"(bytes),
        "l"(uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST))
        : "memory");
}

// Orders generic accesses of this thread before its later TMA accesses of global memory.
__device__ __forceinline__ void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Orders generic accesses of shared memory before later TMA accesses of it.
__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Copies 16 bytes from global to shared memory, or writes zeros there.
__device__ __forceinline__ void copy_16_async(uint32_t smem_address, const void* from, bool reads) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address), "l"(from),
                 "r"(reads ? 16 : 0)
                 : "memory");
}

// Has a barrier's phase wait for this thread's copies so far: the phase counts one arrival more,
// which the last of these copies makes. No thread waits. The phase must not end before this call.
__device__ __forceinline__ void arrive_with_copies(uint32_t barrier_address) {
    asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(barrier_address)
                 : "memory");
}

// Lets this CTA's copies that follow a barrier see a TMA descriptor in global memory as it is now,
// though it was written since the last launch.
__device__ __forceinline__ void acquire_tensor_map(const void* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}

// All bulk stores of this thread are complete and visible (not merely read out of shared memory).
__device__ __forceinline__ void bulk_wait_complete() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ uint64_t globaltimer_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// A barrier of some warps of a CTA, which are `threads` threads.
__device__ __forceinline__ void barrier_sync(int barrier, int threads) {
    __syncwarp();
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Arrives there without waiting for the others.
__device__ __forceinline__ void barrier_arrive(int barrier, int threads) {
    __syncwarp();
    asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Keeps the address of something in shared memory in a register. Otherwise ptxas computes it again
// at each use of a barrier or a copy, from the CTA's place in its cluster, which takes tens of
// cycles. Scope: a warp.
template <class T>
__device__ __forceinline__ T& keep_address(T& shared) {
    const uint32_t address = __shfl_sync(~0u, uint32_t(__cvta_generic_to_shared(&shared)), 0);
    return *static_cast<T*>(__cvta_shared_to_generic(address));
}

// Stores 16 bytes if `is_stored`. A branch would have ptxas compute what is stored only after it,
// and nothing else meanwhile.
__device__ __forceinline__ void store_if(bool is_stored, uint4& to, const uint4& value) {
    asm volatile(
        "{\n\t.reg .pred stored;\n\tsetp.ne.u32 stored, %5, 0;\n\t"
        "@stored st.global.v4.u32 [%0], {%1, %2, %3, %4};\n\t}" ::"l"(&to),
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(uint32_t(is_stored))
        : "memory");
}

// The number of this CTA within its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The number of this CTA. In FP8, where registers are few, it is read again at each use: blockIdx.x
// would be kept all the time, and others spilled to say in a fault which CTA waits.
__device__ __forceinline__ uint32_t block_number() {
    if constexpr (not kIsFp8) return blockIdx.x;
    uint32_t number;
    asm volatile("mov.u32 %0, %ctaid.x;" : "=r"(number));
    return number;
}

// Writes to the same shared-memory address of one CTA of the cluster; that CTA's barrier, at the
// same address as this one's, counts the 16 bytes. Acquire and release at cluster scope would do it
// as well, but they cost a fence of all memory and the whole L1.
__device__ __forceinline__ void st_async_cluster(void* smem,
                                                 const int4& v,
                                                 const void* barrier,
                                                 uint32_t cta) {
    asm volatile(
        "{\n\t.reg .b32 to, counter;\n\t"
        "mapa.shared::cluster.u32 to, %0, %6;\n\t"
        "mapa.shared::cluster.u32 counter, %1, %6;\n\t"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
        " [to], {%2, %3, %4, %5}, [counter];\n\t}" ::"r"(uint32_t(__cvta_generic_to_shared(smem))),
        "r"(uint32_t(__cvta_generic_to_shared(barrier))), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w),
        "r"(cta)
        : "memory");
}

// One instruction each; denormals are zero.
__device__ __forceinline__ float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float rcp(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ void stmatrix_x4(uint32_t smem_address, const uint32_t (&r)[4]) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
}

// The same of the matrices' transposes.
__device__ __forceinline__ void stmatrix_x4_turned(uint32_t smem_address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     smem_address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

__device__ __forceinline__ void st_shared(uint32_t smem_address, float a) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem_address), "f"(a) : "memory");
}
__device__ __forceinline__ void st_shared(uint32_t smem_address, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(smem_address), "f"(a), "f"(b) : "memory");
}

// Adds to four floats in global memory, in the L2.
__device__ __forceinline__ void add_float4(void* to, const float4& v) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w)
                 : "memory");
}

__device__ __forceinline__ uint4 ld_shared(uint32_t smem_address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(smem_address)
                 : "memory");
    return v;
}

__device__ __forceinline__ float ld_shared(const float* from) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];"
                 : "=f"(value)
                 : "r"(uint32_t(__cvta_generic_to_shared(from)))
                 : "memory");
    return value;
}

}  // namespace flashmoe::ptx
