// The work of finishers on outputs. GEMM0's go through the activation and the routing weight in the
// forward, and through their derivatives in the backward; GEMM1's just leave. A warp has 16 rows of
// a tile, and a lane eight columns of a row at a time. A functor is made for a processor's rows of
// a tile, and called for its warps one after another.
#pragma once

#include "flashmoe/moe/args.cuh"
#include "flashmoe/tile/activation.cuh"
#include "flashmoe/tile/handover.cuh"
#include "flashmoe/tile/quantize.cuh"

namespace flashmoe {

// One chunk in each of some rows that follow one another. The first address is worked out once, in
// 64 bits, and the next row's is one addition.
class Chunks {
 public:
    __device__ __forceinline__ Chunks(char* rows, int64_t first_row, int width, int column)
        : first_(rows + (first_row * width + column) * kElementBytes),
          row_bytes_(width * kElementBytes) {}
    __device__ __forceinline__ uint4& operator[](int row) const {
        return *reinterpret_cast<uint4*>(first_ + row * row_bytes_);
    }

 private:
    char* first_;
    int row_bytes_;
};

// The facts that a finisher needs of its processor's 64 rows. A lane loads it for two rows, before
// the outputs are there.
class RowFacts {
 public:
    __device__ __forceinline__ RowFacts(const Plan& plan, int first_row) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = first_row + i * 32 + int(threadIdx.x % 32);
            prob_[i] = plan.row_prob[row];
            meta_[i] = *reinterpret_cast<const uint2*>(plan.row_meta + row);
        }
    }
    // The probability of a row, which a processor's warp counts among its own. Scope: one warp.
    __device__ __forceinline__ float prob(int warp, int row) const {
        return __shfl_sync(~0u, warp < 2 ? prob_[0] : prob_[1], warp % 2 * kWarpRows + row);
    }
    __device__ __forceinline__ RowMeta meta(int warp, int row) const {
        const uint2 words = {warp < 2 ? meta_[0].x : meta_[1].x,
                             warp < 2 ? meta_[0].y : meta_[1].y};
        return shuffled(words, warp % 2 * kWarpRows + row);
    }

 private:
    float prob_[2];
    uint2 meta_[2];  // words, which stay in registers where one of two is chosen
};

// The outputs that one processor warp hands over: its rows of the tile's outputs.
struct WarpRows {
    int first;  // in the row buffers
    int warp;
    const OutputsView& outputs;
    const RowFacts& facts;
};

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
        case Activation::kSwish:
            return visit(std::integral_constant<Activation, Activation::kSwish>{});
    }
}

// Two chunks in which gate and up values of eight columns alternate: makes one of all gate values
// of the first, one of all up values of the second.
__device__ __forceinline__ void unpair(uint4& first, uint4& second) {
    const uint4 f = first, s = second;
    first = {__byte_perm(f.x, f.y, 0x5410), __byte_perm(f.z, f.w, 0x5410),
             __byte_perm(s.x, s.y, 0x5410), __byte_perm(s.z, s.w, 0x5410)};
    second = {__byte_perm(f.x, f.y, 0x7632), __byte_perm(f.z, f.w, 0x7632),
              __byte_perm(s.x, s.y, 0x7632), __byte_perm(s.z, s.w, 0x7632)};
}

// The way back.
__device__ __forceinline__ void pair(uint4& gate, uint4& up) {
    const uint4 g = gate, u = up;
    gate = {__byte_perm(g.x, u.x, 0x5410), __byte_perm(g.x, u.x, 0x7632),
            __byte_perm(g.y, u.y, 0x5410), __byte_perm(g.y, u.y, 0x7632)};
    up = {__byte_perm(g.z, u.z, 0x5410), __byte_perm(g.z, u.z, 0x7632),
          __byte_perm(g.w, u.w, 0x5410), __byte_perm(g.w, u.w, 0x7632)};
}

