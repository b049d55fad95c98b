// The symmetric heap: what peers write into each rank's memory, and where each byte is.
//
// The paper's layout L[P, R, B, E, C, H] keeps four token buffers so that no two writes conflict.
// Here rows are pulled, so a rank's own tokens are the outgoing buffer and there is no incoming one
// in the heap at all; results arrive in one slot per (token, rank that computed for it), unless all
// were computed on the token's own rank. A write's place is a function of its writer, which is
// Theorem 3.1: no write-write conflict.
#pragma once

#include "flashmoe/base/shape.cuh"
#include "flashmoe/comm/fault.cuh"
#include "flashmoe/protocol/places.h"
#include "flashmoe/protocol/signals.h"

namespace flashmoe {

// One selected expert of one token; expert < 0 means none.
struct alignas(8) Route {
    int32_t expert;
    float prob;
};

using protocol::RouteSignal;

// Ranks signal that fc2's gradients are stored within a backward, and the others after it.
enum class SlotGrads : int { kFc2, kOthers };

// Layers of different shapes share a heap, and a rank may begin with the next layer while a peer is
// not done with this one. What a rank writes before any signal of that peer has come, up to
// `routes`, has the same place for every layer; what follows is written only once its owner has
// published its rows, and hence is done with the layer before.
struct HeapLayout {
    // Byte offsets. Words are tagged with the epoch, so none is ever reset.
    uint64_t gave_up;           // u32: Watchdog::gave_up
    uint64_t route_signals;     // RouteSignal[rank], two parities
    uint64_t row_block_bounds;  // RowBound[rank], two parities: what fits in that rank's buffers
    uint64_t refusals;          // Fault[rank], two parities: why that rank refuses its call
    uint64_t row_signals;       // u32[rank]: epoch whose rows that rank has published
    uint64_t result_signals;    // u32[token][rank]: epoch whose result that rank has delivered
    uint64_t routes;            // Route[parity 2][rank][token][heap_topk], every rank's routing
    // These are there if some layer has spare slots: every rank's routes by expert, u32[parity
    // 2][rank][heap_experts]; epochs whose weights owners have pushed, u32[spare slot], and whose
    // gradients ranks have stored in slots, u32[SlotGrads][rank]; and what is in slots, of
    // expert_elements each, 16-bit weights that owners write and f32 gradients that they read.
    FLASHMOE_SLOT_FIELD(uint64_t, route_counts);
    FLASHMOE_SLOT_FIELD(uint64_t, weights_ready);
    FLASHMOE_SLOT_FIELD(uint64_t, grads_ready);
    FLASHMOE_SLOT_FIELD(uint64_t, slot_weights);
    FLASHMOE_SLOT_FIELD(uint64_t, slot_grads);
    uint64_t rows;     // [token], Shape::token_bytes() each: this rank's tokens, read by peers
    uint64_t results;  // bf16[token][slot][hidden], written by peers
    uint64_t dprobs;   // f32[token][topk], written by peers in the backward
    uint64_t bytes;
};

__host__ __device__ inline HeapLayout heap_layout(const Shape& s) {
    const uint64_t tokens = s.heap_tokens, ranks = s.num_ranks;
    // One rank alone reads tokens where they are, and sums them where they go.
    const uint64_t row_bytes = ranks > 1 ? s.row_bytes() : 0;
    // In FP8 they lie here in any case. The layer's backward has rows of dY, of 16 bits, here.
    const uint64_t token_bytes = kIsFp8 and ranks == 1 ? s.token_bytes() : row_bytes;
    HeapLayout at{};
    uint64_t end = 0;
    auto take = [&end](uint64_t bytes) {
        const uint64_t offset = end;
        end = align_up<uint64_t>(end + bytes, 1024);
        return offset;
    };
    at.gave_up = take(sizeof(uint32_t));
    at.route_signals = take(2 * ranks * sizeof(uint64_t));
    at.row_block_bounds = take(2 * ranks * sizeof(uint32_t));
    at.refusals = take(2 * ranks * sizeof(Fault));
    at.row_signals = take(ranks * sizeof(uint32_t));
    at.result_signals = take(tokens * ranks * sizeof(uint32_t));
    at.routes = take(2 * ranks * tokens * s.heap_topk * sizeof(Route));
    const bool has_slots = s.heap_experts > 0;
    FLASHMOE_SET_SLOT_FIELD(at.route_counts, take(2 * ranks * s.heap_experts * sizeof(uint32_t)));
    FLASHMOE_SET_SLOT_FIELD(at.weights_ready,
                            take(has_slots ? kMaxSpareSlots * sizeof(uint32_t) : 0));
    FLASHMOE_SET_SLOT_FIELD(at.grads_ready, take(has_slots ? 2 * ranks * sizeof(uint32_t) : 0));
    FLASHMOE_SET_SLOT_FIELD(at.slot_weights, take(uint64_t(s.heap_slot_elements) * kElementBytes));
    FLASHMOE_SET_SLOT_FIELD(at.slot_grads, take(uint64_t(s.heap_slot_elements) * sizeof(float)));
    at.rows = take(tokens * token_bytes);
    at.results = take(tokens * s.max_slots() * row_bytes);
    at.dprobs = take(tokens * s.topk * sizeof(float));
    at.bytes = end;
    return at;
}

// Every rank's heap as mapped into this GPU, with typed access by owner.
struct Heap {
    HeapLayout at;
    char* base[kMaxRanks];
    int num_ranks;
    int heap_tokens;
    int heap_topk;
    int hidden;
    int topk;
    int num_slots;
    FLASHMOE_SLOT_FIELD(int, heap_experts);
    FLASHMOE_SLOT_FIELD(int64_t, expert_elements);

