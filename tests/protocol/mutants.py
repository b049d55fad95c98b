"""Faults put into the protocol, one at a time, and who has to catch each.

A mutant is an edit of the protocol's own text, so that the shipped headers carry no trace of it.
Text that is not found exactly once is an error: no mutant goes stale unnoticed.
"""

from dataclasses import dataclass

GIVE_UP = "flashmoe/protocol/give_up.h"
GRID = "flashmoe/protocol/grid.h"
SIGNALS = "flashmoe/protocol/signals.h"
QUEUE = "flashmoe/protocol/queue.h"
EPOCH = "flashmoe/protocol/epoch.h"
PLACES = "flashmoe/protocol/places.h"
ORDER = "flashmoe/protocol/order.h"
FORWARD = "forward.h"  # what is control flow: the steps of a launch, as the tests have them

SYSTEM = "A::template fence<Scope::kSystem>();\n"
GPU = "A::template fence<Scope::kGpu>();\n"
RELEASE_SYSTEM = "A::template release_fence<Scope::kSystem>();\n"
RELEASE_GPU = "A::template release_fence<Scope::kGpu>();\n"
COPY_OF_FEW = "        for_each_row(rows, [&](int to) { A::write(&here_.received[to], value); });\n"
COUNT_OF_FEW = (
    "        for_each_row(\n"
    "            rows, [&](int to) { protocol::publish<A>("
    "here_.rows_ready(s_, to / s_.block_rows)); });\n"
)
PADS_OF_FEW = "        for (int row = first; row < end; ++row) A::write(&here_.received[row], 0);\n"

