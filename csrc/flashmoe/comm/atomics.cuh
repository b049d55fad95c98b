// The operations that the protocol is written over (protocol/atomics.h), as single instructions.
#pragma once

#include "flashmoe/protocol/atomics.h"
#include "flashmoe/ptx/ld_st.cuh"

namespace flashmoe {

struct Atomics {
    using Scope = protocol::Scope;
    using U32 = uint32_t;
    using U64 = uint64_t;

    static constexpr int kLanes = 32;
    __device__ __forceinline__ static int lane() { return int(threadIdx.x % 32); }
    __device__ __forceinline__ static void sync_warp() { __syncwarp(); }

    __device__ __forceinline__ static uint32_t load(const uint32_t* word) {
        return *static_cast<const volatile uint32_t*>(word);
    }
    template <Scope kScope, class Word>
    __device__ __forceinline__ static Word load_acquire(const Word* word) {
        if constexpr (kScope == Scope::kSystem) {
            return ptx::ld_acquire_sys(word);
        } else {
            return ptx::ld_acquire_gpu(word);
        }
    }
    template <Scope kScope, class Word>
    __device__ __forceinline__ static void store(Word* word, Word value) {
        static_assert(kScope == Scope::kSystem, "words of this GPU are added to, or plain");
        ptx::st_relaxed_sys(word, value);
    }
    __device__ __forceinline__ static uint32_t add(uint32_t* word, uint32_t value) {
        return atomicAdd(word, value);
    }
    __device__ __forceinline__ static uint32_t fetch_or(uint32_t* word, uint32_t bits) {
        return atomicOr_block(word, bits);  // a word of one CTA
    }
    __device__ __forceinline__ static uint32_t compare_and_swap(uint32_t* word,
                                                                uint32_t expected,
                                                                uint32_t value) {
        return atomicCAS(word, expected, value);
    }
    __device__ __forceinline__ static void count(uint32_t* word, uint32_t value) {
        atomicAdd(word, value);
    }
    __device__ __forceinline__ static void add_release(uint32_t* word, uint32_t value) {
        ptx::red_release_gpu(word, value);
    }
    template <Scope kScope>
    __device__ __forceinline__ static void fence() {
        if constexpr (kScope == Scope::kSystem) {
            ptx::fence_acq_rel_sys();
        } else {
            __threadfence();
        }
    }
    template <Scope kScope>
    __device__ __forceinline__ static void release_fence() {
        if constexpr (kScope == Scope::kSystem) {
            ptx::fence_release_sys();
        } else {
            ptx::fence_release_gpu();
        }
    }
    template <class T>
    __device__ __forceinline__ static void write(T* target, T value) {
        *target = value;
    }
    __device__ __forceinline__ static void fence_proxy_async() { ptx::fence_proxy_async_global(); }
    __device__ __forceinline__ static void bulk_wait_complete() { ptx::bulk_wait_complete(); }
};

}  // namespace flashmoe