    template <class T>
    __device__ __forceinline__ T* address(int owner, uint64_t offset) const {
        return reinterpret_cast<T*>(base[owner] + offset);
    }
    uint32_t* gave_up(int owner) const {
        return reinterpret_cast<uint32_t*>(base[owner] + at.gave_up);
    }
    __device__ __forceinline__ uint64_t* route_signal(int owner, uint32_t epoch, int src) const {
        return address<uint64_t>(owner, at.route_signals) +
               protocol::route_word(epoch, num_ranks, src);
    }
    __device__ __forceinline__ uint32_t* row_block_bound(int owner, uint32_t epoch, int src) const {
        return address<uint32_t>(owner, at.row_block_bounds) +
               protocol::route_word(epoch, num_ranks, src);
    }
    __device__ __forceinline__ Fault* refusal(int owner, uint32_t epoch, int src) const {
        return address<Fault>(owner, at.refusals) + protocol::route_word(epoch, num_ranks, src);
    }
    __device__ __forceinline__ uint32_t* row_signal(int owner, int src) const {
        return address<uint32_t>(owner, at.row_signals) + src;
    }
    __device__ __forceinline__ uint32_t* result_signal(int owner, int token, int src) const {
        return address<uint32_t>(owner, at.result_signals) +
               protocol::result_word(token, num_ranks, src);
    }
    __device__ __forceinline__ Route* routes(int owner, uint32_t epoch, int src, int token) const {
        return address<Route>(owner, at.routes) +
               protocol::route_place(epoch, num_ranks, src, heap_tokens, heap_topk, token);
    }
    __device__ __forceinline__ uint32_t* route_counts(int owner, uint32_t epoch, int src) const {
        return address<uint32_t>(owner, at.route_counts) +
               protocol::route_word(epoch, num_ranks, src) * heap_experts;
    }
    __device__ __forceinline__ uint32_t* weights_ready(int owner, int spare_slot) const {
        return address<uint32_t>(owner, at.weights_ready) + spare_slot;
    }
    __device__ __forceinline__ uint32_t* grads_ready(int owner, SlotGrads which, int src) const {
        return address<uint32_t>(owner, at.grads_ready) + int(which) * num_ranks + src;
    }
    __device__ __forceinline__ char* slot_weights(int owner, int spare_slot) const {
        return address<char>(owner, at.slot_weights) + spare_slot * expert_elements * kElementBytes;
    }
    __device__ __forceinline__ float* slot_grads(int owner, int spare_slot) const {
        return address<float>(owner, at.slot_grads) + spare_slot * expert_elements;
    }
    __device__ __forceinline__ char* row(int owner, int token) const {
        const int64_t bytes =
            kIsFp8 ? int64_t(token) * token_bytes() : int64_t(token) * hidden * kElementBytes;
        return address<char>(owner, at.rows) + bytes;
    }
    __device__ __forceinline__ char* result(int owner, int token, int slot) const {
        return address<char>(owner, at.results) +
               protocol::result_row(token, num_slots, slot) * hidden * kElementBytes;
    }
    // As Shape has them.
    __device__ __forceinline__ int row_bytes() const { return hidden * kElementBytes; }
    __device__ __forceinline__ int token_bytes() const { return operand_row_bytes(hidden); }
    __device__ __forceinline__ float* dprobs(int owner, int token) const {
        return address<float>(owner, at.dprobs) + int64_t(token) * topk;
    }
};

}  // namespace flashmoe
