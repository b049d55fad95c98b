"""Gates against their definitions, written as loops, and against DeepSpeed's own."""

import functools
import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flashmoe_megatron.errors import ConfigError, RoutingError, ShapeError
from flashmoe_megatron.gates import (
    ExpertChoiceGate,
    Gate,
    GatedExperts,
    GShardGate,
    Routing,
    SigmoidGate,
    SoftMoEGate,
    XMoEGate,
)
from flashmoe_megatron.layer import FlashMoELayer
from flashmoe_megatron.oracle import moe_reference
from tests.distributed import RankPool
from tests.unit import cases

HIDDEN, EXPERTS, TOKENS = 64, 8, 40

MAKERS: dict[str, Callable[[], Gate]] = {
    "gshard": lambda: GShardGate(HIDDEN, EXPERTS, random_second=False),
    "sigmoid": lambda: SigmoidGate(HIDDEN, EXPERTS, topk=2),
    "xmoe": lambda: XMoEGate(HIDDEN, EXPERTS, topk=2),
    "expert choice": lambda: ExpertChoiceGate(
        HIDDEN, EXPERTS, capacity_factor=1.2, max_routes=2, allow_future=True
    ),
    "soft": lambda: SoftMoEGate(HIDDEN, EXPERTS, slots=2, allow_future=True),
}


def make_gate(name: str, dtype: torch.dtype = torch.float64) -> Gate:
    torch.manual_seed(3)
    return MAKERS[name]().to(dtype)


def tokens(seed: int = 5) -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=cases.generator(seed), dtype=torch.float64)


def as_table(routing: Routing) -> torch.Tensor:
    """``[tokens, experts]`` weights."""
    return cases.spread(cases.make_config(), routing.topk_idx, routing.topk_weight.detach())


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(value - max(values)) for value in values]
    return [power / sum(powers) for power in powers]


def dots(x: torch.Tensor, weight: torch.Tensor) -> list[list[float]]:
    return [[float((token * row).sum()) for row in weight] for token in x]


def gshard_by_loop(
    gate: GShardGate, x: torch.Tensor, drawn: list[float]
) -> tuple[torch.Tensor, float, int]:
    table = torch.zeros(len(x), EXPERTS, dtype=torch.float64)
    scores = [softmax(row) for row in dots(x, gate.weight.detach())]
    assert gate.capacity_factor is not None
    capacity = math.ceil(2 * len(x) * gate.capacity_factor / EXPERTS)
    used, first_of, dropped = [0] * EXPERTS, [0] * EXPERTS, 0
    ranked = [sorted(range(EXPERTS), key=lambda e: -row[e]) for row in scores]
    for choice in (0, 1):
        for token, (row, order) in enumerate(zip(scores, ranked, strict=True)):
            expert = order[choice]
            weight = row[expert] / (row[order[0]] + row[order[1]])
            first_of[expert] += choice == 0
            if choice and not 2 * weight > drawn[token]:
                continue
            if used[expert] < capacity:
                table[token, expert] = weight
            else:
                dropped += 1
            used[expert] += 1
    loss = 0.0
    for expert in range(EXPERTS):
        mean = sum(row[expert] for row in scores) / len(x)
        loss += EXPERTS * mean * first_of[expert] / len(x)
    return table, loss, dropped


@pytest.mark.parametrize("random_second", [False, True])
def test_gshard_is_its_loop(random_second: bool) -> None:
    torch.manual_seed(3)
    draws = cases.generator(9)
    gate = GShardGate(
        HIDDEN, EXPERTS, capacity_factor=0.7, random_second=random_second, generator=draws
    ).double()
    x = tokens()
    drawn = [0.0] * TOKENS
    if random_second:
        drawn = torch.rand(TOKENS, generator=cases.generator(9), dtype=torch.float64).tolist()
    table, loss, dropped = gshard_by_loop(gate, x, drawn)
    routing = gate(x)
    torch.testing.assert_close(as_table(routing), table, rtol=1e-12, atol=1e-12)
    assert routing.aux_loss.item() == pytest.approx(loss, rel=1e-9)
    assert int(routing.logs["dropped"]) == dropped > 0
    assert (int((table > 0).sum()) < 2 * TOKENS - dropped) == random_second
    table, _, _ = gshard_by_loop(gate, x, [0.0] * TOKENS)
    evaluated = as_table(gate.eval()(x))
    torch.testing.assert_close(evaluated, table, rtol=1e-12, atol=1e-12)


