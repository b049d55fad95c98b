// The common part of delivering and reducing: sums of rows, in float32 and in a fixed order, and
// how a CTA's warps share the work.
#pragma once

#include "flashmoe/moe/args.cuh"
#include "flashmoe/protocol/tree.h"
#include "flashmoe/tile/element.cuh"

namespace flashmoe {

// Shared state of the warps of a CTA while they combine; zero when the launch begins.
struct CombineSmem {
    int next_unit;                         // the next unit to be delivered
    uint32_t reduced[kMaxCtaTokens / 32];  // a bit for each of the CTA's tokens: a warp has it
};

enum class Progress { kNone, kSome, kFinished };

template <class T>
__device__ __forceinline__ void add8(float (&sum)[8], const uint4& loaded) {
    float values[8];
    unpack8<T>(loaded, values);
#pragma unroll
    for (int c = 0; c < 8; ++c) sum[c] += values[c];
}

// Sums rows of `chunks` 16-byte chunks into `target`. Each call of next_row gives one more row, or
// null past the last. Each lane has kUnroll chunks of two rows in flight. Scope: one warp.
template <class T, int kUnroll, class Rows>
__device__ __forceinline__ void sum_rows(char* target, int chunks, Rows rows) {
    // The loops are uniform over the warp, since next_row may shuffle.
    for (int first = 0; first < chunks; first += 32 * kUnroll) {
        const int base = first + int(threadIdx.x % 32);
        float sum[kUnroll][8] = {};
        auto next_row = rows();
        for (;;) {
            const uint4* row = next_row();
            if (row == nullptr) break;
            const uint4* next = next_row();
            uint4 loaded[kUnroll], loaded_next[kUnroll];
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                const bool inside = base + u * 32 < chunks;
                loaded[u] = inside ? row[base + u * 32] : uint4{};
                loaded_next[u] = inside and next != nullptr ? next[base + u * 32] : uint4{};
            }
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                add8<T>(sum[u], loaded[u]);
                add8<T>(sum[u], loaded_next[u]);
            }
            if (next == nullptr) break;
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            if (base + u * 32 >= chunks) continue;
            reinterpret_cast<uint4*>(target)[base + u * 32] = pack8<T>(sum[u]);
        }
    }
}

// A node of protocol/tree.h: rounded sums of a lane's chunks.
template <class T, int kUnroll>
struct SumNode {
    uint4 chunks[kUnroll];

    __device__ __forceinline__ static SumNode rounded(const float (&sum)[kUnroll][8]) {
        SumNode node;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) node.chunks[u] = pack8<T>(sum[u]);
        return node;
    }
    __device__ __forceinline__ SumNode operator+(const SumNode& right) const {
        float sum[kUnroll][8];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            unpack8<T>(chunks[u], sum[u]);
            add8<T>(sum[u], right.chunks[u]);
        }
        return rounded(sum);
    }
};

// Sums rows as sum_rows does, but in the order of protocol/tree.h. `rows()` walks a token's rows by
// ascending leaf: count(leaf) is how many that has, and next() the next one, or null past the last.
// A row is loaded while the one before is added. Scope: one warp.
template <class T, class Rows>
__device__ __forceinline__ void sum_rows_in_tree(char* target,
                                                 int chunks,
                                                 int num_leaves,
                                                 Rows rows) {
    constexpr int kUnroll = 2;
    using Node = SumNode<T, kUnroll>;
    // The loops are uniform over the warp, since rows may shuffle.
#pragma unroll 1
    for (int first = 0; first < chunks; first += 32 * kUnroll) {
        const int base = first + int(threadIdx.x % 32);
        auto walk = rows();
        Node ahead{};
        const auto load_next = [&] {
            const uint4* row = walk.next();
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                if (row != nullptr and base + u * 32 < chunks) ahead.chunks[u] = row[base + u * 32];
            }
        };
        load_next();
        const Node sum = protocol::sum_tree<Node>(
            num_leaves,
            [&](int leaf) {
                float sum[kUnroll][8];
#pragma unroll
                for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
                    for (int c = 0; c < 8; ++c) sum[u][c] = protocol::kNoSum;
                }
#pragma unroll 1
                for (int left = walk.count(leaf); left > 0; --left) {
                    const Node row = ahead;
                    load_next();
#pragma unroll
                    for (int u = 0; u < kUnroll; ++u) add8<T>(sum[u], row.chunks[u]);
                }
                return Node::rounded(sum);
            },
            [](const Node& left, const Node& right) { return left + right; });
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            if (base + u * 32 >= chunks) continue;
            reinterpret_cast<uint4*>(target)[base + u * 32] = sum.chunks[u];
        }
    }
}

}  // namespace flashmoe
