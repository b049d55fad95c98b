// The protocol of signals, counters and tickets, written once over a policy: the kernel compiles it
// to single instructions (comm/atomics.cuh), tests/protocol to host threads that ThreadSanitizer
// watches and to an explorer of all interleavings. Nothing here knows of CUDA.
//
// A policy A has, besides the types U32, U64 and Plain<T> of memory that it reads and writes,
//
//   load, load_acquire<Scope>, store<Scope>         of U32 and U64; load and store are relaxed
//   add, fetch_or, compare_and_swap                 relaxed, return what was there
//   count, add_release                              add at the scope of this GPU, return nothing;
//                                                   count is relaxed
//   fence<Scope>, release_fence<Scope>              acquire and release; release alone
//   read, write                                     ordinary accesses, which must not race
//   fence_proxy_async, bulk_wait_complete           between ordinary accesses and those of TMA
//   lane, kLanes, sync_warp                         who this thread is within its warp
//
// A `wait(load, done)` polls `load` until `done` accepts its value, and is false if that does not
// come about; the caller says for how long and what to record.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FLASHMOE_PROTOCOL __device__ __forceinline__
#define FLASHMOE_KEEP_LOOP _Pragma("unroll 1")  // where code is rarely run, and often inlined
#define FLASHMOE_PROTOCOL_CONST __host__ __device__ __forceinline__ constexpr
#else
#define FLASHMOE_PROTOCOL inline
#define FLASHMOE_KEEP_LOOP
#define FLASHMOE_PROTOCOL_CONST constexpr
#endif

namespace flashmoe::protocol {

// The threads that see the order of an operation: those of this GPU, or of all.
enum class Scope { kGpu, kSystem };

}  // namespace flashmoe::protocol