def test_gshard_without_a_capacity_drops_nothing_and_tries_second_choices_all_the_same() -> None:
    """As with places for all tokens, which it has no need to count."""
    tables = []
    for factor in (None, float(EXPERTS)):
        torch.manual_seed(3)
        draws = cases.generator(9)
        gate = GShardGate(HIDDEN, EXPERTS, capacity_factor=factor, generator=draws).double()
        routing = gate(tokens())
        assert int(routing.logs["dropped"]) == 0
        tables.append(as_table(routing))
    assert torch.equal(*tables)
    assert TOKENS < int((tables[0] > 0).sum()) < 2 * TOKENS


def test_gshard_routes_as_deepspeed_does() -> None:
    sharded_moe = pytest.importorskip("deepspeed.moe.sharded_moe")
    torch.manual_seed(3)
    gate = GShardGate(HIDDEN, EXPERTS, capacity_factor=0.7, random_second=False)
    x = tokens().float()
    logits = x @ gate.weight.detach().t()
    loss, combine, _, _ = sharded_moe.top2gating(
        logits.clone(), 0.7, 0, top2_2nd_expert_sampling=False
    )
    routing = gate(x)
    table, theirs = as_table(routing), combine.sum(2)
    assert torch.equal(table > 0, theirs > 0)
    # A token that loses one of its two choices keeps its weight in the paper and gets 1 there.
    both = (table > 0).sum(1) == 2
    assert 0 < int(both.sum()) < TOKENS
    torch.testing.assert_close(table[both], theirs[both])
    torch.testing.assert_close(routing.aux_loss.detach(), loss)


def test_sigmoid_is_its_loop() -> None:
    gate, x = make_gate("sigmoid"), tokens()
    assert isinstance(gate, SigmoidGate)
    table = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64)
    products = dots(x, gate.weight.detach())
    for token, row in enumerate(products):
        for expert in sorted(range(EXPERTS), key=lambda e: -row[e])[:2]:
            table[token, expert] = 1 / (1 + math.exp(-row[expert]))
    routing = gate(x)
    torch.testing.assert_close(as_table(routing), table, rtol=1e-12, atol=1e-12)
    assert int(routing.logs["dropped"]) == 0
    loss = 0.0
    for expert in range(EXPERTS):
        share = float((table[:, expert] > 0).sum()) / (2 * TOKENS)
        scores = [[1 / (1 + math.exp(-value)) for value in row] for row in products]
        loss += EXPERTS * share * sum(row[expert] / sum(row) for row in scores) / TOKENS
    assert routing.aux_loss.item() == pytest.approx(loss, rel=1e-9)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("temperature", [0.07, 0.001])
def test_xmoe_is_its_loop(activation: str, temperature: float) -> None:
    torch.manual_seed(3)
    gate = XMoEGate(HIDDEN, EXPERTS, topk=2, activation=activation).double()
    with torch.no_grad():
        gate.temperature.fill_(temperature)
    x = tokens()
    table, means = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64), [0.0] * EXPERTS
    for token, projected in enumerate(dots(x, gate.projection.detach())):
        logits = []
        for embedding in gate.embeddings.detach().tolist():
            product = sum(a * b for a, b in zip(projected, embedding, strict=True))
            cosine = product / math.hypot(*projected) / math.hypot(*embedding)
            logits.append(cosine / max(temperature, 0.01))
        scores = softmax(logits)
        means = [mean + score / TOKENS for mean, score in zip(means, scores, strict=True)]
        if activation == "sigmoid":
            scores = [1 / (1 + math.exp(-value)) for value in logits]
        for expert in sorted(range(EXPERTS), key=lambda e: -logits[e])[:2]:
            table[token, expert] = scores[expert]
    routing = gate(x)
    torch.testing.assert_close(as_table(routing), table, rtol=1e-9, atol=1e-15)
    assert int(routing.logs["dropped"]) == 0
    shares = [routes / (2 * TOKENS) for routes in (table > 0).sum(0).tolist()]
    loss = EXPERTS * sum(mean * share for mean, share in zip(means, shares, strict=True))
    assert routing.aux_loss.item() == pytest.approx(loss, rel=1e-9)


