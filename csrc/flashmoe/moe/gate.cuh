// The gate: what a router computes, in the launch whose routing it is. Logits are products of
// tensor cores, summed in float32 in a fixed order; a token's choice is its topk largest, of equal
// ones the first.
#pragma once

#include <cute/arch/mma_sm80.hpp>

#include "flashmoe/moe/args.cuh"
#include "flashmoe/tile/element.cuh"

namespace flashmoe {

constexpr int kGateTokens = 16;   // of one warp at a time: M of a product
constexpr int kGateExperts = 64;  // whose sums a warp holds at a time, in products of 8
constexpr int kGateWords = 2;     // of a row that a lane has on their way at a time

template <class T>
using GateProduct = std::conditional_t<std::is_same_v<T, __half>,
                                       cute::SM80_16x8x16_F32F16F16F32_TN,
                                       cute::SM80_16x8x16_F32BF16BF16F32_TN>;

// Logits of the tokens from `first` on. K is summed over, so a lane may bring any of it as long as
// both operands agree: it brings eight neighbours, which one load gives and two products take.
// Scope: one warp.
template <class T>
__device__ __forceinline__ void compute_logits(const LayerArgs& args, int first) {
    const Shape& s = args.shape;
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
    const int row_words = s.hidden * int(sizeof(T)) / int(sizeof(uint4));
    // Rows past the last are the last one's, and their logits go nowhere.
    const auto row_of = [&](const char* rows, int index, int num_rows) {
        return reinterpret_cast<const uint4*>(rows) +
               int64_t(min(index, num_rows - 1)) * row_words + column;
    };
    const uint4* above = row_of(args.x, first + row, args.num_tokens);
    const uint4* below = row_of(args.x, first + row + 8, args.num_tokens);
    const uint4* weight = reinterpret_cast<const uint4*>(args.gate.weight) + column;
#pragma unroll 1
    for (int base = 0; base < s.num_experts; base += kGateExperts) {
        constexpr int kProducts = kGateExperts / 8;
        const auto is_inside = [&](int n) { return base + 8 * n < s.num_experts; };
        float sums[kProducts][4] = {};
#pragma unroll 1
        for (int word = 0; word < row_words; word += 4 * kGateWords) {
            // All are on their way before the first is waited for: a warp is alone with its tokens.
            uint4 a[kGateWords], b[kGateWords], w[kGateWords][kProducts];
#pragma unroll
            for (int i = 0; i < kGateWords; ++i) {
                a[i] = above[word + 4 * i], b[i] = below[word + 4 * i];
#pragma unroll
                for (int n = 0; n < kProducts; ++n) {
                    // In 32 bits, for want of registers.
                    const int of_expert = min(base + 8 * n + row, s.num_experts - 1) * row_words;
                    if (is_inside(n)) w[i][n] = weight[of_expert + word + 4 * i];
                }
            }
#pragma unroll
            for (int i = 0; i < kGateWords; ++i) {
#pragma unroll
                for (int n = 0; n < kProducts; ++n) {
                    if (not is_inside(n)) continue;
                    float(&d)[4] = sums[n];
                    GateProduct<T>::fma(d[0], d[1], d[2], d[3], a[i].x, b[i].x, a[i].y, b[i].y,
                                        w[i][n].x, w[i][n].y, d[0], d[1], d[2], d[3]);
                    GateProduct<T>::fma(d[0], d[1], d[2], d[3], a[i].z, b[i].z, a[i].w, b[i].w,
                                        w[i][n].z, w[i][n].w, d[0], d[1], d[2], d[3]);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < kGateExperts / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = first + row + i / 2 * 8;
                const int expert = base + 8 * n + 2 * column + i % 2;
                if (token < args.num_tokens and expert < s.num_experts) {
                    args.gate.logits[int64_t(token) * s.num_experts + expert] = sums[n][i];
                }
            }
        }
    }
}

__device__ __forceinline__ float sum_of_warp(float value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

// Of a token's logits the next after (value, expert), the larger first, of equal ones the first.
// NaN comes before everything, so that it is chosen and refused. Scope: one warp; the same for all.
__device__ __forceinline__ void next_choice(const float* logits,
                                            int num_experts,
                                            float& value,
                                            int& expert) {
    float best = -INFINITY;
    int best_expert = INT32_MAX;
    for (int e = int(threadIdx.x % 32); e < num_experts; e += 32) {
        const float logit = isnan(logits[e]) ? INFINITY : logits[e];
        const bool is_left = logit < value or (logit == value and e > expert);
        if (is_left and (logit > best or best_expert == INT32_MAX)) best = logit, best_expert = e;
    }
    for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(~0u, best, step);
        const int other_expert = __shfl_xor_sync(~0u, best_expert, step);
        if (other > best or (other == best and other_expert < best_expert)) {
            best = other, best_expert = other_expert;
        }
    }
    value = best, expert = best_expert;
}

// Turns a token's logits into its row of probabilities and of the map. Scope: one warp.
__device__ __forceinline__ void choose_experts(const LayerArgs& args, int token) {
    const Shape& s = args.shape;
    const Gate& gate = args.gate;
    const int lane = threadIdx.x % 32;
    const int64_t begin = int64_t(token) * s.num_experts;
    const float* logits = gate.logits + begin;
    float value = INFINITY, largest = 0.0f;
    int expert = -1, own_expert = 0;
    for (int k = 0; k < s.topk; ++k) {
        next_choice(logits, s.num_experts, value, expert);
        if (k == 0) largest = value;
        if (k == lane) own_expert = expert;
    }
    const auto score = [&](int e) {
        return gate.score == Score::kSigmoid ? 1.0f / (1.0f + expf(-logits[e]))
                                             : expf(logits[e] - largest);
    };
    const bool is_choice = lane < s.topk;
    const float own = is_choice ? score(own_expert) : 0.0f;
    float total = own;
    if (gate.score == Score::kSoftmax) {
        total = 0.0f;
        for (int e = lane; e < s.num_experts; e += 32) total += score(e);
    }
    total = sum_of_warp(total);
    if (gate.score == Score::kSigmoid) total = s.topk > 1 ? total + 1e-20f : 1.0f;

    for (int e = lane; e < s.num_experts; e += 32) {
        gate.probs[begin + e] = 0.0f;
        gate.routing_map[begin + e] = 0;
    }
    __syncwarp();
    if (is_choice) {
        gate.probs[begin + own_expert] = own / total * gate.scaling_factor;
        gate.routing_map[begin + own_expert] = 1;
    }
}

// Routes the kGateTokens tokens from `first` on, as far as there are. Scope: one warp.
__device__ __forceinline__ void gate_tokens(const LayerArgs& args, int first) {
    if (args.gate.dtype == Dtype::kFloat16) {
        compute_logits<__half>(args, first);
    } else {
        compute_logits<__nv_bfloat16>(args, first);
    }
    __syncwarp();
    const int end = min(first + kGateTokens, args.num_tokens);
    for (int token = first; token < end; ++token) choose_experts(args, token);
    __syncwarp();
}

}  // namespace flashmoe
