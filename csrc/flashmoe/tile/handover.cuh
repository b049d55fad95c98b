// How a tile leaves the processors. Each of their warps rounds its 16 rows of outputs to 16 bits,
// lays them down in shared memory for a finisher, and goes on with the next product: what becomes
// of the outputs costs the tensor cores nothing. A finisher reads whole rows, eight columns a lane;
// rows that leave as they are leave by bulk copies, one each.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "flashmoe/ptx/ld_st.cuh"
#include "flashmoe/tile/element.cuh"
#include "flashmoe/tile/pipeline.cuh"

namespace flashmoe {

constexpr int kRowChunks = BLOCK_N * kElementBytes / 16;  // 16-byte chunks of a tile's row

// Outputs of one processor's warp. Rows are a chunk further apart than they are long, so that eight
// rows of one chunk lie in different banks. The alignment is for the swizzle of the floats that
// float_half.cuh lays down.
struct alignas(256) WarpOutputs {
    uint8_t row[kWarpRows][BLOCK_N * kElementBytes + 16];
};

using AllOutputs = WarpOutputs[kNumProcessors][kProcessorWarps];

struct HandoverBarriers {
    Barrier full[kNumProcessors][kProcessorWarps];
    Barrier empty[kNumProcessors][kProcessorWarps];
};

struct Handover {
    AllOutputs& outputs;
    Barrier (&full)[kNumProcessors][kProcessorWarps];
    Barrier (&empty)[kNumProcessors][kProcessorWarps];
};

// One processor warp's part of it.
struct WarpRoom {
    WarpOutputs& outputs;
    Barrier& full;
    Barrier& empty;

    __device__ __forceinline__ WarpRoom(const Handover& handover, int processor, int warp)
        : outputs(handover.outputs[processor][warp]),
          full(handover.full[processor][warp]),
          empty(handover.empty[processor][warp]) {}
};

__device__ __forceinline__ void init_barriers(const Handover& handover) {
    for (int processor = 0; processor < kNumProcessors; ++processor) {
        for (int warp = 0; warp < kProcessorWarps; ++warp) {
            // Each lane arrives for itself: if one arrived for all after __syncwarp, racecheck
            // would not take the other lanes' accesses for ordered.
            handover.full[processor][warp].init(32);
            handover.empty[processor][warp].init(32);
        }
    }
}

// Lets a processor's warps have their rooms, which are not free from the first, since a finisher
// may have used them for something else. Scope: one warp.
__device__ __forceinline__ void open_rooms(const Handover& handover, int processor) {
    for (Barrier& empty : handover.empty[processor]) empty.arrive();
}

// Lays down a warp's share of an accumulator, rounded.
template <class T, class Accumulator>
__device__ __forceinline__ void lay_down(WarpOutputs& outputs, const Accumulator& accumulator) {
    const uint32_t lane = threadIdx.x % 32;
    const auto& row = outputs.row[lane % kWarpRows];
    const uint32_t target = uint32_t(__cvta_generic_to_shared(&row[lane / kWarpRows * 16]));
#pragma unroll
    for (int pair = 0; pair < BLOCK_N / 16; ++pair) {
        // packed[2 j + i] holds the pair of 8-column group j (0 or 1) and row half i.
        uint32_t packed[4];
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            const int at = pair * 8 + word * 2;
            packed[word] = pack<T>(accumulator(at), accumulator(at + 1));
        }
        ptx::stmatrix_x4(target + pair * 32, packed);
    }
}

// Lays down this warp's outputs once their room is free, and tells its finisher. The time that the
// warp waits is added to `waited`. Scope: a warp of a processor.
template <class T, class Accumulator>
__device__ __forceinline__ void give_outputs(const Watchdog& watchdog,
                                             const WarpRoom& room,
                                             RingCursor<1>& cursor,
                                             uint32_t& waited,
                                             const Accumulator& accumulator) {
    waited += wait_barrier<Waiter::kWarp>(watchdog, Wait::kProcessorHandover, room.empty,
                                          cursor.parity());
    lay_down<T>(room.outputs, accumulator);
    ptx::fence_proxy_async_shared();
    ptx::delay_point_of_warp();
    room.full.arrive();
    cursor.advance();
}

// A finishing warp's view of one processor's rows.
class OutputsView {
 public:
    __device__ explicit OutputsView(const WarpOutputs& outputs) : outputs_(outputs) {}

    // The address of a row's 16-byte chunk, for a bulk copy from there on.
    __device__ __forceinline__ const uint8_t* at(int row, int chunk = 0) const {
        return &outputs_.row[row][chunk * 16];
    }
    __device__ __forceinline__ uint4 chunk(int row, int chunk) const {
        return ptx::ld_shared(uint32_t(__cvta_generic_to_shared(at(row, chunk))));
    }

 private:
    const WarpOutputs& outputs_;
};

// Gives rooms back to a processor's warps, each once this lane and its bulk copies have read it. It
// is one room late, so that the copies of one warp's outputs are under way while those of the next
// begin. Scope: one warp.
class GiveBack {
 public:
    __device__ __forceinline__ void follow(Barrier& empty) {
        cute::tma_store_arrive();
        if (last_ != nullptr) {
            cute::tma_store_wait<1>();
            ptx::delay_point_of_warp();
            last_->arrive();
        }
        last_ = &empty;
    }
    __device__ __forceinline__ void finish() {
        if (last_ == nullptr) return;
        cute::tma_store_wait<0>();
        ptx::delay_point_of_warp();
        last_->arrive();
        last_ = nullptr;
    }

 private:
    Barrier* last_ = nullptr;
};

}  // namespace flashmoe