def test_xmoe_begins_as_its_paper_does() -> None:
    gate = XMoEGate(HIDDEN, EXPERTS)
    assert gate.projection.shape == (EXPERTS // 2, HIDDEN)
    assert gate.temperature.item() == pytest.approx(0.07)
    assert XMoEGate(HIDDEN, EXPERTS, width=1).projection.shape == (1, HIDDEN)
    assert XMoEGate(HIDDEN, 1).projection.shape == (1, HIDDEN)


@pytest.mark.parametrize("name", ["gshard", "sigmoid", "xmoe"])
def test_the_loss_is_a_mean_over_tokens(name: str) -> None:
    gate, x = make_gate(name), tokens()[:1]
    twice = x.expand(2, -1)
    assert gate(x).aux_loss.item() == pytest.approx(gate(twice).aux_loss.item(), rel=1e-12)


@pytest.mark.parametrize("name", MAKERS)
def test_scores_begin_as_those_of_a_linear_layer(name: str) -> None:
    """With smaller weights all experts would be alike, with larger ones a few would get all."""
    for parameter in make_gate(name).parameters():
        if parameter.dim() == 2:
            spread = parameter.shape[1] ** -0.5
            assert 0.9 * spread < parameter.abs().max().item() <= spread
            assert abs(parameter.mean().item()) < 0.2 * spread


def test_expert_choice_is_its_loop() -> None:
    gate, x = make_gate("expert choice"), tokens()
    assert isinstance(gate, ExpertChoiceGate)
    scores = [softmax(row) for row in dots(x, gate.weight.detach())]
    takes = int(TOKENS * 1.2 / EXPERTS)
    chosen: list[list[int]] = [[] for _ in range(TOKENS)]
    for expert in range(EXPERTS):
        for token in sorted(range(TOKENS), key=lambda t: -scores[t][expert])[:takes]:
            chosen[token].append(expert)
    table, dropped = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64), 0
    for token, experts in enumerate(chosen):
        kept = sorted(experts, key=lambda e: -scores[token][e])[:2]
        dropped += len(experts) - len(kept)
        for expert in kept:
            table[token, expert] = scores[token][expert]
    routing = gate(x)
    torch.testing.assert_close(as_table(routing), table, rtol=1e-12, atol=1e-12)
    assert int(routing.logs["dropped"]) == dropped > 0
    assert int(routing.logs["unrouted"]) == sum(not experts for experts in chosen) > 0
    assert int(routing.logs["load"].sum()) == EXPERTS * takes - dropped
    few = gate(x[:2]).logs  # an expert would take 0.3 of them
    assert int(few["load"].sum() + few["dropped"]) == EXPERTS


@pytest.mark.parametrize("num_experts", [1, 8])
def test_every_expert_may_choose_all_tokens(num_experts: int) -> None:
    gate = ExpertChoiceGate(64, num_experts, capacity_factor=num_experts, allow_future=True)
    assert gate(torch.ones(4, 64)).logs["load"].tolist() == [4] * num_experts


