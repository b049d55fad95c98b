// One forward or backward of the kernel, with its real order of steps and its real protocol, over
// plain memory and small integers in place of rows: a row's value tells its epoch, rank and token,
// and what arrives is compared with what the routing alone says should.
//
// A is the policy of the protocol (flashmoe/protocol/atomics.h). The harness asks more of it:
// read_by_tma and write_by_bulk for the asynchronous proxy, `wait` with a name and with the word
// that ends all waits, `join` where hardware or the stream brings threads together, `forget` where
// what a thread knows is given by its place in the program, `count_ahead`, and `check`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "flashmoe/protocol/give_up.h"
#include "flashmoe/protocol/grid.h"
#include "flashmoe/protocol/order.h"
#include "flashmoe/protocol/places.h"
#include "flashmoe/protocol/queue.h"
#include "flashmoe/protocol/signals.h"

namespace protocol_test {

namespace protocol = flashmoe::protocol;

constexpr int kMaxRanks = 4, kMaxTopk = 4, kMaxTokens = 16, kMaxExperts = 16, kMaxWidth = 2;

// How a rank gets at its rows, or at its own ones: moe/args.cuh.
enum class RowAccess { kCopied, kFirstCopied, kInPlaceUntilCopied, kInPlace, kOwnInPlace };

struct Sizes {
    int ranks;
    int ctas;    // CTAs of each rank
    int agents;  // warps of each CTA: 1 does all; 2 are dispatch and tiles; a 3rd combines early
    int experts;
    int topk;                  // most of any layer
    int tokens;                // most of one rank
    int block_rows;            // BLOCK_M
    int n_tiles[2];            // along N, of GEMM0 and GEMM1
    int warps;                 // that share a tile, and count it
    int group_units;           // what the order of tiles advances by
    bool cuts_groups = false;  // or these end where experts do, by a table of the plan
    int lag = 1;               // of GEMM1, in such steps
    bool is_mixed = false;     // their tickets of both products alternate
    int rows_per_ticket;       // of dispatch
    int unit_rows;             // of deliver
    int chunk_tokens;          // of reduce
    bool finishers_combine;    // a little, before each tile
    bool has_slots = false;    // for replicas, whose gradients of fc2 are added within a backward
    int idle_looks = 2;        // in a row, behind which who combines early leaves the rest
    RowAccess row_access = RowAccess::kCopied;
    bool has_own_routes = false;  // each CTA places the routes that it has written
    bool plans_few = false;       // or counts all routes for itself, as they are given
    bool copies_tokens = false;   // a backward makes rows of x, besides those of dY
    bool quantizes = false;  // FP8: forwards write this rank's tokens into its heap, and read them

    int local_experts() const { return experts / ranks; }
    int local_routes() const { return topk < local_experts() ? topk : local_experts(); }
    int max_blocks() const {
        return (ranks * tokens * local_routes() + block_rows - 1) / block_rows + local_experts();
    }
    int max_rows() const { return max_blocks() * block_rows; }
    int chunks() const { return (tokens + chunk_tokens - 1) / chunk_tokens; }
};

enum class Kind {
    kForward,   // plans in the launch
    kPlan,      // the plan alone; the epoch goes on
    kPlanned,   // the rest of it
    kBackward,  // along the last plan
    kGather,    // dispatch alone, along the last plan; two epochs
};

struct Launch {
    Kind kind = Kind::kForward;
    // What this launch's layer has; other layers share its heap.
    int topk;
    int width = 1;  // words of a row, its hidden size
    int tokens[kMaxRanks] = {};
    int8_t expert[kMaxRanks][kMaxTokens][kMaxTopk] = {};  // or -1
    int refusing_rank = -1;                               // refuses its call, or its routing
    int row_block_bound = 1 << 20;                        // blocks that fit in every rank's buffers
    bool fails = false;                                   // hence no rank goes on
    int absent_rank = -1;                                 // does not launch, and exits
    int unfollowed_rank = -1;                             // has no backward of this forward
    bool is_in_time = false;                              // no wait runs out of time early
};

inline uint64_t mix(uint64_t a, uint64_t b) {
    uint64_t x = a * 0x9e3779b97f4a7c15ull + b + 1;
    x = (x ^ x >> 29) * 0xbf58476d1ce4e5b9ull;
    return x ^ x >> 32;
}

// What rows hold at each step.
inline uint64_t x_value(uint32_t epoch, int rank, int token) {
    return mix(epoch, uint64_t(rank) << 8 | token);
}
inline uint64_t gemm_value(int gemm, uint64_t row, int expert, int n) {
    return mix(row, uint64_t(gemm) << 16 | expert << 8 | n);
}
inline uint64_t dprob_value(uint64_t row, int expert) { return mix(row, 1u << 20 | expert); }

inline uint64_t expected_result(const Sizes& s, uint64_t x, int expert, int n) {
    uint64_t act = 0;
    for (int i = 0; i < s.n_tiles[0]; ++i) act += gemm_value(0, x, expert, i);
    return gemm_value(1, act, expert, n);
}

// How a wait ended.
enum class WaitEnd { kDone, kTimeIsUp, kTold };

struct Row {
    int token, src, slot;
    bool owner, last, pad;
    bool home;  // all rows of the token are on its own rank

    bool alone() const { return owner and last; }
    static Row unpack(uint64_t word) {
        return {int(word & 255),      int(word >> 8 & 255), int(word >> 16 & 255),
                bool(word >> 24 & 1), bool(word >> 25 & 1), bool(word >> 26 & 1),
                bool(word >> 27 & 1)};
    }
    uint64_t pack() const {
        return uint64_t(token) | uint64_t(src) << 8 | uint64_t(slot) << 16 | uint64_t(owner) << 24 |
               uint64_t(last) << 25 | uint64_t(pad) << 26 | uint64_t(home) << 27;
    }
};

// Lists of up to kMaxTopk small numbers in one word; -1 means none.
inline int entry(uint64_t word, int k) { return int16_t(word >> (16 * k)); }
inline uint64_t with_entry(uint64_t word, int k, int value) {
    return (word & ~(uint64_t(0xffff) << 16 * k)) | uint64_t(uint16_t(value)) << 16 * k;
}

// Where a layer has its arrays: comm/heap.cuh.
struct HeapPlaces {
    int64_t rows, results, dprobs, end;

    HeapPlaces(const Sizes& s, int topk, int width) {
        rows = 2 * s.ranks * s.tokens * heap_topk(s, topk);
        results = rows + s.tokens * width;
        dprobs = results + s.tokens * num_slots(s, topk) * s.n_tiles[1] * width;
        end = dprobs + s.tokens * topk;
    }
    static int heap_topk(const Sizes& s, int) { return s.topk; }
    static int num_slots(const Sizes& s, int topk) { return topk < s.ranks ? topk : s.ranks; }
};

// The memory of one rank.
template <class A>
struct Memory {
    using Words = typename A::template Array<typename A::U32>;
    using Cells = typename A::template Array<typename A::Plain>;

    // The symmetric heap.
    typename A::template Array<typename A::U64> route_signals;
    Words gave_up, row_signals, result_signals;
    Cells row_block_bounds, refusals;
    Cells heap;  // the rest of it, where each layer has its routes, rows, results and dprobs
    // The workspace.
    Words raised, counters;
    Words next_unit;  // in shared memory of each CTA
    Cells epoch, cta_counts;
    // The plan, and the buffers of a launch.
    Cells header, units, groups, row_meta, token_rows, own_ranks, received, act, result, out,
        weight_grads;
    Cells token_copies;
    // What CTAs tell their own agents through shared memory.
    Cells go_on, spoiled;
    std::vector<typename A::Join> cta_join;
    typename A::Join launch_join;

