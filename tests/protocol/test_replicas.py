"""Weights that come to slots and gradients that go back: every order, and every mutant caught."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.protocol.mutants import BY_TMA, HANG, STILL_READ, TWICE, UNWRITTEN, Mutant
from tests.protocol.programs import build, run, summary

PROTOCOL = "flashmoe/protocol/replicas.h"
MODEL = "replicas.h"

# States that each has; a search that ends earlier has lost some.
SCENARIOS = {
    "forwards": 0,
    "training": 4_000,
    "one_ahead": 4_000,
    "owners_change": 1_000,
    "everywhere": 200,
    "ahead": 25,
    "ahead_again": 35,
    "ahead_unused": 20,
    "ahead_of_another": 1_500,
    "owners_ahead": 4_000,
}

LEFT = "[=](uint32_t seen) { return epoch_reached(seen, epoch); });"
WEIGHTS = """A::bulk_wait_complete();
    A::template release_fence<Scope::kSystem>();
    A::template store<Scope::kSystem>(weights_ready, epoch);"""
GRADS = """A::bulk_wait_complete();
    A::template release_fence<Scope::kSystem>();
    FLASHMOE_KEEP_LOOP"""
WAITS_FOR_HOST = 'protocol::await_left<A>(&here_.row_signals[host], epoch, waiting("a push"));\n'
WAITS_FOR_ALL = "if (is_host) hear_all(epoch);\n"
WAITS_FOR_OWN = 'protocol::await<A>(&here_.tickets[2], 1, waiting("an addition"));\n'
WAITS_FOR_HOSTS = "for_replicas(launch, [&](int host, int, int) { is_awaited |= host == src; });\n"
STORES = "store_in_slots(launch, epoch, product);\n"
STORED = "if (product == 0) publish_slot_grads(epoch, product);\n"
OWN_STORED = """A::bulk_wait_complete();
            if (product == 0) protocol::publish<A>(&here_.tickets[2]);"""
TELLS = "[&] { tell_of_fc2(launch, epoch); }"
PUSHES_AHEAD_AT_ONCE = f"if (launch.kind != ReplicaKind::kSettle) {WAITS_FOR_HOST}"
WAITS_FOR_WEIGHTS = (
    'protocol::await_weights<A>(&here_.weights_ready[slot], epoch, waiting("a tile"));'
)
IS_OWN_EPOCH = "epoch == uint32_t(A::read(&here_.epoch[0])) + 1"
ANY_WEIGHTS = (
    "load_acquire<Scope::kSystem>(weights_ready); },\n"
    "         [=](uint32_t seen) { return seen == epoch; });",
    "load_acquire<Scope::kSystem>(weights_ready); },\n"
    "         [=](uint32_t seen) { return seen != 0; });",
)

MUTANTS = [
    Mutant(
        "weights are read before they are there",
        "forwards",
        "other weights than its owner",
        False,
        ((MODEL, WAITS_FOR_WEIGHTS, ""),),
    ),
    Mutant(
        "weights are told of before their copies are complete",
        "forwards",
        BY_TMA,
        False,
        ((PROTOCOL, WEIGHTS, WEIGHTS.replace("A::bulk_wait_complete();", "")),),
    ),
    Mutant(
        "weights are released to the owner's GPU only",
        "forwards",
        BY_TMA,
        False,
        (
            (
                PROTOCOL,
                WEIGHTS,
                WEIGHTS.replace("release_fence<Scope::kSystem>", "release_fence<Scope::kGpu>"),
            ),
        ),
    ),
    Mutant(
        "weights are read without acquiring",
        "forwards",
        BY_TMA,
        False,
        (
            (
                PROTOCOL,
                "load_acquire<Scope::kSystem>(weights_ready)",
                "load_acquire<Scope::kGpu>(weights_ready)",
            ),
        ),
    ),
    Mutant(
        "weights are read by TMA without a proxy fence",
        "forwards",
        BY_TMA,
        False,
        (
            (
                PROTOCOL,
                "[=](uint32_t seen) { return seen == epoch; });\n    A::fence_proxy_async();",
                "[=](uint32_t seen) { return seen == epoch; });",
            ),
        ),
    ),
    Mutant(
        "weights of any launch will do",
        "training",
        BY_TMA,
        False,
        ((PROTOCOL, *ANY_WEIGHTS),),
    ),
    Mutant(
        "weights are pushed before the host left the last launch",
        "forwards",
        STILL_READ,
        False,
        ((MODEL, WAITS_FOR_HOST, ""),),
    ),
    Mutant(
        "a slot is written over by another owner before its host left",
        "owners_change",
        TWICE,
        False,
        ((MODEL, WAITS_FOR_HOST, ""),),
    ),
    Mutant(
        "a push has no proxy fence behind its wait",
        "forwards",
        STILL_READ,
        False,
        ((PROTOCOL, LEFT + "\n    A::fence_proxy_async();", LEFT),),
    ),
    Mutant(
        "a slot's gradient waits for its new owner alone",
        "owners_change",
        STILL_READ,
        False,
        (
            (
                MODEL,
                WAITS_FOR_ALL,
                """for (int src = 0; src < s_.ranks; ++src) {
            const int held = launch.hosts[rank_][0];
            if (held < 0 or held / s_.local != src) continue;
            protocol::await_left<A>(&here_.row_signals[src], epoch, waiting("a slot's gradient"));
        }
