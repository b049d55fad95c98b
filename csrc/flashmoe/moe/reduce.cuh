// Reduction: a token's rank sums the shares that all ranks have delivered, in the ranks' order, or
// as nodes of a tree.
#pragma once

#include "flashmoe/moe/sums.cuh"

namespace flashmoe {

__device__ __forceinline__ void scatter_dprobs(const LayerArgs& args, int token) {
    const int lane = threadIdx.x % 32, num_columns = args.grad_columns;
    const int topk = args.plan.topk;
    const int64_t row = int64_t(token) * num_columns;
    for (int column = lane; column < num_columns; column += 32) {
        store_float(args.grad_probs, args.grad_probs_dtype, row + column, 0.0f);
    }
    __syncwarp();
    if (lane >= topk) return;
    const int column = args.plan.own_columns[int64_t(token) * topk + lane];
    if (column >= 0) {
        store_float(args.grad_probs, args.grad_probs_dtype, row + column,
                    args.heap.dprobs(args.shape.rank, token)[lane]);
    }
}

// A chunk of tokens is one line of result signals: as many tokens as have room in a warp with a
// lane for every rank. A CTA owns every gridDim'th chunk, and reduces its tokens in whatever order
// they become complete.
struct ReduceChunks {
    int width;  // lanes of a token
    int num_tokens;

    __device__ explicit ReduceChunks(const LayerArgs& args)
        : width(chunk_lanes(args.shape.num_ranks)), num_tokens(args.num_tokens) {}

    __device__ __forceinline__ int tokens_per_chunk() const { return 32 / width; }
    // How many chunks this CTA has.
    __device__ __forceinline__ int count() const {
        return ceil_div(ceil_div(num_tokens, tokens_per_chunk()) - int(ptx::block_number()),
                        int(gridDim.x));
    }
    __device__ __forceinline__ int first_token(int chunk) const {
        return (chunk * int(gridDim.x) + int(ptx::block_number())) * tokens_per_chunk();
    }
};

// The ranks' shares of a token, for sum_rows_in_tree, whose leaves are the ranks.
class ReducedShares {
 public:
    __device__ __forceinline__ ReducedShares(const LayerArgs& args, int token, uint32_t ranks)
        : heap_(args.heap), rank_(args.shape.rank), token_(token), ranks_(ranks) {}
    __device__ __forceinline__ int count(int rank) const { return ranks_ >> rank & 1; }
    __device__ __forceinline__ const uint4* next() {
        if (slot_ == __popc(ranks_)) return nullptr;
        return reinterpret_cast<const uint4*>(heap_.result(rank_, token_, slot_++));
    }

