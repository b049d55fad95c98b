"""Rows of a rank's own tokens that it reads where they are, on one of several ranks.

A forward that keeps nothing copies no block of own rows alone. In training all rows are copied.
"""

from typing import Any

import pytest
import torch

from flashmoe_megatron.call import Given
from flashmoe_megatron.config import TILE_M, Activation, MoEConfig
from flashmoe_megatron.kernel.backend import KernelBackend, _Buffers
from flashmoe_megatron.oracle import assert_close
from flashmoe_megatron.weights import ExpertWeights
from tests.gpu import steps
from tests.gpu.expected import expected
from tests.gpu.layers import make_config
from tests.gpu.virtual import VirtualLayer
from tests.unit import cases

pytestmark = pytest.mark.gpu

TOKENS = {2: [700, 513], 4: [700, 0, 390, 130]}
"""Enough that an expert has blocks of own rows, of others' and, nearly always, a mixed one."""
NARROW, WIDE = 512, 576
"""FFN widths of four tiles of a gated fc1, and of more than read own rows in place."""


def of_ranks(num_ranks: int, **changes: Any) -> MoEConfig:
    defaults: dict[str, Any] = {
        "num_experts": 8,
        "topk": 3,
        "max_tokens": 700,
        "intermediate": NARROW,
    }
    return make_config(num_ranks, gated=True, activation=Activation.SILU, **{**defaults, **changes})


def uniform(
    num_ranks: int, **changes: Any
) -> tuple[MoEConfig, cases.Inputs, list[ExpertWeights], VirtualLayer]:
    """Returns a layer with tokens and weights, whose experts are chosen uniformly."""
    config = of_ranks(num_ranks, **changes)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[num_ranks])
    return config, inputs, steps.weights_of(config, inputs), VirtualLayer(config)


