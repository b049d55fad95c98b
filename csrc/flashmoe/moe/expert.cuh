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
    // The chunks that lie some columns further in the same rows.
    __device__ __forceinline__ Chunks after(int columns) const {
        Chunks further = *this;
        further.first_ += columns * kElementBytes;
        return further;
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
        with_activation(args_.activation, [&](auto activation) {
            if (kGated and args_.shape.glu.is_paired) return finish<activation(), true>(rows);
            finish<activation(), false>(rows);
        });
    }

 private:
    template <Activation kAct, bool kIsPaired>
    __device__ __forceinline__ void finish(const WarpRows& rows) const {
        constexpr int kChunks = kGated ? kRowChunks / 2 : kRowChunks, kRowsAtOnce = 32 / kChunks;
        constexpr int kBatch = 4;  // chunks of a lane whose arithmetic overlaps
        constexpr int kUps = kGated ? kBatch : 1, kRows = kBatch * kRowsAtOnce;
        const int lane = threadIdx.x % 32, chunk = lane % kChunks;
        const int intermediate = args_.shape.intermediate, fc1_rows = args_.shape.fc1_rows();
        const int column = (tile_n_ * kChunks + chunk) * 8;
        const bool is_inside = column < intermediate;
        const bool leaves_preacts = is_inside and args_.preact != nullptr;
        const GluRows& glu = args_.shape.glu;
        const SwishTerms& terms = args_.swish;
        const int gate_chunk = glu.gate(chunk * 8) / 8, up_chunk = gate_chunk + glu.tile_to_up / 8;
        const int at = kGated ? glu.gate(column) : column;
        const Chunks gates(args_.preact, rows.first + lane / kChunks, fc1_rows, at);
        const Chunks ups = gates.after(glu.to_up);
        const Chunks acts(args_.act, rows.first + lane / kChunks, intermediate, column);
#pragma unroll 1
        for (int from = 0; from < kWarpRows; from += kRows) {
            const int first = from + lane / kChunks;
            uint4 gate[kBatch], up[kUps];
            float prob[kBatch], z[kBatch][8], exponential[kBatch][8], reciprocal[kBatch][8];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int row = first + i * kRowsAtOnce, of = from + i * kRowsAtOnce;
                gate[i] = rows.outputs.chunk(row, kGated ? gate_chunk : chunk);
                if constexpr (kGated) up[i] = rows.outputs.chunk(row, up_chunk);
                prob[i] = rows.facts.prob(rows.warp, row);
                ptx::store_if(leaves_preacts, gates[of], gate[i]);
                if constexpr (kGated) ptx::store_if(leaves_preacts, ups[of], up[i]);
                if constexpr (kIsPaired) unpair(gate[i], up[i]);
                unpack8<T>(gate[i], z[i]);
            }
            const auto activated_at = [&](int i, int c) {
                return kGated ? activated_gate<kAct>(z[i][c], terms) : z[i][c];
            };
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    exponential[i][c] = exponential_of<kAct>(activated_at(i, c), terms);
                }
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    reciprocal[i][c] = reciprocal_of<kAct>(activated_at(i, c), exponential[i][c]);
                }
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                float u[8];
                if constexpr (kGated) unpack8<T>(up[i], u);
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    const Activated f = activated<kAct>(activated_at(i, c), exponential[i][c],
                                                        reciprocal[i][c], terms);
                    float value = f.value;
                    if constexpr (kGated) value = glu_of<kAct>(f, z[i][c], u[c], terms).value;
                    z[i][c] = value * prob[i];
                }
                gate[i] = pack8<T>(z[i]);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                ptx::store_if(is_inside, acts[from + i * kRowsAtOnce], gate[i]);
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

// Where a lane has its chunks of fc1's outputs, or of their gradients, in a row and those after it.
template <bool kGated>
struct PreactChunks {
    Chunks gates, ups;

    __device__ __forceinline__
    PreactChunks(const LayerArgs& args, char* rows, int64_t first, int column)
        : gates(rows, first, args.shape.fc1_rows(), kGated ? args.shape.glu.gate(column) : column),
          ups(gates.after(args.shape.glu.to_up)) {}
};

// A lane's columns of a tile, and the rows of its processor, for finishers of derivatives.
class LaneOfTile {
 protected:
    __device__ __forceinline__ LaneOfTile(const LayerArgs& args,
                                          const TileInfo& tile,
                                          int first_row)
        : args_(args),
          tile_n_(tile.n),
          column_((tile.n * kRowChunks + int(threadIdx.x % 32)) * 8),
          end_(first_row + kProcessorWarps * kWarpRows) {}

    const LayerArgs& args_;
    int tile_n_, column_, end_;
};

