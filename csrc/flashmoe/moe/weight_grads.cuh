// Weight gradients, dW = left^T right over the rows of one expert: tiles of the backward's launch,
// behind those of its two products, so that they fill the tensor cores while results travel. One
// cluster owns a whole pair of 128 x 256 tiles, with all rows of the expert as K. No split along K,
// hence no atomics in the order of sums, and the same bits at every run. Pad rows are zeros. fc2's
// tiles come first, so that its gradients are complete early.
#pragma once

#include "flashmoe/moe/args.cuh"
#include "flashmoe/protocol/order.h"
#include "flashmoe/tile/handover.cuh"

namespace flashmoe {

// Weight gradients are products 2 (fc2's) and 3 (fc1's) of a backward.
constexpr int kFirstWeightGrad = 2;

__device__ __forceinline__ bool is_weight_grad(const TileInfo& tile) {
    return tile.gemm >= kFirstWeightGrad;
}
__device__ __forceinline__ const WeightGradProduct& product_of(const BackwardArgs& args,
                                                               const TileInfo& tile) {
    return args.weight_grads.product[tile.gemm - kFirstWeightGrad];
}

// Ticket -> pair of tiles; an expert's pairs stay together.
__device__ __forceinline__ TileInfo weight_grad_pair(const BackwardArgs& args, int ticket) {
    for (int which = 0; which < 2; ++which) {
        const WeightGradProduct& product = args.weight_grads.product[which];
        const protocol::BandOrder order{ceil_div(product.num_out, kClusterSize * BLOCK_M),
                                        ceil_div(product.num_in, BLOCK_N)};
        const int per_expert = order.num_m * order.num_n;
        const int tiles = args.shape.num_local_experts() * per_expert;
        if (ticket < tiles) {
            const protocol::BandOrder::Place place = order.at(ticket % per_expert);
            return {int16_t(kFirstWeightGrad + which),
                    int16_t(ticket / per_expert),
                    Pair::kAlongM,
                    kClusterSize * kNumProcessors,
                    false,
                    0,
                    place.m * kClusterSize,
                    place.n};
        }
        ticket -= tiles;
    }
    return TileInfo::nothing(TileInfo::kNoTile);
}

// 0 for an expert without rows, whose gradient is zero.
__device__ __forceinline__ int weight_grad_k_blocks(const Plan& plan, const TileInfo& tile) {
    return ceil_div(plan.expert_rows[tile.expert], BLOCK_K);
}

// Where the rows of a gradient go that one processor's warp has of a tile. A warp's writes are the
// only ones to them in a launch, so sums have a fixed order.
class GradRows {
 public:
    __device__ __forceinline__ GradRows(const BackwardArgs& args,
                                        const TileInfo& tile,
                                        int processor)
        : num_in_(product_of(args, tile).num_in), column_(tile.n * BLOCK_N) {
        const int matrix = kFirstWeightGrad + 1 - tile.gemm;  // fc1's pointers come first
        grad_ = static_cast<char*>(
            args.weight_grads.grads[matrix * args.shape.num_local_experts() + tile.expert]);
        const int warp = int(threadIdx.x / 32) % kProcessorWarps;
        row_ = tile.m * BLOCK_M + (processor * kProcessorWarps + warp) * kWarpRows;
        num_rows_ = min(product_of(args, tile).num_out - row_, kWarpRows);
    }
    __device__ __forceinline__ int num_rows() const { return num_rows_; }  // or less than none
    // Of a row, from some column of the tile on.
    __device__ __forceinline__ char* at(int row, int column, int element_bytes) const {
        return grad_ + (int64_t(row_ + row) * num_in_ + column_ + column) * element_bytes;
    }
    __device__ __forceinline__ int columns_from(int column) const {
        return num_in_ - column_ - column;
    }

 private:
    char* grad_;
    int num_in_, column_, row_, num_rows_;
};

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

// Stores a warp's rows of a tile unrounded, half after half, since a half takes all the room there
// is: the warp's own, once finishers have no more use for it. Bulk copies fetch what is float32,
// the last of them while the next tile is multiplied. A loop over the halves would cost ptxas the
// uniform registers of the main loop before it. Scope: a warp of a processor.
template <class T, int kHalf = 0, class Accumulator>
__device__ __forceinline__ void store_weight_grad(const BackwardArgs& args,
                                                  const GradRows& grad,
                                                  WarpOutputs& room,
                                                  const Accumulator& accumulator) {
    constexpr int kColumns = BLOCK_N / 2, kFirst = kHalf * kColumns;
    const int lane = threadIdx.x % 32, columns = min(grad.columns_from(kFirst), kColumns);
    const bool accumulates = args.weight_grads.accumulate;
    cute::tma_store_wait<0>();
    __syncwarp();
    lay_down_floats<kHalf>(room, accumulator);
    if (args.weight_grads.dtype == Dtype::kFloat32) {
        ptx::fence_proxy_async_shared();
        __syncwarp();
        if (lane < grad.num_rows() and columns > 0) {
            char* target = grad.at(lane, kFirst, 4);
            if (accumulates) {
                ptx::bulk_add_f32(room.row[lane], target, 4 * columns);
            } else {
                cute::SM90_BULK_COPY_S2G::copy(room.row[lane], target, 4 * columns);
            }
        }
        cute::tma_store_arrive();
    } else {
        __syncwarp();
        if (lane * 4 < columns) {
#pragma unroll 8
            for (int row = 0; row < grad.num_rows(); ++row) {
                put_rounded<T>(grad.at(row, kFirst + lane * 4, 2), HandedOver(room).floats(row),
                               accumulates);
            }
        }
    }
    if constexpr (kHalf == 0) store_weight_grad<T, 1>(args, grad, room, accumulator);
}

// Writes zeros for an expert without rows. Scope: a warp of a processor.
__device__ __forceinline__ void store_no_weight_grad(const BackwardArgs& args,
                                                     const GradRows& grad) {
    if (args.weight_grads.accumulate) return;
    const int bytes = args.weight_grads.dtype == Dtype::kFloat32 ? 4 : 2;
    const int per_lane = 8 / bytes, columns = min(grad.columns_from(0), BLOCK_N);
    for (int row = 0; row < grad.num_rows(); ++row) {
        for (int i = int(threadIdx.x % 32) * per_lane; i < columns; i += 32 * per_lane) {
            *reinterpret_cast<uint2*>(grad.at(row, i, bytes)) = uint2{};
        }
    }
}

}  // namespace flashmoe
