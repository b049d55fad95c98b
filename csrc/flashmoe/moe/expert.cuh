// What happens to GEMM0's outputs on their way out of registers: in the forward the activation and
// the routing weight, in the backward their derivatives. GEMM1's outputs just leave.
#pragma once

#include "flashmoe/moe/args.cuh"
#include "flashmoe/tile/activation.cuh"
#include "flashmoe/tile/epilogue.cuh"
#include "flashmoe/tile/mainloop.cuh"

namespace flashmoe {

// If gated, half of the forward's columns are `up`.
template <bool kGated>
constexpr int kForwardColumns = kGated ? BLOCK_N / 2 : BLOCK_N;
constexpr int kPreactPerThread = BLOCK_N / 16;  // uint4 of one thread and tile

// Pre-activations are saved in the accumulator's own order, 16 bytes a thread and coalesced: only
// the backward's epilogue, which has the same thread layout, reads them. Entry q holds the 8-column
// groups 2 q and 2 q + 1 of the forward's tile.
__device__ __forceinline__ uint4* preact_entry(uint4* preact, int tile, int warpgroup, int q) {
    const int64_t row = (int64_t(tile) * kNumProcessors + warpgroup) * kPreactPerThread + q;
    return ptx::opaque(preact) + (row * 128 + ptx::thread_index() % 128);
}

__device__ __forceinline__ float round_bf16(float value) {
    return __bfloat162float(__float2bfloat16_rn(value));
}

// The routing weights of the two rows (i = 0, 1) that this thread's accumulators belong to.
struct RowProbs {
    float of[2];

    __device__ RowProbs(const float* row_prob, int first_row) {
        const int thread = threadIdx.x % 128;
        const int row = first_row + thread / 32 * 16 + thread % 32 / 4;
        of[0] = row_prob[row];
        of[1] = row_prob[row + 8];
    }
};

// One staging tile of this warp, into some columns of a row buffer.
template <class Out>
__device__ __forceinline__ void store_piece(
    Out& out, char* rows, int width, int first_row, int column, int tile = 0) {
    const int row = first_row + int(threadIdx.x % 128 / 32) * kWarpRows;
    out.store(rows + (int64_t(row) * width + column) * 2, int64_t(width) * 2, tile);
}

// act(gate) * up * prob, or act(z) * prob, in bf16. z is rounded to bf16 first, as every unfused
// path does, so that the backward differentiates exactly what the forward computed.
template <Activation kAct, bool kGated, class Accumulator, class Out>
__device__ __forceinline__ void activate_tile(
    const LayerArgs& args, const TileInfo& tile, int warpgroup, const Accumulator& z, Out& out) {
    const int first_row = tile.m * BLOCK_M + warpgroup * 64;
    const RowProbs prob(args.plan.row_prob, first_row);

    if (args.preact != nullptr) {
        const int index = tile.m * args.num_n_tiles[0] + tile.n;
#pragma unroll
        for (int q = 0; q < kPreactPerThread; ++q) {
            *preact_entry(args.preact, index, warpgroup, q) = {
                pack_bf16(z(8 * q), z(8 * q + 1)), pack_bf16(z(8 * q + 2), z(8 * q + 3)),
                pack_bf16(z(8 * q + 4), z(8 * q + 5)), pack_bf16(z(8 * q + 6), z(8 * q + 7))};
        }
    }

#pragma unroll
    for (int piece = 0; piece < kForwardColumns<kGated> / Out::kColumns; ++piece) {
        const int column = tile.n * kForwardColumns<kGated> + piece * Out::kColumns;
        if (column >= args.shape.intermediate) break;
#pragma unroll
        for (int pair = 0; pair < Out::kColumns / 16; ++pair) {
            uint32_t packed[4];
#pragma unroll
            for (int word = 0; word < 4; ++word) {  // word = 2 j + i, as in the accumulator
                const int at = piece * Out::kColumns / 2 + pair * 8 + word * 2;
                float value[2];
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    value[c] = activate<kAct>(round_bf16(z(at + c))).value;
                    if constexpr (kGated) value[c] *= round_bf16(z(at + c + BLOCK_N / 4));
                    value[c] *= prob.of[word % 2];
                }
                packed[word] = pack_bf16(value[0], value[1]);
            }
            out.write(pair, packed);
        }
        store_piece(out, args.act, args.shape.intermediate, first_row, column);
    }
}