// From G = dY W2 (unscaled): the gradient of fc1's output, fc2's input again, and this tile's share
// of the probabilities' gradient, <G, act>; there is no division by the probability anywhere. A
// processor's warps follow one another, and pre-activations are loaded four rows ahead across them,
// the first before there are outputs.
//
// A row's exponentials are begun one after another, and then its reciprocals, which ptxas would
// otherwise have the warp wait for two or three at a time. Lanes past the last column do as the
// last one does, and store nothing, so that rows need no branch and registers no zeros.
template <class T, bool kGated>
class DifferentiateRows {
 public:
    __device__ __forceinline__ DifferentiateRows(const LayerArgs& args,
                                                 const TileInfo& tile,
                                                 int first_row)
        : args_(args), tile_n_(tile.n) {
        load(first_row, preacts_[0]);
        load(first_row + kPair, preacts_[1]);
    }
    __device__ __forceinline__ void operator()(const WarpRows& rows) {
        with_activation(args_.activation, [&](auto activation) {
            if (kGated and args_.shape.glu.is_paired) return finish<activation(), true>(rows);
            finish<activation(), false>(rows);
        });
    }

 private:
    static constexpr int kPair = 2, kRows = 2 * kPair;  // loaded at once, and summed at once
    struct Preacts {
        uint4 gate[kPair];
        uint4 up[kGated ? kPair : 1];
    };

    __device__ __forceinline__ int column() const {
        return (tile_n_ * kRowChunks + int(threadIdx.x % 32)) * 8;
    }
    __device__ __forceinline__ void load(int row, Preacts& preacts) const {
        const PreactChunks<kGated> from(args_, args_.preact, row,
                                        min(column(), args_.shape.intermediate - 8));
#pragma unroll
        for (int i = 0; i < kPair; ++i) {
            preacts.gate[i] = from.gates[i];
            if constexpr (kGated) preacts.up[i] = from.ups[i];
        }
        __syncwarp();  // ptxas would move the loads to after the products
    }

    template <Activation kAct, bool kIsPaired>
    __device__ __forceinline__ void finish(const WarpRows& rows) {
        const int lane = threadIdx.x % 32;
        const bool is_inside = column() < args_.shape.intermediate;
        const SwishTerms& terms = args_.swish;
        // The processor's last rows are loaded again past its end.
        const int last = rows.first + (kProcessorWarps - rows.warp) * kWarpRows - kPair;
#pragma unroll 1
        for (int first = 0; first < kWarpRows; first += kRows) {
            const int first_row = rows.first + first;
            Preacts next;
            load(min(first_row + kRows, last), next);
            const PreactChunks<kGated> grads(args_, args_.dpre, first_row, column());
            const Chunks acts(args_.act, first_row, args_.shape.intermediate, column());
            float dprobs[kRows];
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                Preacts& preacts = preacts_[i / kPair];
                uint4& gate = preacts.gate[i % kPair];
                const float prob = rows.facts.prob(rows.warp, first + i);
                dprobs[i] = 0.0f;
                float g[8], z[8], u[8], exponential[8], reciprocal[8], act[8];
                if constexpr (kGated) {
                    uint4& up = preacts.up[i % kPair];
                    if constexpr (kIsPaired) unpair(gate, up);
                    unpack8<T>(up, u);
                }
                unpack8<T>(gate, z);
                unpack8<T>(rows.outputs.chunk(first + i, lane), g);
                const auto activated_at = [&](int c) {
                    return kGated ? activated_gate<kAct>(z[c], terms) : z[c];
                };
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    exponential[c] = exponential_of<kAct>(activated_at(c), terms);
                }
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    reciprocal[c] = reciprocal_of<kAct>(activated_at(c), exponential[c]);
                }
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    const Activated f =
                        activated<kAct>(activated_at(c), exponential[c], reciprocal[c], terms);
                    const float scaled = prob * g[c];
                    float value = f.value;
                    if constexpr (kGated) {
                        const GluValue glu = glu_of<kAct>(f, z[c], u[c], terms);
                        value = glu.value;
                        z[c] = scaled * glu.gate_slope;
                        u[c] = scaled * glu.up_slope;
                    } else {
                        z[c] = scaled * f.slope;
                    }
                    dprobs[i] += g[c] * value;
                    act[c] = value * prob;
                }
                uint4 input = pack8<T>(act), dgate = pack8<T>(z), dup{};
                if constexpr (kGated) {
                    dup = pack8<T>(u);
                    if constexpr (kIsPaired) pair(dgate, dup);
                }
                ptx::store_if(is_inside, acts[i], input);
                ptx::store_if(is_inside, grads.gates[i], dgate);
                if constexpr (kGated) ptx::store_if(is_inside, grads.ups[i], dup);
                if (not is_inside) dprobs[i] = 0.0f;
                if (i == kPair - 1) {
                    load(min(first_row + kRows + kPair, last), preacts_[0]);
                }
            }
            preacts_[1] = preacts_[0];
            preacts_[0] = next;
            const float dprob = sum_four(dprobs);
            if (lane < kRows) {
                const int64_t place = int64_t(first_row + lane) * args_.num_n_tiles[0] + tile_n_;
                args_.dprob_partial[place] = dprob;
            }
        }
    }

    const LayerArgs& args_;
    Preacts preacts_[2];  // the next two pairs of rows
    int tile_n_;
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
