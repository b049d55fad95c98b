// The work of finishers on GEMM0's outputs in kernels that have no register left for rows that
// overlap: forwards in FP8, their backwards, and backwards with spare slots. Results are those of
// moe/expert.cuh, bit by bit, but the arithmetic of some rows ends before that of the next begins.
#pragma once

#include "flashmoe/moe/expert.cuh"

namespace flashmoe {

// Computes what ActivateRows computes, for forwards in FP8.
template <class T, bool kGated>
class ActivateRowsSparing {
 public:
    __device__ __forceinline__ ActivateRowsSparing(const LayerArgs& args, const TileInfo& tile, int)
        : args_(args), tile_n_(tile.n) {}
    __device__ __forceinline__ void operator()(const WarpRows& rows) const {
        with_activation(args_.activation, [&](auto activation) { finish<activation()>(rows); });
    }

 private:
    template <Activation kAct>
    __device__ __forceinline__ void finish(const WarpRows& rows) const {
        constexpr int kChunks = kGated ? kRowChunks / 2 : kRowChunks, kRowsAtOnce = 32 / kChunks;
        constexpr int kBatch = 2;  // chunks of a lane whose arithmetic overlaps
        const int lane = threadIdx.x % 32, chunk = lane % kChunks;
        const int intermediate = args_.shape.intermediate, fc1_rows = args_.shape.fc1_rows();
        const int column = (tile_n_ * kChunks + chunk) * 8;
        const bool is_inside = column < intermediate;
        const GluRows& glu = args_.shape.glu;
        const int gate_chunk = glu.gate(chunk * 8) / 8, up_chunk = gate_chunk + glu.tile_to_up / 8;
#pragma unroll 1
        for (int first = lane / kChunks; first < kWarpRows; first += kBatch * kRowsAtOnce) {
            uint4 gate[kBatch], up[kBatch];
            float prob[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int row = first + i * kRowsAtOnce;
                gate[i] = rows.outputs.chunk(row, kGated ? gate_chunk : chunk);
                if constexpr (kGated) up[i] = rows.outputs.chunk(row, up_chunk);
                prob[i] = rows.facts.prob(rows.warp, row);
            }
            const int64_t first_row = rows.first + first;
            if (is_inside and args_.preact != nullptr) {
                const int at = kGated ? glu.gate(column) : column;
                const Chunks gates(args_.preact, first_row, fc1_rows, at);
                const Chunks ups(args_.preact, first_row, fc1_rows, at + glu.to_up);
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    gates[i * kRowsAtOnce] = gate[i];
                    if constexpr (kGated) ups[i * kRowsAtOnce] = up[i];
                }
            }
            if (kGated and glu.is_paired) {
#pragma unroll
                for (int i = 0; i < kBatch; ++i) unpair(gate[i], up[i]);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                float z[8], u[8];
                unpack8<T>(gate[i], z);
                if constexpr (kGated) unpack8<T>(up[i], u);
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    if constexpr (kGated) {
                        z[c] = activate_glu<kAct>(z[c], u[c], args_.swish).value * prob[i];
                    } else {
                        z[c] = activate<kAct>(z[c], args_.swish).value * prob[i];
                    }
                }
                gate[i] = pack8<T>(z);
            }
            char* act = args_.act + first_row * operand_row_bytes(intermediate);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                auto* scales = reinterpret_cast<float*>(act + intermediate);
                quantize8(gate[i], ~0u, is_inside, reinterpret_cast<uint2*>(act + column),
                          scales + column / kScaleBlock);
                act += kRowsAtOnce * operand_row_bytes(intermediate);
            }
        }
    }

    const LayerArgs& args_;
    int tile_n_;
};

// A lane's chunks of four rows of pre-activations.
template <bool kGated>
struct Preacts {
    static constexpr int kRows = 4;
    uint4 gate[kRows] = {};
    uint4 up[kGated ? kRows : 1] = {};

