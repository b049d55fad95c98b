// What connects the actors of the two CTAs of a cluster: the ring of shared-memory stages between
// loader and processors, and the mailbox through which the leading loader announces tiles. The CTAs
// compute neighbouring tiles, and what both read is loaded once, half by each, for both.
#pragma once

#include <cutlass/arch/barrier.h>

#include "flashmoe/base/shape.cuh"
#include "flashmoe/comm/wait.cuh"

namespace flashmoe {

using Barrier = cutlass::arch::ClusterTransactionBarrier;

constexpr int kTileSlots = 2;
constexpr int kBoxBytes = kBoxRows * BLOCK_K * 2;
constexpr int kNumProcessors = 2;  // warpgroups; each owns 64 rows of the tile
constexpr int kProcessorWarps = 4 * kNumProcessors;

// How the tiles of the two CTAs lie: along M they share B, along N they share A.
enum class Pair : int16_t { kAlongM, kAlongN };

// The tile of one product: block m of BLOCK_M rows, block n of BLOCK_N columns, for one expert.
struct alignas(16) TileInfo {
    int16_t gemm;  // 0 or 1; kNoTile ends the kernel
    Pair pair;
    int32_t expert;
    int32_t m;
    int32_t n;

    static constexpr int16_t kNoTile = -1, kSkip = -2;

    static __device__ __forceinline__ TileInfo nothing(int16_t why) {
        return {why, Pair::kAlongM, 0, 0, 0};
    }
    // From the pair's first tile to the one of CTA `cta`.
    __device__ __forceinline__ TileInfo of(int cta) const {
        const bool along_m = pair == Pair::kAlongM;
        return {gemm, pair, expert, m + (along_m ? cta : 0), n + (along_m ? 0 : cta)};
    }
};

struct alignas(1024) Stage {
    uint8_t a[BLOCK_M / kBoxRows][kBoxBytes];
    uint8_t b[BLOCK_N / kBoxRows][kBoxBytes];
};

struct TileMailbox {
    TileInfo tile[kTileSlots];
    Barrier full[kTileSlots];
    Barrier empty[kTileSlots];     // the leading CTA's counts for both
    int pending[kProcessorWarps];  // see PendingStores
};

template <int kStages>
struct StageRing {
    static constexpr int kNumStages = kStages;
    Stage stage[kStages];
    Barrier full[kStages];
    Barrier empty[kStages];
};

template <class Ring>
__device__ __forceinline__ void init_barriers(Ring& ring, TileMailbox& mailbox) {
    for (int i = 0; i < Ring::kNumStages; ++i) {
        ring.full[i].init(1);  // the own loader's expect_tx; bytes do the rest
        ring.empty[i].init(kClusterSize * kNumProcessors);  // both loaders may write to a stage
    }
    for (int i = 0; i < kTileSlots; ++i) {
        mailbox.full[i].init(1);                                    // the leading loader
        mailbox.empty[i].init(kClusterSize * kProcessorWarps + 1);  // and the other loader
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
    const int64_t begin = Trace::now();
    if (barrier.try_wait(parity)) {
#ifdef FLASHMOE_TRACE
        if (Trace::now() - begin > 100) watchdog.trace.add(uint32_t(role), -1, begin);
#endif
        return;
    }
    wait_or_trap(
        watchdog, role, -1, int(blockIdx.x), parity,
        [&] { return uint32_t(barrier.try_wait(parity)); },
        [](uint32_t arrived) { return arrived != 0; });
}

// Hands a pair of tiles to both CTAs. Scope: the leading CTA's loader thread.
__device__ __forceinline__ void announce_tile(const Watchdog& watchdog,
                                              TileMailbox& mailbox,
                                              RingCursor<kTileSlots>& slot,
                                              const TileInfo& tile) {
    wait_barrier(watchdog, Role::kLoaderTile, mailbox.empty[slot.index()], slot.parity() ^ 1);
    static_assert(sizeof(TileInfo) == sizeof(int4));
    for (int cta = 0; cta < kClusterSize; ++cta) {
        mailbox.full[slot.index()].arrive_and_expect_tx(sizeof(tile), uint32_t(cta), 1);
        ptx::st_async_cluster(&mailbox.tile[slot.index()], reinterpret_cast<const int4&>(tile),
                              &mailbox.full[slot.index()], uint32_t(cta));
    }
    slot.advance();
}

// Takes the announced pair. Scope: the other CTA's loader thread, or one lane.
__device__ __forceinline__ TileInfo read_tile(TileMailbox& mailbox, RingCursor<kTileSlots>& slot) {
    const TileInfo tile = mailbox.tile[slot.index()];
    mailbox.empty[slot.index()].arrive(0u);
    return tile;
}

}  // namespace flashmoe
