"""Biases of experts, and gate and up projections that are parameters of their own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.errors import ConfigError, ShapeError
from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.kernel.gradients import UniformGrads
from flashmoe_megatron.kernel.group_memory import GroupMemory
from flashmoe_megatron.kernel.tables import AddressTables
from flashmoe_megatron.layer import FlashMoELayer
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.oracle import assert_close, moe_reference
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.weights import ExpertWeights, SplitWeights, WeightGrad
from tests.distributed import RankPool
from tests.unit import cases

BIASES = {"both": ("fc1_bias", "fc2_bias"), "fc1": ("fc1_bias",), "fc2": ("fc2_bias",)}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


def make_biases(config: MoEConfig, kinds: tuple[str, ...], dtype: torch.dtype) -> dict:
    g = cases.generator(3)
    rows = {"fc1_bias": config.fc1_rows, "fc2_bias": config.hidden}
    return {
        kind: [torch.randn(rows[kind], generator=g).to(dtype) for _ in range(config.num_experts)]
        for kind in kinds
    }


def run_rank(
    group: dist.ProcessGroup, config: MoEConfig, inputs: cases.Inputs, biases: dict
) -> dict[str, torch.Tensor]:
    """Output and all gradients of one rank's share."""
    rank = dist.get_rank(group)
    backend = ReferenceBackend(config, group)
    first = rank * config.num_local_experts
    experts = slice(first, first + config.num_local_experts)
    leaves = {
        kind: [tensor.clone().requires_grad_() for tensor in tensors[experts]]
        for kind, tensors in {"fc1": inputs.fc1, "fc2": inputs.fc2, **biases}.items()
    }
    x = inputs.x[rank].clone().requires_grad_()
    probs = inputs.probs[rank].clone().requires_grad_()
    weights = ExpertWeights(**{kind: tuple(tensors) for kind, tensors in leaves.items()})
    out = moe_apply(backend, x, probs, inputs.routing_map[rank], weights)
    out.backward(inputs.grad_out[rank])
    found = {"out": out.detach(), "grad x": x.grad, "grad probs": probs.grad}
    for kind, tensors in leaves.items():
        for expert, tensor in enumerate(tensors, start=first):
            found[f"grad {kind} of expert {expert}"] = tensor.grad
    return found


def oracle(config: MoEConfig, inputs: cases.Inputs, biases: dict) -> list[dict]:
    """The same for all ranks, by autograd through the oracle."""
    x = torch.cat(inputs.x).double().requires_grad_()
    probs = torch.cat(inputs.probs).double().requires_grad_()
    leaves = {
        kind: [tensor.double().requires_grad_() for tensor in tensors]
        for kind, tensors in {"fc1": inputs.fc1, "fc2": inputs.fc2, **biases}.items()
    }
    out = moe_reference(
        x,
        probs,
        torch.cat(inputs.routing_map),
        leaves["fc1"],
        leaves["fc2"],
        **cases.form_of(config),
        fc1_bias=leaves.get("fc1_bias", ()),
        fc2_bias=leaves.get("fc2_bias", ()),
    )
    out.backward(torch.cat(inputs.grad_out).double())
    sizes = [len(tokens) for tokens in inputs.x]
    want = []
    for rank in range(config.num_ranks):
        found = {
            name: tensor.split(sizes)[rank]
            for name, tensor in (
                ("out", out.detach()),
                ("grad x", x.grad),
                ("grad probs", probs.grad),
            )
        }
        first = rank * config.num_local_experts
        for kind, tensors in leaves.items():
            for expert in range(first, first + config.num_local_experts):
                grad = tensors[expert].grad
                if grad is None:  # an expert without tokens
                    grad = torch.zeros_like(tensors[expert])
                found[f"grad {kind} of expert {expert}"] = grad
        want.append(found)
    return want


