"""The planner that evens out loads: how well, that it is valid, and that C++ plans the same."""

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_megatron.planner import least_rows_of
from flashmoe_megatron.replicas.balance import PREFERENCES, balance
from flashmoe_megatron.replicas.placement import Counts, Hosts, Placement, placement_of
from flashmoe_megatron.replicas.popular import popular
from tests.protocol.programs import CSRC, compiler
from tests.replicas import cases
from tools.simulate import skew
from tools.simulate.workloads import workloads


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize(("num_experts", "topk"), [(64, 2), (128, 8), (256, 8)])
def test_two_spare_slots_even_out_skewed_routers(num_experts: int, topk: int, num_ranks: int):
    """200 draws for each width of model and exponent."""
    for exponent in (0.25, 0.5, 0.75, 1.0):
        router = skew.Zipf(num_experts, topk, exponent)
        found = []
        for _ in range(50):
            counts = router.draw(num_ranks)
            placement = balance(counts, 2)
            placement.check(num_ranks, num_experts, 2)
            found.append(skew.imbalance(counts, placement))
        rows, blocks = zip(*found, strict=True)
        assert np.mean(rows) <= 1.02
        assert max(blocks) <= 1.08
        # Where a rank has 64 blocks alone, a piece of a hot expert is some percent of its load.
        assert max(rows) <= (1.05 if topk == 2 else 1.025)