    Memory(const Sizes& s, int rank)
        : route_signals(2 * s.ranks, "route_signal", rank),
          gave_up(1, "gave_up", rank),
          row_signals(s.ranks, "row_signal", rank),
          result_signals(s.tokens * s.ranks, "result_signal", rank),
          row_block_bounds(2 * s.ranks, "row_block_bound", rank),
          refusals(2 * s.ranks, "refusal", rank),
          heap(int(HeapPlaces(s, s.topk, kMaxWidth).end), "heap", rank),
          raised(1, "raised", rank),
          counters(num_counters(s), "counter", rank),
          next_unit(s.ctas, "next_unit", rank),
          epoch(1, "epoch", rank),
          cta_counts(s.local_experts() * s.ctas, "cta_counts", rank),
          header(1, "plan.header", rank),
          units(s.max_blocks(), "plan.units", rank),
          groups(s.max_blocks() + protocol::kMostLag + 1, "plan.groups", rank),
          row_meta(s.max_rows(), "plan.row_meta", rank),
          token_rows(s.ranks * s.tokens, "plan.token_rows", rank),
          own_ranks(s.tokens, "plan.own_ranks", rank),
          received(s.max_rows(), "received", rank),
          act(s.max_rows() * s.n_tiles[0], "act", rank),
          result(s.max_rows() * s.n_tiles[1], "result", rank),
          out(s.tokens * s.n_tiles[1], "out", rank),
          weight_grads(2 * s.local_experts(), "weight_grads", rank),
          token_copies(s.max_rows(), "token_copies", rank),
          go_on(s.ctas, "go_on", rank),
          spoiled(1, "spoiled", rank),
          launch_join(s.ctas * s.agents) {
        for (int cta = 0; cta < s.ctas; ++cta) cta_join.emplace_back(s.agents);
        auto name = [&](int first, int count, const char* what) {
            for (int i = 0; i < count; ++i) A::name(&counters[first + i], what, i);
        };
        static const char* const tickets[kTickets] = {
            "tickets.tile", "tickets.dispatch", "differentiated",   "fc2_grads_stored",
            "dispatched",   "tokens_copied",    "routes_published", "rows_published",
            "rows_taken",   "leaving",          "barrier0",         "barrier1"};
        for (int i = 0; i < kTickets; ++i) name(i, 1, tickets[i]);
        const int blocks = s.max_blocks();
        name(kTickets, blocks, "rows_ready");
        name(kTickets + blocks, blocks, "tile_ready[0]");
        name(kTickets + 2 * blocks, blocks, "tile_ready[1]");
        name(kTickets + 3 * blocks, s.experts, "selections");
        name(kTickets + 3 * blocks + s.experts, s.chunks(), "reduced");
    }

    // Counters of one launch, in one piece as `reset` wants them.
    enum Counter {
        kTile,
        kDispatch,
        kDifferentiated,
        kFc2GradsStored,
        kDispatched,
        kTokensCopied,
        kRoutes,
        kRows,
        kTaken,
        kLeaving,
        kBarrier,
        kTickets = kBarrier + 2
    };

    static int num_counters(const Sizes& s) {
        return kTickets + 3 * s.max_blocks() + s.experts + s.chunks();
    }
    typename A::U32* counter(int index) { return &counters[index]; }
    typename A::U32* rows_ready(const Sizes&, int block) { return &counters[kTickets + block]; }
    typename A::U32* tile_ready(const Sizes& s, int gemm, int block) {
        return &counters[kTickets + (1 + gemm) * s.max_blocks() + block];
    }
    typename A::U32* selections(const Sizes& s, int expert) {
        return &counters[kTickets + 3 * s.max_blocks() + expert];
    }
    typename A::U32* reduced(const Sizes& s, int chunk) {
        return &counters[kTickets + 3 * s.max_blocks() + s.experts + chunk];
    }
};

template <class A>
struct World {
    Sizes sizes;
    const std::vector<Launch>& launches;
    std::vector<Memory<A>*> ranks;
};

// What one warp (`role` of a CTA) does in all launches.
template <class A>
class Agent {
 public:
    Agent(World<A>& world, int rank, int cta, int role)
        : s_(world.sizes),
          world_(world),
          here_(*world.ranks[rank]),
          rank_(rank),
          cta_(cta),
          role_(role) {}

    void run() {
        for (size_t i = 0; i < world_.launches.size(); ++i) {
            launch_index_ = int(i);
            A::join(here_.launch_join, true);
            forget(0);
            // After a fault that nobody mends the host launches no more.
            const Launch& launch = world_.launches[i];
            if (launch.absent_rank == rank_ or A::read(&here_.spoiled[0])) return;
            if (follows(launch) and launch.unfollowed_rank == rank_) continue;
            run_launch(launch);
        }
    }

 private:
    using M = Memory<A>;

    void run_launch(const Launch& launch) {
        A::set_in_time(launch.is_in_time);
        topk_ = launch.topk;
        width_ = launch.width;
        access_ = s_.row_access;
        quantizes_ = s_.quantizes and launch.kind != Kind::kBackward;
        // Nothing else leaves the rows where they are.
        if (access_ == RowAccess::kInPlace and launch.kind != Kind::kForward and
            launch.kind != Kind::kBackward) {
            access_ = RowAccess::kInPlaceUntilCopied;
        }
        if (access_ == RowAccess::kOwnInPlace and follows(launch)) access_ = RowAccess::kCopied;
        if (follows(launch) and unfollowed() != 0) return leave_unmatched(launch);
        const uint32_t epoch = uint32_t(A::read(&here_.epoch[0])) + 1;
        bool go_on = true;
        if (launch.kind != Kind::kPlanned) {
            if (role_ == 0) {
                if (launch.kind == Kind::kGather) {
                    publish_rows(launch, epoch);
                } else if (launch.kind != Kind::kBackward) {
                    go_on = plan(launch, epoch);
                    A::check(go_on == not launch.fails or A::is_void(),
                             "ranks disagree whether to go on");
                }
                A::write(&here_.go_on[cta_], go_on);
            } else if (role_ == 1 and plans(launch) and not s_.quantizes) {
                publish_rows(launch, epoch);  // while the other plans, in whatever order
            }
            join_cta();
            go_on = A::read(&here_.go_on[cta_]) != 0;
        }
        forget(1);
        if (launch.kind == Kind::kGather) {
            if (role_ == 0) gather(epoch);
        } else if (launch.kind != Kind::kPlan and go_on) {
            if (role_ == 0) A::write(&here_.next_unit[cta_], 0u);
            join_cta();
            if (launch.kind == Kind::kBackward and role_ == (s_.agents == 1 ? 0 : 1)) {
                publish_rows(launch, epoch);  // while the other dispatches
            }
            // As in kernel/layer.cuh, but that there all warps copy the first rows before any goes
            // on; and every warp helps to combine once its own part is done.
            const bool are_copied = copies_with_plan(launch);
            if ((role_ == 1 or s_.agents == 1) and not are_copied) copy_first_rows(epoch);
            if (role_ == 0) dispatch(epoch, first_blocks(), not are_copied);
            if (role_ == 0 and s_.copies_tokens and launch.kind == Kind::kBackward) {
                copy_tokens(launch, epoch);
            }
            if (role_ == 1 or s_.agents == 1) compute_tiles(launch, epoch);
            if (role_ == 2) combine_meanwhile(launch, epoch);
            deliver(launch, epoch);
            reduce(launch, epoch);
            if (s_.has_slots and launch.kind == Kind::kBackward) await_fc2_grads(launch, epoch);
        }
        forget(2);
        join_cta();
        if (role_ == 0) leave(launch, epoch, go_on);
    }

    static bool follows(const Launch& launch) {
        return launch.kind == Kind::kBackward or launch.kind == Kind::kGather;
    }
    static bool plans(const Launch& launch) {
        return launch.kind != Kind::kPlanned and not follows(launch);
    }

    // The ranks that have no backward of the last plan, a bit each.
    uint32_t unfollowed() { return uint32_t(A::read(&here_.header[0]) >> 16 & 0xffff); }

    // A launch of a backward that some rank does not have: moe/unmatched.cuh.
    void leave_unmatched(const Launch& launch) {
        A::check(unfollowed() == 1u << launch.unfollowed_rank, "other ranks have no backward");
        if (cta_ == 0 and role_ == 0) A::fetch_or(&here_.raised[0], 1);
    }

    // Publish: moe/publish.cuh.