// From G = dY W2 (unscaled): the gradient of fc1's output, fc2's input again, and this tile's share
// of the probabilities' gradient, <G, act>; no division by the probability anywhere.
template <Activation kAct, bool kGated, class Accumulator, class Out>
__device__ __forceinline__ void differentiate_tile(
    const LayerArgs& args, const TileInfo& tile, int warpgroup, const Accumulator& g, Out& out) {
    const int first_row = tile.m * BLOCK_M + warpgroup * 64;
    const int intermediate = args.shape.intermediate;
    const RowProbs prob(args.plan.row_prob, first_row);
    float dprob[2] = {0.0f, 0.0f};

    constexpr int kColumns = kForwardColumns<kGated>;
    const int forward_tiles = ceil_div(intermediate, kColumns);
#pragma unroll
    for (int piece = 0; piece < BLOCK_N / Out::kColumns; ++piece) {
        const int column = tile.n * BLOCK_N + piece * Out::kColumns;
        if (column >= intermediate) break;
        const int index = tile.m * forward_tiles + column / kColumns;
        const int first_q = column % kColumns / 16;

#pragma unroll
        for (int pair = 0; pair < Out::kColumns / 16; ++pair) {
            const uint4 gate4 =
                ptx::ld_in_order(preact_entry(args.preact, index, warpgroup, first_q + pair));
            const uint32_t gate[4] = {gate4.x, gate4.y, gate4.z, gate4.w};
            uint32_t up[4] = {};
            if constexpr (kGated) {
                const uint4 up4 = ptx::ld_in_order(preact_entry(
                    args.preact, index, warpgroup, first_q + pair + kPreactPerThread / 2));
                up[0] = up4.x, up[1] = up4.y, up[2] = up4.z, up[3] = up4.w;
            }
            uint32_t act[4], dgate[4], dup[4];
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                const int at = piece * Out::kColumns / 2 + pair * 8 + word * 2;
                const float p = prob.of[word % 2];
                const float2 z2 = unpack_bf16(gate[word]), u2 = unpack_bf16(up[word]);
                const float z[2] = {z2.x, z2.y}, u[2] = {u2.x, u2.y};
                float a[2], dz[2], du[2];
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const Activated f = activate<kAct>(z[c]);
                    const float value = kGated ? f.value * u[c] : f.value;
                    const float scaled = p * g(at + c);
                    dprob[word % 2] += g(at + c) * value;
                    a[c] = value * p;
                    dz[c] = scaled * f.slope * (kGated ? u[c] : 1.0f);
                    du[c] = scaled * f.value;
                }
                act[word] = pack_bf16(a[0], a[1]);
                dgate[word] = pack_bf16(dz[0], dz[1]);
                dup[word] = pack_bf16(du[0], du[1]);
            }
            out.write(pair, act, 0);
            out.write(pair, dgate, 1);
            if constexpr (kGated) out.write(pair, dup, 2);
        }
        store_piece(out, args.act, intermediate, first_row, column, 0);
        store_piece(out, args.dpre, args.shape.fc1_rows(), first_row, column, 1);
        if constexpr (kGated) {
            store_piece(out, args.dpre, args.shape.fc1_rows(), first_row, intermediate + column, 2);
        }
    }

    // The four threads of a quad hold one row's columns.
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        dprob[i] += __shfl_xor_sync(~0u, dprob[i], 1);
        dprob[i] += __shfl_xor_sync(~0u, dprob[i], 2);
        const int row = first_row + thread / 32 * 16 + thread % 32 / 4 + 8 * i;
        if (thread % 4 == 0) {
            args.dprob_partial[int64_t(row) * args.num_n_tiles[0] + tile.n] = dprob[i];
        }
    }
}

// GEMM1: bf16 rows of the result buffer.
template <class Accumulator, class Out>
__device__ __forceinline__ void store_result_tile(
    const LayerArgs& args, const TileInfo& tile, int warpgroup, const Accumulator& y, Out& out) {
    const int first_row = tile.m * BLOCK_M + warpgroup * 64;
#pragma unroll
    for (int piece = 0; piece < BLOCK_N / Out::kColumns; ++piece) {
        const int column = tile.n * BLOCK_N + piece * Out::kColumns;
        if (column >= args.shape.hidden) break;
#pragma unroll
        for (int pair = 0; pair < Out::kColumns / 16; ++pair) {
            const int at = piece * Out::kColumns / 2 + pair * 8;
            const uint32_t packed[4] = {
                pack_bf16(y(at), y(at + 1)), pack_bf16(y(at + 2), y(at + 3)),
                pack_bf16(y(at + 4), y(at + 5)), pack_bf16(y(at + 6), y(at + 7))};
            out.write(pair, packed);
        }
        store_piece(out, args.result, args.shape.hidden, first_row, column);
    }
}

}  // namespace flashmoe
