// Gathers the rows of a tile, 16 bytes a lane at a time, to where a TMA box would put them. A rank
// that is alone has all rows at home and can read them where its tokens have them: nothing is then
// dispatched, and no copy of the rows in the order of their experts is made.
#pragma once

#include <type_traits>

#include "flashmoe/moe/plan.cuh"
#include "flashmoe/tile/pipeline.cuh"

namespace flashmoe {

// A warp copies four rows of 128 bytes at a time: this lane the chunk `lane % 8` of row `lane / 8`.
constexpr int kGatherRows = 4;

// The rows of a tile that a lane copies from: the place of its chunk in each, counted in chunks of
// 16 bytes from the first token's first column. They stay in registers, so that a stage costs an
// addition and a copy for each row.
class GatheredRows {
 public:
    static constexpr int kCount = BLOCK_M / kGatherRows;  // rows that a lane copies of

    __device__ __forceinline__ GatheredRows(const Plan& plan, int first_row, int row_bytes) {
        const int lane = threadIdx.x % 32;
        const RowMeta* meta = plan.row_meta + first_row + lane;
        int token[BLOCK_M / 32];
#pragma unroll
        for (int i = 0; i < BLOCK_M / 32; ++i) token[i] = meta[i * 32].token;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int row = i * kGatherRows;
            const int of_row = __shfl_sync(~0u, token[row / 32], row % 32 + lane / 8);
            are_tokens_ |= uint32_t(of_row >= 0) << i;
            chunk_[i] = uint32_t(max(of_row, 0)) * uint32_t(row_bytes / 16) + uint32_t(lane % 8);
        }
    }
    __device__ __forceinline__ uint32_t chunk(int i) const { return chunk_[i]; }
    // A bit for each row that has a token; the others are pads.
    __device__ __forceinline__ uint32_t are_tokens() const { return are_tokens_; }
    __device__ __forceinline__ bool have_pads() const {
        return __any_sync(~0u, are_tokens_ != ~0u);
    }

 private:
    uint32_t chunk_[kCount];
    uint32_t are_tokens_ = 0;
};
static_assert(GatheredRows::kCount == 32);

// Copies 64 columns of each row into a box, as TMA's 128-byte swizzle has them; zeros for pad rows.
// Half of the instructions are predicates, which rows without pads do not need.
__device__ __forceinline__ void gather_box(const GatheredRows& rows,
                                           bool have_pads,
                                           const char* x,
                                           int column,
                                           uint8_t (&box)[kBoxBytes]) {
    constexpr int kBoxRowBytes = BLOCK_K * kOperandBytes;
    const int lane = threadIdx.x % 32, row = lane / 8, chunk = lane % 8;
    const auto* from = reinterpret_cast<const uint4*>(x + column * kOperandBytes);
    uint32_t are_tokens = rows.are_tokens();
    asm volatile("" : "+r"(are_tokens));  // else each of its bits takes a register of its own
    const uint32_t to = uint32_t(__cvta_generic_to_shared(box)) + row * kBoxRowBytes;
    // Row r has its chunk c at c ^ (r % 8); of a lane's rows every other one is 4 modulo 8 away.
    const uint32_t even = to + (chunk ^ row) * 16, odd = to + (chunk ^ row ^ kGatherRows) * 16;
    const auto copy = [&](auto have_pads) {
#pragma unroll
        for (int i = 0; i < GatheredRows::kCount; ++i) {
            if (i == GatheredRows::kCount / 2) ptx::delay_point();  // other copies come late
            ptx::copy_16_async((i % 2 == 0 ? even : odd) + i * kGatherRows * kBoxRowBytes,
                               from + rows.chunk(i), not have_pads() or (are_tokens >> i & 1));
        }
    };
    if (have_pads) {
        copy(std::true_type{});
    } else {
        copy(std::false_type{});
    }
}

// The rows of an expert as K of a gradient: what a lane copies of a stage's 64 rows, 128 columns of
// each. Each stage has other rows, whose tokens are handed out while the processors multiply the
// stage before, so that there is little but copies between a stage's room and its rows. The warp
// waits for the tokens that it loads at the next stage already, so it loads those of several stages
// at once: else no stage would take less time than a load. Scope: one warp.
class GatheredSlabs {
 public:
    static constexpr int kCount = BLOCK_K / kGatherRows;  // rows that a lane copies of