    void publish_routes(const Launch& launch, uint32_t epoch) {
        if (launch.refusing_rank == rank_ and cta_ == 0) A::fetch_or(&here_.raised[0], 1);
        const bool is_own = s_.has_own_routes;
        const int per_cta = (s_.tokens + s_.ctas - 1) / s_.ctas, step = is_own ? 1 : s_.ctas;
        const int begin = is_own ? cta_ * per_cta : cta_;
        const int tokens = launch.tokens[rank_], last = is_own ? begin + per_cta : tokens;
        for (int token = begin; token < last and token < tokens; token += step) {
            for (int rank = 0; rank < s_.ranks; ++rank) {
                for (int k = 0; k < topk_; ++k) {
                    A::write(route_of(rank, epoch, rank_, token, k),
                             uint64_t(launch.expert[rank_][token][k] + 1));
                }
            }
        }
        if (cta_ == 0) write_row_block_bounds(launch, epoch);
        if (not is_own) tell_routes(launch, epoch);
        // In the kernel another warp does so, once its CTA's routes are out, unless all warps
        // quantize.
        if (s_.agents == 1 or s_.quantizes) publish_rows(launch, epoch);
    }

    void tell_routes(const Launch& launch, uint32_t epoch) {
        protocol::arrive<A>(here_.counter(M::kRoutes), s_.ctas, [&] {
            const bool refused = A::load(&here_.raised[0]) != 0;
            if (refused) {
                protocol::give_reasons<A>(s_.ranks, [&](int rank) {
                    A::write(refusal_of(rank, epoch, rank_), mix(epoch, rank_));
                });
            }
            protocol::publish_routes<A>(
                s_.ranks, protocol::RouteSignal::make(epoch, launch.tokens[rank_], refused),
                [&](int rank) {
                    return &world_.ranks[rank]
                                ->route_signals[protocol::route_word(epoch, s_.ranks, rank_)];
                });
        });
    }

    void write_row_block_bounds(const Launch& launch, uint32_t epoch) {
        const uint32_t bound = protocol::RowBound::make(uint32_t(launch.row_block_bound),
                                                        launch.unfollowed_rank == rank_);
        for (int rank = 0; rank < s_.ranks; ++rank) {
            A::write(
                &world_.ranks[rank]->row_block_bounds[protocol::route_word(epoch, s_.ranks, rank_)],
                uint64_t(bound));
        }
    }

    void publish_rows(const Launch& launch, uint32_t epoch) {
        if (s_.ranks > 1 or quantizes_) {
            for (int token = cta_; token < launch.tokens[rank_]; token += s_.ctas) {
                A::write(row_of(rank_, token), x_value(epoch, rank_, token));
            }
        }
        tell_rows(M::kRows, epoch);
    }

    void tell_rows(typename M::Counter arrivals, uint32_t epoch) {
        protocol::arrive<A>(here_.counter(arrivals), s_.ctas, [&] {
            protocol::publish_rows<A>(
                s_.ranks, epoch, [&](int rank) { return &world_.ranks[rank]->row_signals[rank_]; });
        });
    }

    // The heap: comm/heap.cuh.

    HeapPlaces places() const { return HeapPlaces(s_, topk_, width_); }

    typename A::Plain* route_of(int owner, uint32_t epoch, int src, int token, int k) {
        const int heap_topk = HeapPlaces::heap_topk(s_, topk_);
        return &world_.ranks[owner]->heap[k + protocol::route_place(epoch, s_.ranks, src, s_.tokens,
                                                                    heap_topk, token)];
    }

    typename A::Plain* refusal_of(int owner, uint32_t epoch, int src) {
        return &world_.ranks[owner]->refusals[protocol::route_word(epoch, s_.ranks, src)];
    }

    typename A::Plain* row_of(int owner, int token) {
        return &world_.ranks[owner]->heap[places().rows + token * width_];
    }

    typename A::Plain* result_of(const Row& meta, int n) {
        const int slots = HeapPlaces::num_slots(s_, topk_);
        const int64_t row = protocol::result_row(meta.token, slots, meta.slot);
        return &world_.ranks[meta.src]->heap[places().results + (row * s_.n_tiles[1] + n) * width_];
    }

    typename A::Plain* out_of(int token, int n) { return &here_.out[token * s_.n_tiles[1] + n]; }

    // Where the sum of a token's rows goes, and what it is there: args.cuh.
    struct Target {
        typename A::Plain* at;
        uint64_t value;
    };
    Target target_of(const Row& meta, int n, uint32_t epoch, uint64_t sum) {
        if (meta.home) return {out_of(meta.token, n), mix(epoch, sum)};
        return {result_of(meta, n), sum};
    }

    typename A::Plain* dprob_of(int owner, int token, int k) {
        return &world_.ranks[owner]->heap[places().dprobs + token * topk_ + k];
    }

    // A token's routes as they have arrived.
    uint64_t read_routes(uint32_t epoch, int src, int token) {
        uint64_t routes = ~0ull;
        for (int k = 0; k < topk_; ++k) {
            const uint64_t route = A::read(route_of(rank_, epoch, src, token, k));
            routes = with_entry(routes, k, int(route) - 1);
        }
        return routes;
    }

    // Plan: moe/plan_layer.cuh.

    bool plan(const Launch& launch, uint32_t epoch) {
        if (s_.plans_few) return plan_few(launch, epoch);
        publish_routes(launch, epoch);
        int num_tokens[kMaxRanks];
        const bool has_routes = s_.has_own_routes ? take_own_routes(launch, num_tokens)
                                                  : await_routes(epoch, num_tokens);
        count_routes(epoch, num_tokens);  // if not all routes are here, those that are
        if (not grid_barrier(0, has_routes)) return false;
        const bool fit = rows_fit(epoch);
        check_counts(launch);
        place_rows(epoch, num_tokens);
        return grid_barrier(1, fit);
    }

    // The plan of few tokens: moe/place_few.cuh, with one token a chunk.
    bool plan_few(const Launch& launch, uint32_t epoch) {
        if (launch.refusing_rank == rank_ and cta_ == 0) A::fetch_or(&here_.raised[0], 1);
        if (cta_ == 0) write_row_block_bounds(launch, epoch);
        if (s_.agents == 1) publish_rows(launch, epoch);
        const int per_cta = (s_.tokens + s_.ctas - 1) / s_.ctas, first = cta_ * per_cta;
        uint32_t counts[kMaxExperts] = {}, before[kMaxExperts] = {};
        for (int token = 0; token < launch.tokens[rank_]; ++token) {
            for (int k = 0; k < topk_; ++k) {
                const int expert = launch.expert[rank_][token][k];
                if (expert < 0) continue;
                ++counts[expert];
                before[expert] += token < first;
            }
        }
        int blocks = 0;
        for (int expert = 0; expert < s_.experts; ++expert) {
            blocks += blocks_for(int(counts[expert]));
        }
        bool may_go_on = blocks <= launch.row_block_bound;
        if (not may_go_on) A::fetch_or(&here_.raised[0], 1);
        const auto for_tokens = [&](auto visit) {
            for (int i = first; i < first + per_cta and i < launch.tokens[rank_]; ++i) visit(i);
        };
        int next[kMaxExperts];
        if (may_go_on) {
            lay_out(
                epoch, [&](int expert) { return int(counts[expert]); },
                [&](int local) { return int(before[local]); }, next);
            for_tokens([&](int token) {
                place(rank_, token, routes_of(launch.expert[rank_][token]), next);
            });
        }
        may_go_on = may_go_on and A::load(&here_.raised[0]) == 0;
        auto* word = here_.counter(M::kBarrier);
        protocol::come_to_barrier<A>(word, may_go_on);
        if (may_go_on and copies_with_plan(launch)) {
            int begin = 0;
            for (int i = 0; i < s_.experts; ++i) {
                const int end = begin + blocks_for(int(counts[i]));
                if ((i + 1) % s_.ctas == cta_) {  // whichever: not who reads them first
                    make_pads(begin * s_.block_rows + int(counts[i]), end * s_.block_rows);
                }
                begin = end;
            }
            for_tokens([&](int token) { copy_few(epoch, token); });
        }
        return protocol::await_barrier<A>(word, s_.ctas, [&](auto load, auto done) {
            return wait("a grid barrier", load, done);
        });
    }

