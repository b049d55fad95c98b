// Weight gradients, dW = left^T right over the rows of one expert: tiles of the backward's launch,
// which follow those of its two products, so that they fill the tensor cores while results travel.
// One cluster owns a whole pair of 128 x 256 tiles, with all rows of the expert as K. No split
// along K, hence no atomics in the order of sums, and the same bits at every run. Pad rows are
// zeros. fc2's tiles come first: its gradients are complete while fc1's are computed, and a signal
// says so to a stream that waits for them alone, such as their reduction over data-parallel ranks.
// With spare slots it comes once owners have added the gradients in those slots (slot_grads.cuh).
// Tiles of spare slots come first within a product, so that owners can fetch fc2's while the own
// experts' are multiplied. A gradient that is not wanted, as of a frozen weight, has no tiles.
#pragma once

#include "flashmoe/moe/args.cuh"
#include "flashmoe/protocol/order.h"
#include "flashmoe/protocol/replicas.h"
#include "flashmoe/tile/float_half.cuh"

namespace flashmoe {

// Weight gradients are products 2 (fc2's) and 3 (fc1's) of a backward.
constexpr int kFirstWeightGrad = 2, kFc1WeightGrad = 3;

__device__ __forceinline__ bool is_weight_grad(const TileInfo& tile) {
    return tile.gemm >= kFirstWeightGrad;
}
__device__ __forceinline__ const WeightGradProduct& product_of(const BackwardArgs& args,
                                                               const TileInfo& tile) {
    return args.weight_grads.product[tile.gemm - kFirstWeightGrad];
}

// Ticket -> pair of tiles; an expert's pairs stay together.
__device__ __forceinline__ TileInfo weight_grad_pair(const BackwardArgs& args, int ticket) {
    const int* wanted = args.weight_grads.wanted;
    for (int which = 0; which < 2; ++which) {
        const WeightGradProduct& product = args.weight_grads.product[which];
        const protocol::BandOrder order{ceil_div(product.num_out, kClusterSize * BLOCK_M),
                                        ceil_div(product.num_in, BLOCK_N)};
        const int per_expert = order.num_m * order.num_n;
        const int tiles = __ldg(wanted) * per_expert;
        if (ticket < tiles) {
            const protocol::BandOrder::Place place = order.at(ticket % per_expert);
            return {int16_t(kFirstWeightGrad + which),
                    int16_t(__ldg(wanted + 1 + ticket / per_expert)),
                    Pair::kAlongM,
                    kClusterSize * kNumProcessors,
                    false,
                    false,
                    place.m * kClusterSize,
                    place.n};
        }
        ticket -= tiles;
        wanted += 1 + args.shape.num_local_slots();
    }
    return TileInfo::nothing(TileInfo::kNoTile);
}

// Where threads copy the left operand, and not TMA, from: for fc2's gradient it is dY, which is
// read where its tokens lie unless a pass copies it, and for fc1's x, unless its rows were kept or
// the pass copies them. Else null, as with spare slots, where no registers are left for it.
__device__ __forceinline__ const char* gathered_from(const BackwardArgs& args,
                                                     const TileInfo& tile) {
    if constexpr (kHasReplicas) return nullptr;
    if (tile.gemm == kFc1WeightGrad) return copies_tokens(args) ? nullptr : args.tokens;
    return args.row_access == RowAccess::kInPlace ? args.x : nullptr;
}

// True if a tile is of the transpose of fc1's gradient.
template <class Pass>
__device__ __forceinline__ bool is_turned(const BackwardArgs& args, const TileInfo& tile) {
    return Pass::kTurnsGrads and product_of(args, tile).is_turned;
}

// 0 for an expert without rows, whose gradient is zero.
__device__ __forceinline__ int weight_grad_k_blocks(const Plan& plan, const TileInfo& tile) {
    return ceil_div(plan.expert_rows[tile.expert], BLOCK_K);
}

// The place of one warp's rows of a tile within a gradient; `warp` counts over both processors. No
// other warp of the launch writes them, so sums have a fixed order.
class GradRows {
 public:
    __device__ __forceinline__ GradRows(const BackwardArgs& args, const TileInfo& tile, int warp)
        : num_in_(product_of(args, tile).num_in), column_(tile.n * BLOCK_N) {
        const bool is_fc1 = tile.gemm == kFc1WeightGrad;
        int index = tile.expert + (is_fc1 ? 0 : args.shape.num_fc1());
        int num_out = product_of(args, tile).num_out;
        row_ = tile.m * BLOCK_M + warp * kWarpRows;
        if (is_fc1 and args.shape.is_split) {  // no warp has rows of both halves
            num_out /= 2;
            if (row_ >= num_out) index += args.shape.num_local_slots(), row_ -= num_out;
        }
        map_ = args.weight_grads.maps + index;
        grad_ = static_cast<char*>(args.weight_grads.pointers[index]);
        num_rows_ = min(num_out - row_, kWarpRows);
    }
    __device__ __forceinline__ int num_rows() const { return num_rows_; }  // may be below 0
    // True if they are in a spare slot, where gradients are float32 and written, also if the own
    // experts' are rounded or added. It follows from the map, since processors have no register
    // left for that.
    __device__ __forceinline__ bool are_spare(const BackwardArgs& args) const {
        const int num_slots = args.first_spare + args.shape.spare_slots;
        int index = int(map_ - args.weight_grads.maps);
        if (index >= 2 * num_slots) index -= num_slots;  // only split weights have a third kind
        return index - (index >= num_slots ? num_slots : 0) >= args.first_spare;
    }
    // The address of a row, from some column of the tile on.
    __device__ __forceinline__ char* at(int row, int column, int element_bytes) const {
        return grad_ + (int64_t(row_ + row) * num_in_ + column_ + column) * element_bytes;
    }
    __device__ __forceinline__ int columns_from(int column) const {
        return num_in_ - column_ - column;
    }
    // Writes or adds a block of the floats that are laid down, as far as it lies within the
    // gradient. Scope: one lane.
    __device__ __forceinline__ void send(const WarpOutputs& room,
                                         int half,
                                         int block,
                                         bool adds) const {
        const int column = half * kHalfColumns + block * kFloatBlockColumns;
        if (num_rows_ <= 0 or columns_from(column) <= 0) return;
        const uint8_t* const from = &room.row[0][0] + block * kFloatBlockBytes;
        const int place = (column_ + column) / kFloatBlockColumns;
        if (adds) {
            cute::SM90_TMA_REDUCE_ADD_3D::copy(map_, from, 0, row_, place);
        } else {
            cute::SM90_TMA_STORE_3D::copy(map_, from, 0, row_, place);
        }
    }

