// What happens to GEMM0's outputs: in the forward the activation and the routing weight, in the
// backward their derivatives. GEMM1's outputs just leave. A warp has 16 rows of a tile, and a lane
// eight columns of a row at a time.
#pragma once

#include "flashmoe/moe/args.cuh"
#include "flashmoe/tile/activation.cuh"
#include "flashmoe/tile/handover.cuh"

namespace flashmoe {

__device__ __forceinline__ uint4* chunk_of(char* rows, int64_t row, int width, int column) {
    return reinterpret_cast<uint4*>(rows + (row * width + column) * 2);
}

// The routing weights of a warp's rows, one a lane.
__device__ __forceinline__ float load_probs(const LayerArgs& args, int first_row) {
    return args.plan.row_prob[first_row + int(threadIdx.x % kWarpRows)];
}

// act(gate) * up * prob, or act(z) * prob. z has been rounded to 16 bits, as every unfused path
// does, so that the backward differentiates exactly what the forward computed.
template <class T, Activation kAct, bool kGated>
__device__ __forceinline__ void activate_rows(const LayerArgs& args,
                                              const TileInfo& tile,
                                              int first_row,
                                              const HandedOver& outputs) {
    constexpr int kChunks = kGated ? kRowChunks / 2 : kRowChunks, kRowsAtOnce = 32 / kChunks;
    const int lane = threadIdx.x % 32, chunk = lane % kChunks;
    const int intermediate = args.shape.intermediate;
    const int column = (tile.n * kChunks + chunk) * 8;
    const float probs = load_probs(args, first_row);
#pragma unroll 2
    for (int i = 0; i < kWarpRows; i += kRowsAtOnce) {
        const int row = i + lane / kChunks;
        const float prob = __shfl_sync(~0u, probs, row);
        if (column >= intermediate) continue;
        const uint4 gate = outputs.chunk(row, chunk);
        uint4 up{};
        if constexpr (kGated) up = outputs.chunk(row, chunk + kChunks);
        if (args.preact != nullptr) {
            *chunk_of(args.preact, first_row + row, args.shape.fc1_rows(), column) = gate;
            if constexpr (kGated) {
                *chunk_of(args.preact, first_row + row, args.shape.fc1_rows(),
                          intermediate + column) = up;
            }
        }
        float z[8], u[8];
        unpack8<T>(gate, z);
        if constexpr (kGated) unpack8<T>(up, u);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            z[c] = activate<kAct>(z[c]).value * prob;
            if constexpr (kGated) z[c] *= u[c];
        }
        *chunk_of(args.act, first_row + row, intermediate, column) = pack8<T>(z);
    }
}

// From G = dY W2 (unscaled): the gradient of fc1's output, fc2's input again, and this tile's share
// of the probabilities' gradient, <G, act>; no division by the probability anywhere.
template <class T, Activation kAct, bool kGated>
__device__ __forceinline__ void differentiate_rows(const LayerArgs& args,
                                                   const TileInfo& tile,
                                                   int first_row,
                                                   const HandedOver& outputs) {
    constexpr int kBatch = 4;  // rows whose pre-activations are on their way at once
    const int lane = threadIdx.x % 32, column = (tile.n * kRowChunks + lane) * 8;
    const int intermediate = args.shape.intermediate, fc1_rows = args.shape.fc1_rows();
    const bool is_inside = column < intermediate;
    const float probs = load_probs(args, first_row);
#pragma unroll 1
    for (int first = 0; first < kWarpRows; first += kBatch) {
        uint4 gate[kBatch] = {}, up[kBatch] = {};
        if (is_inside) {
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int64_t row = first_row + first + i;
                gate[i] = *chunk_of(args.preact, row, fc1_rows, column);
                if constexpr (kGated) {
                    up[i] = *chunk_of(args.preact, row, fc1_rows, intermediate + column);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int row = first + i;
            const float prob = __shfl_sync(~0u, probs, row);
            float dprob = 0.0f;
            if (is_inside) {
                float g[8], z[8], u[8], act[8];
                unpack8<T>(outputs.chunk(row, lane), g);
                unpack8<T>(gate[i], z);
                if constexpr (kGated) unpack8<T>(up[i], u);
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    const Activated f = activate<kAct>(z[c]);
                    const float value = kGated ? f.value * u[c] : f.value;
                    const float scaled = prob * g[c];
                    dprob += g[c] * value;
                    act[c] = value * prob;
                    z[c] = scaled * f.slope * (kGated ? u[c] : 1.0f);
                    u[c] = scaled * f.value;
                }
                const int64_t at = first_row + row;
                *chunk_of(args.act, at, intermediate, column) = pack8<T>(act);
                *chunk_of(args.dpre, at, fc1_rows, column) = pack8<T>(z);
                if constexpr (kGated) {
                    *chunk_of(args.dpre, at, fc1_rows, intermediate + column) = pack8<T>(u);
                }
            }
#pragma unroll
            for (int step = 16; step > 0; step /= 2) dprob += __shfl_xor_sync(~0u, dprob, step);
            if (lane == 0) {
                args.dprob_partial[int64_t(first_row + row) * args.num_n_tiles[0] + tile.n] = dprob;
            }
        }
    }
}

// Calls visit with the activation as a type: a branch per tile, not a kernel per activation.
template <class Visit>
__device__ __forceinline__ void with_activation(Activation activation, Visit visit) {
    switch (activation) {
        case Activation::kSilu:
            return visit(std::integral_constant<Activation, Activation::kSilu>{});
        case Activation::kGelu:
            return visit(std::integral_constant<Activation, Activation::kGelu>{});
        case Activation::kGeluTanh:
            return visit(std::integral_constant<Activation, Activation::kGeluTanh>{});
        case Activation::kRelu:
            return visit(std::integral_constant<Activation, Activation::kRelu>{});
        case Activation::kSquaredRelu:
            return visit(std::integral_constant<Activation, Activation::kSquaredRelu>{});
    }
}

// GEMM1: a row that is alone here is its token's result, and goes to the token's rank, tile by
// tile; the others wait in the result buffer to be summed.
__device__ __forceinline__ void store_results(const LayerArgs& args,
                                              const TileInfo& tile,
                                              int first_row,
                                              const HandedOver& outputs) {
    const int lane = threadIdx.x % 32, column = (tile.n * kRowChunks + lane) * 8;
    const RowMeta meta = args.plan.row_meta[first_row + lane % kWarpRows];
    char* target = args.result + int64_t(first_row + lane % kWarpRows) * args.shape.hidden * 2;
    if (meta.is_alone()) target = args.heap.result(meta.src_rank, meta.token, meta.slot);
#pragma unroll 4
    for (int row = 0; row < kWarpRows; ++row) {
        char* to =
            reinterpret_cast<char*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(target), row));
        if (column < args.shape.hidden) *chunk_of(to, 0, 0, column) = outputs.chunk(row, lane);
    }
}

}  // namespace flashmoe
