// The sizes of one layer at run time, and the tile that everything is aligned to at compile time.
#pragma once

#include <cstdint>

namespace flashmoe {

constexpr int BLOCK_M = 128;     // rows of a tile; expert segments start at multiples of it
constexpr int BLOCK_N = 256;     // columns of a tile
constexpr int kHalfRows = 64;    // of a tile's rows, which one processor multiplies
constexpr int BLOCK_K = 64;      // 128 bytes of bf16: one swizzle row
constexpr int kBoxRows = 128;    // of M or N in one TMA box, with BLOCK_K of K: 16 KiB
constexpr int kClusterSize = 2;  // CTAs that share the operands which both need
constexpr int kMaxRanks = 8;
constexpr int kMaxTopk = 16;
constexpr int kMaxCtas = 256;
constexpr int kMaxLocalExperts = 512;
constexpr int kMaxCtaTokens = 1024;  // of its own rank, that a CTA reduces

// Mirrors FlashMoEDtype.
enum class Dtype : int { kFloat32, kBFloat16, kFloat16 };

template <class Int>
__host__ __device__ constexpr Int ceil_div(Int a, Int b) {
    return (a + b - 1) / b;
}

template <class Int>
__host__ __device__ constexpr Int align_up(Int a, Int b) {
    return ceil_div(a, b) * b;
}

// The least power of two that is not less; n up to 32.
__host__ __device__ constexpr int power_of_two(int n) {
    int power = 1;
    while (power < n) power *= 2;
    return power;
}

// Of a warp, that have a token's signals, one of each rank.
__host__ __device__ constexpr int chunk_lanes(int num_ranks) { return power_of_two(num_ranks); }

struct Shape {
    int rank;
    int num_ranks;
    int hidden;
    int intermediate;
    int num_experts;
    int topk;
    int max_tokens;
    int heap_tokens;  // what the heap is laid out for: the same for all layers that share it
    int heap_topk;    // likewise
    bool is_gated;
    bool skip_zero_probs;

    __host__ __device__ int num_local_experts() const { return num_experts / num_ranks; }
    __host__ __device__ int first_expert() const { return rank * num_local_experts(); }
    __host__ __device__ int fc1_rows() const { return is_gated ? 2 * intermediate : intermediate; }

    // A token uses at most this many ranks, and at most this many experts of one rank.
    __host__ __device__ int max_slots() const { return topk < num_ranks ? topk : num_ranks; }
    __host__ __device__ int max_local_routes() const {
        return topk < num_local_experts() ? topk : num_local_experts();
    }
    __host__ __device__ int64_t max_row_blocks() const {
        const int64_t rows = int64_t(num_ranks) * max_tokens * max_local_routes();
        return ceil_div<int64_t>(rows, BLOCK_M) + num_local_experts();
    }

    // Routing is processed in chunks of one warp's width; chunks of all sources are interleaved.
    __host__ __device__ int chunks_per_rank() const { return ceil_div(max_tokens, 32); }
    __host__ __device__ int num_chunks() const { return chunks_per_rank() * num_ranks; }
};

}  // namespace flashmoe
