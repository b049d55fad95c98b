// The derivative of a backward in FP8, as DifferentiateRows has it in 16 bits: the gradient of
// fc1's output is also quantized, for GEMM1, which reads that alone. Finishers have few registers
// here: they take a row at a time, and load its pre-activations one row ahead, from the L2, which
// has been asked for them when the tile began.
#pragma once

#include "flashmoe/moe/expert.cuh"

namespace flashmoe {

template <class T, bool kGated>
class DifferentiateInFp8 : LaneOfTile {
 public:
    __device__ __forceinline__ DifferentiateInFp8(const LayerArgs& args,
                                                  const TileInfo& tile,
                                                  int first_row)
        : LaneOfTile(args, tile, first_row) {
        prefetch(first_row);
        load(first_row);
    }
    __device__ __forceinline__ void operator()(const WarpRows& rows) {
        with_activation(args_.activation, [&](auto activation) { finish<activation()>(rows); });
    }

 private:
    // Has the L2 get the pre-activations of all rows.
    __device__ __forceinline__ void prefetch(int first_row) const {
        using Prefetch = cute::SM90_BULK_COPY_G2S::PREFETCH;
        constexpr int kBytes = kScaleBlock * kElementBytes;
#pragma unroll 1
        for (int row = first_row + int(threadIdx.x % 32); row < end_; row += 32) {
#pragma unroll 1
            for (int half = 0; half < BLOCK_N; half += kScaleBlock) {
                const int column = tile_n_ * BLOCK_N + half;
                if (column >= args_.shape.intermediate) continue;
                char* const gates = place(args_.preact, row, column);
                Prefetch::copy(gates, kBytes);
                if constexpr (kGated) Prefetch::copy(gates + up_bytes(), kBytes);
            }
        }
    }
    // Where a row of fc1's outputs, or of their gradients, has those of a column.
    __device__ __forceinline__ char* place(char* rows, int64_t row, int column) const {
        const int at = kGated ? args_.shape.glu.gate(column) : column;
        return rows + (row * args_.shape.fc1_rows() + at) * kElementBytes;
    }
    __device__ __forceinline__ int up_bytes() const {
        return args_.shape.glu.to_up * kElementBytes;
    }
    __device__ __forceinline__ void load(int row) {
        if (column_ >= args_.shape.intermediate) return;
        const char* const from = place(args_.preact, row, column_);
        gate_ = *reinterpret_cast<const uint4*>(from);
        if constexpr (kGated) up_ = *reinterpret_cast<const uint4*>(from + up_bytes());
    }
    // Half a warp has a block of a row's gradients.
    __device__ __forceinline__ void quantize(int64_t row, int at, const uint4& packed) const {
        const int width = args_.shape.fc1_rows();
        char* const to = args_.dpre_in_fp8 + row * operand_row_bytes(width);
        quantize8(packed, half_warp(), true, reinterpret_cast<uint2*>(to + at),
                  reinterpret_cast<float*>(to + width) + at / kScaleBlock);
    }
    __device__ __forceinline__ static uint32_t half_warp() {
        return 0xFFFFu << int(threadIdx.x % 32) / kScaleLanes * kScaleLanes;
    }

    template <Activation kAct>
    __device__ __forceinline__ void finish(const WarpRows& rows) {
        const bool is_inside = column_ < args_.shape.intermediate;
#pragma unroll 1
        for (int row = 0; row < kWarpRows; ++row) {
            const int of_all = rows.first + row;
            uint4 gate = gate_, up = up_;
            if (of_all + 1 < end_) load(of_all + 1);
            const float prob = rows.facts.prob(rows.warp, row);
            float dprob = 0.0f;
            if (is_inside) {
                uint4 act = rows.outputs.chunk(row, int(threadIdx.x % 32));  // G, at first
                differentiate<kAct>(prob, gate, up, act, dprob);
                char* const acts = args_.act + int64_t(column_) * kElementBytes;
                *reinterpret_cast<uint4*>(acts + int64_t(of_all) * args_.shape.intermediate *
                                                     kElementBytes) = rounded8(act, half_warp());
                char* const grads = place(args_.dpre, of_all, column_);
                const int at = kGated ? args_.shape.glu.gate(column_) : column_;
                *reinterpret_cast<uint4*>(grads) = gate;
                quantize(of_all, at, gate);
                if constexpr (kGated) {
                    *reinterpret_cast<uint4*>(grads + up_bytes()) = up;
                    quantize(of_all, at + args_.shape.glu.to_up, up);
                }
            }
#pragma unroll
            for (int step = 1; step < 32; step *= 2) dprob += __shfl_xor_sync(~0u, dprob, step);
            if (threadIdx.x % 32 == 0) {
                args_.dprob_partial[int64_t(of_all) * args_.num_n_tiles[0] + tile_n_] = dprob;
            }
        }
    }
    // Makes gradients of pre-activations, and fc2's input of G.
    template <Activation kAct>
    __device__ __forceinline__ void differentiate(
        float prob, uint4& gate, uint4& up, uint4& g_and_act, float& dprob) const {
        auto* const gates = reinterpret_cast<uint32_t*>(&gate);
        auto* const ups = reinterpret_cast<uint32_t*>(&up);
        auto* const gs = reinterpret_cast<uint32_t*>(&g_and_act);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 g = unpack<T>(gs[i]), z = unpack<T>(gates[i]);
            const float2 u = kGated ? unpack<T>(ups[i]) : float2{};
            float dz[2], du[2], act[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float of_g = c ? g.y : g.x, scaled = prob * of_g;
                float value;
                if constexpr (kGated) {
                    const GluValue f =
                        activate_glu<kAct>(c ? z.y : z.x, c ? u.y : u.x, args_.swish);
                    value = f.value;
                    dz[c] = scaled * f.gate_slope;
                    du[c] = scaled * f.up_slope;
                } else {
                    const Activated f = activate<kAct>(c ? z.y : z.x, args_.swish);
                    value = f.value;
                    dz[c] = scaled * f.slope;
                }
                dprob += of_g * value;
                act[c] = value * prob;
            }
            gates[i] = pack<T>(dz[0], dz[1]);
            if constexpr (kGated) ups[i] = pack<T>(du[0], du[1]);
            gs[i] = pack<T>(act[0], act[1]);
        }
    }

    uint4 gate_{}, up_{};
};

}  // namespace flashmoe
