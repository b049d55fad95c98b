// Delivery: the rows of a token on this rank are summed here, and one row goes to the token's rank.
#pragma once

#include "flashmoe/moe/sums.cuh"

namespace flashmoe {

constexpr int kMostUnitRows = 4;  // most of LayerArgs::rows_per_unit

// The gradient of a route's probability, from the partial sums of its row's tiles.
__device__ __forceinline__ float sum_dprob(const float* partial, int num_tiles) {
    float sum = 0.0f;
    for (int tile = 0; tile < num_tiles; ++tile) sum += partial[tile];
    return sum;
}

// <dY, fc2's bias>: what the bias adds to the gradient of a route's probability, whose row of dY is
// given. Scope: one warp.
template <class T>
__device__ __forceinline__ float dot_with_bias(const LayerArgs& args, int row, const T* dy) {
    const int32_t* blocks = args.plan.expert_block;  // ascending, one more than experts
    int expert = 0;
    for (int step = 256; step > 0; step /= 2) {
        if (expert + step < args.shape.num_local_slots() and
            blocks[expert + step] <= row / BLOCK_M) {
            expert += step;
        }
    }
    const int hidden = args.shape.hidden;
    const T* bias = static_cast<const T*>(args.biases[1][expert]);
    float dot = 0.0f;
    for (int i = int(threadIdx.x % 32); i < hidden; i += 32) dot += float(dy[i]) * float(bias[i]);
    for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(~0u, dot, step);
    return dot;
}

// Rows are delivered in units. A unit has few rows, so that a CTA's warps share what comes at the
// end, and no more than leave a lane for each route of their tokens. A CTA owns every gridDim'th
// unit, so its warps share them through shared memory alone.
//
// Delivers the next unit of this CTA. With `must_wait` it waits for the rows; without, it takes the
// unit only if all rows of its tokens are there. Scope: one warp; any number share the work.
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
    const int width = power_of_two(plan.topk), rows_of_unit = args.rows_per_unit;

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
        begin_span(Span::kResultWait);
        if (row >= 0) {
            protocol::await<Atomics>(ready, block_target, [&](auto load, auto done) {
                wait_for(args.watchdog, {Wait::kCombineResult, -1, row / BLOCK_M, block_target},
                         load, done);
            });
        }
        __syncwarp();
        end_span(Span::kResultWait);
    } else {
        if (not __all_sync(~0u, row < 0 or protocol::is_complete<Atomics>(ready, block_target))) {
            return Progress::kNone;
        }
        __syncwarp();  // all lanes may read the rows that one lane's counter tells of
        bool is_mine = false;
        if (lane == 0) is_mine = atomicCAS_block(&smem.next_unit, unit, unit + 1) == unit;
        if (not __shfl_sync(~0u, is_mine, 0)) return Progress::kSome;
    }

    const int64_t begin = Trace::now();
    begin_span(Span::kDeliver);
    const int64_t row_bytes = heap.row_bytes();
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
            const int of = __ffs(left) - 1, row_of = __shfl_sync(~0u, row, of);
            // Nobody has to have copied an own row.
            const int own = token.src_rank == rank ? token.token : -1;
            const int own_of = __shfl_sync(~0u, own, of);
            const char* dy =
                own_of >= 0 ? args.x + own_of * row_bytes : args.rows + row_of * row_bytes;
            const float dot = dot_with_bias(args, row_of, reinterpret_cast<const T*>(dy));
            if (lane == of) dprob += dot;
        }
        if (row >= 0) heap.dprobs(token.src_rank, token.token)[k] = dprob;
    }
    __syncwarp();
    args.watchdog.trace.add(event_of(Span::kDeliver), kOne, begin);
    const int64_t summed = Trace::now();
    if (is_last) {
        if (kIsBackward or not meta.is_home()) {  // else nobody waits for it
            protocol::publish_result<Atomics>(heap.result_signal(meta.src_rank, meta.token, rank),
                                              current_epoch(workspace));
        }
        atomicAdd_block(&counters().results_pushed[meta.src_rank], 1u);
    }
    __syncwarp();
    args.watchdog.trace.add(event_of(Span::kDeliver), kSignals, summed);
    end_span(Span::kDeliver);
    return Progress::kSome;
}

}  // namespace flashmoe