    __device__ __forceinline__ GatheredSlabs(
        const Plan& plan, int first_row, int num_slabs, const char* x, int column, int width)
        : meta_(plan.row_meta + first_row + int(threadIdx.x % 32)),
          num_left_(num_slabs),
          row_bytes_(uint32_t(width) * kElementBytes),
          num_halves_(min(max(ceil_div(width - column, BLOCK_K), 0), 2)) {
        // The last token has nothing where a column past its width would be.
        x_ = x + (num_halves_ > 0 ? column : 0) * kElementBytes + threadIdx.x % 8 * 16;
        load();
        advance();
    }
    // Goes on to the next stage's rows.
    __device__ __forceinline__ void advance() {
        const int lane = int(threadIdx.x % 32);
        uint32_t are_tokens[kWords];
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
            are_tokens[word] = __ballot_sync(~0u, token_[word] >= 0);
            token_[word] = max(token_[word], 0);
        }
        is_whole_ = num_halves_ == 2 and (are_tokens[0] & are_tokens[1]) == ~0u;
#pragma unroll
        for (int word = 0; word < kWords; ++word) are_tokens_[word] = are_tokens[word] >> lane / 8;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int row = i * kGatherRows;
            token_of_row_[i] = __shfl_sync(~0u, token_[row / 32], row % 32 + lane / 8);
        }
#pragma unroll
        for (int i = 0; i < (kLoadedStages - 1) * kWords; ++i) token_[i] = token_[i + kWords];
        if (--num_loaded_ == 0) load();
    }
    // This lane's chunk of the first token's columns.
    __device__ __forceinline__ const char* x() const { return x_; }
    __device__ __forceinline__ uint32_t row_bytes() const { return row_bytes_; }
    __device__ __forceinline__ int token(int i) const { return token_of_row_[i]; }
    // True if each row has a token; the others are pads.
    __device__ __forceinline__ bool is_token(int i) const {
        return are_tokens_[i * kGatherRows / 32] >> i * kGatherRows % 32 & 1;
    }
    // The halves of the 128 columns that lie within the tokens.
    __device__ __forceinline__ int num_halves() const { return num_halves_; }
    // True if all rows have tokens, and these all columns.
    __device__ __forceinline__ bool is_whole() const { return is_whole_; }

 private:
    static constexpr int kWords = BLOCK_K / 32, kLoadedStages = 8;
    static_assert(kIsFp8 or kWords == 2);

    // Loads the tokens of the next stages. Rows end with the last expert's.
    __device__ __forceinline__ void load() {
#pragma unroll
        for (int i = 0; i < kLoadedStages * kWords; ++i) {
            if (i / kWords < num_left_) token_[i] = meta_[i * 32].token;
        }
        meta_ += kLoadedStages * BLOCK_K;
        num_left_ -= kLoadedStages;
        num_loaded_ = kLoadedStages;
    }

    const RowMeta* meta_;
    int num_left_;
    uint32_t row_bytes_;
    int num_halves_;
    const char* x_;
    int token_[kLoadedStages * kWords] = {};
    int num_loaded_;
    int token_of_row_[kCount];  // 0 for a pad
    uint32_t are_tokens_[kWords];
    bool is_whole_;
};

// Copies 128 columns of each row into a box whose rows are K, as TMA has them: 64 columns of all
// rows, then the next 64. Zeros for pad rows, and for columns that tokens do not have.
__device__ __forceinline__ void gather_box(const GatheredSlabs& slabs, uint8_t (&box)[kBoxBytes]) {
    constexpr int kBoxRowBytes = BLOCK_K * kElementBytes, kHalfBytes = BLOCK_K * kBoxRowBytes;
    static_assert(kIsFp8 or 2 * kHalfBytes == kBoxBytes);  // no backward is in FP8
    const int lane = threadIdx.x % 32, row = lane / 8, chunk = lane % 8;
    const uint32_t to = uint32_t(__cvta_generic_to_shared(box)) + row * kBoxRowBytes;
    const uint32_t even = to + (chunk ^ row) * 16, odd = to + (chunk ^ row ^ kGatherRows) * 16;
    const auto copy = [&](int i, int half, const char* from, bool reads) {
        ptx::copy_16_async(
            (i % 2 == 0 ? even : odd) + half * kHalfBytes + i * kGatherRows * kBoxRowBytes, from,
            reads);
    };
    const char* x = slabs.x();
    uint32_t row_bytes = slabs.row_bytes();
    asm volatile("" : "+l"(x), "+r"(row_bytes));  // else an address takes three instructions
    const auto from = [&](int i) { return x + uint64_t(uint32_t(slabs.token(i))) * row_bytes; };
    if (slabs.is_whole()) {
#pragma unroll
        for (int i = 0; i < GatheredSlabs::kCount; ++i) {
            if (i == GatheredSlabs::kCount / 2) ptx::delay_point();  // as above
            copy(i, 0, from(i), true);
            copy(i, 1, from(i) + kBoxRowBytes, true);
        }
        return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const bool is_inside = half < slabs.num_halves();
        ptx::delay_point();
#pragma unroll
        for (int i = 0; i < GatheredSlabs::kCount; ++i) {
            copy(i, half, from(i) + (is_inside ? half : 0) * kBoxRowBytes,
                 is_inside and slabs.is_token(i));
        }
    }
}

}  // namespace flashmoe