FEW_STATES = 20_000
"""In which nearly every mutant is found."""
SIZES = 5
"""Up to which the order of tiles is enumerated for mutants of its own."""


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: What is wrong.
        scenario: The explorer's scenario that finds it.
        failure: Part of what the explorer says.
        by_stress: Whether host threads have to find it, too: by a race that ThreadSanitizer
            reports, a wrong value or a hang. They find more than those that are marked so, which
            each stand for a kind; what they cannot see is scopes, and what TMA does.
        edits: ``(file, text, replacement)``; each text is once in its file.
        states: It is found in fewer states of the scenario, or runs of a random walk, or for
            smaller sizes of the order of tiles.
    """

    name: str
    scenario: str
    failure: str
    by_stress: bool
    edits: tuple[tuple[str, str, str], ...]
    states: int = FEW_STATES


def dropped(file: str, text: str, line: str) -> tuple[str, str, str]:
    """An edit that takes ``line`` out of ``text``."""
    return file, text, text.replace(line, "", 1)


UNWRITTEN = "is read before it is known to be written"
BY_TMA = "is read by TMA before it is known to be written"
STILL_READ = "is written over while it may still be read"
TWICE = "is written over by one who does not know of the last write"
HANG = "nobody can go on"

MUTANTS = [
    # Tokens that this rank quantizes for itself.
    Mutant(
        "a rank quantizes its tokens after the plan",
        "quantized",
        "a row of another epoch is read",
        True,
        (
            (FORWARD, "if (s_.agents == 1 or s_.quantizes) publish_rows(launch, epoch);", ""),
            (
                FORWARD,
                "        return grid_barrier(1, fit);",
                "        const bool all = grid_barrier(1, fit);\n"
                "        publish_rows(launch, epoch);\n        return all;",
            ),
        ),
    ),
    Mutant(
        "own tokens are read by TMA without a proxy fence",
        "quantized",
        BY_TMA,
        False,
        ((FORWARD, "if (quantizes_) A::fence_proxy_async();", ""),),
    ),
    Mutant(
        "a gather does not wait for this rank's tokens",
        "quantized",
        BY_TMA,
        False,
        ((FORWARD, "if (quantizes_) await_rows(epoch);", ""),),
    ),
    Mutant(
        "quantized tokens are told of before they are written",
        "ranks2_quantized",
        BY_TMA,
        True,
        (
            (
                FORWARD,
                "if (s_.ranks > 1 or quantizes_) {",
                "if (quantizes_) tell_rows(M::kRows, epoch);\n"
                "        if (s_.ranks > 1 or quantizes_) {",
            ),
            (
                FORWARD,
                "        tell_rows(M::kRows, epoch);\n    }\n\n    void tell",
                "        if (not quantizes_) tell_rows(M::kRows, epoch);\n    }\n\n    void tell",
            ),
        ),
    ),
    # Gradients that are complete before the launch is.
    Mutant(
        "fc2's gradients are told of before their copies are complete",
        "ctas2_grads",
        "weight_grads",
        False,
        (
            dropped(
                FORWARD,
                "        A::bulk_wait_complete();\n        auto* stored",
                "        A::bulk_wait_complete();\n",
            ),
        ),
    ),
    Mutant(
        "the first CTA tells of fc2's gradients",
        "ctas2_grads",
        "weight_grads",
        True,
        ((FORWARD, "arrive<A>(stored, s_.ctas,", "arrive<A>(stored, 1,"),),
    ),
    Mutant(
        "a CTA counts fc2's gradients before it is done with them",
        "ctas2_grads",
        "fc2's gradients count as complete before they are",
        True,
        (
            (
                FORWARD,
                "if (product == 1 and not has_counted",
                "if (product == 0 and not has_counted",
            ),
        ),
    ),
    Mutant(
        "who has no tile of fc1's gradients does not count fc2's",
        "ctas2_grads_slots",
        HANG,
        False,
        (
            (
                FORWARD,
                "if (counts and not has_counted_grads) count_fc2_grads(launch, epoch);",
                "(void)counts;",
            ),
        ),
    ),
    Mutant(
        "fc2's gradients are counted with spare slots before their copies are complete",
        "ctas2_grads_slots",
        "weight_grads",
        False,
        (
            (
                FORWARD,
                "                    A::bulk_wait_complete();\n"
                "                    const bool counts",
                "                    const bool counts",
            ),
            dropped(
                FORWARD,
                "        A::bulk_wait_complete();\n        auto* stored",
                "        A::bulk_wait_complete();\n",
            ),
        ),
    ),
    Mutant(
        "with spare slots fc2's gradients are not awaited",
        "ctas2_grads_slots",
        "weight_grads",
        False,
        (
            (
                FORWARD,
                'wait("an addition waits for fc2", load, done);',
                "(void)load, (void)done;",
            ),
        ),
    ),
    # Fences.
    Mutant(
        "no fence before a CTA arrives",
        "ctas2_backward",
        UNWRITTEN,
        True,
        (dropped(GRID, SYSTEM + "    if (A::add", SYSTEM),),
    ),
    Mutant(
        "no fence after the last CTA has arrived",
        "ctas2_backward",
        "heap",
        False,
        (dropped(GRID, SYSTEM + "        then();", SYSTEM),),
    ),
    Mutant(
        "row bounds are written after the fence behind all arrivals",
        "ranks3",
        "row_block_bound",
        True,
        (
            (
                FORWARD,
                "if (cta_ == 0) write_row_block_bounds(launch, epoch);\n        if (not is_own)",
                "if (not is_own)",
            ),
            (
                FORWARD,
                "const bool refused =",
                "write_row_block_bounds(launch, epoch);\n            const bool refused =",
            ),
        ),
    ),
    Mutant(
        "a rank keeps to itself that it has no backward",
        "ranks3_unmatched",
        HANG,
        True,
        ((SIGNALS, "return blocks | (is_unfollowed ? kUnfollowed : 0);", "return blocks;"),),
    ),
    Mutant(
        "a backward that some rank lacks takes an epoch",
        "ranks3_unmatched",
        HANG,
        True,
        (
            (
                FORWARD,
                '"other ranks have no backward");\n',
                '"other ranks have no backward");\n        if (cta_ == 0 and role_ == 0) '
                "A::write(&here_.epoch[0], A::read(&here_.epoch[0]) + 1);\n",
            ),
        ),
    ),
    Mutant(
        "a backward that some rank lacks leaves no reason",
        "ranks3_unmatched",
        "ranks disagree whether to go on",
        False,
        (
            (
                FORWARD,
                "if (cta_ == 0 and role_ == 0) A::fetch_or(&here_.raised[0], 1);\n    }\n",
                "}\n",
            ),
        ),
    ),
    Mutant(
        "a bound of rows is compared with what it says of a backward",
        "ranks3_unfollowed_large",
        "ranks disagree whether to go on",
        False,
        ((SIGNALS, "return word & ~kUnfollowed;", "return word;"),),
    ),
    Mutant(
        "no fence between a result and its signal",
        "ranks3",
        "heap",
        True,
        (
            dropped(
                SIGNALS,
                RELEASE_SYSTEM + "    A::template store<Scope::kSystem>(signal, epoch);\n}",
                RELEASE_SYSTEM,
            ),
        ),
    ),
    Mutant(
        "the fence between a result and its signal is for this GPU only",
        "ranks3",
        "heap",
        False,
        (
            (
                SIGNALS,
                RELEASE_SYSTEM + "    A::template store<Scope::kSystem>(signal, epoch);\n}",
                RELEASE_GPU + "    A::template store<Scope::kSystem>(signal, epoch);\n}",
            ),
        ),
    ),
    Mutant(
        "the signals of results are awaited without acquiring",
        "ranks2",
        "heap",
        True,
        (
            (
                SIGNALS,
                "return wait([=] { return A::template load_acquire<Scope::kSystem>(signal); },\n"
                "                [=](uint32_t seen) { return seen == epoch; });",
                "return wait([=] { return A::load(signal); },\n"
                "                [=](uint32_t seen) { return seen == epoch; });",
            ),
        ),
    ),
    Mutant(
        "the signals of results are looked at without acquiring",
        "ranks2",
        "heap",
        True,
        (
            (
                SIGNALS,
                "return A::template load_acquire<Scope::kSystem>(signal) == epoch;",
                "return A::load(signal) == epoch;",
            ),
        ),
    ),
    Mutant(
        "a CTA arrives at a grid barrier without releasing",
        "ctas2_backward",
        UNWRITTEN,
        False,
        (
            (
                GRID,
                "A::add_release(word, may_go_on ? 1 : 1 + kStop);",
                "A::add(word, may_go_on ? 1 : 1 + kStop);",
            ),
        ),
    ),
    Mutant(
        "the word of a grid barrier is read without acquiring",
        "ctas2_backward",
        UNWRITTEN,
        True,
        (
            (
                GRID,
                "return A::template load_acquire<Scope::kGpu>(word); };",
                "return A::load(word); };",
            ),
        ),
    ),
    Mutant(
        "no fence before a CTA leaves",
        "ctas2",
        "is",
        False,
        (dropped(GRID, GPU + "    if (A::add(counter", GPU),),
    ),
    Mutant(
        "no fence after the last CTA has left",
        "ctas2",
        "is",
        False,
        (dropped(GRID, GPU + "    return true;", GPU),),
    ),
    Mutant(
        "no proxy fence before rows of peers are read by TMA",
        "ranks3",
        BY_TMA,
        False,
        (dropped(SIGNALS, "    A::fence_proxy_async();\n", "    A::fence_proxy_async();\n"),),
    ),
    Mutant(
        "no proxy fence before tiles are loaded by TMA",
        "ranks3",
        BY_TMA,
        False,
        (dropped(QUEUE, "    A::fence_proxy_async();\n", "    A::fence_proxy_async();\n"),),
    ),
    Mutant(
        "rows are counted before their copies are complete",
        "ranks2",
        "received",
        False,
        (
            dropped(
                QUEUE,
                "    A::bulk_wait_complete();\n    A::template release_fence",
                "    A::bulk_wait_complete();\n",
            ),
        ),
    ),
    Mutant(
        "no fence between rows that were copied and their counters",
        "ranks2_layers",
        "received",
        True,
        (dropped(QUEUE, RELEASE_GPU + "    for_each", RELEASE_GPU),),
    ),
    Mutant(
        "results are counted before their copies are complete",
        "ranks2",
        UNWRITTEN,
        False,
        (
            dropped(
                QUEUE,
                "    A::bulk_wait_complete();\n    A::sync_warp();",
                "    A::bulk_wait_complete();\n",
            ),
        ),
    ),
    # Orders and scopes of single accesses.
    Mutant(
        "the signal of rows is read without acquiring",
        "ranks3",
        "heap",
        True,
        (
            (
                SIGNALS,
                "src, [=] { return A::template load_acquire<Scope::kSystem>(signal); },",
                "src, [=] { return A::load(signal); },",
            ),
        ),
    ),
    Mutant(
        "the signal of routes is acquired from this GPU only",
        "ranks3",
        UNWRITTEN,
        False,
        (
            (
                SIGNALS,
                "load_acquire<Scope::kSystem>(signal); },\n                [=](uint64_t seen)",
                "load_acquire<Scope::kGpu>(signal); },\n                [=](uint64_t seen)",
            ),
        ),
    ),
    Mutant(
        "what a warp has written is counted without releasing it",
        "ranks2",
        "is read",
        True,
        ((QUEUE, "    A::add_release(counter, items);", "    A::add(counter, items);"),),
    ),
    Mutant(
        "counters are read without acquiring",
        "ranks2",
        "is read",
        True,
        (
            (
                QUEUE,
                "return A::template load_acquire<Scope::kGpu>(counter); }",
                "return A::load(counter); }",
            ),
        ),
    ),
    # Epochs and parities.
    Mutant(
        "routes have one copy",
        "walk",
        STILL_READ,
        True,
        ((EPOCH, "return epoch & 1;", "return epoch & 0;"),),
    ),
    Mutant(
        "a signal of rows has to be of this very epoch",
        "ranks3",
        "has gone past what is waited for",
        False,
        ((SIGNALS, "return epoch_reached(seen, epoch);", "return seen == epoch;"),),
    ),
    Mutant(
        "signals of results tell no epoch",
        "ranks3",
        "a token's sum is wrong",
        False,
        (
            (
                SIGNALS,
                "A::template store<Scope::kSystem>(signal, epoch);\n}",
                "A::template store<Scope::kSystem>(signal, 1u);\n}",
            ),
            (
                SIGNALS,
                "return A::template load_acquire<Scope::kSystem>(signal) == epoch;",
                "return A::template load_acquire<Scope::kSystem>(signal) == 1;",
            ),
            (
                SIGNALS,
                "return wait([=] { return A::template load_acquire<Scope::kSystem>(signal); },\n"
                "                [=](uint32_t seen) { return seen == epoch; });",
                "return wait([=] { return A::template load_acquire<Scope::kSystem>(signal); },\n"
                "                [=](uint32_t seen) { return seen == 1; });",
            ),
        ),
    ),
    Mutant(
        "ranks from which nothing comes are not awaited",
        "ranks3_apart",
        STILL_READ,
        False,
        (
            (
                FORWARD,
                "[&](int src) { return &here_.row_signals[src]; },",
                """[&](int src) {
                const Launch& launch = world_.launches[launch_index_];
                bool sends = false;
                for (int token = 0; token < launch.tokens[src]; ++token) {
                    for (int k = 0; k < s_.topk; ++k) {
                        const int expert = launch.expert[src][token][k];
                        sends |= expert >= 0 and expert / s_.local_experts() == rank_;
                    }
                }
                return &here_.row_signals[sends ? src : rank_];
            },""",
            ),
        ),
    ),
    Mutant(
        "a rank without tokens says nothing",
        "ranks3",
        HANG,
        True,
        (
            (
                FORWARD,
                "    void tell_rows(typename M::Counter arrivals, uint32_t epoch) {\n",
                "    void tell_rows(typename M::Counter arrivals, uint32_t epoch) {\n"
                "        if (world_.launches[launch_index_].tokens[rank_] == 0) return;\n",
            ),
        ),
    ),
    Mutant(
        "a rank does not tell that it refuses",
        "ranks3_refused",
        "ranks disagree whether to go on",
        False,
        ((SIGNALS, "(refused ? kRefused : 0)", "(refused ? 0 : 0)"),),
    ),
    Mutant(
        "no fence between the reason of a refusal and the signal",
        "ranks3_refused_twice",
        "refusal",
        False,
        (dropped(SIGNALS, "give(rank);\n    " + SYSTEM, SYSTEM),),
    ),
    Mutant(
        "reasons of refusals have one copy",
        "ranks3_refused_twice",
        "refusal",
        False,
        (
            (
                FORWARD,
                "refusals[protocol::route_word(epoch, s_.ranks, src)]",
                "refusals[src]",
            ),
        ),
    ),
    # Giving up.
    Mutant(
        "only the first to give up tells the others",
        "ranks3_late_backward",
        "passes for right",
        False,
        (
            (
                FORWARD,
                "        if (end == WaitEnd::kTimeIsUp) {\n"
                "            A::fetch_or(&here_.raised[0], 1);\n",
                "        if (end == WaitEnd::kTold) return false;\n"
                "        {\n"
                "            A::fetch_or(&here_.raised[0], 1);\n",
            ),
        ),
        states=500_000,
    ),
    Mutant(
        "a plan goes on although routes were given up",
        "late",
        "a plan is made of some of the routes",
        False,
        (
            (
                FORWARD,
                "if (not grid_barrier(0, has_routes)) return false;",
                "if (not grid_barrier(0, true)) return false;",
            ),
        ),
    ),
    Mutant(
        "a rank that is alone does not wait for routes that other CTAs have written",
        "own_routes",
        "is read before it is known to be written",
        True,
        (
            (
                FORWARD,
                "const int begin = is_own ? cta_ * per_cta : cta_;",
                "const int begin = is_own ? (cta_ + 1) % s_.ctas * per_cta : cta_;",
            ),
        ),
    ),
    Mutant(
        "a CTA of a rank that is alone tells no other that it refuses its routes",
        "own_routes",
        "ranks disagree whether to go on",
        False,
        (
            (
                FORWARD,
                "return A::load(&here_.raised[0]) == 0;\n    }\n\n    template <class Visit>",
                "return true;\n    }\n\n    template <class Visit>",
            ),
        ),
    ),
    # Plans of few tokens, whose CTAs count all routes.
    Mutant(
        "a CTA comes to the barrier before it has described its rows",
        "few",
        UNWRITTEN,
        True,
        (
            (
                FORWARD,
                "        protocol::come_to_barrier<A>(word, may_go_on);\n",
                "",
            ),
            (
                FORWARD,
                "        int next[kMaxExperts];\n        if (may_go_on) {\n",
                "        int next[kMaxExperts];\n"
                "        protocol::come_to_barrier<A>(here_.counter(M::kBarrier), may_go_on);\n"
                "        if (may_go_on) {\n",
            ),
        ),
    ),
    Mutant(
        "a CTA that counts all routes does not wait for the others' rows",
        "few",
        UNWRITTEN,
        True,
        (
            (
                FORWARD,
                "        return protocol::await_barrier<A>(word, s_.ctas,",
                "        if (may_go_on) return true;\n"
                "        return protocol::await_barrier<A>(word, s_.ctas,",
            ),
        ),
    ),
    Mutant(
        "a CTA that counts all routes tells no other that they are refused",
        "few",
        "ranks disagree whether to go on",
        False,
        (
            (
                FORWARD,
                "        may_go_on = may_go_on and A::load(&here_.raised[0]) == 0;\n",
                "",
            ),
        ),
    ),
    Mutant(
        "rows that are copied with the plan are counted before they are written",
        "few",
        BY_TMA,
        False,
        (
            (
                FORWARD,
                COPY_OF_FEW + COUNT_OF_FEW,
                COUNT_OF_FEW + COPY_OF_FEW,
            ),
        ),
    ),
    Mutant(
        "rows that are copied with the plan are dispatched, too",
        "few",
        TWICE,
        False,
        ((FORWARD, "first_blocks(), not are_copied);", "first_blocks(), true);"),),
    ),
    Mutant(
        "rows are left to the plan by a launch that does not plan",
        "few",
        HANG,
        False,
        ((FORWARD, "  launch.kind == Kind::kForward;", "  launch.kind != Kind::kPlan;"),),
    ),
    Mutant(
        "of an expert's pads one is counted",
        "few",
        HANG,
        False,
        ((QUEUE, "    A::add_release(counter, items);", "    A::add_release(counter, 1);"),),
    ),
    Mutant(
        "pads are counted before they are written",
        "few",
        BY_TMA,
        False,
        (
            (
                FORWARD,
                PADS_OF_FEW + "        if (first < end) {",
                "        if (first < end) {",
            ),
            (
                FORWARD,
                "       uint32_t(end - first));\n        }\n",
                "       uint32_t(end - first));\n        }\n" + PADS_OF_FEW,
            ),
        ),
    ),
    Mutant(
        "tickets begin with those that takers have had for their own",
        "ctas2",
        "a tile is computed twice",
        False,
        ((QUEUE, "    return takers + take<A>(tickets, 1);", "    return take<A>(tickets, 1);"),),
    ),
    Mutant(
        "takers' own tickets are one",
        "ctas2",
        UNWRITTEN,
        False,
        ((FORWARD, "for (int ticket = cta_;; ticket", "for (int ticket = 0;; ticket"),),
    ),
    Mutant(
        "nobody is told that a rank gives up",
        "ranks3_absent",
        HANG,
        False,
        (
            (
                GIVE_UP,
                "A::template store<Scope::kSystem>(word_of(rank), who);",
                "(void)word_of(rank);",
            ),
        ),
    ),
    # Counters and tickets.
    Mutant(
        "counters are zeroed after publishing instead of when a launch ends",
        "ctas2",
        "is used before it is known to be reset",
        True,
        (
            (GRID, "i < count; i += step) A::write", "i < 0; i += step) A::write"),
            (
                FORWARD,
                "        publish_routes(launch, epoch);\n        int num_tokens",
                "        publish_routes(launch, epoch);\n"
                "        for (int i = 0; i < M::num_counters(s_) and cta_ == 0; ++i) {\n"
                "            A::write(here_.counter(i), 0u);\n"
                "        }\n"
                "        int num_tokens",
            ),
        ),
    ),
    Mutant(
        "counters are not zeroed",
        "ctas2",
        HANG,
        False,
        ((GRID, "i < count; i += step) A::write", "i < 0; i += step) A::write"),),
    ),
    Mutant(
        "a block is taken for full one row short",
        "ranks2",
        BY_TMA,
        False,
        (
            (
                FORWARD,
                "gemm == 0 ? s_.block_rows : s_.warps * s_.n_tiles[0];",
                "gemm == 0 ? s_.block_rows - 1 : s_.warps * s_.n_tiles[0];",
            ),
        ),
    ),
    Mutant(
        "a block's tiles are taken for done one warp short",
        "ranks2",
        UNWRITTEN,
        False,
        (
            (
                FORWARD,
                "const uint32_t target = s_.warps * s_.n_tiles[1];",
                "const uint32_t target = s_.warps * s_.n_tiles[1] - 1;",
            ),
        ),
    ),
    Mutant(
        "a unit of rows is delivered by everyone who finds it",
        "walk",
        TWICE,
        False,
        (
            (
                FORWARD,
                "if (not must_wait and "
                "A::compare_and_swap(next_unit, unit, unit + taken) != unit) {",
                "A::compare_and_swap(next_unit, unit, unit + taken);\n        if (s_.ranks < 0) {",
            ),
        ),
    ),
    Mutant(
        "of units that are taken together all but the first are left to others, too",
        "ahead",
        UNWRITTEN,
        False,
        (
            (
                FORWARD,
                "A::compare_and_swap(next_unit, unit, unit + taken) != unit",
                "A::compare_and_swap(next_unit, unit, unit + 1) != unit",
            ),
        ),
    ),
    Mutant(
        "units ahead are taken although rows of their tokens are not there",
        "ahead",
        STILL_READ,
        False,
        (
            (
                FORWARD,
                "if (tokens < 0 or tokens > left) break;",
                "if ((tokens < 0 and taken == 0) or tokens > left) break;",
            ),
        ),
    ),
    Mutant(
        "pad rows are not counted",
        "ranks2",
        HANG,
        False,
        (
            (
                FORWARD,
                "A::write(&here_.received[row], 0);\n                    protocol::publish<A>(",
                "A::write(&here_.received[row], 0);\n                    (void)(",
            ),
        ),
    ),
    Mutant(
        "rows that are copied for the first tiles are dispatched, too",
        "ctas2",
        TWICE,
        False,
        (
            (
                FORWARD,
                "if (meta.owner and not(is_own and is_first(copied_blocks, row))) {",
                "if (meta.owner) {",
            ),
        ),
    ),
    Mutant(
        "the first CTA publishes instead of the last",
        "ctas2_backward",
        UNWRITTEN,
        False,
        ((GRID, "if (A::add(counter, 1) == expected - 1) {", "if (A::add(counter, 1) == 0) {"),),
    ),
    Mutant(
        "a grid barrier does not wait for its last CTA",
        "ctas2_backward",
        "disagree",
        False,
        ((GRID, "return seen % kStop == expected;", "return seen % kStop + 1 >= expected;"),),
    ),
    Mutant(
        "the first CTA to leave zeroes the counters",
        "ctas2",
        TWICE,
        False,
        (
            (
                GRID,
                "if (A::add(counter, 1) != expected - 1) return false;",
                "if (A::add(counter, 1) != 0) return false;",
            ),
        ),
    ),
    Mutant(
        "tickets are read and written instead of added to",
        "ctas2",
        UNWRITTEN,
        False,
        (
            (
                QUEUE,
                "    return A::add(tickets, count);",
                "    const uint32_t first = A::load(tickets);\n"
                "    A::template store<Scope::kGpu>(tickets, first + count);\n"
                "    return first;",
            ),
        ),
    ),
    Mutant(
        "tokens that another warp has taken are reduced again",
        "ranks2",
        "out",
        False,
        ((QUEUE, "return items & ~before;", "return items;"),),
    ),
    Mutant(
        "GEMM1 of a group comes before its GEMM0",
        "ranks2",
        HANG,
        False,
        (
            (
                ORDER,
                "return ticket < gemm0 ? in_group(0, ticket)",
                "return ticket < gemm0 ? TilePlace{1, in_group(0, ticket).unit, 0}",
            ),
        ),
    ),
    Mutant(
        "GEMM1 of a group is mixed with its own GEMM0",
        "mixed",
        HANG,
        False,
        (
            (
                ORDER,
                "> before) return in_group(1, before);",
                "> before) return {1, in_group(0, before).unit, in_group(0, before).n};",
            ),
        ),
    ),
    Mutant(
        "GEMM0 of a mixed step has the places of GEMM1, too",
        "order",
        "no tile",
        False,
        (
            (
                ORDER,
                "return in_group(0, ticket - before);",
                "return in_group(0, ticket);",
            ),
        ),
        SIZES,
    ),
    Mutant(
        "a mixed step has GEMM0 first",
        "order",
        "products are apart",
        False,
        ((ORDER, "if (order_.is_mixed) {", "if (order_.is_mixed and order_.lag < 0) {"),),
        SIZES,
    ),
    Mutant(
        "groups end with experts of few rows",
        "order",
        "the wrong groups are cut",
        False,
        ((ORDER, "kFewBlocks = 4;", "kFewBlocks = 2;"),),
        SIZES,
    ),
    Mutant(
        "a backward of few stages follows groups that end with experts",
        "order",
        "the wrong passes follow cut groups",
        False,
        ((ORDER, "kFewStages = 16;", "kFewStages = 15;"),),
        SIZES,
    ),
    Mutant(
        "groups of experts in FP8 end with experts",
        "order",
        "the wrong groups are cut",
        False,
        ((ORDER, "is_alone and not is_in_fp8 and", "is_alone and"),),
        SIZES,
    ),
    Mutant(
        "few units of an expert are a group with the next expert's",
        "order",
        "a group has the rest of an expert and others",
        False,
        ((ORDER, "units < least and", "units <= least and"),),
        SIZES,
    ),
    Mutant(
        "a table of groups has too few ends",
        "order",
        "groups are not in order",
        False,
        ((ORDER, "i <= kMostLag; ++i", "i < kMostLag; ++i"),),
        SIZES,
    ),
    Mutant(
        "an expert's first part is larger than the most of a group",
        "order",
        "a group is empty or too large",
        False,
        ((ORDER, "(units + most - 1) / most;", "units / most + (units < most);"),),
        SIZES,
    ),
    Mutant(
        "a step ends where the next group does",
        "order",
        "products are apart",
        False,
        ((ORDER, "ends_[0] = before(step_ + 1)", "ends_[0] = before(step_ + 2)"),),
        SIZES,
    ),
    Mutant(
        "every CTA cuts groups",
        "cut_groups",
        "is written over by one who does not know of the last write",
        False,
        ((FORWARD, "s_.cuts_groups and cta_ == s_.ctas - 1", "s_.cuts_groups and cta_ >= 0"),),
    ),
    Mutant(
        "GEMM1 of five stages is mixed",
        "order",
        "the wrong products are mixed",
        False,
        ((ORDER, "kMostStages[2] = {32, 4};", "kMostStages[2] = {32, 5};"),),
        SIZES,
    ),
    Mutant(
        "products with large weights are mixed",
        "order",
        "the wrong products are mixed",
        False,
        ((ORDER, "kMostStages[2] = {32, 4};", "kMostStages[2] = {64, 4};"),),
        SIZES,
    ),
    Mutant(
        "a forward that keeps its pre-activations is mixed",
        "order",
        "the wrong products are mixed",
        False,
        ((ORDER, "return keeps_nothing and gemm0_stages", "return gemm0_stages"),),
        SIZES,
    ),
    Mutant(
        "weight gradients do not wait for the blocks' GEMM0",
        "first_copied",
        BY_TMA,
        False,
        (
            (
                FORWARD,
                "            [&](auto load, auto done) { wait("
                '"weight gradients wait for GEMM0", load, done); });\n',
                "            [](auto, auto) {});\n",
            ),
        ),
    ),
    Mutant(
        "weight gradients wait for one tile less than there are",
        "ctas2_backward",
        HANG,
        False,
        (
            (
                FORWARD,
                "uint32_t(s_.warps * s_.n_tiles[0] * num_blocks()),",
                "uint32_t(s_.warps * s_.n_tiles[0] * num_blocks()) - 1,",
            ),
        ),
    ),
    Mutant(
        "tiles of GEMM1 are counted as differentiated, too",
        "ranks2_backward",
        HANG,
        False,
        (
            (
                FORWARD,
                "            if (launch.kind == Kind::kBackward and gemm == 0) {",
                "            if (gemm == 0 or launch.kind == Kind::kBackward) {",
            ),
        ),
    ),
    # Rows in place.
    Mutant(
        "what a look that goes ahead has not found is not awaited",
        "in_place",
        "a token was lost, or is wrong and passes for right",
        True,
        ((QUEUE, "    if (not is_seen) await<A>(counter, target, wait);\n", ""),),
    ),
    Mutant(
        "a look that goes ahead does not acquire",
        "in_place",
        BY_TMA,
        True,
        (
            (
                QUEUE,
                "return A::template load_acquire<Scope::kGpu>(counter) == target;",
                "return A::load(counter) == target;",
            ),
        ),
    ),
    Mutant(
        "weight gradients do not wait for the copies of rows that were read in place",
        "in_place",
        BY_TMA,
        False,
        (
            (
                FORWARD,
                'wait("weight gradients wait for rows", load, done);',
                "(void)load, (void)done;",
            ),
        ),
    ),
    Mutant(
        "weight gradients wait for copies of rows that no warp makes",
        "not_copied",
        HANG,
        False,
        (
            (
                FORWARD,
                "        if (access_ == RowAccess::kInPlaceUntilCopied) {\n"
                "            protocol::await_for_tma<A>(\n",
                "        if (reads_in_place()) {\n            protocol::await_for_tma<A>(\n",
            ),
        ),
    ),
    Mutant(
        "the first dispatch warp that is done tells that all are",
        "in_place",
        HANG,
        False,
        (
            (
                FORWARD,
                "here_.counter(M::kDispatched), uint32_t(s_.ctas),",
                "here_.counter(M::kDispatched), 1u,",
            ),
        ),
    ),
    Mutant(
        "a dispatch warp tells that it is done before its last rows",
        "in_place",
        BY_TMA,
        False,
        (
            (
                FORWARD,
                "        while (has_rows and access_ != RowAccess::kInPlace) {\n",
                "        if (access_ == RowAccess::kInPlaceUntilCopied) {\n"
                "            protocol::publish<A>(here_.counter(M::kDispatched));\n"
                "        }\n"
                "        while (has_rows and access_ != RowAccess::kInPlace) {\n",
            ),
            (
                FORWARD,
                "        if (access_ == RowAccess::kInPlaceUntilCopied) {\n"
                "            protocol::publish<A>(here_.counter(M::kDispatched));\n"
                "        }\n"
                "        if (not has_heard) await_rows(epoch);\n",
                "        if (not has_heard) await_rows(epoch);\n",
            ),
        ),
    ),
    # Copies of x in a backward.
    Mutant(
        "fc1's gradient does not wait for the copies of x",
        "tokens_copied",
        BY_TMA,
        False,
        ((FORWARD, 'wait("fc1\'s gradient waits for x", load, done);', "(void)load, (void)done;"),),
    ),
    Mutant(
        "the first dispatch warp that has copied its share of x tells that all have",
        "tokens_copied",
        HANG,
        False,
        (
            (
                FORWARD,
                "here_.counter(M::kTokensCopied), uint32_t(s_.ctas),",
                "here_.counter(M::kTokensCopied), 1u,",
            ),
        ),
    ),
    Mutant(
        "a dispatch warp tells of its share of x before its copies are complete",
        "both_copied_agents2",
        BY_TMA,
        False,
        (
            dropped(
                FORWARD,
                "        protocol::complete_copies<A>();\n"
                "        protocol::publish<A>(here_.counter(M::kTokensCopied));\n",
                "        protocol::complete_copies<A>();\n",
            ),
        ),
    ),
    Mutant(
        "fc1's gradient waits for copies of x that no warp makes",
        "not_copied",
        HANG,
        False,
        (
            (
                FORWARD,
                "const bool reads_copies = s_.copies_tokens and product == 1;",
                "const bool reads_copies = product == 1;",
            ),
        ),
    ),
    Mutant(
        "own rows of a block that others share are not copied",
        "ranks2_own",
        HANG,
        False,
        (
            (
                FORWARD,
                "if (not meta.pad and not is_block_own(row / s_.block_rows)) {",
                "if (false) {",
            ),
        ),
    ),
    Mutant(
        "a block passes for one of own rows alone by its first row",
        "ranks2_own",
        "a token's sum is wrong",
        False,
        ((FORWARD, "block * s_.block_rows + s_.block_rows - 1", "block * s_.block_rows"),),
    ),
    Mutant(
        "a block passes for one of own rows alone by its pads",
        "ranks2_own",
        "a token's sum is wrong",
        False,
        ((FORWARD, "return last.src == rank_ and not last.pad;", "return last.src == rank_;"),),
    ),
    Mutant(
        "copies of blocks of own rows alone are awaited, which no warp makes",
        "ranks2_own",
        HANG,
        False,
        (
            (
                FORWARD,
                "if (reads_own_in_place()) return is_block_own(block);",
                "if (reads_own_in_place()) return false;",
            ),
        ),
    ),
    Mutant(
        "own rows that are read in place are counted",
        "ranks2_own",
        "rows are counted though not copied",
        False,
        (
            (
                FORWARD,
                "                        fetch_row(epoch, meta, row, 1);\n                    }\n",
                "                        fetch_row(epoch, meta, row, 1);\n"
                "                    } else if (not meta.pad) {\n"
                "                        protocol::publish<A>(\n"
                "                            here_.rows_ready(s_, row / s_.block_rows));\n"
                "                    }\n",
            ),
        ),
    ),
    Mutant(
        "rows that were copied for the first tiles alone are copied again",
        "first_copied",
        TWICE,
        False,
        ((FORWARD, "            first_row = row_behind(copied_blocks);\n", ""),),
    ),
    Mutant(
        "nobody copies the other rows of the first tiles' tokens",
        "first_copied",
        HANG,
        False,
        ((FORWARD, "            copied_blocks = 0;\n", ""),),
    ),
    Mutant(
        "a gather ends before its rows have been read",
        "ranks2_gather",
        STILL_READ,
        False,
        (
            dropped(
                FORWARD,
                "        await_rows(protocol::next_epoch(epoch));\n",
                "        await_rows(protocol::next_epoch(epoch));\n",
            ),
        ),
    ),
    Mutant(
        "a gather tells that rows have been read before they are",
        "ranks2_gather",
        BY_TMA,
        False,
        (
            (
                FORWARD,
                "        dispatch(epoch, 0, true);\n"
                "        tell_rows(M::kTaken, protocol::next_epoch(epoch));\n",
                "        tell_rows(M::kTaken, protocol::next_epoch(epoch));\n"
                "        dispatch(epoch, 0, true);\n",
            ),
        ),
    ),
    Mutant(
        "a gather takes one epoch",
        "ranks2_gather",
        "is read",
        False,
        (
            dropped(
                FORWARD,
                "        if (gathers) epoch = protocol::next_epoch(epoch);\n",
                "        if (gathers) epoch = protocol::next_epoch(epoch);\n",
            ),
        ),
    ),
    Mutant(
        "nobody is told of gradients that come from the own rank alone",
        "ranks2_backward",
        HANG,
        False,
        (
            (
                FORWARD,
                "if (meta.home and launch.kind != Kind::kBackward) return;",
                "if (meta.home) return;",
            ),
        ),
    ),
    # Places.
    Mutant(
        "a token of another rank is taken for one of this",
        "ranks2",
        HANG,
        False,
        (
            (
                FORWARD,
                "is_home = ranks == 1u << src;",
                "is_home = ranks == 1u << rank_;",
            ),
        ),
    ),
    Mutant(
        "all ranks write a token's result to one slot",
        "ranks3",
        TWICE,
        False,
        (
            (
                PLACES,
                "return ranks & ((1u << rank) - 1);",
                "return ranks & ~ranks & uint32_t(rank);",
            ),
        ),
    ),
    Mutant(
        "all ranks share a token's signal of results",
        "ranks3",
        "a token's sum is wrong",
        False,
        (
            (
                PLACES,
                "return int64_t(token) * num_ranks + src;",
                "return int64_t(token) * num_ranks + 0 * src;",
            ),
        ),
    ),
    Mutant(
        "a layer's routes lie where its own top-k puts them",
        "ranks2_layers",
        "heap",
        True,
        (
            (
                FORWARD,
                "static int heap_topk(const Sizes& s, int) { return s.topk; }",
                "static int heap_topk(const Sizes&, int topk) { return topk; }",
            ),
        ),
    ),
]
