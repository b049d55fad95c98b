"""The scheduled backend's Triton kernels on the processor, in Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.unit.interpreted_kernels

Triton reads the variable when it is imported, so that this is a process of its own.
"""

import functools
import inspect
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from triton.language import core
from triton.runtime import interpreter

from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.errors import RoutingError
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.oracle import assert_close
from flashmoe_megatron.ranks import REFUSED
from flashmoe_megatron.separate import backend
from flashmoe_megatron.separate.backend import ScheduledBackend
from flashmoe_megatron.separate.kernels import KERNELS as kernels
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.separate.steps import PLAIN as plain
from tests.unit import cases
from tests.unit.separate import oracle, run

FORMS = (
    *(
        {"activation": activation, "gated": gated}
        for activation in Activation
        for gated in (False, True)
    ),
    {"linear_offset": 0.5, "clamp_value": 1.0, "glu_interleave": 32},
    cases.GPT_OSS,
)


_cut: set[tuple[int | bytes, ...]] = set()


@functools.cache
def _builtins(package: Any) -> tuple[str, ...]:
    """The names that the interpreter replaces, of which there are no more once it has begun."""
    return tuple(name for name, member in inspect.getmembers(package) if core.is_builtin(member))


def _members(package: Any) -> list[tuple[str, Any]]:
    """Is a quick ``inspect.getmembers``: the interpreter calls that for every call of a kernel."""
    return [(name, getattr(package, name)) for name in _builtins(package)]


def same(name: str, found: torch.Tensor, want: torch.Tensor, size: int | None = None) -> None:
    assert found.dtype == want.dtype, name
    assert found.shape == want.shape, name
    assert torch.equal(found[:size], want[:size]), name


def check_sorted(config: MoEConfig, probs: torch.Tensor, routing: torch.Tensor) -> None:
    found, want = (one.sort_routes(config, probs, routing) for one in (kernels, plain))
    same("counts", found.counts, want.counts)
    if want.counts[0] != REFUSED:
        num_routes = int(want.counts.sum())
        for name in ("place", "ends"):
            same(name, getattr(found, name), getattr(want, name))
        for name in ("token_idx", "flat_idx", "row_probs"):
            same(name, getattr(found, name), getattr(want, name), num_routes)
    routes = (found.token_idx, found.place, found.ends)
    given = (len(probs), *(one.numpy().tobytes() for one in (*routes, want.counts)))
    if given in _cut:
        return  # probabilities in bfloat16 and indices of 64 bits give the same routes
    _cut.add(given)
    for degree in (2, 7):
        cut = kernels.cut_routes(*routes, degree)
        tokens = cut.token_idx.tolist()
        assert all(0 <= token < len(probs) for token in tokens), "rows are collected of any routing"
        if want.counts[0] != REFUSED:
            wanted = plain.cut_routes(*routes, degree)
            same("place in parts", cut.place, wanted.place)
            same("tokens in parts", cut.token_idx, wanted.token_idx)


def check_routes() -> None:
    routings = (cases.skewed, cases.with_dropped_tokens, cases.to_nobody, cases.to_one_expert)
    for routing, skips, tokens in itertools.product(routings, (False, True), (1, 0, 150)):
        config = cases.make_config(skip_zero_probs=skips, num_experts=24, topk=3, max_tokens=150)
        inputs = cases.make_inputs(config, routing, [tokens], dtype=torch.float32)
        probs, routing_map = inputs.probs[0], inputs.routing_map[0]
        if tokens > 3:
            probs[2] = 0.0
        check_sorted(config, probs, routing_map)
        check_sorted(config, probs.bfloat16(), routing_map)
        indices, weights = cases.as_choices(config, probs, routing_map)
        for kind in (torch.int32, torch.int64):
            check_sorted(config, weights, indices.to(kind))
        if tokens < 150 or routing is cases.to_nobody:
            continue
        for place, change in ((140, 24), (3, -2), (7, int(indices[7, 1]))):
            broken = indices.clone()
            broken[place, 0] = change
            check_sorted(config, weights, broken)
        token = int(routing_map.any(1).nonzero()[-1])
        nan = probs.masked_fill(routing_map & (torch.arange(150) == token)[:, None], float("nan"))
        check_sorted(config, nan, routing_map)
        too_many = routing_map.clone()
        too_many[token] = True
        check_sorted(config, probs.masked_fill(too_many, 0.5), too_many)