@settings(max_examples=300)
@given(st.data())
def test_no_routing_gets_worse(data: st.DataObject):
    num_ranks = data.draw(st.sampled_from([1, 2, 3, 4, 8]))
    local = data.draw(st.integers(1, 6))
    spare = data.draw(st.integers(0, local))
    num_experts = num_ranks * local
    most = data.draw(st.sampled_from([0, 3, 200, 5000]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    counts = rng.integers(0, most + 1, (num_ranks, num_experts))
    counts *= rng.random((num_ranks, num_experts)) < data.draw(st.sampled_from([0.1, 0.5, 1.0]))
    placement = balance(counts.tolist(), spare)
    placement.check(num_ranks, num_experts, spare)
    ours = skew.rows_of_ranks(counts.tolist(), placement)
    home = skew.rows_of_ranks(counts.tolist(), skew.home_placement(num_ranks, num_experts, spare))
    for measure in (sum, skew.blocks_of):
        loads = [max(measure(rows.values()) for rows in ranks) for ranks in (ours, home)]
        assert loads[0] <= loads[1]
    assert sum(sum(rows.values()) for rows in ours) == counts.sum()
    computed = [{slot - rank * (local + spare) for slot in rows} for rank, rows in enumerate(ours)]
    for slots, experts in zip(computed, placement.hosts, strict=True):
        assert {slot for slot in slots if slot >= local} == {local + i for i in range(len(experts))}


def test_fewer_rows_are_not_bought_with_more_blocks():
    """Pieces of experts fill blocks in part, so that the busiest rank could get one more."""
    counts = [[191, 22, 101, 117, 21, 296, 124, 299], [197, 260, 52, 37, 62, 31, 152, 198]]
    home = skew.home_placement(2, 8, 1)
    found, at_home = (
        [skew.blocks_of(rows.values()) for rows in skew.rows_of_ranks(counts, placement)]
        for placement in (balance(counts, 1), home)
    )
    assert max(found) <= max(at_home) == 11


def test_the_first_of_the_best_attempts_counts():
    from flashmoe_megatron.replicas.balance import _Attempt

    rng = np.random.default_rng(5)
    places = set()
    for _ in range(40):
        counts = rng.integers(0, 400, (4, 8)).tolist()
        attempts = []
        for preference in PREFERENCES:
            attempts.append(_Attempt(counts, 1, preference, None, 0))
            attempts[-1].run()
            if attempts[-1].is_good():
                break
        loads = [attempt.most() for attempt in attempts]
        place = loads.index(min(loads))
        best = attempts[place]
        assert balance(counts, 1) == placement_of(best.rank_of, best.replicas(), 1)
        places.add(place)
    assert len(places) > 3


def test_settled_hosts_are_kept_and_used():
    counts = skew.Zipf(64, 2, 1.0).draw(4)
    chosen = balance(counts, 2)
    settled = balance(counts, 2, chosen.hosts)
    assert settled.hosts == chosen.hosts
    settled.check(4, 64, 2)
    # Also where nobody needs them.
    assert balance([[10] * 4] * 2, 1, ((3,), (0,))).hosts == ((3,), (0,))
    home = skew.imbalance(counts, skew.home_placement(4, 64, 2))
    assert skew.imbalance(counts, settled)[0] <= 1 + (home[0] - 1) / 4


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_replicas_take_no_fewer_rows_than_asked_for(exponent: float):
    """What does not pay is not moved; what pays still is."""
    for seed in range(10):
        counts = skew.Zipf(64, 2, exponent, seed=seed).draw(8)
        least = least_rows_of(340e9)
        placement = balance(counts, 2, None, least)
        rows = skew.rows_of_ranks(counts, placement)
        for rank, hosted in enumerate(placement.hosts):
            first = rank * placement.slots_per_rank + 64 // 8
            assert all(rows[rank][first + i] >= least for i in range(len(hosted)))
        assert bool(any(placement.hosts)) == (exponent == 1.0)
        home, after = (
            max(sum(one.values()) for one in skew.rows_of_ranks(counts, each))
            for each in (skew.home_placement(8, 64, 2), placement)
        )
        assert after <= home - least * (exponent == 1.0)


def test_a_slow_link_makes_replicas_dear():
    assert least_rows_of(0.0) == 0
    assert 2_000 < least_rows_of(340e9) < 4_000
    assert least_rows_of(34e9) == pytest.approx(10 * least_rows_of(340e9), rel=1e-3)


def test_kinds_of_routing_are_evened_out():
    """An empty rank gets no more than its spare slots hold, so W5 needs more of them than two."""
    rng = np.random.default_rng(3)
    for workload in workloads(8, 128):
        counts = workload.counts(8, rng)
        spare = 8 if workload.name.startswith("W5") else 2
        placement = balance(counts, spare)
        placement.check(8, 128, spare)
        rows, blocks = skew.imbalance(counts, placement)
        assert rows <= (1.08 if workload.name.startswith("W5") else 1.05), workload.name
        assert blocks <= 1.08, workload.name


def test_stale_replicas_do_no_harm():
    """Replicas that were chosen for another routing, as a hot spot that rotates leaves them."""
    rng = np.random.default_rng(3)
    rotating = [one for one in workloads(8, 128) if one.name.startswith("W6")]
    steps = [one.counts(8, rng) for one in rotating]
    before, now = steps[0], steps[1]
    home = skew.imbalance(now, skew.home_placement(8, 128, 2))
    stale = skew.imbalance(now, balance(now, 2, balance(before, 2).hosts))
    assert stale[0] <= home[0]
    assert stale[1] <= home[1]


MORE_BLOCKS = [
    [1, 129, 200, 129, 5, 200, 2, 5, 1],
    [0, 60, 0, 100, 100, 129, 1, 200, 127],
    [127, 129, 127, 60, 2, 0, 0, 0, 0],
]
"""Routes of which some moves would even out rows and give a rank more blocks than any has."""

PROGRAM = r"""
#include <pthread.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "flashmoe/placement/balance.h"
#include "flashmoe/placement/popular.h"
#include "flashmoe/placement/settled.h"

using namespace flashmoe::placement;

// The host's team of one, and a team of threads as a launch has it.
struct One {
    static constexpr int kLanes = 1;
    static int index() { return 0; }
    static int size() { return 1; }
    static int group() { return 0; }
    static int num_groups() { return 1; }
    static int lane() { return 0; }
    static void sync() {}
    static int sum(int value) { return value; }
    static int max(int value) { return value; }
    static int min(int value) { return value; }
    static int count(bool is_true) { return is_true; }
    static int before(bool) { return 0; }
};

thread_local int mine;

struct Many {
    static constexpr int kLanes = 4, kGroups = 3;
    static inline pthread_barrier_t all, of_group[kGroups];
    static inline int values[kGroups][kLanes];
    static int index() { return mine; }
    static int size() { return kLanes * kGroups; }
    static int group() { return mine / kLanes; }
    static int num_groups() { return kGroups; }
    static int lane() { return mine % kLanes; }
    static void sync() { pthread_barrier_wait(&all); }
    template <class Op>
    static int fold(int value, int lanes, Op op) {
        values[group()][lane()] = value;
        pthread_barrier_wait(&of_group[group()]);
        int found = lanes > 0 ? values[group()][0] : 0;
        for (int i = 1; i < lanes; ++i) found = op(found, values[group()][i]);
        pthread_barrier_wait(&of_group[group()]);
        return found;
    }
    static int add(int a, int b) { return a + b; }
    static int more(int a, int b) { return std::max(a, b); }
    static int less(int a, int b) { return std::min(a, b); }
    static int sum(int value) { return fold(value, kLanes, add); }
    static int max(int value) { return fold(value, kLanes, more); }
    static int min(int value) { return fold(value, kLanes, less); }
    static int count(bool is_true) { return fold(is_true, kLanes, add); }
    static int before(bool is_true) { return fold(is_true, lane(), add); }
};

struct Case {
    int ranks, experts, spare, least_rows, has_hosts, is_popular, has_links;
    std::vector<int> hosts, links, counts, rows, chosen;
    std::vector<uint8_t> sources, holders;
    std::vector<uint16_t> slot_of;
    Loads loads;
};

void print(const char* name, const std::vector<int>& values) {
    std::printf(", \"%s\": [", name);
    for (size_t i = 0; i < values.size(); ++i) std::printf(i ? ", %d" : "%d", values[i]);
    std::printf("]");
}

template <class Team>
void print_placement(Case& c) {
    int* chosen = c.has_hosts ? nullptr : c.chosen.data();
    number_slots<Team>(c.sources.data(), c.ranks, c.experts, c.spare, chosen, c.slot_of.data());
    if (c.has_hosts) {
        keep_slots<Team>(c.hosts.data(), c.counts.data(), c.sources.data(), c.ranks, c.experts,
                         c.spare, c.chosen.data(), c.slot_of.data());
    }
    if (Team::index() == 0) {
        print("sources", {c.sources.begin(), c.sources.end()});
        print("hosts", c.chosen);
        print("slot_of", {c.slot_of.begin(), c.slot_of.end()});
        std::printf("}");
    }
    Team::sync();
}

// Writes every attempt's placement and load, or the one of popular, as a line of JSON.
template <class Team>
void plan(Case& c) {
    if (c.is_popular) {
        if (c.has_hosts) {
            use_own_replicas<Team>(c.hosts.data(), c.ranks, c.experts, c.spare, c.sources.data());
        } else {
            const auto plan_by = [&c](auto links) {
                popular<Team>(c.counts.data(), c.ranks, c.experts, c.spare, c.sources.data(),
                              c.rows.data(), c.holders.data(), &c.loads, links);
            };
            c.has_links ? plan_by(LinksByRate{c.links.data()}) : plan_by(EqualLinks{});
        }
        if (Team::index() == 0) std::printf("[{\"most\": 0");
        print_placement<Team>(c);
        if (Team::index() == 0) std::printf("]\n");
        return;
    }
    for (int number = 0; number < kNumPreferences; ++number) {
        Attempt<Team> attempt{c.counts.data(), c.ranks, c.experts, c.sources.data(),
                              c.rows.data(), c.holders.data(), &c.loads, c.least_rows};
        attempt.begin(c.spare, c.has_hosts ? c.hosts.data() : nullptr, preference(number),
                      c.counts.data(), c.experts);
        const bool is_good = attempt.run();
        if (!attempt.is_laid_out) attempt.lay_out();
        if (Team::index() == 0) {
            std::printf("%s{\"most\": %d, \"is_good\": %d", number ? ", " : "[", attempt.most,
                        int(is_good));
        }
        print_placement<Team>(c);
    }
    if (Team::index() == 0) std::printf("]\n");
}

int main(int argc, char**) {
    Case c;
    while (std::scanf("%d %d %d %d %d %d %d", &c.ranks, &c.experts, &c.spare, &c.least_rows,
                      &c.has_hosts, &c.is_popular, &c.has_links) == 7) {
        const int all = c.ranks * c.experts;
        for (auto* each : {&c.hosts, &c.chosen}) each->resize(c.ranks * c.spare);
        for (auto* each : {&c.counts, &c.rows}) each->resize(all);
        c.sources.resize(all);
        c.slot_of.resize(all);
        c.holders.resize(c.experts);
        for (int& host : c.hosts) {
            if (c.has_hosts) std::scanf("%d", &host);
        }
        c.links.resize(c.ranks * c.ranks);
        for (int& link : c.links) {
            if (c.has_links) std::scanf("%d", &link);
        }
        for (int& count : c.counts) std::scanf("%d", &count);
        if (argc == 1) {
            plan<One>(c);
            continue;
        }
        pthread_barrier_init(&Many::all, nullptr, Many::size());
        for (auto& each : Many::of_group) pthread_barrier_init(&each, nullptr, Many::kLanes);
        std::vector<std::thread> threads;
        for (int i = 0; i < Many::size(); ++i) {
            threads.emplace_back([&c, i] { mine = i, plan<Many>(c); });
        }
        for (auto& thread : threads) thread.join();
    }
}
"""


def built(folder: Path, team: str) -> Callable[[list[str]], list[Any]]:
    """Compiles the program with a sanitizer; returns what gives its answers to lines."""
    source, program = folder / "plan.cc", folder / "plan"
    source.write_text(PROGRAM)
    sanitizer = {"one": "undefined", "many": "thread"}[team]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wno-unused-result", f"-fsanitize={sanitizer}"]
    subprocess.run(
        [compiler(), *flags, f"-I{CSRC}", str(source), "-o", str(program), "-pthread"],
        check=True,
        timeout=300,
    )

    def answers(lines: list[str]) -> list[Any]:
        done = subprocess.run(
            [str(program), *["many"] * (team == "many")],
            input="\n".join(lines),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert (done.returncode, done.stderr) == (0, "")
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(found) == len(lines)
        return found

    return answers


def line(
    counts: Counts,
    spare: int,
    hosts: Hosts | None,
    least_rows: int,
    is_popular: bool,
    links: Sequence[Sequence[int]] | None = None,
) -> str:
    """A case as the program reads it."""
    flat = [slot for experts in hosts or () for slot in [*experts, *[-1] * spare][:spare]]
    kind = [int(hosts is not None), int(is_popular), int(links is not None)]
    tables = [*flat, *(rate for row in links or () for rate in row)]
    numbers = [len(counts), len(counts[0]), spare, least_rows, *kind, *tables]
    return " ".join(map(str, [*numbers, *(count for row in counts for count in row)]))


def assert_same(got: dict[str, list[int]], want: Placement, counts: Counts, spare: int) -> None:
    """Replicas that nobody uses keep their slots, but are not told of."""
    assert got["slot_of"] == [slot for row in want.slot_of for slot in row]
    used = [
        [
            expert if rows.get((rank + 1) * want.slots_per_rank - spare + i) else -1
            for i, expert in enumerate(row)
        ]
        for rank, (row, rows) in enumerate(
            zip(want.hosts, skew.rows_of_ranks(counts, want), strict=True)
        )
    ]
    assert got["hosts"] == [slot for row in used for slot in [*row, *[-1] * spare][:spare]]


@pytest.mark.parametrize("team", ["one", "many"])
def test_the_kernels_planners_plan_the_same(tmp_path: Path, team: str):
    """Also where threads share the work, whose races ThreadSanitizer looks for."""
    from flashmoe_megatron.replicas.balance import _Attempt

    planner = built(tmp_path, team)
    routings = [
        (skew.Zipf(experts, topk, exponent, seed=seed).draw(ranks), spare)
        for seed, (experts, topk, ranks, spare, exponent) in enumerate(
            [(64, 2, 8, 2, 1.0), (64, 2, 4, 1, 1.2), (128, 8, 8, 2, 0.75), (16, 4, 2, 8, 1.5)]
        )
    ]
    rng = np.random.default_rng(3)
    routings += [(one.counts(4, rng), 2) for one in workloads(4, 32)]
    rng = np.random.default_rng(3)
    for ranks, local, spare in ((1, 4, 2), (2, 1, 1), (3, 5, 2), (5, 4, 0), (8, 2, 2)):
        routings.append((rng.integers(0, 900, (ranks, ranks * local)).tolist(), spare))
    given = [(counts, spare, None, 0) for counts, spare in routings]
    given += [(counts, spare, balance(counts, spare).hosts, 0) for counts, spare in routings[:6]]
    given += [
        (counts, spare, balance(counts[::-1], spare).hosts, 0) for counts, spare in routings[:6]
    ]
    given += [(counts, spare, None, 700) for counts, spare in routings]
    given += [
        ([[10] * 4] * 2, 1, ((3,), (0,)), 0),  # nobody needs the replicas
        ([[700, 0], [700, 0]], 1, None, 700),  # what can move is just enough
        (MORE_BLOCKS, 2, None, 0),
    ]

    def sources_of(rank_of: list[list[int]]) -> list[int]:
        ranks, experts = range(len(rank_of)), range(len(rank_of[0]))
        return [sum((rank_of[s][e] == r) << s for s in ranks) for r in ranks for e in experts]

    shared = [(counts, spare) for counts, spare in routings if len(counts) > 1 and spare]
    shared = [(counts, spare, None) for counts, spare in shared]
    shared += [(counts, 1, None) for counts, _ in cases.BY_HAND]
    shared += [(counts, spare, popular(counts[::-1], spare).hosts) for counts, spare, _ in shared]
    lines = [line(*one, is_popular=False) for one in given]
    lines += [line(*one, 0, is_popular=True) for one in shared]
    answers = planner(lines)
    for (counts, spare, hosts, least_rows), answer in zip(
        given, answers[: len(given)], strict=True
    ):
        for preference, got in zip(PREFERENCES, answer, strict=True):
            attempt = _Attempt(counts, spare, preference, hosts, least_rows)
            attempt.run()
            assert (got["most"], bool(got["is_good"])) == (attempt.most(), attempt.is_good())
            assert got["sources"] == sources_of(attempt.rank_of)
            held = attempt.replicas() if hosts is None else hosts
            assert_same(got, placement_of(attempt.rank_of, held, spare), counts, spare)
    moved = 0
    for (counts, spare, hosts), (got,) in zip(shared, answers[len(given) :], strict=True):
        want = popular(counts, spare, hosts=hosts)
        assert_same(got, want, counts, spare)
        moved += sum(map(len, want.hosts))
    assert moved > 50


def test_cold_experts_go_by_the_same_rates_in_both_languages(tmp_path: Path):
    """1,000 random routings over links of random rates, of which many change what is planned."""
    rng = np.random.default_rng(11)
    given = []
    for _ in range(1000):
        ranks, local, spare = (int(rng.integers(*bounds)) for bounds in ((3, 9), (2, 6), (2, 4)))
        popularity = rng.permutation(np.arange(1, ranks * local + 1) ** -rng.uniform(1, 2))
        counts = [rng.multinomial(2048, rng.dirichlet(popularity * local)) for _ in range(ranks)]
        most = int(rng.choice([2, 100, 2**20]))
        links = rng.integers(0, most, (ranks, ranks)).tolist()
        given.append(([row.tolist() for row in counts], spare, links))
    lines = [line(counts, spare, None, 0, True, links) for counts, spare, links in given]
    changed = 0
    for (counts, spare, links), (got,) in zip(given, built(tmp_path, "one")(lines), strict=True):
        want = popular(counts, spare, links)
        assert_same(got, want, counts, spare)
        changed += want != popular(counts, spare)
    assert changed > 200