""",
            ),
        ),
    ),
    Mutant(
        "a slot's gradient is told of before its copies are complete",
        "training",
        UNWRITTEN,
        False,
        ((PROTOCOL, GRADS, GRADS.replace("A::bulk_wait_complete();", "")),),
    ),
    Mutant(
        "a slot's gradient is told of before it is stored",
        "training",
        STILL_READ,
        False,
        (
            (MODEL, STORED, ""),
            (MODEL, STORES, STORED + STORES),
        ),
    ),
    Mutant(
        "a slot's gradient is added without acquiring",
        "training",
        UNWRITTEN,
        False,
        (
            (
                PROTOCOL,
                "load_acquire<Scope::kSystem>(grads_ready)",
                "load_acquire<Scope::kGpu>(grads_ready)",
            ),
        ),
    ),
    Mutant(
        "a slot's gradient has to be of this very epoch",
        "one_ahead",
        "has gone past what is waited for",
        False,
        (
            (
                PROTOCOL,
                f"load_acquire<Scope::kSystem>(grads_ready); }},\n         {LEFT}",
                "load_acquire<Scope::kSystem>(grads_ready); },\n"
                "         [=](uint32_t seen) { return seen == epoch; });",
            ),
        ),
    ),
    Mutant(
        "gradients are added before the owner's own",
        "training",
        UNWRITTEN,
        False,
        ((MODEL, WAITS_FOR_OWN, ""),),
    ),
    Mutant(
        "the owner's own gradients are counted before their copies are complete",
        "training",
        UNWRITTEN,
        False,
        ((MODEL, OWN_STORED, OWN_STORED.replace("A::bulk_wait_complete();\n", "")),),
    ),
    Mutant(
        "gradients are added before their hosts have stored them",
        "training",
        STILL_READ,
        False,
        ((MODEL, WAITS_FOR_HOSTS, ""),),
    ),
    Mutant(
        "fc2's gradients are told of before replicas' are added",
        "training",
        "told of before replicas' are added",
        False,
        (
            (MODEL, TELLS, "[] {}"),
            (MODEL, STORED, STORED + "            if (product == 0) tell_of_fc2(launch, epoch);\n"),
        ),
    ),
    Mutant(
        "fc2's gradients are told of when the first piece is added",
        "training",
        "told of before replicas' are added",
        False,
        (
            (
                MODEL,
                f"protocol::arrive<A>(&here_.tickets[1], count, {TELLS}",
                f"protocol::arrive<A>(&here_.tickets[1], 1, {TELLS}",
            ),
        ),
    ),
    Mutant(
        "gradients of replicas are added in another order",
        "everywhere",
        "told of before replicas' are added",
        False,
        (
            (
                MODEL,
                "for (int host = 0; host < s_.ranks; ++host) {\n            for (int slot",
                "for (int i = 0; i < s_.ranks; ++i) {\n"
                "            const int host = adding_ ? s_.ranks - 1 - i : i;\n"
                "            for (int slot",
            ),
            (
                MODEL,
                "            add_piece(launch, 0, int(piece));\n",
                "            adding_ = true;\n"
                "            add_piece(launch, 0, int(piece));\n"
                "            adding_ = false;\n",
            ),
            (
                MODEL,
                "const bool is_dispatch_;\n",
                "const bool is_dispatch_;\n    bool adding_ = false;\n",
            ),
        ),
    ),
    Mutant(
        "weights are pushed ahead before the host left the last launch",
        "ahead",
        STILL_READ,
        False,
        ((MODEL, WAITS_FOR_HOST, PUSHES_AHEAD_AT_ONCE),),
    ),
    Mutant(
        "a slot is written over ahead by another owner before its host left",
        "owners_ahead",
        TWICE,
        False,
        ((MODEL, WAITS_FOR_HOST, PUSHES_AHEAD_AT_ONCE),),
    ),
    Mutant(
        "weights that were pushed ahead are not awaited",
        "ahead_again",
        "other weights than its owner",
        False,
        ((MODEL, WAITS_FOR_WEIGHTS, f"if ({IS_OWN_EPOCH}) {WAITS_FOR_WEIGHTS}"),),
    ),
    Mutant(
        "weights of an earlier launch ahead will do",
        "ahead_again",
        "other weights than its owner",
        False,
        ((PROTOCOL, *ANY_WEIGHTS),),
    ),
    Mutant(
        "weights that were pushed ahead are awaited with the forward's epoch",
        "ahead",
        HANG,
        False,
        (
            (
                MODEL,
                "is_settled ? uint32_t(A::read(&here_.settled[0])) : epoch",
                "epoch",
            ),
        ),
    ),
    Mutant(
        "a forward whose weights were pushed ahead pushes again",
        "ahead",
        STILL_READ,
        False,
        ((MODEL, "if (not is_settled) push_weights", "push_weights"),),
    ),
    Mutant(
        "a forward uses what was settled on before another launch",
        "ahead_of_another",
        HANG,
        False,
        (
            (
                MODEL,
                "world_.launches[i - 1].kind == ReplicaKind::kSettle;",
                "(world_.launches[i - 1].kind == ReplicaKind::kSettle or\n"
                "                                        world_.launches[0].kind == "
                "ReplicaKind::kSettle);",
            ),
        ),
    ),
]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("replicas", tmp_path_factory.mktemp("protocol") / "replicas")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_order_breaks_a_rule(replicas: Path, scenario: str, tell: Callable[[str], None]) -> None:
    outcome = run(replicas, scenario, 10_000_000)
    tell(summary(outcome))
    assert outcome.code == 0, f"{outcome.record}\n{outcome.text}"
    assert outcome.record["complete"]
    assert outcome.record["states"] >= SCENARIOS[scenario]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_explorer_catches(mutant: Mutant, tmp_path: Path, tell: Callable[[str], None]) -> None:
    program = build("replicas", tmp_path / "mutant", mutant)
    outcome = run(program, mutant.scenario, mutant.states)
    said = f"{outcome.record['failure']}"
    tell(f"{mutant.name}: {mutant.scenario}: {said}")
    assert outcome.code == 1, "the explorer found nothing wrong"
    assert mutant.failure in said