// act(gate) * up * prob, or act(z) * prob. z has been rounded to 16 bits, as every unfused path
// does, so that the backward differentiates exactly what the forward computed.
template <class T, bool kGated>
class ActivateRows {
 public:
    __device__ __forceinline__ ActivateRows(const LayerArgs& args, const TileInfo& tile, int)
        : args_(args), tile_n_(tile.n) {}
    __device__ __forceinline__ void operator()(const WarpRows& rows) const {
        with_activation(args_.activation, [&](auto activation) { finish<activation()>(rows); });
    }

 private:
    template <Activation kAct>
    __device__ __forceinline__ void finish(const WarpRows& rows) const {
        constexpr int kChunks = kGated ? kRowChunks / 2 : kRowChunks, kRowsAtOnce = 32 / kChunks;
        constexpr int kBatch = kIsFp8 ? 2 : 4;  // chunks of a lane whose arithmetic overlaps
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
            if constexpr (kIsFp8) {
                char* act = args_.act + first_row * operand_row_bytes(intermediate);
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    auto* scales = reinterpret_cast<float*>(act + intermediate);
                    quantize8(gate[i], ~0u, is_inside, reinterpret_cast<uint2*>(act + column),
                              scales + column / kScaleBlock);
                    act += kRowsAtOnce * operand_row_bytes(intermediate);
                }
            } else if (is_inside) {
                const Chunks acts(args_.act, first_row, intermediate, column);
#pragma unroll
                for (int i = 0; i < kBatch; ++i) acts[i * kRowsAtOnce] = gate[i];
            }
        }
    }

    const LayerArgs& args_;
    int tile_n_;
};

// The sums over the warp of four values of each lane: lane i < 4 gets the ith.
__device__ __forceinline__ float sum_four(const float (&values)[4]) {
    const bool is_odd = threadIdx.x & 1, is_high = threadIdx.x & 2;
    float pairs[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float kept = is_odd ? values[2 * i + 1] : values[2 * i];
        const float given = is_odd ? values[2 * i] : values[2 * i + 1];
        pairs[i] = kept + __shfl_xor_sync(~0u, given, 1);
    }
    float sum =
        (is_high ? pairs[1] : pairs[0]) + __shfl_xor_sync(~0u, is_high ? pairs[0] : pairs[1], 2);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
}

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

// From G = dY W2 (unscaled): the gradient of fc1's output, fc2's input again, and this tile's share
// of the probabilities' gradient, <G, act>; there is no division by the probability anywhere. A
// processor's warps follow one another, and pre-activations are loaded four rows ahead across them,
// the first before there are outputs. With kIsRounded fc2's input is what it stands for in FP8.
template <class T, bool kGated, bool kIsRounded = false>
class DifferentiateRows {
 public:
    __device__ __forceinline__ DifferentiateRows(const LayerArgs& args,
                                                 const TileInfo& tile,
                                                 int first_row)
        : args_(args),
          tile_n_(tile.n),
          column_((tile.n * kRowChunks + int(threadIdx.x % 32)) * 8),
          end_(first_row + kProcessorWarps * kWarpRows) {
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

    const LayerArgs& args_;
    Preacts<kGated> preacts_;
    int tile_n_, column_, end_;
};

// GEMM1: a token's only row here is its share, and goes to the token's rank, tile by tile; other
// rows wait in the result buffer to be summed. Scope: one warp, a lane for each row.
__device__ __forceinline__ void store_results(const LayerArgs& args,
                                              const TileInfo& tile,
                                              const WarpRows& rows) {
    const int row = int(threadIdx.x) % kWarpRows, hidden = args.shape.hidden;
    const int column = tile.n * BLOCK_N;
    const RowMeta meta = rows.facts.meta(rows.warp, row);
    if (threadIdx.x % 32 >= kWarpRows) return;
    char* target = meta.is_alone()
                       ? target_of(args, meta)
                       : args.result + int64_t(rows.first + row) * hidden * kElementBytes;
    cute::SM90_BULK_COPY_S2G::copy(rows.outputs.at(row), target + column * kElementBytes,
                                   kElementBytes * min(BLOCK_N, hidden - column));
}

}  // namespace flashmoe