def check(ranks: RankPool, config: MoEConfig, inputs: cases.Inputs, biases: dict) -> None:
    results = ranks.run(run_rank, config, inputs, biases, num_ranks=config.num_ranks)
    tolerance = TOLERANCE[inputs.x[0].dtype]
    for rank, (got, want) in enumerate(zip(results, oracle(config, inputs, biases), strict=True)):
        assert got.keys() == want.keys()
        for name, tensor in got.items():
            assert_close(f"{name} of rank {rank}", tensor, want[name], rel_l2=tolerance)


@pytest.mark.parametrize("kinds", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_biases(ranks: RankPool, gated: bool, kinds: tuple[str, ...]):
    config = cases.make_config(num_ranks=2, gated=gated, activation=Activation.GELU)
    inputs = cases.make_inputs(config, cases.uniform, [37, 20], dtype=torch.float32)
    check(ranks, config, inputs, make_biases(config, kinds, torch.float32))


@pytest.mark.parametrize("routing", [cases.with_empty_experts, cases.to_one_rank, cases.to_nobody])
def test_biases_of_experts_without_tokens_and_of_none_padded(ranks: RankPool, routing):
    """Pad rows go through the experts' memory, and may not reach a gradient of a bias."""
    config = cases.make_config(num_ranks=4)
    inputs = cases.make_inputs(config, routing, [9, 0, 33, 16], dtype=torch.float32)
    check(ranks, config, inputs, make_biases(config, BIASES["both"], torch.float32))


def test_biases_of_gpt_oss(ranks: RankPool):
    config = cases.make_config(num_ranks=2, **cases.GPT_OSS)
    inputs = cases.make_inputs(config, cases.uniform, [37, 20], dtype=torch.float32)
    check(ranks, config, inputs, make_biases(config, BIASES["both"], torch.float32))


def test_biases_in_bfloat16(ranks: RankPool):
    config = cases.make_config(num_ranks=2)
    inputs = cases.make_inputs(config, cases.uniform, [37, 20], dtype=torch.bfloat16)
    check(ranks, config, inputs, make_biases(config, BIASES["both"], torch.bfloat16))


def test_one_token_by_hand():
    """``p * (w2 * relu(w1 x + b1) + b2)``."""
    out = moe_reference(
        torch.tensor([[2.0]]),
        torch.tensor([[0.5]]),
        torch.tensor([[True]]),
        [torch.tensor([[3.0]])],
        [torch.tensor([[4.0]])],
        activation=Activation.RELU,
        gated=False,
        fc1_bias=[torch.tensor([-1.0])],
        fc2_bias=[torch.tensor([10.0])],
    )
    assert out.item() == 0.5 * (4 * (3 * 2 - 1) + 10)


def test_split_weights_have_no_rows_in_blocks():
    config = cases.make_config(glu_interleave=32)
    inputs = cases.make_inputs(config, cases.uniform, [24], dtype=torch.float32)
    gate, up = zip(*(weight.chunk(2) for weight in inputs.fc1), strict=True)
    with pytest.raises(ConfigError, match="glu_interleave=32 with gate and up .*: wanted 0"):
        moe_apply(
            ReferenceBackend(config),
            inputs.x[0],
            inputs.probs[0],
            inputs.routing_map[0],
            SplitWeights(gate, up, tuple(inputs.fc2)),
        )


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "per expert"])
def test_split_weights_are_the_joined_ones(stacked: bool):
    config = cases.make_config(num_experts=4)
    inputs = cases.make_inputs(config, cases.uniform, [24], dtype=torch.float32)
    biases = make_biases(config, BIASES["both"], torch.float32)
    backend = ReferenceBackend(config)

    def run(weights: ExpertWeights | SplitWeights, leaves: list[torch.Tensor]):
        x = inputs.x[0].clone().requires_grad_()
        probs = inputs.probs[0].clone().requires_grad_()
        out = moe_apply(backend, x, probs, inputs.routing_map[0], weights)
        return out, torch.autograd.grad(out, [x, probs, *leaves], inputs.grad_out[0])

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone().requires_grad_()

    fields = {kind: tuple(leaf(tensor) for tensor in found) for kind, found in biases.items()}
    bias_leaves = [tensor for tensors in fields.values() for tensor in tensors]
    fc1, fc2 = ([leaf(w) for w in weights] for weights in (inputs.fc1, inputs.fc2))
    want, want_grads = run(
        ExpertWeights(tuple(fc1), tuple(fc2), **fields), [*fc1, *fc2, *bias_leaves]
    )
    halves = [weight.chunk(2) for weight in inputs.fc1]
    parts = [[gate for gate, _ in halves], [up for _, up in halves], inputs.fc2]
    if stacked:
        parts = [[torch.stack(part)] for part in parts]
    gate, up, down = ([leaf(tensor) for tensor in part] for part in parts)
    split = SplitWeights(tuple(gate), tuple(up), tuple(down), **fields)
    got, got_grads = run(split, [*gate, *up, *down, *bias_leaves])
    assert torch.equal(got, want)
    assert all(grad.is_contiguous() for grad in got_grads)
    with torch.no_grad():
        assert torch.equal(run_without_grad(backend, inputs, split), want)
    grads = iter(got_grads[2:-8])
    by_kind = [[next(grads) for _ in part] for part in (gate, up, down)]
    if stacked:
        by_kind = [list(stack.unbind()) for (stack,) in by_kind]
    gate_grads, up_grads, down_grads = by_kind
    joined = [torch.cat(pair) for pair in zip(gate_grads, up_grads, strict=True)]
    found = [*got_grads[:2], *joined, *down_grads, *got_grads[-8:]]
    for index, (grad, wanted) in enumerate(zip(found, want_grads, strict=True)):
        assert torch.equal(grad, wanted), index