    __device__ __forceinline__ void load(const LayerArgs& args, int64_t first, int column) {
        const int fc1_rows = args.shape.fc1_rows();
        if (column >= args.shape.intermediate) return;
        const GluRows& glu = args.shape.glu;
        const int at = kGated ? glu.gate(column) : column;
        const Chunks gates(args.preact, first, fc1_rows, at);
        const Chunks ups(args.preact, first, fc1_rows, at + glu.to_up);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            gate[i] = gates[i];
            if constexpr (kGated) up[i] = ups[i];
        }
    }
};

// Computes what DifferentiateRows computes, for backwards of forwards in FP8 and with spare slots.
// Pre-activations are loaded four rows ahead. With kIsRounded fc2's input is what it stands for in
// FP8.
template <class T, bool kGated, bool kIsRounded = false>
class DifferentiateRowsSparing : LaneOfTile {
 public:
    __device__ __forceinline__ DifferentiateRowsSparing(const LayerArgs& args,
                                                        const TileInfo& tile,
                                                        int first_row)
        : LaneOfTile(args, tile, first_row) {
        preacts_.load(args, first_row, column_);
    }
    __device__ __forceinline__ void operator()(const WarpRows& rows) {
        with_activation(args_.activation, [&](auto activation) { finish<activation()>(rows); });
    }

 private:
    template <Activation kAct>
    __device__ __forceinline__ void finish(const WarpRows& rows) {
        constexpr int kBatch = Preacts<kGated>::kRows;
        const int lane = threadIdx.x % 32;
        const int intermediate = args_.shape.intermediate, fc1_rows = args_.shape.fc1_rows();
        const bool is_inside = column_ < intermediate;
#pragma unroll 1
        for (int first = 0; first < kWarpRows; first += kBatch) {
            const int first_of_next = rows.first + first + kBatch;
            Preacts<kGated> next;
            if (first_of_next < end_) next.load(args_, first_of_next, column_);
            const int64_t first_row = rows.first + first;
            const Chunks acts(args_.act, first_row, intermediate, column_);
            const GluRows& glu = args_.shape.glu;
            const int at = kGated ? glu.gate(column_) : column_;
            const Chunks gates(args_.dpre, first_row, fc1_rows, at);
            const Chunks ups(args_.dpre, first_row, fc1_rows, at + glu.to_up);
            float dprobs[kBatch] = {};
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int row = first + i;
                const float prob = rows.facts.prob(rows.warp, row);
                if (not is_inside) continue;
                float g[8], z[8], u[8], act[8];
                unpack8<T>(rows.outputs.chunk(row, lane), g);
                if constexpr (kGated) {
                    if (glu.is_paired) unpair(preacts_.gate[i], preacts_.up[i]);
                    unpack8<T>(preacts_.up[i], u);
                }
                unpack8<T>(preacts_.gate[i], z);
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    const float scaled = prob * g[c];
                    float value;
                    if constexpr (kGated) {
                        const GluValue f = activate_glu<kAct>(z[c], u[c], args_.swish);
                        value = f.value;
                        z[c] = scaled * f.gate_slope;
                        u[c] = scaled * f.up_slope;
                    } else {
                        const Activated f = activate<kAct>(z[c], args_.swish);
                        value = f.value;
                        z[c] = scaled * f.slope;
                    }
                    dprobs[i] += g[c] * value;
                    act[c] = value * prob;
                }
                if constexpr (kIsRounded) {
                    const uint32_t lanes = 0xFFFFu << lane / kScaleLanes * kScaleLanes;
                    acts[i] = rounded8(pack8<T>(act), lanes);
                } else {
                    acts[i] = pack8<T>(act);
                }
                uint4 dgate = pack8<T>(z);
                if constexpr (kGated) {
                    uint4 dup = pack8<T>(u);
                    if (glu.is_paired) pair(dgate, dup);
                    ups[i] = dup;
                }
                gates[i] = dgate;
            }
            const float dprob = sum_four(dprobs);
            if (lane < kBatch) {
                args_.dprob_partial[(first_row + lane) * args_.num_n_tiles[0] + tile_n_] = dprob;
            }
            preacts_ = next;
        }
    }

    Preacts<kGated> preacts_;
};

}  // namespace flashmoe
