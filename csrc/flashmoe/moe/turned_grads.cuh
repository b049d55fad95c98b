// Gradients of fc1 whose tiles are turned round where they are stored. A rank that is alone keeps
// tokens for them, and no rows. Threads copy these to where a tile's left operand is, which each
// CTA reads for itself; so the product is tokens^T dpre, the transpose of the gradient. A warp's 16
// columns of it are 32 or 64 bytes of each row of the gradient, and leave by ordinary stores.
#pragma once

#include "flashmoe/moe/weight_grads.cuh"
#include "flashmoe/tile/turned.cuh"

namespace flashmoe {

// The place of one warp's columns of a tile within a gradient; `warp` counts over both processors.
class TurnedGrad {
 public:
    __device__ __forceinline__ TurnedGrad(const BackwardArgs& args,
                                          const TileInfo& tile,
                                          int warp) {
        const WeightGradProduct& product = product_of(args, tile);
        const int column = tile.m * BLOCK_M + warp * kWarpRows, row = tile.n * BLOCK_N;
        num_rows_ = column < product.num_out ? min(product.num_in - row, kTurnedRows) : 0;
        row_bytes_ = product.num_out * element_bytes(args);
        void* const* pointers = args.weight_grads.pointers + tile.expert;
        const int64_t first = int64_t(row) * row_bytes_ + column * element_bytes(args);
        at_ = static_cast<char*>(pointers[0]) + first;
        if (args.shape.is_split) {  // rows of `up` are a matrix of their own
            const int rows_of_gate = product.num_in / 2;
            first_up_ = rows_of_gate - row;
            up_ = static_cast<char*>(pointers[args.shape.num_local_slots()]) + first -
                  int64_t(rows_of_gate) * row_bytes_;
        } else {
            first_up_ = kTurnedRows;
            up_ = at_;
        }
    }
    __device__ __forceinline__ static int element_bytes(const BackwardArgs& args) {
        return args.weight_grads.dtype == Dtype::kFloat32 ? int(sizeof(float)) : kElementBytes;
    }
    __device__ __forceinline__ int num_rows() const { return num_rows_; }
    // The address of the first of the warp's columns in a row of the tile.
    __device__ __forceinline__ char* at(int row) const {
        return (row < first_up_ ? at_ : up_) + int64_t(row) * row_bytes_;
    }

 private:
    char *at_, *up_;
    int row_bytes_, first_up_, num_rows_;
};

// Does something to this lane's four values of each row of a half, which are laid down in float32.
// Scope: a warp.
template <class Put>
__device__ __forceinline__ void for_turned_floats(
    const TurnedGrad& grad, const WarpOutputs& room, int half, int element_bytes, Put put) {
    const int lane = int(threadIdx.x % 32), first = half * kHalfTurnedRows;
    const int num_rows = min(grad.num_rows() - first, kHalfTurnedRows);
#pragma unroll 1  // or ptxas keeps times in uniform registers within the main loops' waits
    for (int row = lane / 4; row < num_rows; row += 8) {
        put(grad.at(first + row) + lane % 4 * 4 * element_bytes, turned_floats(room, row));
    }
}

// Writes or adds a half in float32, in pieces with a pause after each. Scope: a warp.
__device__ __forceinline__ void store_turned_floats(const BackwardArgs& args,
                                                    const TurnedGrad& grad,
                                                    const WarpOutputs& room,
                                                    int half,
                                                    unsigned pause_ns) {
    int put = 0;
    for_turned_floats(grad, room, half, sizeof(float), [&](char* to, const float4& value) {
        if (args.weight_grads.accumulate) {
            ptx::add_float4(to, value);
        } else {
            *reinterpret_cast<float4*>(to) = value;
        }
        if (pause_ns > 0 and ++put % 4 == 0) __nanosleep(pause_ns);
    });
}

// Stores a warp's columns of a tile unrounded, as store_weight_grad does its rows. Scope: a warp of
// a processor.
template <class T, int kHalf = 0, class Accumulator>
__device__ __forceinline__ void store_turned(const BackwardArgs& args,
                                             const TileInfo& tile,
                                             int warp,
                                             const WarpRoom& room,
                                             const Accumulator& accumulator) {
    if constexpr (kHalf == 0) ptx::bulk_wait_complete();  // fc2's: its finisher relies on it
    lay_down_turned_floats<kHalf>(room.outputs, accumulator);
    __syncwarp();
    if (args.weight_grads.dtype != Dtype::kFloat32) {
        for_turned_floats(TurnedGrad(args, tile, warp), room.outputs, kHalf, kElementBytes,
                          [&](char* to, const float4& value) {
                              put_rounded<T>(to, value, args.weight_grads.accumulate);
                          });
    } else if (kHalf == 0) {
        store_turned_floats(args, TurnedGrad(args, tile, warp), room.outputs, 0, 0);
    }
    __syncwarp();
    if constexpr (kHalf == 0) {
        store_turned<T, 1>(args, tile, warp, room, accumulator);
    } else {
        ptx::delay_point_of_warp();
        room.full.arrive();
    }
}

// Lays down a warp's columns of a tile, rounded, as give_outputs does its rows. Scope: as above.
template <class T, class Accumulator>
__device__ __forceinline__ void give_turned(const WarpRoom& room, const Accumulator& accumulator) {
    lay_down_turned<T>(room.outputs, accumulator);
    ptx::delay_point_of_warp();
    room.full.arrive();
}

// Does the finisher's part of a warp's columns.
__device__ __forceinline__ void finish_turned(const BackwardArgs& args,
                                              const TurnedGrad& grad,
                                              const WarpOutputs& room,
                                              unsigned pause_ns) {
    if (leave_rounded(args, false)) {
        const int lane = int(threadIdx.x % 32), chunk = lane % 2;
#pragma unroll 2
        for (int row = lane / 2; row < grad.num_rows(); row += 16) {
            *reinterpret_cast<uint4*>(grad.at(row) + chunk * 16) =
                ptx::ld_shared(turned_at(room, row, chunk));
        }
    } else if (args.weight_grads.dtype == Dtype::kFloat32) {
        store_turned_floats(args, grad, room, 1, pause_ns);
    }
}

// Writes zeros for an expert without rows. Scope: a warp of a processor.
__device__ __forceinline__ void store_no_turned(const BackwardArgs& args, const TurnedGrad& grad) {
    if (args.weight_grads.accumulate) return;
    const int lane = int(threadIdx.x % 32), bytes = kWarpRows * TurnedGrad::element_bytes(args);
#pragma unroll 1
    for (int row = lane / 4; row < grad.num_rows(); row += 8) {
#pragma unroll 1
        for (int i = lane % 4 * 8; i < bytes; i += 32) {
            *reinterpret_cast<uint2*>(grad.at(row) + i) = uint2{};
        }
    }
}

}  // namespace flashmoe