def own_blocks(config: MoEConfig, inputs: cases.Inputs, rank: int) -> list[tuple[int, int]]:
    """Returns, for each of a rank's experts, its first block and its number of own ones."""
    found, begin = [], 0
    for local in range(config.num_local_experts):
        expert = rank * config.num_local_experts + local
        own, rows = (
            int(sum(chosen[:, expert].sum() for chosen in maps))
            for maps in (inputs.routing_map[rank : rank + 1], inputs.routing_map)
        )
        found.append((begin, own // TILE_M))
        begin += -(-rows // TILE_M)
    return found


def note_rows(backend: KernelBackend, noted: list[torch.Tensor]) -> None:
    """Notes the rows of all buffers that a backend makes from now on."""
    make = backend._make_buffers

    def make_and_note(num_row_blocks: int, given: Given, **options: Any) -> _Buffers:
        buffers = make(num_row_blocks, given, **options)
        assert buffers.rows is not None
        noted.append(buffers.rows)
        return buffers

    backend._make_buffers = make_and_note  # type: ignore[method-assign]


@pytest.mark.parametrize("intermediate", [192, NARROW, WIDE])
@pytest.mark.parametrize(
    "case", ["uniform", "skewed", "to_one_rank", "to_one_expert", "with_empty_experts"]
)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_own_rows_in_place_give_the_bits_of_copies(
    dtype: torch.dtype, transposed: bool, num_ranks: int, case: str, intermediate: int
) -> None:
    config = of_ranks(num_ranks, intermediate=intermediate)
    inputs = steps.make_inputs(config, getattr(cases, case), TOKENS[num_ranks], dtype=dtype)
    weights = steps.weights_of(config, inputs, transposed=transposed)
    arguments = (inputs.x, inputs.probs, inputs.routing_map, weights)
    layer = VirtualLayer(config)
    want, _ = layer.forward(*arguments)
    bound = int(layer.backends[0]._sizes.max_row_blocks)
    for num_row_blocks in (None, bound, None):
        got, _ = layer.forward(*arguments, training=False, num_row_blocks=num_row_blocks)
        torch.cuda.synchronize()
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other)
    assert_close("out", torch.cat(got), expected(config, inputs).exact.out, rel_l2=2e-2)
    layer.check_guards()


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("intermediate", [NARROW, WIDE])
def test_only_blocks_of_other_ranks_are_copied(intermediate: int, num_ranks: int) -> None:
    """Blocks of own rows stay as they were, in buffers full of NaN, and cross no counter."""
    config, inputs, weights, layer = uniform(num_ranks, intermediate=intermediate)
    made: list[torch.Tensor] = []
    for backend in layer.backends:
        note_rows(backend, made)
    layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights, training=False)
    torch.cuda.synchronize()
    counts = [0, 0]
    for rank, rows in enumerate(made):
        blocks = rows.view(torch.bfloat16).view(-1, TILE_M, config.hidden)
        is_written = blocks.isfinite().all(2).all(1)
        is_copied = torch.ones_like(is_written)
        for begin, own in own_blocks(config, inputs, rank):
            is_copied[begin : begin + own] = intermediate > NARROW
        assert torch.equal(is_written, is_copied)
        counts[0] += int(is_copied.sum())
        counts[1] += int((~is_copied).sum())
    assert counts[0] > 0
    assert (counts[1] > 0) == (intermediate <= NARROW)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_nan_stays_with_its_token(num_ranks: int) -> None:
    """Also where it is of a token that no expert has, and in a token of a block read in place."""
    _, inputs, weights, layer = uniform(num_ranks)
    unrouted, poisoned = slice(5, 60), slice(100, 103)
    for chosen, probs in zip(inputs.routing_map, inputs.probs, strict=True):
        chosen[unrouted], probs[unrouted] = False, 0
    arguments = (inputs.probs, inputs.routing_map, weights)
    want, _ = layer.forward(inputs.x, *arguments, training=False)
    spoiled = [x.clone() for x in inputs.x]
    for x in spoiled:
        x[unrouted] = x[poisoned] = float("nan")
    got, _ = layer.forward(spoiled, *arguments, training=False)
    torch.cuda.synchronize()
    for one, other in zip(got, want, strict=True):
        is_nan = torch.zeros(len(one), dtype=torch.bool, device=one.device)
        is_nan[poisoned] = True
        assert torch.equal(one[~is_nan], other[~is_nan])
        assert one[is_nan].isnan().all()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rows_that_peers_send_are_counted_as_before(num_ranks: int) -> None:
    """Pads of mixed blocks and of others' blocks are made; in blocks of own rows are none."""
    _, inputs, weights, layer = uniform(num_ranks)
    counted = []
    for training in (True, False):
        before = [backend.traffic for backend in layer.backends]
        layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights, training=training)
        torch.cuda.synchronize()
        now = [backend.traffic for backend in layer.backends]
        counted.append(
            [
                (one.rows_sent - was.rows_sent, one.pad_rows_local - was.pad_rows_local)
                for one, was in zip(now, before, strict=True)
            ]
        )
    assert counted[0] == counted[1]
    assert all(sent > 0 for sent, _ in counted[0])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_hooks_see_all_rows(num_ranks: int) -> None:
    _, inputs, weights, layer = uniform(num_ranks)
    seen = steps.rows_seen(layer)
    rows = []
    for training in (True, False):
        layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights, training=training)
        torch.cuda.synchronize()
        rows.append(dict(seen))
    for rank in range(num_ranks):
        assert torch.equal(rows[0][rank], rows[1][rank])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_tokens_bits_are_the_same_in_blocks_of_either_kind(num_ranks: int) -> None:
    """Fewer own tokens leave an expert fewer blocks of own rows alone, or none."""
    _, inputs, weights, layer = uniform(num_ranks)
    every, _ = layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights, training=False)
    torch.cuda.synchronize()
    for count in (1, 100, 389):
        for rank in range(num_ranks):

            def fewer(of: list[torch.Tensor], rank: int = rank, count: int = count) -> list[Any]:
                return [one[:count] if at == rank else one for at, one in enumerate(of)]

            some, _ = layer.forward(
                fewer(inputs.x),
                fewer(inputs.probs),
                fewer(inputs.routing_map),
                weights,
                training=False,
            )
            torch.cuda.synchronize()
            for one, other in zip(some, every, strict=True):
                assert torch.equal(one, other[: len(one)])
