// The fused router: it routes in the launch that its routing is for. Logits are products of tensor
// cores, summed in float32 in a fixed order. A token chooses the experts of its topk largest
// logits, among equal ones the first.
#pragma once

#include <cute/arch/mma_sm80.hpp>

#include "flashmoe/moe/args.cuh"
#include "flashmoe/tile/element.cuh"

namespace flashmoe {

constexpr int kRouterTokens = 8;    // a warp chooses for so many at a time: half a product's M
constexpr int kRouterExperts = 32;  // a warp computes so many logits at a time, in products of 8
constexpr int kRouterWords = 4;     // 16-byte words of a row that a lane has in flight

template <class T>
using RouterProduct = std::conditional_t<std::is_same_v<T, __half>,
                                         cute::SM80_16x8x16_F32F16F16F32_TN,
                                         cute::SM80_16x8x16_F32BF16BF16F32_TN>;

// Computes the logits of some tokens from `above` and as many from `below` on, for the experts from
// `first_expert` on. K is summed over, so a lane may bring any part of it as long as both operands
// agree: it brings eight neighbours, which one load gives and two products take. Scope: one warp.
template <class T>
__device__ __forceinline__ void compute_logits(const LayerArgs& args,
                                               int above,
                                               int below,
                                               int first_expert) {
    constexpr int kProducts = kRouterExperts / 8;
    const Shape& s = args.shape;
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
    const int row_words = s.hidden * int(sizeof(T)) / int(sizeof(uint4));
    // Rows past the last one repeat it, and their logits go nowhere.
    const auto row_of = [&](const void* rows, int index, int num_rows) {
        return static_cast<const uint4*>(rows) + int64_t(min(index, num_rows - 1)) * row_words +
               column;
    };
    const uint4* token[2] = {row_of(args.x, above + row, args.num_tokens),
                             row_of(args.x, below + row, args.num_tokens)};
    const uint4* expert[kProducts];
#pragma unroll
    for (int n = 0; n < kProducts; ++n) {
        expert[n] = row_of(args.router.weight, first_expert + 8 * n + row, s.num_experts);
    }
    float sums[kProducts][4] = {};
#pragma unroll 1
    for (int word = 0; word < row_words; word += 4 * kRouterWords) {
        // All loads are issued before the first is waited for, since few warps have tokens.
        uint4 a[kRouterWords][2], b[kRouterWords][kProducts];
#pragma unroll
        for (int i = 0; i < kRouterWords; ++i) {
            const int at = word + 4 * i;
            const auto load = [&](const uint4* of) { return at < row_words ? of[at] : uint4{}; };
            a[i][0] = load(token[0]), a[i][1] = load(token[1]);
#pragma unroll
            for (int n = 0; n < kProducts; ++n) b[i][n] = load(expert[n]);
        }
#pragma unroll
        for (int i = 0; i < kRouterWords; ++i) {
            const auto& [x, y] = a[i];
#pragma unroll
            for (int n = 0; n < kProducts; ++n) {
                float(&d)[4] = sums[n];
                RouterProduct<T>::fma(d[0], d[1], d[2], d[3], x.x, y.x, x.y, y.y, b[i][n].x,
                                      b[i][n].y, d[0], d[1], d[2], d[3]);
                RouterProduct<T>::fma(d[0], d[1], d[2], d[3], x.z, y.z, x.w, y.w, b[i][n].z,
                                      b[i][n].w, d[0], d[1], d[2], d[3]);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < kProducts; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int of_token = (i < 2 ? above : below) + row;
            const int of_expert = first_expert + 8 * n + 2 * column + i % 2;
            if (of_token < args.num_tokens and of_expert < s.num_experts) {
                args.router.logits[int64_t(of_token) * s.num_experts + of_expert] = sums[n][i];
            }
        }
    }
}

constexpr int kChoosers = 4;  // lanes that choose for one token
static_assert(kRouterTokens * kChoosers == 32);

// A logit and its expert, in the order of the choice: the larger logit first, and among equal ones
// the first expert. NaN comes before everything, so that it is chosen and refused.
struct Choice {
    uint64_t key = ~uint64_t(0);  // before all

    Choice() = default;
    __device__ __forceinline__ Choice(float logit, int expert) {
        const uint32_t bits = __float_as_uint(logit + 0.0f);  // makes -0 the same as 0
        const uint32_t ordered =
            isnan(logit) ? ~0u : bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
        key = uint64_t(ordered) << 32 | uint32_t(INT32_MAX - expert);
    }
    __device__ __forceinline__ int expert() const { return INT32_MAX - int(uint32_t(key)); }
};

// The token's next best choice after `last`. Scope: a token's lanes, which all get the same.
__device__ __forceinline__ Choice next_choice(const float* logits, int num_experts, Choice last) {
    Choice next;
    next.key = 0;
#pragma unroll 8  // so that as many loads are on their way at once
    for (int e = int(threadIdx.x) % kChoosers; e < num_experts; e += kChoosers) {
        const Choice choice(logits[e], e);
        if (choice.key < last.key) next.key = max(next.key, choice.key);
    }
#pragma unroll
    for (int step = 1; step < kChoosers; step *= 2) {
        next.key = max(next.key, __shfl_xor_sync(~0u, next.key, step));
    }
    return next;
}

// Turns the logits of up to kRouterTokens tokens from `first` on into their rows of probabilities
// and of the map. Scope: one warp.
__device__ __forceinline__ void choose_experts(const LayerArgs& args, int first) {
    const Shape& s = args.shape;
    const Router& router = args.router;
    const int lane = threadIdx.x % 32, nth = lane % kChoosers;
    const int num_tokens = min(kRouterTokens, args.num_tokens - first);
    const bool is_token = lane / kChoosers < num_tokens;
    const int64_t begin = int64_t(first) * s.num_experts;
    const int64_t row = begin + (is_token ? lane / kChoosers : 0) * s.num_experts;
    const float* logits = router.logits + row;
    for (int i = lane; i < num_tokens * s.num_experts; i += 32) {
        router.probs[begin + i] = 0.0f;
        router.routing_map[begin + i] = 0;
    }
    // The experts that this lane scores: every kChoosers-th choice, with the last one in the lowest
    // bits.
    constexpr int kExpertBits = 64 * kChoosers / kMaxTopk;
    static_assert(kMaxLocalExperts * kMaxRanks <= 1 << kExpertBits);
    uint64_t own = 0;
    Choice last;
    float largest = 0.0f;
#pragma unroll 1
    for (int k = 0; k < s.topk; ++k) {
        last = next_choice(logits, s.num_experts, last);
        if (k == 0) largest = logits[last.expert()];
        if (k % kChoosers == nth) own = own << kExpertBits | uint64_t(last.expert());
    }
    const auto score = [&](int e) {
        return router.score == Score::kSigmoid ? 1.0f / (1.0f + expf(-logits[e]))
                                               : expf(logits[e] - largest);
    };
    const auto for_own = [&](auto visit) {
        uint64_t left = own;
#pragma unroll 1
        for (int k = nth; k < s.topk; k += kChoosers, left >>= kExpertBits) {
            visit(int(left & ((1u << kExpertBits) - 1)));
        }
    };
    float total = 0.0f;
    if (router.score == Score::kSoftmax) {
        for (int e = nth; e < s.num_experts; e += kChoosers) total += score(e);
    } else {
        for_own([&](int e) { total += score(e); });
    }
#pragma unroll
    for (int step = 1; step < kChoosers; step *= 2) total += __shfl_xor_sync(~0u, total, step);
    if (router.score == Score::kSigmoid) total = s.topk > 1 ? total + 1e-20f : 1.0f;
    __syncwarp();  // the rows are zeros
    if (is_token) {
        for_own([&](int e) {
            router.probs[row + e] = score(e) / total * router.scaling_factor;
            router.routing_map[row + e] = 1;
        });
    }
    __syncwarp();
}

}  // namespace flashmoe