def test_soft_is_its_loop() -> None:
    gate = make_gate("soft")
    assert isinstance(gate, SoftMoEGate)
    x = tokens().view(2, TOKENS // 2, HIDDEN)
    routing = gate(x)
    outputs = routing.tokens.detach() * 3 - 1  # stands for the experts
    found = routing.finish(outputs).view_as(x)
    num_slots = EXPERTS * gate.slots
    keys = [row / row.norm() * gate.scale.detach() for row in gate.weight.detach()]
    for sequence, rows in enumerate(x):
        logits = [[float((token / token.norm() * key).sum()) for key in keys] for token in rows]
        for slot in range(num_slots):
            shares = softmax([row[slot] for row in logits])
            want = sum(
                (share * token for share, token in zip(shares, rows, strict=True)),
                torch.zeros(HIDDEN, dtype=torch.float64),
            )
            row = sequence * num_slots + slot
            torch.testing.assert_close(routing.tokens[row].detach(), want)
            assert int(routing.topk_idx[row, 0]) == slot // gate.slots
        own = outputs[sequence * num_slots : (sequence + 1) * num_slots]
        for token, row_of in enumerate(logits):
            want = sum(
                (share * out for share, out in zip(softmax(row_of), own, strict=True)),
                torch.zeros(HIDDEN, dtype=torch.float64),
            )
            torch.testing.assert_close(found[sequence, token].detach(), want)


@pytest.mark.parametrize("name", MAKERS)
def test_gradients_are_those_of_differences(name: str) -> None:
    """Through weights, auxiliary loss and slots, where no choice changes nearby."""
    gate = make_gate(name)
    x = tokens()[:6].requires_grad_()
    parameters = list(gate.parameters())

    def values(x: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        routing = gate(x)
        return routing.finish(routing.tokens), routing.topk_weight, routing.aux_loss

    assert torch.autograd.gradcheck(values, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("name", MAKERS)
def test_autocast_leaves_gates_in_float32(name: str) -> None:
    """In bfloat16 other experts would be chosen."""
    gate, x = make_gate(name, torch.float32), tokens().float()
    want = gate(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gate(x)
        out = found.finish(x.new_ones(found.tokens.shape))
    for part in ("tokens", "topk_idx", "topk_weight", "aux_loss"):
        assert torch.equal(getattr(found, part), getattr(want, part))
        assert getattr(found, part).dtype == getattr(want, part).dtype
    assert torch.equal(out, want.finish(x.new_ones(want.tokens.shape)))
    exact = make_gate(name)(tokens())
    close = functools.partial(torch.testing.assert_close, check_dtype=False, rtol=1e-4, atol=1e-5)
    close(found.topk_weight, exact.topk_weight)
    close(found.finish(found.tokens), exact.finish(exact.tokens))


@pytest.mark.parametrize("name", MAKERS)
def test_a_layer_follows_its_gate(name: str) -> None:
    """Outputs and all gradients are those of the oracle, in fp64."""
    gate = make_gate(name)
    config = cases.make_config(topk=gate.num_choices)
    layer = FlashMoELayer(config, device="cpu", dtype=torch.float64, backend="reference")
    model = GatedExperts(gate, layer)
    x = tokens().view(2, TOKENS // 2, HIDDEN).requires_grad_()
    out, routing = model(x)
    given = gate(x if name == "soft" else x.view(-1, HIDDEN))
    probs = cases.spread(config, given.topk_idx, given.topk_weight)
    chosen = cases.spread(config, given.topk_idx, torch.ones_like(given.topk_weight)) > 0
    want = given.finish(
        moe_reference(
            given.tokens, probs, chosen, list(layer.fc1), list(layer.fc2), **cases.form_of(config)
        )
    ).view_as(x)
    leaves = (x, *model.parameters())
    found_grads = torch.autograd.grad(out.sum() + routing.aux_loss, leaves, allow_unused=True)
    want_grads = torch.autograd.grad(want.sum() + given.aux_loss, leaves, allow_unused=True)
    torch.testing.assert_close(out, want)
    for found, wanted in zip(found_grads, want_grads, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            torch.testing.assert_close(found, wanted)
    assert routing.logs["load"].shape == (EXPERTS,)


@pytest.mark.parametrize("name", ["sigmoid", "soft"])
def test_tokens_may_have_any_number_of_dimensions(name: str) -> None:
    """The last but one is a sequence for SoftMoE, the others are as many of them."""
    gate = make_gate(name)
    config = cases.make_config(topk=gate.num_choices)
    layer = FlashMoELayer(config, device="cpu", dtype=torch.float64, backend="reference")
    model = GatedExperts(gate, layer)
    x = tokens()
    want, _ = model(x.view(4, TOKENS // 4, HIDDEN))
    found, _ = model(x.view(2, 2, TOKENS // 4, HIDDEN))
    assert torch.equal(found, want.view(2, 2, TOKENS // 4, HIDDEN))


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_trains_with_the_gate(name: str) -> None:
    """Forty steps of a layer that is to rotate its tokens lower the loss by a third and more."""
    gate = make_gate(name, torch.float32)
    config = cases.make_config(topk=gate.num_choices)
    torch.manual_seed(4)
    layer = FlashMoELayer(config, device="cpu", dtype=torch.float32, backend="reference")
    model = GatedExperts(gate, layer)
    readout = nn.Linear(HIDDEN, HIDDEN)
    optimizer = torch.optim.Adam([*model.parameters(), *readout.parameters()], lr=3e-3)
    x = tokens().float()
    target = x.roll(1, dims=1)
    losses = []
    before = [parameter.clone() for parameter in gate.parameters()]
    for _ in range(40):
        out, routing = model(x)
        loss = (readout(x + out) - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        (loss + 0.01 * routing.aux_loss).backward()
        optimizer.step()
    assert losses[-1] < 0.67 * losses[0]
    changed = zip(before, gate.parameters(), strict=True)
    assert all(not torch.equal(old, new) for old, new in changed)


def train_the_example(group: dist.ProcessGroup) -> dict[str, list[float]]:
    """The losses of the example's model with each gate."""
    with pytest.MonkeyPatch.context() as patches:
        patches.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
        patches.setattr(sys, "argv", ["train_pytorch.py"])
        example = importlib.import_module("train_pytorch")
        args = example.parse_args()
    small = {"num_layers": 1, "hidden_size": 64, "moe_ffn_hidden_size": 64, "seq_length": 64}
    small |= {"train_iters": 24, "data_megabytes": 1, "micro_batch_size": 2, "lr": 1e-2}
    vars(args).update(small, log_interval=100)
    losses = {}
    before = set(dist.distributed_c10d._world.pg_map)
    for name in example.GATES:
        args.gate = name
        losses[name] = example.train(args)
        for made in set(dist.distributed_c10d._world.pg_map) - before:
            dist.destroy_process_group(made)  # its threads poll, as long as it lives
    return losses


def test_the_examples_model_trains_with_each_gate(ranks: RankPool) -> None:
    first, *others = ranks.run(train_the_example)
    assert all(other == first for other in others)
    assert set(first) == {"router", "gshard", "sigmoid", "xmoe", "expert-choice", "soft"}
    for name, losses in first.items():
        assert losses[0] > 5.5, name
        assert sum(losses[-4:]) / 4 < losses[0] - 1.5, f"{name}: {losses}"
    assert len({losses[-1] for losses in first.values()}) == len(first), "each is another model"


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "soft"])
def test_a_rank_without_tokens_is_served(name: str) -> None:
    routing = make_gate(name)(torch.empty(0, HIDDEN, dtype=torch.float64))
    assert routing.topk_idx.shape[0] == 0
    assert routing.aux_loss.item() == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GShardGate(64, 1), "experts of a token=2: wanted an int, 1 to 1"),
        (lambda: SigmoidGate(0, 8), "hidden=0: wanted an int, at least 1"),
        (lambda: GShardGate(64, 8, capacity_factor=0), "capacity_factor=0: wanted a number"),
        (lambda: SigmoidGate(64, 32, topk=17), "experts of a token=17: wanted an int, 1 to 16"),
        (lambda: XMoEGate(64, 8, activation="relu"), "activation='relu': wanted one of softmax"),
        (lambda: XMoEGate(64, 8, width=0), "width=0: wanted an int"),
        (
            lambda: ExpertChoiceGate(64, 8, capacity_factor=9, allow_future=True),
            "capacity_factor=9: an expert would take more tokens than there are; wanted at most 8",
        ),
        (
            lambda: ExpertChoiceGate(64, 8, capacity_factor=0, allow_future=True),
            "capacity_factor=0: wanted a number",
        ),
        (lambda: ExpertChoiceGate(64, 8), "allow_future=False: expert choice lets"),
        (lambda: SoftMoEGate(64, 8), "allow_future=False: SoftMoE lets"),
        (lambda: SoftMoEGate(64, 8, slots=0, allow_future=True), "slots=0: wanted an int"),
    ],
)
def test_a_gate_that_cannot_be_served_is_refused(make: Callable[[], Gate], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def refused_together(group: dist.ProcessGroup) -> list[str]:
    """What every rank hears of tokens that one of their gates refuses; the next call runs."""
    config = cases.make_config(num_ranks=4, max_tokens=20)
    layer = FlashMoELayer(config, group=group, device="cpu", dtype=torch.float32)
    torch.manual_seed(1)
    model = GatedExperts(SoftMoEGate(64, 8, allow_future=True), layer)
    said = []
    for shapes in (((2, 5, 64), (3, 5, 64)), ((5, 64), (0, 64)), ((5, 64), (64,))):
        x = torch.ones(shapes[dist.get_rank(group) == 2])
        try:
            model(x)
        except ShapeError as error:
            said.append(str(error))
    out, _ = model(torch.ones(5, 64))
    assert out.shape == (5, 64)
    return said


def test_what_one_ranks_gate_refuses_ends_the_call_on_all(ranks: RankPool) -> None:
    for said in ranks.run(refused_together):
        assert said[0].startswith("rank 2: the gate makes 24 rows of x of shape (3, 5, 64), but")
        assert said[1] == "rank 2: x has shape (0, 64), wanted at least one token to mix"
        assert said[2] == "rank 2: x has shape (64,), wanted [..., tokens, hidden]"


def token_of_nan(group: dist.ProcessGroup | None, num_ranks: int, name: str) -> str:
    """What a rank hears where the last one's second token has NaN."""
    gate = make_gate(name, torch.float32)
    config = cases.make_config(num_ranks=num_ranks, topk=gate.num_choices)
    layer = FlashMoELayer(
        config, group=group, device="cpu", dtype=torch.float32, backend="reference"
    )
    x = torch.ones(5, HIDDEN)
    if group is None or dist.get_rank(group) == num_ranks - 1:
        x[1, 7] = math.nan
    with pytest.raises(RoutingError) as error:
        GatedExperts(gate, layer)(x)
    return str(error.value)


@pytest.mark.parametrize("name", ["gshard", "sigmoid", "xmoe", "expert choice"])
def test_a_token_of_nan_is_named_in_place_of_its_gates_weights(name: str) -> None:
    assert token_of_nan(None, 1, name).startswith("token 1 of x is nan in column 7, and its")


def test_every_rank_hears_of_the_token_of_nan(ranks: RankPool) -> None:
    for said in ranks.run(token_of_nan, 2, "gshard", num_ranks=2):
        assert said.startswith("rank 1: token 1 of x is nan in column 7, and its routing weights")


def test_a_gate_of_another_layer_is_refused() -> None:
    layer = FlashMoELayer(cases.CONFIG, device="cpu", backend="reference")
    with pytest.raises(ConfigError, match="up to 3 experts of a token, but the layer has topk=2"):
        GatedExperts(SigmoidGate(64, 8, topk=3), layer)
    with pytest.raises(ConfigError, match="num_experts=16, wanted the layer's, 8"):
        GatedExperts(SigmoidGate(64, 16), layer)
    for shape, got in (((4, 32), r"\(4, 32\)"), ((4, 64, 64), r"\(4, 64, 64\)")):
        with pytest.raises(ShapeError, match=rf"shape {got}, wanted \[tokens, 64\]"):
            SigmoidGate(64, 8)(torch.zeros(shape))
    soft = SoftMoEGate(64, 8, allow_future=True)
    assert soft.num_choices == 1
    for shape in ((4, 32), (2, 4, 32), (2, 2, 4, 64)):
        with pytest.raises(ShapeError, match=r"wanted \[batch, tokens, 64\] or \[tokens, 64\]"):
            soft(torch.zeros(shape))


class Wrapper(nn.Module):
    """Stands around a module as an adapter does."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, *args: torch.Tensor) -> object:
        return self.base_layer(*args)


@pytest.mark.parametrize("name", ["soft", "sigmoid"])
def test_gate_and_layer_may_be_wrapped(name: str):
    """A soft gate mixes tokens within each sequence, also within what wraps it."""
    gate = make_gate(name)
    layer = FlashMoELayer(cases.make_config(topk=2), device="cpu", dtype=torch.float64)
    model = GatedExperts(gate, layer)
    x = tokens().view(4, 10, HIDDEN)
    want, routing = model(x)
    model.gate, model.layer = Wrapper(Wrapper(gate)), Wrapper(layer)
    got, wrapped = model(x)
    assert torch.equal(got, want)
    assert torch.equal(wrapped.topk_idx, routing.topk_idx)


@pytest.mark.parametrize("name", MAKERS)
def test_the_host_reads_nothing_of_a_gate(name: str) -> None:
    """Fake tensors have no values, so that whatever a CUDA graph could not capture is an error."""
    gate = make_gate(name, torch.float32)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        routing = gate(mode.from_tensor(torch.randn(TOKENS, HIDDEN)).requires_grad_())
        finished = routing.finish(routing.tokens)
        (finished.sum() + routing.topk_weight.sum() + routing.aux_loss).backward()
