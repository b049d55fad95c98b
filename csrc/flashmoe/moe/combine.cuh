// Combine, in two steps. Deliver: this rank sums the rows that it has of a token, in float32 and in
// a fixed order, and sends one row to the token's rank. Reduce: the token's rank sums the shares of
// all ranks in rank order. A token's only row here has gone there straight from GEMM1, and where
// all rows are on the token's own rank their sum is its result. Routing weights were applied before
// fc2, so both steps are plain sums, and repeatable bit by bit. If a layer is rank-invariant, both
// are parts of one tree of sums (protocol/tree.h), whose code is in one place: warps that
// communicate combine when they have done all else. Elsewhere it would take a processor's
// registers.
#pragma once

#include "flashmoe/moe/deliver.cuh"
#include "flashmoe/moe/reduce.cuh"

namespace flashmoe {

// Combines a little, without waiting for anything: it delivers rows, or else reduces tokens of a
// chunk. With `is_one`, for a warp that has other things to do, that is a unit of rows, or a token;
// else units ahead, or all complete tokens. `chunk` is where this warp looks first. Not for a
// layer that is rank-invariant. Scope: one warp.
template <class T, bool kIsBackward, int kUnroll>
__device__ __forceinline__ Progress
combine_some(const LayerArgs& args, CombineSmem& smem, int& chunk, bool is_one) {
    const Progress delivered = deliver_some<T, kIsBackward, kUnroll, false>(
        args, smem, is_one ? Deliver::kThere : Deliver::kAhead);
    if (delivered == Progress::kSome) return delivered;
    const ReduceChunks chunks(args);
    const auto reduce_one = [&](int of_chunk) {
        return reduce_chunk<T, kIsBackward, kUnroll, false>(args, smem, chunks, of_chunk, is_one,
                                                            false);
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