@pytest.mark.parametrize("of", [list, nn.ParameterList], ids=["list", "ParameterList"])
@pytest.mark.parametrize("is_split", [True, False], ids=["split", "joined"])
def test_experts_in_lists_are_trained(of: Callable[[list], Any], is_split: bool):
    config = cases.make_config(num_experts=4)
    inputs = cases.make_inputs(config, cases.uniform, [24], dtype=torch.float32)
    halves = [weight.chunk(2) for weight in inputs.fc1]
    parts = [list(half) for half in zip(*halves, strict=True)] if is_split else [inputs.fc1]
    biases = make_biases(config, BIASES["both"], torch.float32).values()
    kinds = [of([nn.Parameter(t.clone()) for t in part]) for part in (*parts, inputs.fc2, *biases)]
    *matrices, fc1_bias, fc2_bias = kinds
    make = SplitWeights if is_split else ExpertWeights
    weights = make(*matrices, fc1_bias=fc1_bias, fc2_bias=fc2_bias)
    backend = ReferenceBackend(config)
    out = moe_apply(backend, inputs.x[0], inputs.probs[0], inputs.routing_map[0], weights)
    out.backward(inputs.grad_out[0])
    assert all(parameter.grad is not None for kind in kinds for parameter in kind)


@pytest.mark.parametrize("name", ["fc1", "fc2_bias"])
def test_a_bare_tensor_is_no_kind_of_weights(name: str):
    fields = {"fc1": (torch.ones(2, 4, 8),), "fc2": (torch.ones(2, 8, 4),)}
    with pytest.raises(ShapeError, match=rf"{name} is one tensor of shape \(2, 3, 4\), wanted a t"):
        ExpertWeights(**{**fields, name: torch.ones(2, 3, 4)})
    with pytest.raises(ShapeError, match=f"{name} is a NoneType, wanted a tuple of tensors"):
        ExpertWeights(**{**fields, name: None})
    with pytest.raises(ShapeError, match="up is one tensor"):
        SplitWeights(fields["fc1"], fields["fc1"][0], fields["fc2"])


def run_without_grad(backend, inputs: cases.Inputs, weights: SplitWeights) -> torch.Tensor:
    return moe_apply(backend, inputs.x[0], inputs.probs[0], inputs.routing_map[0], weights)


