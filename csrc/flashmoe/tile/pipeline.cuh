// The ring of shared-memory stages between the loader and the two processor warpgroups, and the
// mailbox through which the loader tells them the next tile.
#pragma once

#include <cutlass/arch/barrier.h>

#include "flashmoe/base/shape.cuh"
#include "flashmoe/comm/wait.cuh"

namespace flashmoe {

using Barrier = cutlass::arch::ClusterTransactionBarrier;

constexpr int kTileSlots = 2;
constexpr int kBoxBytes = kBoxDim * kBoxDim * 2;
constexpr int kABoxes = BLOCK_M / kBoxDim;
constexpr int kNumProcessors = 2;  // warpgroups; each owns 64 rows of the tile

struct TileInfo {
    int32_t gemm;   // 0 or 1; kNoTile ends the kernel
    int32_t block;  // of 128 rows; wgrad: expert
    int32_t m;      // wgrad only: block of 128 output rows
    int32_t n;      // block of BLOCK_N columns

    static constexpr int32_t kNoTile = -1;
};

template <int BLOCK_N>
struct alignas(1024) Stage {
    static constexpr int kBBoxes = BLOCK_N / kBoxDim;
    uint8_t a[kABoxes][kBoxBytes];
    uint8_t b[kBBoxes][kBoxBytes];
};

struct TileMailbox {
    TileInfo tile[kTileSlots];
    Barrier full[kTileSlots];
    Barrier empty[kTileSlots];
};

template <int kStages, int BLOCK_N>
struct StageRing {
    static constexpr int kNumStages = kStages;
    Stage<BLOCK_N> stage[kStages];
    Barrier full[kStages];
    Barrier empty[kStages];
};

template <class Ring>
__device__ __forceinline__ void init_barriers(Ring& ring, TileMailbox& mailbox) {
    for (int i = 0; i < Ring::kNumStages; ++i) {
        ring.full[i].init(1);                // the loader's expect_tx; bytes do the rest
        ring.empty[i].init(kNumProcessors);  // one elected thread of each warpgroup
    }
    for (int i = 0; i < kTileSlots; ++i) {
        mailbox.full[i].init(1);                    // the loader
        mailbox.empty[i].init(kNumProcessors * 4);  // one lane of each processor warp
    }
}

// A position in a ring of N barriers: which slot, and the parity to wait for; one register.
template <int N>
class RingCursor {
 public:
    __device__ __forceinline__ uint32_t index() const {
        return position_ < N ? position_ : position_ - N;
    }
    __device__ __forceinline__ uint32_t parity() const { return position_ < N ? 0 : 1; }
    __device__ __forceinline__ void advance() {
        position_ = position_ + 1 == 2 * N ? 0 : position_ + 1;
    }

 private:
    uint32_t position_ = 0;
};

__device__ __forceinline__ void wait_barrier(const Watchdog& watchdog,
                                             Role role,
                                             Barrier& barrier,
                                             uint32_t parity) {
    if (barrier.try_wait(parity)) return;
    wait_or_trap(
        watchdog, role, -1, int(blockIdx.x), parity,
        [&] { return uint32_t(barrier.try_wait(parity)); },
        [](uint32_t arrived) { return arrived != 0; });
}

}  // namespace flashmoe