    // All rows are copied, and all pads made, by those who plan.
    bool copies_with_plan(const Launch& launch) const {
        return s_.plans_few and access_ == RowAccess::kFirstCopied and
               launch.kind == Kind::kForward;
    }

    void copy_few(uint32_t epoch, int token) {
        const uint64_t rows = A::read(&here_.token_rows[rank_ * s_.tokens + token]);
        const uint64_t value = x_value(epoch, rank_, token);
        for_each_row(rows, [&](int to) { A::write(&here_.received[to], value); });
        for_each_row(
            rows, [&](int to) { protocol::publish<A>(here_.rows_ready(s_, to / s_.block_rows)); });
    }

    // An expert's pads, which are in one block and told of together.
    void make_pads(int first, int end) {
        for (int row = first; row < end; ++row) A::write(&here_.received[row], 0);
        if (first < end) {
            protocol::publish<A>(here_.rows_ready(s_, first / s_.block_rows),
                                 uint32_t(end - first));
        }
    }

    static uint64_t routes_of(const int8_t (&expert)[kMaxTopk]) {
        uint64_t routes = ~0ull;
        for (int k = 0; k < kMaxTopk; ++k) routes = with_entry(routes, k, expert[k]);
        return routes;
    }

    bool await_routes(uint32_t epoch, int (&num_tokens)[kMaxRanks]) {
        bool all = true;
        for (int src = 0; src < s_.ranks; ++src) {
            const auto* signal = &here_.route_signals[protocol::route_word(epoch, s_.ranks, src)];
            uint64_t seen = 0;
            const bool is_here =
                protocol::await_routes<A>(signal, epoch, [&](auto load, auto done) {
                    return wait("the plan waits for routes", [&] { return seen = load(); }, done);
                });
            if (is_here and protocol::RouteSignal::is_refused(seen)) {
                A::check(A::read(refusal_of(rank_, epoch, src)) == mix(epoch, src),
                         "a rank is told another reason");
                A::fetch_or(&here_.raised[0], 1);
                all = false;
            }
            num_tokens[src] = is_here ? int(protocol::RouteSignal::tokens(seen)) : 0;
            all &= is_here;
        }
        return all;
    }

    bool take_own_routes(const Launch& launch, int (&num_tokens)[kMaxRanks]) {
        num_tokens[rank_] = launch.tokens[rank_];
        return A::load(&here_.raised[0]) == 0;
    }

    template <class Visit>
    void for_own_chunks(const int (&num_tokens)[kMaxRanks], Visit visit) {
        const int chunks = s_.ranks * s_.tokens, per_cta = (chunks + s_.ctas - 1) / s_.ctas;
        for (int i = cta_ * per_cta; i < (cta_ + 1) * per_cta and i < chunks; ++i) {
            const int behind = i - s_.tokens, others = s_.ranks > 1 ? s_.ranks - 1 : 1;
            const int away = behind < 0 ? 0 : 1 + behind % others;  // this rank's come first
            const int src = (rank_ + away) % s_.ranks, token = behind < 0 ? i : behind / others;
            if (token < num_tokens[src]) visit(src, token);
        }
    }

    void count_routes(uint32_t epoch, const int (&num_tokens)[kMaxRanks]) {
        uint32_t counts[kMaxExperts] = {};
        for_own_chunks(num_tokens, [&](int src, int token) {
            const uint64_t routes = read_routes(epoch, src, token);
            for (int k = 0; k < topk_; ++k) {
                if (entry(routes, k) >= 0) ++counts[entry(routes, k)];
            }
        });
        for (int expert = 0; expert < s_.experts; ++expert) {
            if (counts[expert] > 0) A::add(here_.selections(s_, expert), counts[expert]);
        }
        for (int i = 0; i < s_.local_experts(); ++i) {
            A::write(&here_.cta_counts[i * s_.ctas + cta_], counts[rank_ * s_.local_experts() + i]);
        }
    }

    // A plan that goes on is whole, also when everything that it is for is void: no row lies
    // outside its buffer.
    void check_counts(const Launch& launch) {
        uint32_t counts[kMaxExperts] = {};
        for (int src = 0; src < s_.ranks; ++src) {
            for (int token = 0; token < launch.tokens[src]; ++token) {
                for (int k = 0; k < topk_; ++k) {
                    if (const int expert = launch.expert[src][token][k]; expert >= 0) {
                        ++counts[expert];
                    }
                }
            }
        }
        for (int expert = 0; expert < s_.experts; ++expert) {
            A::check(A::read(here_.selections(s_, expert)) == counts[expert],
                     "a plan is made of some of the routes");
        }
    }

    int blocks_for(int rows) const { return (rows + s_.block_rows - 1) / s_.block_rows; }
    int rows_of(int expert) { return int(A::read(here_.selections(s_, expert))); }
    int blocks_of(int expert) { return blocks_for(rows_of(expert)); }

    bool rows_fit(uint32_t epoch) {
        bool fit = true;
        for (int rank = 0; rank < s_.ranks; ++rank) {
            int blocks = 0;
            for (int i = 0; i < s_.local_experts(); ++i) {
                blocks += blocks_of(rank * s_.local_experts() + i);
            }
            if (uint32_t(blocks) > protocol::RowBound::blocks(row_bound_of(epoch, rank))) {
                fit = false;
            }
        }
        if (not fit) A::fetch_or(&here_.raised[0], 1);
        return fit;
    }

    uint32_t row_bound_of(uint32_t epoch, int rank) {
        return uint32_t(
            A::read(&here_.row_block_bounds[protocol::route_word(epoch, s_.ranks, rank)]));
    }

    uint64_t unfollowed_ranks(uint32_t epoch) {
        uint64_t ranks = 0;
        for (int rank = 0; rank < s_.ranks; ++rank) {
            const bool is_one = protocol::RowBound::is_unfollowed(row_bound_of(epoch, rank));
            ranks |= uint64_t(is_one) << rank;
        }
        return ranks;
    }

    void place_rows(uint32_t epoch, const int (&num_tokens)[kMaxRanks]) {
        int next[kMaxExperts];
        lay_out(
            epoch, [&](int expert) { return rows_of(expert); },
            [&](int local) {
                int rows = 0;
                for (int cta = 0; cta < cta_; ++cta) {
                    rows += int(A::read(&here_.cta_counts[local * s_.ctas + cta]));
                }
                return rows;
            },
            next);
        for_own_chunks(num_tokens, [&](int src, int token) {
            place(src, token, read_routes(epoch, src, token), next);
        });
    }

    // Describes units and pads, and tells where this CTA's rows of each expert begin, of which
    // other CTAs have so many before.
    template <class RowsOf, class Before>
    void lay_out(uint32_t epoch, RowsOf rows_of, Before before, int (&next)[kMaxExperts]) {
        int begin = 0, unit = 0, ends[kMaxExperts];
        for (int i = 0; i < s_.local_experts(); ++i) {
            const int rows = rows_of(rank_ * s_.local_experts() + i), blocks = blocks_for(rows);
            next[i] = begin * s_.block_rows + before(i);
            if (i % s_.ctas == cta_) {
                for (int row = begin * s_.block_rows + rows; row < (begin + blocks) * s_.block_rows;
                     ++row) {
                    A::write(&here_.row_meta[row], Row{0, 0, 0, false, false, true, false}.pack());
                }
                for (int block = 0; block < blocks; block += 2) {
                    A::write(&here_.units[unit + block / 2],
                             uint64_t(begin + block) << 16 | uint64_t(i) << 8 |
                                 uint64_t(blocks - block > 1 ? 2 : 1));
                }
            }
            begin += blocks;
            unit += (blocks + 1) / 2;
            ends[i] = unit;
        }
        if (s_.cuts_groups and cta_ == s_.ctas - 1) {
            protocol::cut_groups(
                s_.local_experts(), 1, s_.group_units, [&](int local) { return ends[local]; },
                [&](int group, int first) { A::write(&here_.groups[group], uint64_t(first)); });
        }
        if (cta_ == 0) {
            A::write(&here_.header[0],
                     uint64_t(begin) << 32 | unfollowed_ranks(epoch) << 16 | uint64_t(unit));
        }
    }