def test_split_weights_keep_only_parameters_for_backward():
    """The joined matrix is as large as the parameters: it may not live until backward."""
    config = cases.make_config(num_experts=4)
    inputs = cases.make_inputs(config, cases.uniform, [24], dtype=torch.float32)
    gate = torch.stack([w[:64] for w in inputs.fc1]).requires_grad_()
    up = torch.stack([w[64:] for w in inputs.fc1]).requires_grad_()
    down = torch.stack(inputs.fc2).requires_grad_()
    backend = ReferenceBackend(config)
    packed: list[torch.Tensor] = []
    rows: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    def forward(*args, **kwargs):
        out, saved = ReferenceBackend.forward(backend, *args, **kwargs)
        rows.extend((saved.rows, saved.row_probs, saved.preact))
        return out, saved

    backend.forward = forward
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        moe_apply(
            backend,
            inputs.x[0],
            inputs.probs[0],
            inputs.routing_map[0],
            SplitWeights((gate,), (up,), (down,)),
        )
    # By storage: whatever its shape, a view of a joined matrix keeps all of it.
    assert storages(packed) == storages([gate, up, down, *rows])


def storages(tensors: list[torch.Tensor]) -> set[int]:
    """Where tensors of floating point numbers lie."""
    return {t.untyped_storage().data_ptr() for t in tensors if t.is_floating_point()}


def test_gates_without_their_ups_are_refused():
    config = cases.make_config(num_experts=4)
    inputs = cases.make_inputs(config, cases.uniform, [4], dtype=torch.float32)
    gate = tuple(weight[:64] for weight in inputs.fc1)
    with pytest.raises(ShapeError, match=r"up projections have shapes \[\(64, 64\).*as the gates"):
        moe_apply(
            ReferenceBackend(config),
            inputs.x[0],
            inputs.probs[0],
            inputs.routing_map[0],
            SplitWeights(gate, gate[1:], tuple(inputs.fc2)),
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc1_bias": lambda b: b[1:]}, "3 fc1_bias weights, wanted one for each of the 4"),
        (
            {"fc2_bias": lambda b: (b[0], b[1][1:], *b[2:])},
            r"fc2_bias of local expert 1 has shape \(63,\), wanted \[64\]",
        ),
        ({"fc1_bias": lambda b: tuple(t.double() for t in b)}, "fc1_bias .* is torch.float64"),
        (
            {"fc2_bias": lambda b: tuple(torch.stack((t, t), 1)[:, 0] for t in b)},
            r"fc2_bias of local expert 0 has strides \(2,\)",
        ),
    ],
)
def test_wrong_biases_are_refused(change, message: str):
    config = cases.make_config(num_experts=4)
    inputs = cases.make_inputs(config, cases.uniform, [4], dtype=torch.float32)
    biases = make_biases(config, BIASES["both"], torch.float32)
    weights = ExpertWeights(
        tuple(inputs.fc1),
        tuple(inputs.fc2),
        **{kind: tuple(tensors) for kind, tensors in biases.items()},
    )
    for kind, function in change.items():
        weights = replace(weights, **{kind: function(getattr(weights, kind))})
    with pytest.raises(ShapeError, match=message):
        moe_apply(
            ReferenceBackend(config),
            inputs.x[0],
            inputs.probs[0],
            inputs.routing_map[0],
            weights,
        )


CPU = torch.device("cpu")
PROBLEM = bindings.FlashMoEProblem()
SIZES = bindings.FlashMoESizes(weight_map_bytes=512, grad_table_bytes=512)


def address_tables(config: MoEConfig) -> AddressTables:
    return AddressTables(config, GroupMemory(None, CPU, BackendOptions()), CPU)


def test_the_kernel_refuses_biases_of_one_projection_and_misaligned_ones():
    """Before anything is launched: the kernel reads both kinds, 16 bytes at a time."""
    config = cases.make_config(num_experts=1, topk=1)
    tables = address_tables(config)

    def zeros(*shape: int) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(*shape, dtype=torch.bfloat16),)

    weights = ExpertWeights(
        fc1=zeros(config.fc1_rows, config.hidden),
        fc2=zeros(config.hidden, config.intermediate),
        fc2_bias=zeros(config.hidden),
    )
    with pytest.raises(ConfigError, match="one of fc1 and fc2 has biases.* wanted both"):
        tables.of_weights(weights, PROBLEM, SIZES)
    (longer,) = zeros(config.fc1_rows + 1)
    with pytest.raises(ShapeError, match="wanted 16-byte aligned"):
        tables.of_weights(replace(weights, fc1_bias=(longer[1:],)), PROBLEM, SIZES)


