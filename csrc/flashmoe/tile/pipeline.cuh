// Connections between the actors of the two CTAs of a cluster: the ring of shared-memory stages
// between loader and processors, and the mailbox where the leading loader announces tiles. The CTAs
// compute neighbouring tiles, and what both read is loaded once, half by each, for both.
#pragma once

#include <cutlass/arch/barrier.h>

#include "flashmoe/base/shape.cuh"
#include "flashmoe/comm/wait.cuh"

namespace flashmoe {

using Barrier = cutlass::arch::ClusterTransactionBarrier;

constexpr int kTileSlots = 4;  // the finishing warps are later than the processors

// How the tiles of the two CTAs lie: along M they share B, along N they share A.
enum class Pair : int8_t { kAlongM, kAlongN };

// The tile of one product: block m of BLOCK_M rows, block n of BLOCK_N columns, for one expert.
struct alignas(16) TileInfo {
    int16_t gemm;  // 0 or 1, in a backward up to 3; kNoTile ends the kernel
    int16_t expert;
    Pair pair;
    int8_t num_halves;  // halves that have rows: the pair's, or after `of` the tile's
    bool is_late;       // one of the layer's last
    bool is_in_place;   // both CTAs of a pair along N read rows where tokens have them
    int32_t m;
    int32_t n;

    static constexpr int16_t kNoTile = -1, kSkip = -2;

    static __device__ __forceinline__ TileInfo nothing(int16_t why) {
        return {why, 0, Pair::kAlongM, 0, false, false, 0, 0};
    }
    // All zeros.
    static __device__ __forceinline__ TileInfo unknown() {
        return {0, 0, Pair{}, 0, false, false, 0, 0};
    }
    // Gives all lanes the values of the one thread that has them; the others' are zeros. Scope: one
    // warp.
    __device__ __forceinline__ TileInfo of_warp() const {
        static_assert(sizeof(TileInfo) == sizeof(uint4));
        auto words = reinterpret_cast<const uint4&>(*this);
        words = {__reduce_or_sync(~0u, words.x), __reduce_or_sync(~0u, words.y),
                 __reduce_or_sync(~0u, words.z), __reduce_or_sync(~0u, words.w)};
        return reinterpret_cast<const TileInfo&>(words);
    }
    // From the pair's first tile to the one of CTA `cta`.
    __device__ __forceinline__ TileInfo of(int cta) const {
        const bool along_m = pair == Pair::kAlongM;
        TileInfo own = *this;
        own.num_halves -= int8_t(along_m ? cta * kNumProcessors : 0);
        (along_m ? own.m : own.n) += cta;
        return own;
    }
};

struct alignas(1024) Stage {
    uint8_t a[BLOCK_M / kBoxRows][kBoxBytes];
    uint8_t b[BLOCK_N / kBoxRows][kBoxBytes];
};

// The scales of a stage's rows of A and of its halves of B. No copy is of fewer than 16 bytes, so
// the scales of four blocks of K come at once, and a stage uses one of them.
constexpr int kScalesAtOnce = 4;
#ifdef FLASHMOE_IN_FP8
struct alignas(128) StageScales {
    float a[BLOCK_M][kScalesAtOnce];
    float b[BLOCK_N / kBoxRows][kScalesAtOnce];