    void place(int src, int token, uint64_t routes, int (&next)[kMaxExperts]) {
        uint64_t rows = ~0ull;
        uint32_t ranks = 0;
        int first = 1 << 30, last = -1;
        for (int k = 0; k < topk_; ++k) {
            const int expert = entry(routes, k);
            if (expert < 0) continue;
            ranks |= 1u << (expert / s_.local_experts());
            const int local = expert - rank_ * s_.local_experts();
            if (local < 0 or local >= s_.local_experts()) continue;
            const int row = next[local]++;
            rows = with_entry(rows, k, row);
            first = row < first ? row : first;
            last = row > last ? row : last;
        }
        const int slot = __builtin_popcount(protocol::slots_before(ranks, rank_));
        const bool is_home = ranks == 1u << src;
        for (int k = 0; k < topk_; ++k) {
            if (const int row = entry(rows, k); row >= 0) {
                A::write(&here_.row_meta[row],
                         Row{token, src, slot, row == first, row == last, false, is_home}.pack());
            }
        }
        A::write(&here_.token_rows[src * s_.tokens + token], rows);
        if (src == rank_) A::write(&here_.own_ranks[token], ranks);
    }

    bool grid_barrier(int which, bool may_go_on) {
        return protocol::barrier<A>(
            here_.counter(M::kBarrier + which), s_.ctas, may_go_on,
            [&](auto load, auto done) { return wait("a grid barrier", load, done); });
    }

    // False once this rank or another has given up: comm/wait.cuh.
    template <class Load, class Done>
    bool wait(const char* what, Load load, Done done) {
        uint32_t who = 0;
        const WaitEnd end = A::wait(what, load, done, &here_.gave_up[0], &who);
        if (end == WaitEnd::kDone) return true;
        if (end == WaitEnd::kTimeIsUp) {
            A::fetch_or(&here_.raised[0], 1);
            who = uint32_t(rank_) + 1;
        }
        protocol::give_up<A>(s_.ranks, who,
                             [&](int rank) { return &world_.ranks[rank]->gave_up[0]; });
        return false;
    }

    // Dispatch: moe/dispatch.cuh.

    int num_blocks() { return int(A::read(&here_.header[0]) >> 32); }

    // Dispatch alone: kernel/gather.cuh.
    void gather(uint32_t epoch) {
        if (quantizes_) await_rows(epoch);  // this rank's, too, of its other CTAs
        dispatch(epoch, 0, true);
        tell_rows(M::kTaken, protocol::next_epoch(epoch));
        await_rows(protocol::next_epoch(epoch));
    }

    void await_rows(uint32_t epoch) {
        protocol::await_rows<A>(
            s_.ranks, epoch, [&](int src) { return &here_.row_signals[src]; },
            [&](int, auto load, auto done) { wait("dispatch waits for rows", load, done); });
    }

    bool reads_in_place() const { return access_ >= RowAccess::kInPlaceUntilCopied; }
    bool reads_own_in_place() const { return access_ == RowAccess::kOwnInPlace; }

    // Own rows come first among an expert's, and pads last.
    bool is_block_own(int block) {
        const Row last =
            Row::unpack(A::read(&here_.row_meta[block * s_.block_rows + s_.block_rows - 1]));
        return last.src == rank_ and not last.pad;
    }

    // The blocks of the first tiles, a bit each.
    uint32_t first_blocks() {
        if (reads_in_place()) return 0;
        const int units = int(A::read(&here_.header[0]) & 0xffff);
        uint32_t blocks = 0;
        for (int i = 0; i < units and i < s_.group_units; ++i) {
            const uint64_t unit = A::read(&here_.units[i]);
            blocks |= ((1u << (unit & 255)) - 1) << (unit >> 16 & 0xffff);
        }
        return blocks;
    }

    bool is_first(uint32_t blocks, int row) const { return blocks >> (row / s_.block_rows) & 1; }

    void copy_first_rows(uint32_t epoch) {
        const uint32_t blocks = first_blocks();
        const int num_rows = num_blocks() * s_.block_rows;
        for (int row = cta_; row < num_rows; row += s_.ctas) {
            if (not is_first(blocks, row)) continue;
            const Row meta = Row::unpack(A::read(&here_.row_meta[row]));
            const bool is_apart = access_ == RowAccess::kFirstCopied;
            if (not(is_apart ? not meta.pad : meta.owner) or meta.src != rank_) continue;
            uint64_t rows = A::read(&here_.token_rows[rank_ * s_.tokens + meta.token]);
            if (is_apart) rows = with_entry(~0ull, 0, row);
            const uint64_t value = quantizes_ ? uint64_t(A::read(row_of(rank_, meta.token)))
                                              : x_value(epoch, rank_, meta.token);
            for_each_row(rows, [&](int to) { A::write(&here_.received[to], value); });
            for_each_row(rows, [&](int to) {
                protocol::publish<A>(here_.rows_ready(s_, to / s_.block_rows));
            });
        }
    }

    // Visits the rows of a token.
    template <class Visit>
    void for_each_row(uint64_t rows, Visit visit) {
        for (int k = 0; k < topk_; ++k) {
            if (const int row = entry(rows, k); row >= 0) visit(row);
        }
    }

    // The row behind the last of some blocks.
    int row_behind(uint32_t blocks) const {
        int row = 0;
        for (; blocks != 0; blocks >>= 1) row += s_.block_rows;
        return row;
    }

    // All rows but this rank's own ones of the blocks that are copied, if there are others.
    void dispatch(uint32_t epoch, uint32_t copied_blocks, bool has_rows) {
        const int num_rows = num_blocks() * s_.block_rows;
        if (quantizes_) A::fence_proxy_async();  // threads have written this rank's
        bool has_heard = false;                  // that every peer's rows are in place
        int first_row = 0;                       // that is left to copy
        if (access_ == RowAccess::kFirstCopied) {
            first_row = row_behind(copied_blocks);
            copied_blocks = 0;
        }
        while (has_rows and access_ != RowAccess::kInPlace) {
            forget(has_heard ? 3 : 10);
            const int first =
                int(protocol::take<A>(here_.counter(M::kDispatch), s_.rows_per_ticket));
            if (first >= num_rows) break;
            for (int row = first; row < first + s_.rows_per_ticket and row < num_rows; ++row) {
                const Row meta = Row::unpack(A::read(&here_.row_meta[row]));
                const bool is_own = meta.src == rank_;
                if (meta.owner and not is_own and not has_heard) {
                    await_rows(epoch);
                    has_heard = true;
                }
                if (reads_own_in_place() and is_own) {
                    if (not meta.pad and not is_block_own(row / s_.block_rows)) {
                        fetch_row(epoch, meta, row, 1);
                    }
                } else if (meta.owner and not(is_own and is_first(copied_blocks, row))) {
                    fetch_row(epoch, meta, first_row, s_.max_rows());
                }
                if (meta.pad) {
                    A::write(&here_.received[row], 0);
                    protocol::publish<A>(here_.rows_ready(s_, row / s_.block_rows));
                }
            }
        }
        if (access_ == RowAccess::kInPlaceUntilCopied) {
            protocol::publish<A>(here_.counter(M::kDispatched));
        }
        if (not has_heard) await_rows(epoch);
    }

    // x has the values of dY here.
    void copy_tokens(const Launch& launch, uint32_t epoch) {
        for (int token = cta_; token < launch.tokens[rank_]; token += s_.ctas) {
            const uint64_t rows = A::read(&here_.token_rows[rank_ * s_.tokens + token]);
            for_each_row(rows, [&](int row) {
                A::write_by_bulk(&here_.token_copies[row], x_value(epoch, rank_, token));
            });
        }
        for (int row = cta_; row < num_blocks() * s_.block_rows; row += s_.ctas) {
            if (Row::unpack(A::read(&here_.row_meta[row])).pad) {
                A::write(&here_.token_copies[row], 0);
            }
        }
        protocol::complete_copies<A>();
        protocol::publish<A>(here_.counter(M::kTokensCopied));
    }