 private:
    const Heap& heap_;
    int rank_, token_;
    uint32_t ranks_;
    int slot_ = 0;
};

template <class T, bool kIsBackward, int kUnroll, bool kInTree>
__device__ __forceinline__ void reduce_token(const LayerArgs& args, int token, uint32_t ranks) {
    const Heap& heap = args.heap;
    const int rank = args.shape.rank;
    const int64_t row_bytes = heap.row_bytes();
    if (not is_home(ranks, rank)) {  // else it is there
        char* target = args.out + token * row_bytes;
        const int chunks = int(row_bytes / 16);
        if constexpr (kInTree) {
            if (ranks != 0) {
                sum_rows_in_tree<T>(target, chunks, args.shape.num_ranks,
                                    [&] { return ReducedShares(args, token, ranks); });
            } else {  // 0, not -0
                for (int i = int(threadIdx.x % 32); i < chunks; i += 32) {
                    reinterpret_cast<uint4*>(target)[i] = uint4{};
                }
            }
        } else {
            sum_rows<T, kUnroll>(target, chunks, [&] {
                return [&, slot = 0]() mutable -> const uint4* {
                    if (slot == __popc(ranks)) return nullptr;
                    return reinterpret_cast<const uint4*>(heap.result(rank, token, slot++));
                };
            });
        }
    }
    if constexpr (kIsBackward) scatter_dprobs(args, token);
}

// Reduces tokens of one of this CTA's chunks: one token or, without `is_one`, all that are complete
// and that no other warp has taken. With `must_wait` it waits for the first that is not complete.
// kFinished says that every token of the chunk is taken; in a forward, tokens whose rows are all at
// home count as taken, since delivery writes them. Scope: one warp.
template <class T, bool kIsBackward, int kUnroll, bool kInTree>
__device__ __forceinline__ Progress reduce_chunk(const LayerArgs& args,
                                                 CombineSmem& smem,
                                                 const ReduceChunks& chunks,
                                                 int chunk,
                                                 bool is_one,
                                                 bool must_wait) {
    const uint32_t epoch = current_epoch(args.workspace);  // reloaded to save a register
    const int lane = threadIdx.x % 32, width = chunks.width;
    const int first = chunks.first_token(chunk), nth = lane / width, src = lane % width;
    const int in_chunk = min(chunks.tokens_per_chunk(), args.num_tokens - first);
    const uint32_t all = in_chunk == 32 ? ~0u : (1u << in_chunk) - 1;
    const int bit = chunk * chunks.tokens_per_chunk();  // the first token's
    uint32_t* taken_word = smem.reduced + bit / 32;
    uint32_t taken = __shfl_sync(~0u, Atomics::load(taken_word), 0) >> bit % 32 & all;
    if (taken == all) return Progress::kFinished;
    const uint32_t token_lanes = width == 32 ? ~0u : (1u << width) - 1;
    // One bit for each token, set if something is true on all of the token's lanes.
    const auto tokens_of = [&](bool is_true) {
        const uint32_t lanes = __ballot_sync(~0u, is_true);
        const uint32_t tokens =
            __ballot_sync(~0u, (lanes >> (nth * width) & token_lanes) == token_lanes);
        uint32_t bits = 0;
        for (int i = 0; i < in_chunk; ++i) bits |= (tokens >> (i * width) & 1) << i;
        return bits;
    };

    const uint32_t ranks = nth < in_chunk ? args.plan.own_ranks[first + nth] : 0;
    const bool is_share = nth < in_chunk and src < args.shape.num_ranks;
    const uint32_t* signal = args.heap.result_signal(args.shape.rank, first + nth, src);
    bool is_here = is_share and protocol::result_is_here<Atomics>(signal, epoch);
    const bool is_awaited = is_share and (ranks >> src & 1);
    const auto take = [&](uint32_t tokens) {
        uint32_t is_mine = 0;
        if (lane == 0) {
            is_mine = protocol::take_bits<Atomics>(taken_word, tokens << bit % 32, &taken);
        }
        taken = __shfl_sync(~0u, taken, 0) >> bit % 32 & all;
        return __shfl_sync(~0u, is_mine, 0) != 0;
    };
    if constexpr (not kIsBackward) {
        // Delivery makes the results of these.
        const uint32_t home = tokens_of(is_home(ranks, args.shape.rank));
        if (home & ~taken) take(home);
        if (taken == all) return Progress::kFinished;
    }
    __syncwarp();  // all lanes may read the share that one lane's signal tells of
    if (must_wait) {
        begin_span(Span::kShareWait);
        const int next = __ffs(all & ~taken) - 1;
        if (nth == next and is_awaited) {
            protocol::await_result<Atomics>(signal, epoch, [&](auto load, auto done) {
                wait_for(args.watchdog, {Wait::kReduceResult, src, first + nth, epoch}, load, done);
            });
            is_here = true;
        }
        __syncwarp();
        end_span(Span::kShareWait);
    }
    const uint32_t complete = tokens_of(is_here or not is_awaited);
    if ((complete & ~taken) == 0) return Progress::kNone;

    const int turn = int(threadIdx.x / 32) % in_chunk;  // each warp begins with another token
    while (const uint32_t left = complete & ~taken) {
        const uint32_t turned = (left >> turn | left << (in_chunk - turn)) & all;
        const int mine = (__ffs(turned) - 1 + turn) % in_chunk;
        if (not take(1u << mine)) continue;
        const int64_t begin = Trace::now();
        begin_span(Span::kReduce);
        reduce_token<T, kIsBackward, kUnroll, kInTree>(args, first + mine,
                                                       __shfl_sync(~0u, ranks, mine * width));
        __syncwarp();
        args.watchdog.trace.add(event_of(Span::kReduce), kOne, begin);
        end_span(Span::kReduce);
        if (is_one) break;
    }
    return taken == all ? Progress::kFinished : Progress::kSome;
}

// Reduces this CTA's tokens until all of them are taken, and waits, with a bound, for results that
// are not there yet. Scope: one warp; any number of warps share the work.
template <class T, bool kIsBackward, int kUnroll, bool kInTree>
__device__ __forceinline__ void reduce_results(const LayerArgs& args, CombineSmem& smem) {
    const ReduceChunks chunks(args);
    const int count = chunks.count();
    bool must_wait = false;
    for (;;) {
        bool is_finished = true, moved = false;
        for (int i = 0; i < count; ++i) {
            const int chunk = (i + int(threadIdx.x / 32)) % count;  // each warp begins with another
            const Progress progress = reduce_chunk<T, kIsBackward, kUnroll, kInTree>(
                args, smem, chunks, chunk, false, must_wait and is_finished);
            is_finished &= progress == Progress::kFinished;
            moved |= progress == Progress::kSome;
        }
        if (is_finished) return;
        must_wait = not moved;
    }
}

}  // namespace flashmoe