    // The bytes that copies bring.
    static constexpr int kBytes =
        int(sizeof(float)) * kScalesAtOnce * (BLOCK_M + BLOCK_N / kBoxRows);
};
constexpr int kStageBytes = sizeof(Stage) + StageScales::kBytes;
#else
constexpr int kStageBytes = sizeof(Stage);
#endif

struct TileMailbox {
    TileInfo tile[kTileSlots];
    Barrier full[kTileSlots];
    Barrier empty[kTileSlots];  // the leading CTA's counts for both
};

template <int kStages>
struct StageBarriers {
    Barrier full[kStages];
    Barrier empty[kStages];
};

template <int kStages>
struct StageRing {
    static constexpr int kNumStages = kStages;
    Stage (&stage)[kStages];
    Barrier (&full)[kStages];
    Barrier (&empty)[kStages];
    FLASHMOE_SCALE_FIELD(StageScales, (&scales)[kStages]);
};

// `reader_warps` is how many warps of each CTA read the mailbox, besides the loader.
template <class Ring>
__device__ __forceinline__ void init_barriers(const Ring& ring,
                                              TileMailbox& mailbox,
                                              int reader_warps) {
    for (int i = 0; i < Ring::kNumStages; ++i) {
        ring.full[i].init(1);  // the own loader's expect_tx; bytes do the rest
        ring.empty[i].init(kClusterSize * kNumProcessors);  // both loaders may write to a stage
    }
    for (int i = 0; i < kTileSlots; ++i) {
        mailbox.full[i].init(1);                                           // the leading loader
        mailbox.empty[i].init(uint32_t(kClusterSize * reader_warps + 1));  // and the other loader
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
    __device__ __forceinline__ void advance(int steps) {
        position_ = (position_ + uint32_t(steps)) % (2 * N);
    }

 private:
    uint32_t position_ = 0;
};

// Waiters for a barrier: a thread for itself, or a warp. A warp's lanes may see the barrier come at
// different times, but all of them have to do together what comes next, shuffles and products, and
// ptxas takes what depends on a barrier for uniform.
enum class Waiter { kThread, kWarp };

template <Waiter kWaiter>
__device__ __forceinline__ bool agreed(bool has_come) {
    return kWaiter == Waiter::kThread ? has_come : __all_sync(~0u, has_come);
}

template <Waiter kWaiter>
__device__ __forceinline__ void delay_point() {
    if constexpr (kWaiter == Waiter::kThread) {
        ptx::delay_point();
    } else {
        ptx::delay_point_of_warp();
    }
}

// Waits for a barrier that has not come; gives the nanoseconds that it takes. Barriers within a
// cluster always come, also after a thread has given up: the loader never stops loading. A barrier
// that does not come is a broken GPU, or a defect here, and `expired` has the last word.
template <Waiter kWaiter, class Expired>
__device__ __forceinline__ uint32_t await_barrier(
    const Watchdog& watchdog, Wait wait, Barrier& barrier, uint32_t parity, Expired expired) {
    [[maybe_unused]] const int64_t begin = Trace::now();
    const uint64_t start = ptx::globaltimer_ns();
    while (not agreed<kWaiter>(barrier.try_wait(parity))) {
        if (ptx::globaltimer_ns() - start > 2 * watchdog.timeout_ns) {
            expired();
            __trap();
            __builtin_unreachable();  // or the compiler would save the accumulators for afterwards
        }
    }
#ifdef FLASHMOE_TRACE
    if (Trace::now() - begin > 100) watchdog.trace.add(event_of(wait), kNoPart, begin);
#endif
    return uint32_t(ptx::globaltimer_ns() - start);
}
// Waits for a barrier; gives the nanoseconds that it takes, which are not counted yet.
template <Waiter kWaiter>
__device__ __forceinline__ uint32_t
wait_barrier(const Watchdog& watchdog, Wait wait, Barrier& barrier, uint32_t parity) {
    delay_point<kWaiter>();
    if (agreed<kWaiter>(barrier.test_wait(parity))) return 0;
    return await_barrier<kWaiter>(watchdog, wait, barrier, parity, [&] {
        watchdog.raise(kFaultTimeout, wait, -1, int(ptx::block_number()), parity, 0);
        watchdog.give_up(uint32_t(watchdog.rank) + 1);
    });
}

// Hands a pair of tiles to both CTAs. Scope: the leading CTA's loader thread.
__device__ __forceinline__ void announce_tile(const Watchdog& watchdog,
                                              TileMailbox& mailbox,
                                              RingCursor<kTileSlots>& slot,
                                              const TileInfo& tile) {
    wait_barrier<Waiter::kThread>(watchdog, Wait::kLoaderTile, mailbox.empty[slot.index()],
                                  slot.parity() ^ 1);
    static_assert(sizeof(TileInfo) == sizeof(int4));
    for (int cta = 0; cta < kClusterSize; ++cta) {
        mailbox.full[slot.index()].arrive_and_expect_tx(sizeof(tile), uint32_t(cta), 1);
        ptx::delay_point();
        ptx::st_async_cluster(&mailbox.tile[slot.index()], reinterpret_cast<const int4&>(tile),
                              &mailbox.full[slot.index()], uint32_t(cta));
    }
    slot.advance();
}

// Takes the announced pair. The arrival may overtake the load that was issued first, and then the
// next pair would be there before this one is read. So the arrival depends on the loaded words,
// which are never negative. Scope: the other CTA's loader thread, or one lane.
__device__ __forceinline__ TileInfo read_tile(TileMailbox& mailbox, RingCursor<kTileSlots>& slot) {
    const int4 tile = reinterpret_cast<const int4&>(mailbox.tile[slot.index()]);
    ptx::delay_point();
    mailbox.empty[slot.index()].arrive(0u, (tile.x | tile.y | tile.z | tile.w) >= 0);
    return reinterpret_cast<const TileInfo&>(tile);
}

// Waits for the announced pair, which adds to `waited`, and takes this CTA's tile of it. Scope: one
// warp.
__device__ __forceinline__ TileInfo take_tile(const Watchdog& watchdog,
                                              Wait wait,
                                              TileMailbox& mailbox,
                                              RingCursor<kTileSlots>& slot,
                                              uint32_t& waited) {
    waited +=
        wait_barrier<Waiter::kWarp>(watchdog, wait, mailbox.full[slot.index()], slot.parity());
    int4 tile{};
    if (threadIdx.x % 32 == 0) {  // the lane that reads is the lane that gives the slot back
        reinterpret_cast<TileInfo&>(tile) = read_tile(mailbox, slot);
    }
    slot.advance();
    tile = {__shfl_sync(~0u, tile.x, 0), __shfl_sync(~0u, tile.y, 0), __shfl_sync(~0u, tile.z, 0),
            __shfl_sync(~0u, tile.w, 0)};
    return reinterpret_cast<TileInfo&>(tile).of(int(ptx::cluster_rank()));
}

}  // namespace flashmoe