def check_indices() -> None:
    """Also where sources and experts are no powers of two, and a run has more rows than a tile."""
    for sources, experts, degree in itertools.product((1, 3), (1, 5), (1, 2, 7)):
        for most in (0, 9, 300):
            received = torch.randint(most + 1, (sources, experts))
            num_rows = int(received.sum())
            found, want = (one.index_rows(received, num_rows, degree) for one in (kernels, plain))
            while want is not None:
                for name in ("by_expert", "by_rank", "ends"):
                    same(name, getattr(found, name), getattr(want, name))
                if want.rows is not None:
                    same("rows", found.rows, want.rows)
                found, want = found.whole, want.whole


def check_copies() -> None:
    for width, step, dtype in itertools.product(
        (8, 1300), (0, 24), (torch.float32, torch.bfloat16, torch.float16)
    ):
        rows = torch.randn(9, width + step).to(dtype)[:, :width]
        index = torch.randperm(31)[:9]
        for num_rows in (9, 0):
            found, want = (torch.zeros(31, width, dtype=dtype) for _ in range(2))
            for one, target in ((kernels, found), (plain, want)):
                one.put_rows(target, index[:num_rows], rows[:num_rows])
            same(f"{width} {step}", found, want)


def check_sums() -> None:
    for choices, width in ((1, 8), (3, 1300)):
        rows = torch.randn(20, width).bfloat16()
        place = torch.stack([torch.randperm(21)[:choices] for _ in range(9)])
        torch.testing.assert_close(kernels.sum_routes(rows, place), plain.sum_routes(rows, place))


def check_activations() -> None:
    for form, width in itertools.product(FORMS, (64, 192)):
        config = cases.make_config(intermediate=width, **form)
        for dtype in (torch.float32, torch.bfloat16):
            preact = torch.randn(37, config.fc1_rows).to(dtype)
            weight, grad = torch.rand(37), torch.randn(37, width).to(dtype)
            for name, given in (
                ("weighted_activation", (preact, weight)),
                ("weighted_activation_backward", (preact, weight.to(dtype), grad)),
            ):
                found, want = (getattr(one, name)(config, *given) for one in (kernels, plain))
                torch.testing.assert_close(found, want, msg=f"{form}: {name}")


def check_layers() -> None:
    """One rank's on a GPU, with grouped products, which torch has for processors, too.

    In one part its forward waits for nothing.
    """
    kernels.is_grouped = lambda rows: rows.dtype == torch.bfloat16
    backend.steps_for = lambda x: kernels
    forward = ScheduledBackend._forward_alone
    config = cases.make_config()
    for routing in (cases.skewed, cases.with_dropped_tokens, cases.with_empty_experts):
        inputs = cases.make_inputs(config, routing, [37], dtype=torch.bfloat16)
        wide = {
            name: [one.double() if one.is_floating_point() else one for one in tensors]
            for name, tensors in vars(inputs).items()
        }
        want = run(ReferenceBackend(config), replace(inputs, **wide))
        for keep in ("all", "preactivations"):
            layer = ScheduledBackend(config, options=BackendOptions(keep=keep))
            with mock.patch.object(ScheduledBackend, "_forward_alone", autospec=True) as alone:
                alone.side_effect = forward
                for form in ({}, {"as_indices": True}):
                    for name, value in run(layer, inputs, **form).items():
                        assert_close(name, value, want[name], rel_l2=1e-2)
                assert alone.call_count == 2
            parts = ScheduledBackend(config, options=BackendOptions(keep=keep), degrees=(2, 3))
            for name, value in run(parts, inputs).items():
                assert_close(name, value, want[name], rel_l2=1e-2)
            broken = inputs.routing_map[0].clone()
            broken[5] = True
            with pytest.raises(RoutingError, match="rank 0: token 5 selects 8 experts"):
                run(layer, replace(inputs, routing_map=[broken]))


def check_layers_in_fp8() -> None:
    """The same steps, whose rows of tokens are bytes; called after :func:`check_layers`.

    The interpreter rounds to bfloat16 towards zero, which moves one activation in FP8 in thirty.
    """
    config = cases.make_config(hidden=128, intermediate=128, num_experts=4, experts="fp8")
    inputs = cases.make_inputs(config, cases.skewed, [37], dtype=torch.bfloat16)
    (want,) = oracle(config, inputs)
    for degrees, keep in (((1, 1), "all"), ((2, 3), "all"), ((2, 3), "preactivations")):
        layer = ScheduledBackend(config, options=BackendOptions(keep=keep), degrees=degrees)
        for name, value in run(layer, inputs).items():
            assert_close(name, value, want[name], rel_l2=3e-2)


if __name__ == "__main__":
    torch.manual_seed(0)
    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": _members})
    check_layers()
    check_layers_in_fp8()
    check_routes()
    check_indices()
    check_copies()
    check_sums()
    check_activations()
