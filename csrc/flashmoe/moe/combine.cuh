// Combine: the rows of a token on this rank are summed here, in float32 and in a fixed order, and
// one row goes to the token's rank; that rank sums the shares of all ranks in rank order. A row
// that is the only one of its token here has gone there straight from GEMM1, and where all rows are
// on the token's own rank their sum is its result. Routing weights were applied before fc2, so both
// are plain sums, and repeatable bit by bit.
#pragma once

#include "flashmoe/moe/args.cuh"
#include "flashmoe/tile/handover.cuh"
#include "flashmoe/tile/pipeline.cuh"

namespace flashmoe {

constexpr int kMostUnitRows = 4;

// What a CTA's warps share that combine; zero when the launch begins.
struct CombineSmem {
    int next_unit;                         // of delivery
    uint32_t reduced[kMaxCtaTokens / 32];  // bits of this CTA's tokens that a warp has taken
};

enum class Progress { kNone, kSome, kFinished };

template <class T>
__device__ __forceinline__ void add8(float (&sum)[8], const uint4& loaded) {
    float values[8];
    unpack8<T>(loaded, values);
#pragma unroll
    for (int c = 0; c < 8; ++c) sum[c] += values[c];
}

// Sums rows of `chunks` 16-byte chunks into `target`; each call of next_row gives one more of
// them, or null past the last. Per lane, kUnroll chunks of two rows are in flight. Scope: one warp.
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

// The gradient of a route's probability, from the partial sums of its row's tiles.
__device__ __forceinline__ float sum_dprob(const float* partial, int num_tiles) {
    float sum = 0.0f;
    for (int tile = 0; tile < num_tiles; ++tile) sum += partial[tile];
    return sum;
}

// <dY, fc2's bias>: what the bias adds to the gradient of a route's probability. Scope: one warp.
template <class T>
__device__ __forceinline__ float dot_with_bias(const LayerArgs& args, int row) {
    const int32_t* blocks = args.plan.expert_block;  // ascending, one more than experts
    int expert = 0;
    for (int step = 256; step > 0; step /= 2) {
        if (expert + step < args.shape.num_local_experts() and
            blocks[expert + step] <= row / BLOCK_M) {
            expert += step;
        }
    }
    const int hidden = args.shape.hidden;
    const T* dy = reinterpret_cast<const T*>(args.rows) + int64_t(row) * hidden;
    const T* bias = static_cast<const T*>(args.biases[1][expert]);
    float dot = 0.0f;
    for (int i = int(threadIdx.x % 32); i < hidden; i += 32) dot += float(dy[i]) * float(bias[i]);
    for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(~0u, dot, step);
    return dot;
}

// Rows are delivered in units: few, so that a CTA's warps share what comes at the end, and no more
// than leave a lane for each route of their tokens. A CTA owns every gridDim'th unit, so its warps
// share them through shared memory alone.
//
// Delivers the next unit of this CTA. If it must wait it does, else it takes the unit only if all
// rows of its tokens are there. Scope: one warp; any number of warps share the work.
template <class T, bool kIsBackward, int kUnroll>
__device__ __forceinline__ Progress deliver_unit(const LayerArgs& args,
                                                 CombineSmem& smem,
                                                 bool must_wait) {
    const Heap& heap = args.heap;
    const Plan& plan = args.plan;
    const Workspace& workspace = args.workspace;
    const int rank = args.shape.rank;
    const uint32_t block_target = uint32_t(kNumProcessors * args.num_n_tiles[1]);
    const int lane = threadIdx.x % 32;
    const int width = power_of_two(plan.topk), rows_of_unit = min(32 / width, kMostUnitRows);

    int unit = 0;
    if (lane == 0) {
        unit = must_wait ? atomicAdd_block(&smem.next_unit, 1)
                         : *static_cast<volatile int*>(&smem.next_unit);
    }
    unit = __shfl_sync(~0u, unit, 0);
    const int64_t place = (int64_t(unit) * gridDim.x + blockIdx.x) * rows_of_unit;
    if (place >= plan.num_places()) return Progress::kFinished;
    const int first = plan.row_at(int(place));

    RowMeta meta{};
    if (lane < rows_of_unit and first >= 0) meta = plan.row_meta[first + lane];
    const bool is_last = lane < rows_of_unit and first >= 0 and meta.is_last();
    const uint32_t last = __ballot_sync(~0u, is_last);
    const int count = __popc(last), nth = lane / width, k = lane % width;
    int at = 0;  // the lane of the nth token
    for (int i = 0; i < rows_of_unit; ++i) {
        if (last >> i & 1 and __popc(last & ((1u << i) - 1)) == nth) at = i;
    }
    const RowMeta token = shuffled(meta, at);
    int row = -1;
    if (nth < count and k < plan.topk) row = plan.rows_of(token.src_rank, token.token)[k];
    const uint32_t* ready = workspace.tile_ready + workspace.tile_counter(1, max(row, 0) / BLOCK_M);
    if (must_wait) {
        begin_span(uint32_t(Role::kCombineResult));
        if (row >= 0) {
            protocol::await<Atomics>(ready, block_target, [&](auto load, auto done) {
                wait_for(args.watchdog, {Role::kCombineResult, -1, row / BLOCK_M, block_target},
                         load, done);
            });
        }
        __syncwarp();
        end_span(uint32_t(Role::kCombineResult));
    } else {
        if (not __all_sync(~0u, row < 0 or protocol::is_complete<Atomics>(ready, block_target))) {
            return Progress::kNone;
        }
        __syncwarp();  // what one lane's counter tells of, all may read
        bool is_mine = false;
        if (lane == 0) is_mine = atomicCAS_block(&smem.next_unit, unit, unit + 1) == unit;
        if (not __shfl_sync(~0u, is_mine, 0)) return Progress::kSome;
    }

    const int64_t begin = Trace::now();
    begin_span(uint32_t(Role::kDeliver));
    const int64_t row_bytes = heap.hidden * 2;
    const uint32_t all_routes = __ballot_sync(~0u, row >= 0);
    for (int i = 0; i < count; ++i) {
        const int base = i * width;
        const uint32_t routes = all_routes & (((1u << width) - 1) << base);
        if (__popc(routes) == 1) continue;  // its finishers have sent it
        char* target = target_of(args, shuffled(token, base));
        sum_rows<T, kUnroll>(target, int(row_bytes / 16), [&] {
            return [&, left = routes]() mutable -> const uint4* {
                if (left == 0) return nullptr;
                const int64_t from = __shfl_sync(~0u, row, __ffs(left) - 1);
                left &= left - 1;
                return reinterpret_cast<const uint4*>(args.result + from * row_bytes);
            };
        });
    }
    if constexpr (kIsBackward) {
        float dprob = 0.0f;
        if (row >= 0) {
            dprob = sum_dprob(args.dprob_partial + int64_t(row) * args.num_n_tiles[0],
                              args.num_n_tiles[0]);
        }
        for (uint32_t left = args.biases[1] ? all_routes : 0; left; left &= left - 1) {
            const int of = __ffs(left) - 1;
            const float dot = dot_with_bias<T>(args, __shfl_sync(~0u, row, of));
            if (lane == of) dprob += dot;
        }
        if (row >= 0) heap.dprobs(token.src_rank, token.token)[k] = dprob;
    }
    __syncwarp();
    args.watchdog.trace.add(uint32_t(Role::kDeliver), kOne, begin);
    const int64_t summed = Trace::now();
    if (is_last) {
        if (kIsBackward or not meta.is_home()) {  // else nobody waits for it
            protocol::publish_result<Atomics>(heap.result_signal(meta.src_rank, meta.token, rank),
                                              current_epoch(workspace));
        }
        atomicAdd_block(&counters().results_pushed[meta.src_rank], 1u);
    }
    __syncwarp();
    args.watchdog.trace.add(uint32_t(Role::kDeliver), kSignals, summed);
    end_span(uint32_t(Role::kDeliver));
    return Progress::kSome;
}

__device__ __forceinline__ void scatter_dprobs(const LayerArgs& args, int token) {
    const int lane = threadIdx.x % 32, num_experts = args.shape.num_experts;
    const int topk = args.plan.topk;
    const int64_t row = int64_t(token) * num_experts;
    for (int expert = lane; expert < num_experts; expert += 32) {
        store_float(args.grad_probs, args.grad_probs_dtype, row + expert, 0.0f);
    }
    __syncwarp();
    if (lane >= topk) return;
    const int expert = args.plan.own_experts[int64_t(token) * topk + lane];
    if (expert >= 0) {
        store_float(args.grad_probs, args.grad_probs_dtype, row + expert,
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
    // Of this CTA.
    __device__ __forceinline__ int count() const {
        return ceil_div(ceil_div(num_tokens, tokens_per_chunk()) - int(blockIdx.x), int(gridDim.x));
    }
    __device__ __forceinline__ int first_token(int chunk) const {
        return (chunk * int(gridDim.x) + int(blockIdx.x)) * tokens_per_chunk();
    }
};

template <class T, bool kIsBackward, int kUnroll>
__device__ __forceinline__ void reduce_token(const LayerArgs& args, int token, uint32_t ranks) {
    const Heap& heap = args.heap;
    const int rank = args.shape.rank;
    const int64_t row_bytes = heap.hidden * 2;
    if (not is_home(ranks, rank)) {  // else it is there
        sum_rows<T, kUnroll>(args.out + token * row_bytes, int(row_bytes / 16), [&] {
            return [&, slot = 0]() mutable -> const uint4* {
                if (slot == __popc(ranks)) return nullptr;
                return reinterpret_cast<const uint4*>(heap.result(rank, token, slot++));
            };
        });
    }
    if constexpr (kIsBackward) scatter_dprobs(args, token);
}

// Sums all ranks' shares of tokens of one of this CTA's chunks that are complete and not taken by
// another warp: of one, or of all that are found so. With `must_wait` it waits for the first one
// that is not complete. Finished is a chunk of which nothing is left to be reduced: in a forward
// not what is summed where its rows are. Scope: one warp.
template <class T, bool kIsBackward, int kUnroll>
__device__ __forceinline__ Progress reduce_chunk(const LayerArgs& args,
                                                 CombineSmem& smem,
                                                 const ReduceChunks& chunks,
                                                 int chunk,
                                                 bool is_one,
                                                 bool must_wait) {
    const uint32_t epoch = current_epoch(args.workspace);  // anew, for want of a register
    const int lane = threadIdx.x % 32, width = chunks.width;
    const int first = chunks.first_token(chunk), nth = lane / width, src = lane % width;
    const int in_chunk = min(chunks.tokens_per_chunk(), args.num_tokens - first);
    const uint32_t all = in_chunk == 32 ? ~0u : (1u << in_chunk) - 1;
    const int bit = chunk * chunks.tokens_per_chunk();  // of the first token
    uint32_t* taken_word = smem.reduced + bit / 32;
    uint32_t taken = __shfl_sync(~0u, Atomics::load(taken_word), 0) >> bit % 32 & all;
    if (taken == all) return Progress::kFinished;
    const uint32_t token_lanes = width == 32 ? ~0u : (1u << width) - 1;
    // One bit per token, of all of whose lanes something is true.
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
        // Who delivers these makes their results.
        const uint32_t home = tokens_of(is_home(ranks, args.shape.rank));
        if (home & ~taken) take(home);
        if (taken == all) return Progress::kFinished;
    }
    __syncwarp();  // what one lane's signal tells of, all may read
    if (must_wait) {
        begin_span(uint32_t(Role::kReduceResult));
        const int next = __ffs(all & ~taken) - 1;
        if (nth == next and is_awaited) {
            protocol::await_result<Atomics>(signal, epoch, [&](auto load, auto done) {
                wait_for(args.watchdog, {Role::kReduceResult, src, first + nth, epoch}, load, done);
            });
            is_here = true;
        }
        __syncwarp();
        end_span(uint32_t(Role::kReduceResult));
    }
    const uint32_t complete = tokens_of(is_here or not is_awaited);
    if ((complete & ~taken) == 0) return Progress::kNone;

    const int turn = int(threadIdx.x / 32) % in_chunk;  // each warp begins with another token
    while (const uint32_t left = complete & ~taken) {
        const uint32_t turned = (left >> turn | left << (in_chunk - turn)) & all;
        const int mine = (__ffs(turned) - 1 + turn) % in_chunk;
        if (not take(1u << mine)) continue;
        const int64_t begin = Trace::now();
        begin_span(uint32_t(Role::kReduce));
        reduce_token<T, kIsBackward, kUnroll>(args, first + mine,
                                              __shfl_sync(~0u, ranks, mine * width));
        __syncwarp();
        args.watchdog.trace.add(uint32_t(Role::kReduce), kOne, begin);
        end_span(uint32_t(Role::kReduce));
        if (is_one) break;
    }
    return taken == all ? Progress::kFinished : Progress::kSome;
}

// Reduces this CTA's tokens until all of them are taken. Scope: one warp; any number share the
// work. What is not there yet is waited for, with a bound.
template <class T, bool kIsBackward, int kUnroll>
__device__ __forceinline__ void reduce_results(const LayerArgs& args, CombineSmem& smem) {
    const ReduceChunks chunks(args);
    const int count = chunks.count();
    bool must_wait = false;
    for (;;) {
        bool is_finished = true, moved = false;
        for (int i = 0; i < count; ++i) {
            const int chunk = (i + int(threadIdx.x / 32)) % count;  // each warp begins with another
            const Progress progress = reduce_chunk<T, kIsBackward, kUnroll>(
                args, smem, chunks, chunk, false, must_wait and is_finished);
            is_finished &= progress == Progress::kFinished;
            moved |= progress == Progress::kSome;
        }
        if (is_finished) return;
        must_wait = not moved;
    }
}

// Combines a little, without waiting for anything: a unit of rows, or a token, or what is complete
// of its chunk. `chunk` is where this warp looks for one first. Scope: one warp.
template <class T, bool kIsBackward, int kUnroll>
__device__ __forceinline__ Progress
combine_some(const LayerArgs& args, CombineSmem& smem, int& chunk, bool is_one) {
    const Progress delivered = deliver_unit<T, kIsBackward, kUnroll>(args, smem, false);
    if (delivered == Progress::kSome) return delivered;
    const ReduceChunks chunks(args);
    const auto reduce_one = [&](int of_chunk) {
        return reduce_chunk<T, kIsBackward, kUnroll>(args, smem, chunks, of_chunk, is_one, false);
    };
    Progress reduced = Progress::kFinished;
    for (; chunk < chunks.count(); ++chunk) {
        reduced = reduce_one(chunk);
        if (reduced != Progress::kFinished) break;
    }
    // Later chunks may be complete while this one is not.
    for (int later = chunk + 1; reduced == Progress::kNone and later < chunks.count(); ++later) {
        if (reduce_one(later) == Progress::kSome) reduced = Progress::kSome;
    }
    return delivered == Progress::kNone and reduced == Progress::kFinished ? Progress::kNone
                                                                           : reduced;
}

}  // namespace flashmoe