    void fetch_row(uint32_t epoch, const Row& meta, int first_row, int num_rows) {
        const uint64_t value = meta.src == rank_ and not quantizes_
                                   ? x_value(epoch, rank_, meta.token)
                                   : A::read_by_tma(row_of(meta.src, meta.token));
        A::check(value == x_value(epoch, meta.src, meta.token) or A::is_void(),
                 "a row of another epoch is read");
        uint64_t rows = A::read(&here_.token_rows[meta.src * s_.tokens + meta.token]);
        for (int k = 0; k < topk_; ++k) {
            const int row = entry(rows, k);
            if (row < first_row or row >= first_row + num_rows) rows = with_entry(rows, k, -1);
        }
        for_each_row(rows, [&](int row) { A::write_by_bulk(&here_.received[row], value); });
        protocol::publish_copies<A>([&](auto count) {
            for_each_row(rows, [&](int row) { count(here_.rows_ready(s_, row / s_.block_rows)); });
        });
    }

    // Tiles: actor/loader.cuh and actor/processor.cuh as one agent.

    void compute_tiles(const Launch& launch, uint32_t epoch) {
        const uint64_t header = A::read(&here_.header[0]);
        const protocol::TileOrder order{int(header & 0xffff),
                                        s_.group_units,
                                        s_.lag,
                                        s_.is_mixed,
                                        {s_.n_tiles[0], s_.n_tiles[1]}};
        const auto units_before = [&](int group) {
            return s_.cuts_groups ? int(A::read(&here_.groups[group])) : order.units_before(group);
        };
        protocol::TileWalk<decltype(units_before)> walk(order, units_before);
        bool has_counted_grads = false;
        for (int ticket = cta_;; ticket = int(protocol::take_after_own<A>(here_.counter(M::kTile),
                                                                          uint32_t(s_.ctas)))) {
            forget(has_counted_grads ? 10 : 4);
            const auto pair = walk.at(ticket);
            if (pair.gemm == protocol::TilePlace::kNone) {
                const int behind = ticket - order.num_tickets();
                if (launch.kind != Kind::kBackward or behind >= 2 * s_.local_experts()) {
                    A::bulk_wait_complete();
                    const bool counts = s_.has_slots and launch.kind == Kind::kBackward;
                    if (counts and not has_counted_grads) count_fc2_grads(launch, epoch);
                    return;
                }
                const int product = behind / s_.local_experts();
                compute_weight_grad(epoch, product, behind % s_.local_experts());
                if (product == 1 and not has_counted_grads) count_fc2_grads(launch, epoch);
                has_counted_grads |= product == 1;
                continue;
            }
            if (s_.finishers_combine) combine_some(launch, epoch, Deliver::kThere);
            const uint64_t unit = A::read(&here_.units[pair.unit]);
            const int block = int(unit >> 16 & 0xffff), local = int(unit >> 8 & 255);
            const int expert = rank_ * s_.local_experts() + local;
            if ((unit & 255) == 2) {
                for (int of_pair : {0, 1}) {
                    const bool in_place = pair.gemm == 0 and is_in_place(block + of_pair);
                    compute_tile(launch, epoch, pair.gemm, block + of_pair, pair.n, expert,
                                 in_place);
                }
            } else if (pair.n % 2 == 0) {  // a single block has two tiles along N, which share A
                const bool in_place = pair.gemm == 0 and is_in_place(block);
                compute_tile(launch, epoch, pair.gemm, block, pair.n, expert, in_place);
                if (pair.n + 1 < s_.n_tiles[pair.gemm]) {
                    compute_tile(launch, epoch, pair.gemm, block, pair.n + 1, expert, in_place);
                }
            }
        }
    }

    bool is_in_place(int block) {
        if (reads_own_in_place()) return is_block_own(block);
        return reads_in_place() and not is_copied(block);
    }

    bool is_copied(int block) {
        return protocol::is_complete<A>(here_.rows_ready(s_, block), s_.block_rows);
    }

    // A look goes ahead of the wait for what a tile reads.
    void compute_tile(const Launch& launch,
                      uint32_t epoch,
                      int gemm,
                      int block,
                      int n,
                      int expert,
                      bool in_place) {
        if (not in_place) {
            const auto* counter =
                gemm == 0 ? here_.rows_ready(s_, block) : here_.tile_ready(s_, 0, block);
            const uint32_t target = gemm == 0 ? s_.block_rows : s_.warps * s_.n_tiles[0];
            const bool is_seen = protocol::is_complete<A>(counter, target);
            protocol::await_for_tma<A>(
                counter, target,
                [&](auto load, auto done) {
                    wait(gemm == 0 ? "GEMM0 waits for rows" : "GEMM1 waits for GEMM0", load, done);
                },
                is_seen);
        }
        for (int row = block * s_.block_rows; row < (block + 1) * s_.block_rows; ++row) {
            uint64_t input = 0;
            if (in_place) {
                const Row meta = Row::unpack(A::read(&here_.row_meta[row]));
                input = meta.pad ? 0 : x_value(epoch, rank_, meta.token);
            } else if (gemm == 0) {
                input = A::read_by_tma(&here_.received[row]);
            } else {
                for (int i = 0; i < s_.n_tiles[0]; ++i) {
                    input += A::read_by_tma(&here_.act[row * s_.n_tiles[0] + i]);
                }
            }
            auto* out = gemm == 0 ? &here_.act[row * s_.n_tiles[0] + n]
                                  : &here_.result[row * s_.n_tiles[1] + n];
            const uint64_t value = input == 0 ? 0 : gemm_value(gemm, input, expert, n);
            if (gemm == 1) {
                const Row meta = Row::unpack(A::read(&here_.row_meta[row]));
                if (meta.alone()) {  // a token's only row here goes straight to where its sum does
                    const auto [target, sum] = target_of(meta, n, epoch, value);
                    A::write_by_bulk(target, sum);
                    continue;
                }
            }
            A::check(value == 0 or A::read(out) != value or A::is_void(),
                     "a tile is computed twice");
            if (gemm == 0) {
                A::write(out, value);
            } else {
                A::fence_proxy_async();  // what has just been read was for the check alone
                A::write_by_bulk(out, value);
            }
        }
        protocol::complete_copies<A>();
        for (int warp = 0; warp < s_.warps; ++warp) {
            protocol::publish<A>(here_.tile_ready(s_, gemm, block));
            if (launch.kind == Kind::kBackward and gemm == 0) {
                protocol::publish<A>(here_.counter(M::kDifferentiated));
            }
        }
    }

    // One tile for each expert and product: moe/weight_grads.cuh. It reads what dispatch and GEMM0
    // have left of all rows of the expert, or the rows where their tokens are.
    void compute_weight_grad(uint32_t epoch, int product, int local) {
        protocol::await_for_tma<A>(
            here_.counter(M::kDifferentiated), uint32_t(s_.warps * s_.n_tiles[0] * num_blocks()),
            [&](auto load, auto done) { wait("weight gradients wait for GEMM0", load, done); });
        if (access_ == RowAccess::kInPlaceUntilCopied) {
            protocol::await_for_tma<A>(
                here_.counter(M::kDispatched), uint32_t(s_.ctas),
                [&](auto load, auto done) { wait("weight gradients wait for rows", load, done); });
        }
        const bool reads_copies = s_.copies_tokens and product == 1;
        if (reads_copies) {
            protocol::await_for_tma<A>(
                here_.counter(M::kTokensCopied), uint32_t(s_.ctas),
                [&](auto load, auto done) { wait("fc1's gradient waits for x", load, done); });
        }
        const int expert = rank_ * s_.local_experts() + local;
        const int num_units = int(A::read(&here_.header[0]) & 0xffff);
        uint64_t sum = 0;
        for (int i = 0; i < num_units; ++i) {
            const uint64_t unit = A::read(&here_.units[i]);
            if (int(unit >> 8 & 255) != local) continue;
            const int first = int(unit >> 16 & 0xffff) * s_.block_rows;
            for (int row = first; row < first + int(unit & 255) * s_.block_rows; ++row) {
                if (reads_copies) {
                    sum += A::read_by_tma(&here_.token_copies[row]);
                } else if (access_ == RowAccess::kInPlace) {
                    const Row meta = Row::unpack(A::read(&here_.row_meta[row]));
                    sum += meta.pad ? 0 : x_value(epoch, rank_, meta.token);
                } else {
                    sum += A::read_by_tma(&here_.received[row]);
                }
                for (int n = 0; n < s_.n_tiles[0]; ++n) {
                    sum += A::read_by_tma(&here_.act[row * s_.n_tiles[0] + n]);
                }
            }
        }
        auto* grad = &here_.weight_grads[product * s_.local_experts() + local];
        const uint64_t value = mix(epoch, mix(sum, uint64_t(product) << 8 | uint64_t(expert)));
        A::check(A::read(grad) != value or A::is_void(), "a weight gradient is added twice");
        A::fence_proxy_async();  // what has just been read was for the check alone
        A::write_by_bulk(grad, value);
    }