@pytest.fixture
def host_tables(monkeypatch: pytest.MonkeyPatch) -> Callable[[MoEConfig], AddressTables]:
    """Makes tables that stay on the host, without the library."""
    monkeypatch.setattr(AddressTables, "_upload", lambda _, host: host)
    monkeypatch.setattr(bindings, "call", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return address_tables


def test_the_kernel_finds_each_bias_where_it_looks_for_it(
    host_tables: Callable[[MoEConfig], AddressTables],
):
    """The table holds fc1's biases by expert, then fc2's."""
    config = cases.make_config(num_experts=2, topk=1)

    def each(*shape: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(*shape, dtype=torch.bfloat16) for _ in range(2))

    weights = ExpertWeights(
        fc1=each(config.fc1_rows, config.hidden),
        fc2=each(config.hidden, config.intermediate),
        fc1_bias=each(config.fc1_rows),
        fc2_bias=each(config.hidden),
    )
    biases = host_tables(config).of_weights(weights, PROBLEM, SIZES).biases
    assert biases is not None
    want = [bias.data_ptr() for bias in (*weights.fc1_bias, *weights.fc2_bias)]
    assert biases.tolist() == want


def test_the_kernel_refuses_a_view_at_the_address_of_a_weight_that_it_knows(
    host_tables: Callable[[MoEConfig], AddressTables],
):
    """A square matrix and its transposed view differ in their strides alone."""
    config = cases.make_config(hidden=64, intermediate=64, num_experts=1, topk=1, gated=False)
    tables = host_tables(config)
    square = torch.zeros(64, 64, dtype=torch.bfloat16)
    tables.of_weights(ExpertWeights((square,), (square,)), PROBLEM, SIZES)
    with pytest.raises(ShapeError, match="strides .*wanted rows of consecutive elements"):
        tables.of_weights(ExpertWeights((square.t(),), (square.t(),)), PROBLEM, SIZES)


def test_the_kernel_takes_other_tables_for_another_layout(
    host_tables: Callable[[MoEConfig], AddressTables],
):
    """At the same addresses: a model made anew may have its weights transposed there."""
    config = cases.make_config(hidden=64, intermediate=64, num_experts=1, topk=1, gated=False)
    tables = host_tables(config)
    square = torch.zeros(64, 64, dtype=torch.bfloat16)
    grads = [WeightGrad(torch.zeros(64, 64), accumulate=True) for _ in range(2)]

    def both(transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        weights = ExpertWeights((square,), (square,), transposed=transposed)
        problem = bindings.FlashMoEProblem(is_transposed=transposed)
        maps = tables.of_weights(weights, problem, SIZES).maps
        return maps, tables.of_grads(UniformGrads(grads), torch.bfloat16, problem, SIZES)

    plain = both(False)
    assert all(one is other for one, other in zip(plain, both(False), strict=True))
    assert all(one is not other for one, other in zip(plain, both(True), strict=True))


def test_layer_with_biases():
    torch.manual_seed(3)
    layer = FlashMoELayer(cases.CONFIG, device="cpu", dtype=torch.float32, router=True, bias=True)
    assert (layer.fc1_bias.shape, layer.fc2_bias.shape) == ((8, 128), (8, 64))
    x = torch.randn(20, 64)
    topk_idx, topk_weight = layer.route(x)
    probs = torch.zeros(20, 8).scatter(1, topk_idx, topk_weight)
    want = moe_reference(
        x,
        probs,
        probs > 0,
        layer.fc1,
        layer.fc2,
        activation=Activation.SILU,
        gated=True,
        fc1_bias=layer.fc1_bias,
        fc2_bias=layer.fc2_bias,
    )
    out = layer(x)
    assert_close("out", out, want, rel_l2=1e-5)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
