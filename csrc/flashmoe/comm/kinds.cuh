// Numbers of the things that a warp waits for and of the work that its time goes to. The host knows
// them, too.
#pragma once

#include <cstdint>

namespace flashmoe {

// The awaited thing that a fault names; flashmoe_wait_name has the words.
enum class Wait : uint32_t {
    kNone,
    kPlanRoutes,         // plan: the routing of a peer
    kDispatchRows,       // dispatch: a peer's rows are published
    kDispatchCopy,       // dispatch: a row on its way from the peer
    kLoaderStage,        // loader: a free stage of the pipeline
    kLoaderTile,         // loader: the other roles take the next tile
    kLoaderRows,         // loader: rows of a block for GEMM0, or (-1) of all
    kLoaderAct,          // loader: what finishers make of GEMM0, of a block or (-1) of all
    kProcessorTile,      // processor: the next tile
    kProcessorStage,     // processor: a full stage of the pipeline
    kProcessorHandover,  // processor: the finisher has taken the last tile
    kFinisherTile,       // finisher: the next tile
    kFinisherRows,       // finisher: a processor's outputs
    kCombineResult,      // combine: results of a block
    kReduceResult,       // reduce: a peer's share of a token
    kGridBarrier,        // plan: the other CTAs of the grid
    kRouting,            // no wait: a routing or a call was refused, or there are too many rows
    kPeerGaveUp,         // no wait here: another rank's wait ran out of time
    kLoaderWeights,      // loader: a replica's weights
    kReplicaGrads,       // the gradients of the replicas on a rank
    kCount,
};

// Work that a warp's time goes to. Counters add up the first kNumSpans; a trace shows the others,
// too.
enum class Span : uint32_t {
    kPlan,          // what a launch begins with: publishing, and the plan
    kDispatch,      // fetching rows
    kProcess,       // a processor's time from its first tile to its last
    kFinish,        // a finisher's
    kDeliver,       // summing a token's rows here, and sending the sum
    kReduce,        // summing the shares of all ranks
    kRowsWait,      // the loader's, Wait::kLoaderRows
    kActWait,       // the loader's, Wait::kLoaderAct
    kStageWait,     // a processor's, Wait::kProcessorStage and kProcessorTile
    kHandoverWait,  // a processor's, Wait::kProcessorHandover
    kResultWait,    // while delivering, Wait::kCombineResult
    kShareWait,     // while reducing, Wait::kReduceResult
    kGemm0,
    kGemm1,
    kEpilogue0,
    kEpilogue1,
    kWeightGrad,
    kStoreGrad,
};
constexpr int kNumSpans = int(Span::kGemm0);

// The kind of a trace's event: waits have their own numbers, and the numbers of spans follow.
constexpr uint32_t kFirstSpanEvent = 32;
static_assert(uint32_t(Wait::kCount) <= kFirstSpanEvent);

constexpr uint32_t event_of(Wait wait) { return uint32_t(wait); }
// `further`: how many spans after this one, as kGemm1 comes after kGemm0.
constexpr uint32_t event_of(Span span, int further = 0) {
    return kFirstSpanEvent + uint32_t(span) + uint32_t(further);
}

// Parts of a span's work, which a trace shows in place of a row block or an expert.
enum TracePart : int32_t {
    kNoPart = -1,
    kWhole = 0,
    kFirstRows = 1,  // kDispatch: the own rows of the first tiles
    kMeanwhile = 1,  // kDeliver: what is combined while tiles are computed
    kOne = 2,        // kDeliver: one unit; kReduce: one token
    kSignals = 3,    // kDeliver: the signals of one unit
};

// True if a wait's time is counted where the wait ends. Processors add theirs up and count them
// once. The other waits are not counted, because counting delays the work that was waited for.
constexpr bool is_counted(Wait wait) {
    return wait == Wait::kLoaderRows or wait == Wait::kLoaderAct;
}
constexpr Span span_of(Wait counted) {
    return counted == Wait::kLoaderRows ? Span::kRowsWait : Span::kActWait;
}

}  // namespace flashmoe