    // Without spare slots the last to come tells whoever waits for fc2's gradients alone.
    void count_fc2_grads(const Launch& launch, uint32_t epoch) {
        A::bulk_wait_complete();
        auto* stored = here_.counter(M::kFc2GradsStored);
        if (s_.has_slots) return protocol::publish<A>(stored);
        protocol::arrive<A>(stored, s_.ctas, [&] { check_fc2_grads(launch, epoch); });
    }

    // With spare slots who adds replicas' gradients waits until all are stored: what is added, and
    // who is told then, is in replicas.h.
    void await_fc2_grads(const Launch& launch, uint32_t epoch) {
        protocol::await<A>(
            here_.counter(M::kFc2GradsStored), uint32_t(s_.ctas),
            [&](auto load, auto done) { wait("an addition waits for fc2", load, done); });
        check_fc2_grads(launch, epoch);
    }

    void check_fc2_grads(const Launch& launch, uint32_t epoch) {
        for (int local = 0; local < s_.local_experts(); ++local) {
            const int expert = rank_ * s_.local_experts() + local;
            A::check(A::read(&here_.weight_grads[local]) ==
                             expected_weight_grad(launch, epoch, 0, expert) or
                         A::is_void(),
                     "fc2's gradients count as complete before they are");
        }
    }

    uint64_t expected_weight_grad(const Launch& launch, uint32_t epoch, int product, int expert) {
        uint64_t sum = 0;
        for (int src = 0; src < s_.ranks; ++src) {
            for (int token = 0; token < launch.tokens[src]; ++token) {
                for (int k = 0; k < topk_; ++k) {
                    if (launch.expert[src][token][k] != expert) continue;
                    const uint64_t row = x_value(epoch, src, token);
                    sum += row;
                    for (int n = 0; n < s_.n_tiles[0]; ++n) sum += gemm_value(0, row, expert, n);
                }
            }
        }
        return mix(epoch, mix(sum, uint64_t(product) << 8 | uint64_t(expert)));
    }

    // Deliver and reduce: moe/combine.cuh.

    enum class Progress { kNone, kSome, kFinished };

    // What a warp takes: the next unit, awaited or if it is there, or as many units ahead as are
    // there and have no more tokens than one may have.
    enum class Deliver { kAwaited, kThere, kAhead };

    // A CTA owns every so manieth unit of rows; its warps take them from a word in shared memory.
    Progress deliver_some(const Launch& launch, uint32_t epoch, Deliver what) {
        constexpr int kUnitsAhead = 3;
        auto* next_unit = &here_.next_unit[cta_];
        const bool must_wait = what == Deliver::kAwaited;
        const uint32_t unit = must_wait ? protocol::take<A>(next_unit, 1) : A::load(next_unit);
        const int num_rows = num_blocks() * s_.block_rows;
        const auto first_row = [&](int nth) {
            return (int(unit + nth) * s_.ctas + cta_) * s_.unit_rows;
        };
        if (first_row(0) >= num_rows) return Progress::kFinished;
        const auto end_row = [&](int nth) {
            const int end = first_row(nth) + s_.unit_rows;
            return end < num_rows ? end : num_rows;
        };
        const uint32_t target = s_.warps * s_.n_tiles[1];
        // How many tokens have their last row in a unit, or -1 if rows of them are not there.
        const auto tokens_of = [&](int nth) {
            int tokens = 0;
            for (int row = first_row(nth); row < end_row(nth); ++row) {
                const Row meta = Row::unpack(A::read(&here_.row_meta[row]));
                if (not meta.last) continue;
                ++tokens;
                const uint64_t rows = A::read(&here_.token_rows[meta.src * s_.tokens + meta.token]);
                for (int k = 0; k < topk_; ++k) {
                    const int one = entry(rows, k);
                    if (one < 0) continue;
                    const auto* ready = here_.tile_ready(s_, 1, one / s_.block_rows);
                    if (must_wait) {
                        protocol::await<A>(ready, target, [&](auto load, auto done) {
                            wait("deliver waits for GEMM1", load, done);
                        });
                    } else if (not protocol::is_complete<A>(ready, target)) {
                        return -1;
                    }
                }
            }
            return tokens;
        };
        int taken = 0;
        for (int left = s_.unit_rows; taken < (what == Deliver::kAhead ? kUnitsAhead : 1);
             ++taken) {
            const int tokens = tokens_of(taken);
            if (tokens < 0 or tokens > left) break;
            left -= tokens;
        }
        if (taken == 0) return Progress::kNone;
        if (not must_wait and A::compare_and_swap(next_unit, unit, unit + taken) != unit) {
            return Progress::kSome;
        }
        if (what == Deliver::kAhead) A::count_ahead();
        for (int nth = 0; nth < taken; ++nth) {
            for (int row = first_row(nth); row < end_row(nth); ++row) {
                const Row meta = Row::unpack(A::read(&here_.row_meta[row]));
                if (meta.last) deliver_token(launch, epoch, meta);
            }
        }
        return Progress::kSome;
    }

    void deliver(const Launch& launch, uint32_t epoch) {
        do forget(5);
        while (deliver_some(launch, epoch, Deliver::kAwaited) != Progress::kFinished);
    }

    // A unit of rows, or units ahead, or a token, without waiting for anything.
    Progress combine_some(const Launch& launch, uint32_t epoch, Deliver what) {
        const Progress delivered = deliver_some(launch, epoch, what);
        if (delivered == Progress::kSome) return delivered;
        const int chunks = (launch.tokens[rank_] + s_.chunk_tokens - 1) / s_.chunk_tokens;
        Progress reduced = Progress::kFinished;
        for (int chunk = cta_; chunk < chunks; chunk += s_.ctas) {
            const Progress one = reduce_chunk(launch, epoch, chunk, false);
            if (one == Progress::kSome) return one;
            if (one == Progress::kNone) reduced = one;
        }
        return delivered == Progress::kFinished ? reduced : Progress::kNone;
    }

    // Combines what there is while tiles are computed, until it has found nothing for long.
    void combine_meanwhile(const Launch& launch, uint32_t epoch) {
        for (int idle = 0; idle < s_.idle_looks;) {
            forget(idle == 0 ? 8 : 9);  // a search of all orders has two looks
            const Progress progress = combine_some(launch, epoch, Deliver::kAhead);
            if (progress == Progress::kFinished) return;
            idle = progress == Progress::kSome ? 0 : idle + 1;
        }
    }

    void deliver_token(const Launch& launch, uint32_t epoch, const Row& meta) {
        const uint64_t rows = A::read(&here_.token_rows[meta.src * s_.tokens + meta.token]);
        M& there = *world_.ranks[meta.src];
        for (int k = 0; k < topk_; ++k) {
            if (entry(rows, k) < 0) continue;
            if (launch.kind == Kind::kBackward) {
                A::write(dprob_of(meta.src, meta.token, k),
                         dprob_value(x_value(epoch, meta.src, meta.token),
                                     launch.expert[meta.src][meta.token][k]));
            }
        }
        for (int n = 0; n < s_.n_tiles[1] and not meta.alone(); ++n) {
            uint64_t sum = 0;
            for (int k = 0; k < topk_; ++k) {
                if (const int row = entry(rows, k); row >= 0) {
                    sum += A::read(&here_.result[row * s_.n_tiles[1] + n]);
                }
            }
            const auto [target, written] = target_of(meta, n, epoch, sum);
            A::check(not meta.home or A::read(target) != written or A::is_void(),
                     "a token is summed twice");
            A::write(target, written);
        }
        if (meta.home and launch.kind != Kind::kBackward) return;  // nobody waits for it
        protocol::publish_result<A>(
            &there.result_signals[protocol::result_word(meta.token, s_.ranks, rank_)], epoch);
    }