 private:
    const CUtensorMap* map_;
    char* grad_;
    int num_in_, column_, row_, num_rows_;
};

// True if gradients leave as results do: rounded, and row by row from their finishers. A gradient
// that is added to 16-bit values is rounded once, after the sum.
__device__ __forceinline__ bool leave_rounded(const BackwardArgs& args, bool are_spare) {
    return args.weight_grads.dtype != Dtype::kFloat32 and not args.weight_grads.accumulate and
           not are_spare;
}

// Sends a warp's rounded rows of a tile. Scope: a warp.
__device__ __forceinline__ void send_rounded(const GradRows& grad, const WarpOutputs& room) {
    const int row = int(threadIdx.x % 32), columns = min(grad.columns_from(0), BLOCK_N);
    if (row >= grad.num_rows() or columns <= 0) return;
    cute::SM90_BULK_COPY_S2G::copy(OutputsView(room).at(row), grad.at(row, 0, kElementBytes),
                                   columns * kElementBytes);
}

// Writes or adds 16-bit values to this lane's four columns of a row, rounded once.
template <class T>
__device__ __forceinline__ void put_rounded(char* at, float4 value, bool accumulates) {
    if (accumulates) {
        const uint2 packed = *reinterpret_cast<const uint2*>(at);
        const float2 low = unpack<T>(packed.x), high = unpack<T>(packed.y);
        value = {low.x + value.x, low.y + value.y, high.x + value.z, high.y + value.w};
    }
    *reinterpret_cast<uint2*>(at) = {pack<T>(value.x, value.y), pack<T>(value.z, value.w)};
}

// Does so with half the columns of a warp's rows, which are laid down. Scope: a warp.
template <class T>
__device__ __forceinline__ void put_half(const BackwardArgs& args,
                                         const GradRows& grad,
                                         const WarpOutputs& laid_down,
                                         int half) {
    const int column = half * kHalfColumns + int(threadIdx.x % 32) * 4;
    if (grad.columns_from(column) <= 0) return;
#pragma unroll 8
    for (int row = 0; row < grad.num_rows(); ++row) {
        put_rounded<T>(grad.at(row, column, kElementBytes), laid_down_floats(laid_down, row),
                       args.weight_grads.accumulate);
    }
}

// Has TMA write or add that half in float32. Each lane issues one block of columns, one after the
// other with a pause between. Scope: a warp.
__device__ __forceinline__ void send_half(const BackwardArgs& args,
                                          const GradRows& grad,
                                          const WarpOutputs& laid_down,
                                          int half,
                                          unsigned pause_ns) {
    for (int block = 0; block < kHalfBlocks; ++block) {
        if (int(threadIdx.x % 32) == block) {
            const bool are_spare = kHasReplicas and grad.are_spare(args);
            grad.send(laid_down, half, block, args.weight_grads.accumulate and not are_spare);
        }
        if (pause_ns > 0) __nanosleep(pause_ns);
    }
}

// Stores a warp's rows of a tile unrounded, half after half, since a half takes all the room there
// is. In float32 the finisher sends the second half, while the next tile is multiplied. A loop over
// the halves would cost ptxas the uniform registers of the main loop before it. Scope: a warp of a
// processor.
template <class T, int kHalf = 0, class Accumulator>
__device__ __forceinline__ void store_weight_grad(const BackwardArgs& args,
                                                  const GradRows& grad,
                                                  const WarpRoom& room,
                                                  const Accumulator& accumulator) {
    // Ends this warp's copies of the previous tile, which are long done: its finisher relies on it.
    if constexpr (kHalf == 0) ptx::bulk_wait_complete();
    lay_down_floats<kHalf>(room.outputs, accumulator);
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (args.weight_grads.dtype != Dtype::kFloat32 and not(kHasReplicas and grad.are_spare(args))) {
        put_half<T>(args, grad, room.outputs, kHalf);
    } else if (kHalf == 0) {
        send_half(args, grad, room.outputs, 0, 0);
        cute::tma_store_arrive();
        cute::tma_store_wait<0>();
    }
    __syncwarp();
    if constexpr (kHalf == 0) {
        store_weight_grad<T, 1>(args, grad, room, accumulator);
    } else {
        ptx::delay_point_of_warp();
        room.full.arrive();
    }
}

// Tells streams that wait for fc2's gradients of this backward. Scope: one thread, once all of them
// are stored.
__device__ __forceinline__ void tell_fc2_grads(const BackwardArgs& args) {
    const uint64_t number = args.weight_grads.number;
    if (number != 0) Atomics::store<protocol::Scope::kSystem>(args.workspace.fc2_grads, number);
}

// Tells all ranks that the gradients in spare slots are stored here. Scope: one thread, once all of
// them are.
__device__ __forceinline__ void publish_slot_grads(const BackwardArgs& args,
                                                   SlotGrads which,
                                                   uint32_t epoch) {
    const int src = args.shape.rank;
    protocol::publish_slot_grads<Atomics>(args.shape.num_ranks, epoch, [&](int rank) {
        return args.heap.grads_ready(rank, which, src);
    });
}

// A finisher's count of its own and its processor's fc2 gradients.
struct CountedGrads {
    bool in_slots = false;  // with spare slots
    bool fc2 = false;       // all of them
};

// Counts that a processor and its finisher have stored their fc2 gradients of spare slots; the
// GPU's last finisher tells all ranks. Scope: as below.
__device__ __forceinline__ void count_slot_grads(const BackwardArgs& args) {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    protocol::arrive<Atomics>(
        &args.workspace.tickets->slot_grads_stored, kNumProcessors * gridDim.x,
        [&] { publish_slot_grads(args, SlotGrads::kFc2, current_epoch(args.workspace)); });
}

// Counts that they have stored all of their fc2 gradients; the GPU's last finisher signals to the
// streams. With spare slots the warps that add replicas' gradients wait for the count, and signal
// instead. Where some CTA has no tile of fc1, the end of the launch signals. Scope: a finisher,
// after its bulk copies and all that its processor's warps have handed over since.
__device__ __forceinline__ void count_fc2_grads(const BackwardArgs& args) {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    if constexpr (kHasReplicas) {
        protocol::publish<Atomics>(&args.workspace.tickets->fc2_grads_stored);
    } else {
        protocol::arrive<Atomics>(&args.workspace.tickets->fc2_grads_stored,
                                  kNumProcessors * gridDim.x, [&] { tell_fc2_grads(args); });
    }
}

// Writes zeros for an expert without rows, but not where there is none. Scope: a warp of a
// processor.
__device__ __forceinline__ void store_no_weight_grad(const BackwardArgs& args,
                                                     const GradRows& grad) {
    if (args.weight_grads.accumulate or (kHasReplicas and grad.are_spare(args))) return;
    const int bytes = args.weight_grads.dtype == Dtype::kFloat32 ? 4 : kElementBytes;
    const int per_lane = 8 / bytes, columns = min(grad.columns_from(0), BLOCK_N);
    for (int row = 0; row < grad.num_rows(); ++row) {
        for (int i = int(threadIdx.x % 32) * per_lane; i < columns; i += 32 * per_lane) {
            *reinterpret_cast<uint2*>(grad.at(row, i, bytes)) = uint2{};
        }
    }
}

}  // namespace flashmoe
