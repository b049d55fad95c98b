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

// Where a lane's four columns of a gradient's row go. One lane's writes are the only ones to an
// element in a launch, so sums have a fixed order.
template <class T>
class GradRows {
 public:
    __device__ __forceinline__
    GradRows(const BackwardArgs& args, const TileInfo& tile, int processor, int half)
        : num_in_(product_of(args, tile).num_in),
          is_float_(args.weight_grads.dtype == Dtype::kFloat32),
          accumulates_(args.weight_grads.accumulate) {
        const int matrix = kFirstWeightGrad + 1 - tile.gemm;  // fc1's pointers come first
        char* grad = static_cast<char*>(
            args.weight_grads.grads[matrix * args.shape.num_local_experts() + tile.expert]);
        const int row = tile.m * BLOCK_M + processor * kProcessorWarps * kWarpRows;
        const int first_column = tile.n * BLOCK_N + half * (BLOCK_N / 2);
        column_ = first_column + int(threadIdx.x % 32) * 4;
        row_bytes_ = 4 * min(BLOCK_N / 2, num_in_ - first_column);
        rows_left_ = row_bytes_ > 0 ? product_of(args, tile).num_out - row : 0;
        first_ = grad + (int64_t(row) * num_in_ + first_column) * (is_float_ ? 4 : 2);
    }

    __device__ __forceinline__ bool is_float() const { return is_float_; }
    // Has a bulk copy write or add to one of the processor's 64 rows, which is of floats. Scope:
    // one lane.
    __device__ __forceinline__ void put(int row, const uint8_t* values) const {
        if (row >= rows_left_) return;
        char* at = first_ + int64_t(row) * num_in_ * 4;
        if (accumulates_) {
            ptx::bulk_add_f32(values, at, row_bytes_);
        } else {
            cute::SM90_BULK_COPY_S2G::copy(values, at, row_bytes_);
        }
    }
    // Writes or adds to this lane's columns of a row.
    __device__ __forceinline__ void put(int row, const float4& value) const {
        if (row >= rows_left_ or column_ >= num_in_) return;
        char* at = first_ + (int64_t(row) * num_in_ + threadIdx.x % 32 * 4) * (is_float_ ? 4 : 2);
        if (is_float_) {
            *reinterpret_cast<float4*>(at) = value;
        } else {
            float4 sum = value;
            if (accumulates_) {  // rounded once
                const uint2 packed = *reinterpret_cast<const uint2*>(at);
                const float2 low = unpack<T>(packed.x), high = unpack<T>(packed.y);
                sum = {low.x + value.x, low.y + value.y, high.x + value.z, high.y + value.w};
            }
            *reinterpret_cast<uint2*>(at) = {pack<T>(sum.x, sum.y), pack<T>(sum.z, sum.w)};
        }
    }
    __device__ __forceinline__ bool accumulates() const { return accumulates_; }

 private:
    char* first_;
    int rows_left_;
    int row_bytes_;
    int column_;  // this lane's first
    int num_in_;
    bool is_float_, accumulates_;
};

// Stores what a processor hands over of a tile, in two halves. Scope: a finisher.
template <class T>
__device__ __forceinline__ void store_weight_grads(const BackwardArgs& args,
                                                   const TileInfo& tile,
                                                   const Handover& handover,
                                                   RingCursor<1>& handed,
                                                   int processor) {
    const bool is_empty = weight_grad_k_blocks(args.plan, tile) == 0;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        const GradRows<T> grad(args, tile, processor, half);
        if (is_empty) {  // nothing is handed over
            if (grad.accumulates()) return;
            for (int row = 0; row < kProcessorWarps * kWarpRows; ++row) grad.put(row, float4{});
            continue;
        }
        GiveBack give_back;
#pragma unroll 1
        for (int warp = 0; warp < kProcessorWarps; ++warp) {
            wait_barrier<Waiter::kWarp>(args.watchdog, Role::kFinisherRows,
                                        handover.full[processor][warp], handed.parity());
            const HandedOver outputs(handover.outputs[processor][warp]);
            if (grad.is_float()) {
                const int row = threadIdx.x % 32;
                if (row < kWarpRows) grad.put(warp * kWarpRows + row, outputs.at(row));
            } else {
#pragma unroll 8
                for (int row = 0; row < kWarpRows; ++row) {
                    grad.put(warp * kWarpRows + row, outputs.floats(row));
                }
            }
            give_back.follow(handover.empty[processor][warp]);
        }
        give_back.finish();
        handed.advance();
    }
}

}  // namespace flashmoe