    const typename A::U32* result_signal(int token, int src) {
        return &here_.result_signals[protocol::result_word(token, s_.ranks, src)];
    }

    void await_result(uint32_t epoch, int token, int src) {
        protocol::await_result<A>(result_signal(token, src), epoch, [&](auto load, auto done) {
            return wait("reduce waits for a result", load, done);
        });
    }

    Progress reduce_chunk(const Launch& launch, uint32_t epoch, int chunk, bool must_wait) {
        const int first = chunk * s_.chunk_tokens, left = launch.tokens[rank_] - first;
        const int in_chunk = left < s_.chunk_tokens ? left : s_.chunk_tokens;
        const uint32_t all = (1u << in_chunk) - 1;
        uint32_t taken = A::load(here_.reduced(s_, chunk)), home = 0;
        if (taken == all) return Progress::kFinished;
        for (int i = 0; i < in_chunk and launch.kind != Kind::kBackward; ++i) {
            if (is_home(first + i)) home |= 1u << i;  // who delivers these makes their results
        }
        if (home & ~taken) protocol::take_bits<A>(here_.reduced(s_, chunk), home, &taken);
        if (taken == all) return Progress::kFinished;
        uint32_t complete = 0;
        for (int i = 0; i < in_chunk; ++i) {
            if (taken >> i & 1) continue;
            const uint32_t ranks = uint32_t(A::read(&here_.own_ranks[first + i]));
            bool is_here = true;
            for (int src = 0; src < s_.ranks and is_here; ++src) {
                if (not(ranks >> src & 1)) continue;
                if (must_wait) {
                    await_result(epoch, first + i, src);
                } else {
                    is_here = protocol::result_is_here<A>(result_signal(first + i, src), epoch);
                }
            }
            must_wait = false;  // the first one only
            if (is_here) complete |= 1u << i;
        }
        if (complete == 0) return Progress::kNone;
        complete &= -complete;  // one each, so that a CTA's warps share what comes at the end
        if (protocol::take_bits<A>(here_.reduced(s_, chunk), complete, &taken) == 0) {
            return Progress::kSome;
        }
        reduce_token(launch, epoch, first + __builtin_ctz(complete));
        return taken == all ? Progress::kFinished : Progress::kSome;
    }

    bool is_home(int token) { return A::read(&here_.own_ranks[token]) == 1u << rank_; }

    uint64_t expected_sum(const Launch& launch, uint32_t epoch, int token, int n) {
        uint64_t sum = 0;
        for (int k = 0; k < topk_; ++k) {
            const int expert = launch.expert[rank_][token][k];
            if (expert >= 0) sum += expected_result(s_, x_value(epoch, rank_, token), expert, n);
        }
        return sum;
    }

    void reduce_token(const Launch& launch, uint32_t epoch, int token) {
        const uint32_t ranks = uint32_t(A::read(&here_.own_ranks[token]));
        const int slots = __builtin_popcount(ranks);
        const bool is_there = ranks == 1u << rank_;  // a backward's: whoever delivered it summed it
        for (int n = 0; n < s_.n_tiles[1] and not is_there; ++n) {
            uint64_t sum = 0;
            for (int slot = 0; slot < slots; ++slot) {
                sum += A::read(result_of({token, rank_, slot, false, false, false, false}, n));
            }
            A::check(sum == expected_sum(launch, epoch, token, n) or A::is_void(),
                     "a token's sum is wrong");
            A::check(A::read(out_of(token, n)) != mix(epoch, sum) or A::is_void(),
                     "a token is reduced twice");
            A::write(out_of(token, n), mix(epoch, sum));
        }
        for (int k = 0; k < topk_ and launch.kind == Kind::kBackward; ++k) {
            const int expert = launch.expert[rank_][token][k];
            if (expert < 0) continue;
            A::check(A::read(dprob_of(rank_, token, k)) ==
                             dprob_value(x_value(epoch, rank_, token), expert) or
                         A::is_void(),
                     "the gradient of a probability is wrong");
        }
    }

    // Until all tokens of this CTA are taken; after a round without progress what is not there yet
    // is waited for.
    void reduce(const Launch& launch, uint32_t epoch) {
        const int chunks = (launch.tokens[rank_] + s_.chunk_tokens - 1) / s_.chunk_tokens;
        bool must_wait = false;
        for (;;) {
            forget(6 + must_wait);
            bool is_finished = true, moved = false;
            for (int chunk = cta_; chunk < chunks; chunk += s_.ctas) {
                const Progress progress =
                    reduce_chunk(launch, epoch, chunk, must_wait and is_finished);
                is_finished &= progress == Progress::kFinished;
                moved |= progress == Progress::kSome;
            }
            if (is_finished) return;
            must_wait = not moved;
        }
    }

    // The end of a launch: moe/workspace.cuh, and spoil_outputs of kernel/layer.cuh.
    void leave(const Launch& launch, uint32_t epoch, bool go_on) {
        if (not protocol::leave<A>(here_.counter(M::kLeaving), s_.ctas)) return;
        const bool gathers = launch.kind == Kind::kGather;
        const bool computes = launch.kind != Kind::kPlan and not gathers;
        if (protocol::who_gave_up<A>(&here_.gave_up[0]) != 0) A::fetch_or(&here_.raised[0], 1);
        const bool is_raised = A::load(&here_.raised[0]) != 0;
        if (is_raised and not launch.fails) A::write(&here_.spoiled[0], 1);
        for (int token = 0; token < launch.tokens[rank_] and computes and not is_raised; ++token) {
            for (int n = 0; n < s_.n_tiles[1]; ++n) {
                A::check(go_on and A::read(out_of(token, n)) ==
                                       mix(epoch, expected_sum(launch, epoch, token, n)),
                         "a token was lost, or is wrong and passes for right");
            }
        }
        const int num_grads = launch.kind == Kind::kBackward ? 2 * s_.local_experts() : 0;
        for (int i = 0; i < num_grads and not is_raised; ++i) {
            const int product = i / s_.local_experts(), local = i % s_.local_experts();
            A::check(A::read(&here_.weight_grads[i]) ==
                         expected_weight_grad(launch, epoch, product,
                                              rank_ * s_.local_experts() + local),
                     "a weight gradient was lost, or is wrong and passes for right");
        }
        const bool copies = gathers or (computes and access_ != RowAccess::kInPlace);
        const int num_rows = copies and go_on and not is_raised ? num_blocks() * s_.block_rows : 0;
        for (int row = 0; row < num_rows; ++row) {
            const Row meta = Row::unpack(A::read(&here_.row_meta[row]));
            if (reads_own_in_place() and is_block_own(row / s_.block_rows)) {
                A::check(A::load(here_.rows_ready(s_, row / s_.block_rows)) == 0,
                         "rows are counted though not copied");
                continue;
            }
            A::check(A::read(&here_.received[row]) ==
                         (meta.pad ? 0 : x_value(epoch, meta.src, meta.token)),
                     "a row was lost, or is another");
        }
        protocol::reset<A>(here_.counter(0), 0, 1, M::num_counters(s_));
        if (gathers) epoch = protocol::next_epoch(epoch);
        if (computes or gathers or not go_on) {
            A::write(&here_.epoch[0], protocol::ended_epoch(epoch));
        }
        if (launch.fails) A::write(&here_.raised[0], 0);  // the host clears the fault
    }

    void join_cta() {
        if (s_.agents > 1) A::join(here_.cta_join[cta_], false);
    }
    // Place 0 begins a launch, 2 its end.
    void forget(int place) {
        A::forget(launch_index_ * 16 + place, launch_index_ * 3 + (place == 0   ? 0
                                                                   : place == 2 ? 2
                                                                                : 1));
    }

    const Sizes s_;
    World<A>& world_;
    M& here_;
    const int rank_, cta_, role_;
    int launch_index_ = 0;
    int topk_ = 0, width_ = 0;  // what the launch under way has
    RowAccess access_ = RowAccess::kCopied;
    bool quantizes_ = false;
};

}  // namespace protocol_test
