// Sizes and routings to run, by name.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "forward.h"

namespace protocol_test {

// Looks that a random order has time for: with few, hardly anything is delivered ahead.
constexpr int kManyLooks = 16;

struct Scenario {
    const char* name;
    Sizes sizes;
    std::vector<Launch> launches;
    int early_timeouts = -1;  // -1: no wait ever runs out of time
};

inline Launch launch_of(Kind kind,
                        const Sizes& s,
                        std::vector<std::vector<std::vector<int>>> experts) {
    Launch launch;
    launch.kind = kind;
    launch.topk = s.topk;
    for (int rank = 0; rank < s.ranks; ++rank) {
        launch.tokens[rank] = int(experts[rank].size());
        for (int token = 0; token < s.tokens; ++token) {
            for (int k = 0; k < s.topk; ++k) {
                const bool is_some =
                    token < launch.tokens[rank] and k < int(experts[rank][token].size());
                launch.expert[rank][token][k] = is_some ? int8_t(experts[rank][token][k]) : -1;
            }
        }
    }
    return launch;
}

inline Launch again(Launch launch, Kind kind) {
    launch.kind = kind;
    return launch;
}

inline std::vector<Scenario> small_scenarios() {
    std::vector<Scenario> all;
    {
        // Two GPUs. The second has no tokens in the first launch and may hurry ahead; then nothing
        // crosses; then everything does.
        Sizes s{};
        s.ranks = 2, s.ctas = 1, s.agents = 2, s.experts = 2, s.topk = 1, s.tokens = 1;
        s.block_rows = 2, s.n_tiles[0] = s.n_tiles[1] = 1, s.warps = 1, s.group_units = 1;
        s.rows_per_ticket = s.unit_rows = 2, s.chunk_tokens = 1;
        const Launch first = launch_of(Kind::kForward, s, {{{1}}, {}});
        const Launch second = launch_of(Kind::kForward, s, {{{0}}, {{1}}});
        const Launch third = launch_of(Kind::kForward, s, {{{1}}, {{0}}});
        all.push_back({"ranks2", s, {first, second, third}});
        all.push_back({"ranks2_backward", s, {second, again(second, Kind::kBackward), third}});
        Sizes fp8 = s;
        fp8.quantizes = true;
        all.push_back({"ranks2_quantized", fp8, {second, third, second}});
        // Rows are fetched again, and then written over.
        all.push_back({"ranks2_gather",
                       s,
                       {third, again(third, Kind::kGather), again(third, Kind::kBackward)}});
    }
    {
        // Two GPUs, the first of which has a block of own rows alone and one of both ranks' rows,
        // then a block of another's row and a pad.
        Sizes s{};
        s.ranks = 2, s.ctas = 1, s.agents = 2, s.experts = 2, s.topk = 1, s.tokens = 3;
        s.block_rows = 2, s.n_tiles[0] = s.n_tiles[1] = 1, s.warps = 1, s.group_units = 1;
        s.rows_per_ticket = s.unit_rows = 2, s.chunk_tokens = 3;
        s.row_access = RowAccess::kOwnInPlace;
        const Launch mixed = launch_of(Kind::kForward, s, {{{0}, {0}, {0}}, {{0}}});
        const Launch other = launch_of(Kind::kForward, s, {{}, {{0}}});
        all.push_back({"ranks2_own", s, {mixed, other}});
        all.push_back({"ranks2_own_backward", s, {mixed, again(mixed, Kind::kBackward)}});
    }
    {
        // Two GPUs and layers of different shapes. The second has nothing to do in the first layer.
        Sizes s{};
        s.ranks = 2, s.ctas = 1, s.agents = 2, s.experts = 2, s.topk = 2, s.tokens = 1;
        s.block_rows = 2, s.n_tiles[0] = s.n_tiles[1] = 1, s.warps = 1, s.group_units = 1;
        s.rows_per_ticket = s.unit_rows = 2, s.chunk_tokens = 1;
        Launch narrow = launch_of(Kind::kForward, s, {{{0}}, {}});
        narrow.topk = 1;
        Launch wide = launch_of(Kind::kForward, s, {{{1}}, {{0, 1}}});
        wide.width = 2;
        all.push_back({"ranks2_layers", s, {narrow, wide}});
        all.push_back({"ranks2_layers_backward", s, {wide, again(wide, Kind::kBackward), narrow}});
    }
    {
        // One GPU whose tiles, deliveries and sums are done by whoever finds them.
        Sizes s{};
        s.ranks = 1, s.ctas = 1, s.agents = 3, s.experts = 2, s.topk = 2, s.tokens = 1;
        s.block_rows = 1, s.n_tiles[0] = s.n_tiles[1] = 1, s.warps = 1, s.group_units = 1;
        s.rows_per_ticket = s.unit_rows = 1, s.chunk_tokens = 1, s.finishers_combine = true;
        const Launch both = launch_of(Kind::kForward, s, {{{0, 1}}});
        all.push_back({"meanwhile", s, {both, again(both, Kind::kBackward)}});
        // Two units, each with a token's last row, which the third agent may take together.
        s.experts = 3, s.tokens = 2, s.block_rows = s.unit_rows = s.chunk_tokens = 2;
        s.finishers_combine = false, s.row_access = RowAccess::kInPlace;
        all.push_back({"ahead", s, {launch_of(Kind::kForward, s, {{{0, 1}, {0, 2}}})}});
    }
    {
        // One GPU whose steps have tickets of both products that alternate; units of two blocks.
        Sizes s{};
        s.ranks = 1, s.ctas = 1, s.agents = 2, s.experts = 2, s.topk = 1, s.tokens = 4;
        s.block_rows = 1, s.n_tiles[0] = s.n_tiles[1] = 2, s.warps = 1, s.group_units = 1;
        s.is_mixed = true, s.row_access = RowAccess::kInPlace;
        s.rows_per_ticket = s.unit_rows = 2, s.chunk_tokens = 2;
        all.push_back({"mixed", s, {launch_of(Kind::kForward, s, {{{0}, {0}, {1}, {1}}})}});
    }
    {
        // One GPU whose groups of units end where experts do, by a table that one of two CTAs
        // writes.
        Sizes s{};
        s.ranks = 1, s.ctas = 2, s.agents = 1, s.experts = 2, s.topk = 1, s.tokens = 2;
        s.block_rows = 1, s.n_tiles[0] = s.n_tiles[1] = 1, s.warps = 1, s.group_units = 1;
        s.cuts_groups = true, s.row_access = RowAccess::kInPlace;
        s.rows_per_ticket = s.unit_rows = 2, s.chunk_tokens = 1;
        all.push_back({"cut_groups", s, {launch_of(Kind::kForward, s, {{{0}, {1}}})}});
    }
    {
        // Three GPUs, one agent each; empty experts, a rank without tokens.
        Sizes s{};
        s.ranks = 3, s.ctas = 1, s.agents = 1, s.experts = 3, s.topk = 2, s.tokens = 1;
        s.block_rows = 2, s.n_tiles[0] = s.n_tiles[1] = 1, s.warps = 1, s.group_units = 1;
        s.rows_per_ticket = s.unit_rows = 4, s.chunk_tokens = 1;
        const Launch first = launch_of(Kind::kForward, s, {{{1, 2}}, {}, {{2}}});
        const Launch second = launch_of(Kind::kForward, s, {{{0, 1}}, {{0, 2}}, {}});
        const Launch own = launch_of(Kind::kForward, s, {{{0}}, {{1}}, {{2}}});
        all.push_back({"ranks3", s, {first, again(first, Kind::kBackward), second}});
        all.push_back({"ranks3_apart", s, {own, again(own, Kind::kBackward), first}});
        all.push_back(
            {"ranks3_split", s, {again(first, Kind::kPlan), again(first, Kind::kPlanned), own}});
        Launch refused = first, large = second;
        refused.refusing_rank = 1, refused.fails = true;
        large.row_block_bound = 0, large.fails = true;
        all.push_back({"ranks3_refused", s, {refused, second, large}});
        all.push_back({"ranks3_refused_twice", s, {refused, refused, second}});
        // One rank has no backward; the others leave theirs, and all fail the next forward.
        Launch evaluated = first, reasoned = second;
        evaluated.unfollowed_rank = 1, reasoned.fails = true;
        all.push_back({"ranks3_unmatched",
                       s,
                       {evaluated, again(evaluated, Kind::kGather),
                        again(evaluated, Kind::kBackward), reasoned, first}});
        Launch crowded = launch_of(Kind::kForward, s, {{{2}}, {}, {}});
        crowded.row_block_bound = 0, crowded.unfollowed_rank = 2, crowded.fails = true;
        all.push_back({"ranks3_unfollowed_large", s, {crowded, second}});
        Launch absent = second;
        absent.absent_rank = 1;
        all.push_back({"ranks3_absent", s, {first, absent}, 0});
        // The first rank's waits may run out of time although nobody is late; whoever has void rows
        // by then must not take them for right.
        s.topk = 1;
        Launch lone = launch_of(Kind::kForward, s, {{}, {}, {{1}}});
        all.push_back({"ranks3_late", s, {lone}, 1});
        const Launch back = again(lone, Kind::kBackward);
        lone.is_in_time = true;
        all.push_back({"ranks3_late_backward", s, {lone, back}, 1});
    }
    {
        // One GPU with two CTAs: tickets, counters, barriers and the reset.
        Sizes s{};
        s.ranks = 1, s.ctas = 2, s.agents = 1, s.experts = 2, s.topk = 2, s.tokens = 2;
        s.block_rows = 2, s.n_tiles[0] = s.n_tiles[1] = 1, s.warps = 1, s.group_units = 1;
        s.rows_per_ticket = s.unit_rows = 2, s.chunk_tokens = 2;
        const Launch both = launch_of(Kind::kForward, s, {{{0, 1}, {0, 1}}});
        const Launch one = launch_of(Kind::kForward, s, {{{1}}});
        all.push_back({"ctas2", s, {both, one, both}});
        Sizes grads = s;  // more of them than CTAs
        grads.experts = 3;
        const Launch lone = launch_of(Kind::kForward, grads, {{{1}}});
        all.push_back({"ctas2_grads", grads, {lone, again(lone, Kind::kBackward)}});
        grads.has_slots = true;
        all.push_back({"ctas2_grads_slots", grads, {lone, again(lone, Kind::kBackward)}});
        Sizes three = s;
        three.ctas = 3, three.tokens = 3, three.chunk_tokens = 1;
        all.push_back({"ctas3", three, {launch_of(Kind::kForward, three, {{{0}, {0}, {0}}})}});
        Sizes two = s;
        two.ranks = 2, two.tokens = 2, two.topk = 1, two.chunk_tokens = 1;
        const Launch across = launch_of(Kind::kForward, two, {{{1}, {1}}, {}});
        all.push_back({"ctas2_backward", two, {across, again(across, Kind::kBackward)}});
        Sizes few = s;  // the first tiles read one of a token's two rows
        few.row_access = RowAccess::kFirstCopied;
        all.push_back({"first_copied", few, {both, again(both, Kind::kBackward)}});
        // Each CTA places the routes that it has written, or the first one refuses them.
        Sizes own = s;
        own.tokens = 3, own.topk = 1, own.has_own_routes = true;
        const Launch third = launch_of(Kind::kForward, own, {{{1}, {0}, {1}}});
        Launch refused = third;
        refused.refusing_rank = 0, refused.fails = true;
        all.push_back({"own_routes", own, {third, refused, again(third, Kind::kPlan)}});
        // Each CTA counts all routes, and copies the rows of its own tokens ahead of the barrier.
        Sizes counted = own;
        counted.has_own_routes = false, counted.plans_few = true;
        counted.row_access = RowAccess::kFirstCopied, counted.block_rows = 4;
        all.push_back({"few", counted, {third, refused, again(third, Kind::kBackward)}});
        all.push_back(
            {"few_split", counted, {again(third, Kind::kPlan), again(third, Kind::kPlanned)}});
        Sizes fp8 = few;  // both read tokens that either CTA has quantized
        fp8.quantizes = true;
        all.push_back({"quantized", fp8, {both, again(both, Kind::kGather), one}});
        all.push_back(
            {"quantized_plan", fp8, {again(both, Kind::kPlan), again(both, Kind::kPlanned)}});
        Sizes placed = s;
        placed.row_access = RowAccess::kInPlaceUntilCopied;
        all.push_back({"in_place", placed, {one, again(one, Kind::kBackward)}});
        placed.row_access = RowAccess::kInPlace;  // a backward that copies nothing either
        all.push_back({"not_copied", placed, {one, again(one, Kind::kBackward)}});
        placed.copies_tokens = true;
        all.push_back({"tokens_copied", placed, {one, again(one, Kind::kBackward)}});
        placed.row_access = RowAccess::kInPlaceUntilCopied;
        all.push_back({"both_copied", placed, {one, again(one, Kind::kBackward)}});
        placed.agents = 2;  // tiles do not wait for bulk copies of dispatch
        all.push_back({"both_copied_agents2", placed, {one, again(one, Kind::kBackward)}});
        s.agents = 2;
        all.push_back({"ctas2_agents2", s, {one, one, one}});
    }
    return all;
}

class Random {
 public:
    explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 0x1234567) { (*this)(); }
    uint64_t operator()() {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return state_ >> 8;
    }
    int below(int bound) { return int((*this)() % uint64_t(bound)); }

