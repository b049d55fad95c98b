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

// A token's rows on this rank, for sum_rows_in_tree: each lane of `routes` has one of them, by
// ascending expert. Scope: one warp.
class DeliveredRows {
 public:
    __device__ __forceinline__
    DeliveredRows(const char* result, int64_t row_bytes, int row, int leaf, uint32_t routes)
        : result_(result),
          row_bytes_(row_bytes),
          row_(row),
          leaf_(leaf),
          all_(routes),
          left_(routes) {}
    __device__ __forceinline__ int count(int leaf) const {
        return __popc(__ballot_sync(~0u, leaf_ == leaf) & all_);
    }
    __device__ __forceinline__ const uint4* next() {
        if (left_ == 0) return nullptr;
        const int64_t from = __shfl_sync(~0u, row_, __ffs(left_) - 1);
        left_ &= left_ - 1;
        return reinterpret_cast<const uint4*>(result_ + from * row_bytes_);
    }

 private:
    const char* result_;
    int64_t row_bytes_;
    int row_, leaf_;  // this lane's
    uint32_t all_, left_;
};

// The share that a warp takes of the rows that are left to deliver.
enum class Deliver {
    kAwaited,  // the next unit, whose rows it waits for
    kThere,    // the next unit, if all rows of its tokens are there
    kAhead,    // as many of the next units as have no more tokens than one may have, all there
};

// Rows are delivered in units. A unit has few rows, so that a CTA's warps share what comes at the
// end, and no more than leave a lane for each route of their tokens. A CTA owns every gridDim'th
// unit, so its warps share them through shared memory alone. Where tokens have many rows here most
// units have no token's last row: who looks ahead looks at 32 rows, a lane each.
//
// Delivers the next unit or units of this CTA, summed in a tree or row after row. Scope: one warp;
// any number share the work.
template <class T, bool kIsBackward, int kUnroll, bool kInTree>
__device__ __forceinline__ Progress deliver_some(const LayerArgs& args,
                                                 CombineSmem& smem,
                                                 Deliver what) {
    const Heap& heap = args.heap;
    const Plan& plan = args.plan;
    const Workspace& workspace = args.workspace;
    const int rank = args.shape.rank;
    const uint32_t block_target = uint32_t(kNumProcessors * args.num_n_tiles[1]);
    const int lane = threadIdx.x % 32;
    const int width = power_of_two(plan.topk), rows_of_unit = args.rows_per_unit;
    const int units = what == Deliver::kAhead ? 32 / rows_of_unit : 1;  // that are looked at

    int unit = 0;
    if (lane == 0) {
        unit = what == Deliver::kAwaited ? atomicAdd_block(&smem.next_unit, 1)
                                         : *static_cast<volatile int*>(&smem.next_unit);
    }
    unit = __shfl_sync(~0u, unit, 0);
    const auto place_of = [&](int each) {
        return (int64_t(each) * gridDim.x + ptx::block_number()) * rows_of_unit;
    };
    if (place_of(unit) >= plan.num_places()) return Progress::kFinished;
    const int nth_unit = units == 1 ? 0 : lane / rows_of_unit;
    const int in_unit = lane - nth_unit * rows_of_unit;
    const int64_t place = place_of(unit + nth_unit) + in_unit;
    const bool is_looked_at = in_unit < rows_of_unit and place < plan.num_places();
    const int of_place = is_looked_at ? plan.row_at(int(place)) : -1;

    RowMeta meta{};
    if (of_place >= 0) meta = plan.row_meta[of_place];
    uint32_t last = __ballot_sync(~0u, meta.is_last());
    int taken = units;
    const auto take_fewer = [&](int lane_behind) {
        taken = lane_behind / rows_of_unit;
        last &= (1u << taken * rows_of_unit) - 1;
    };
    if (units > 1) {
        uint32_t behind = last;  // the rows that are too many
        for (int i = 0; i < rows_of_unit; ++i) behind &= behind - 1;
        if (behind != 0) take_fewer(__ffs(behind) - 1);
    }
    const int nth = lane / width, k = lane % width;
    uint32_t from_nth = last;
    for (int i = 1; i < rows_of_unit; ++i) {
        if (i <= nth) from_nth &= from_nth - 1;
    }
    const int at = max(__ffs(from_nth) - 1, 0);  // the lane of the nth token
    const RowMeta token = shuffled(meta, at);
    int row = -1;
    if (nth < __popc(last) and k < plan.topk) row = plan.rows_of(token.src_rank, token.token)[k];
    const uint32_t* ready = workspace.tile_ready + workspace.tile_counter(1, max(row, 0) / BLOCK_M);
    if (what == Deliver::kAwaited) {
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
        const bool is_missing =
            row >= 0 and not protocol::is_complete<Atomics>(ready, block_target);
        if (const uint32_t missing = __ballot_sync(~0u, is_missing)) {
            if (units == 1) return Progress::kNone;
            take_fewer(__shfl_sync(~0u, at, __ffs(missing) - 1));
            if (taken == 0) return Progress::kNone;
            if (nth >= __popc(last)) row = -1;
        }
        __syncwarp();  // all lanes may read the rows that one lane's counter tells of
        bool is_mine = false;
        if (lane == 0) is_mine = atomicCAS_block(&smem.next_unit, unit, unit + taken) == unit;
        if (not __shfl_sync(~0u, is_mine, 0)) return Progress::kSome;
    }

    const int64_t begin = Trace::now();
    begin_span(Span::kDeliver);
    const int64_t row_bytes = heap.row_bytes();
    const uint32_t all_routes = __ballot_sync(~0u, row >= 0);
    const int count = __popc(last);
    [[maybe_unused]] int leaf = -1;
    if constexpr (kInTree) {
        if (row >= 0) leaf = plan.row_meta[row].leaf;
    }
    for (int i = 0; i < count; ++i) {
        const int base = i * width;
        const uint32_t routes = all_routes & (((1u << width) - 1) << base);
        if (__popc(routes) == 1) continue;  // its finishers have sent it
        char* target = target_of(args, shuffled(token, base));
        if constexpr (kInTree) {
            sum_rows_in_tree<T>(
                target, int(row_bytes / 16), protocol::leaves_of_rank(args.shape.num_ranks),
                [&] { return DeliveredRows(args.result, row_bytes, row, leaf, routes); });
        } else {
            sum_rows<T, kUnroll>(target, int(row_bytes / 16), [&] {
                return [&, left = routes]() mutable -> const uint4* {
                    if (left == 0) return nullptr;
                    const int64_t from = __shfl_sync(~0u, row, __ffs(left) - 1);
                    left &= left - 1;
                    return reinterpret_cast<const uint4*>(args.result + from * row_bytes);
                };
            });
        }
    }
    if constexpr (kIsBackward) {
        float dprob = 0.0f;
        if (row >= 0) {
            dprob = sum_dprob(args.dprob_partial + int64_t(row) * args.num_n_tiles[0],
                              args.num_n_tiles[0]);
        }
        for (uint32_t left = args.biases[1] ? all_routes : 0; left; left &= left - 1) {
            const int of = __ffs(left) - 1, row_of = __shfl_sync(~0u, row, of);
            // An own row need not have been copied.
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
    if (last >> lane & 1) {
        if (kIsBackward or not meta.is_home()) {  // else no rank waits for it
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