 private:
    uint64_t state_;
};

// Some launches are crowded, some leave experts or whole ranks without anything to do.
inline Launch random_launch(const Sizes& s, Random& random) {
    Launch launch;
    launch.topk = 1 + random.below(s.topk);
    launch.width = 1 + random.below(kMaxWidth);
    const int crowd = random.below(3);
    for (int rank = 0; rank < s.ranks; ++rank) {
        launch.tokens[rank] = random.below(4) == 0 ? 0 : 1 + random.below(s.tokens);
        for (int token = 0; token < s.tokens; ++token) {
            bool used[kMaxExperts] = {};
            for (int k = 0; k < s.topk; ++k) {
                int expert = random.below(s.experts);
                if (crowd == 1) expert %= s.local_experts();
                if (crowd == 2) expert = expert / 2 * 2;
                const bool is_none = used[expert] or k >= launch.topk or random.below(8) == 0;
                used[expert] = true;
                launch.expert[rank][token][k] = is_none ? -1 : int8_t(expert);
            }
        }
    }
    return launch;
}

inline std::vector<Launch> random_launches(const Sizes& s, int count, uint64_t seed) {
    Random random(seed);
    std::vector<Launch> launches;
    while (int(launches.size()) < count) {
        Launch launch = random_launch(s, random);
        switch (random.below(8)) {
            case 0:
                launches.push_back(again(launch, Kind::kPlan));
                launches.push_back(again(launch, Kind::kPlanned));
                break;
            case 1:
                launch.refusing_rank = random.below(s.ranks);
                launch.fails = true;
                launches.push_back(launch);
                break;
            case 2:
                launch.unfollowed_rank = random.below(s.ranks);
                launches.push_back(launch);
                break;
            default:
                launches.push_back(launch);
        }
        const bool has_backward = not launch.fails and random.below(3) > 0;
        if (has_backward and random.below(4) == 0) launches.push_back(again(launch, Kind::kGather));
        if (has_backward) {
            launches.push_back(again(launch, Kind::kBackward));
            if (launch.unfollowed_rank >= 0 and s.ranks > 1) {
                launches.push_back(random_launch(s, random));
                launches.back().fails = true;
            }
        }
    }
    return launches;
}

}  // namespace protocol_test
