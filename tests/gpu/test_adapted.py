"""Low-rank additions to experts' matrices on the kernel, beside matrices that hold the sums."""

from typing import Any

import pytest
import torch

from flashmoe_megatron.adapted import AdaptedWeights
from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.config import KeepOption
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.kernel.group_memory import GroupMemory
from flashmoe_megatron.kernel.rows import BackwardRows
from flashmoe_megatron.low_rank import FactorGrads, Factors
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.oracle import assert_close
from flashmoe_megatron.weights import ExpertWeights
from tests.gpu import steps
from tests.gpu.layers import TOKENS, make_config, zipf
from tests.gpu.virtual import VirtualLayer, device
from tests.unit import cases

pytestmark = pytest.mark.gpu

RANK, SCALE = 16, 0.5


class Layer:
    """Frozen experts of one rank, and factors of additions to their matrices."""

    def __init__(
        self,
        form: str,
        *,
        is_stack: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        options: BackendOptions | None = None,
        **changes: object,
    ) -> None:
        config = make_config(1, gated=True, activation="silu", **changes)
        self.options = options or BackendOptions()
        memory = GroupMemory(None, device(), self.options)
        self.backend = KernelBackend(
            config, None, device(), memory=memory, rank=0, options=self.options
        )
        self.inputs = steps.make_inputs(config, cases.with_empty_experts, [300], dtype=dtype)
        generator = torch.Generator(device()).manual_seed(3)
        self.kinds = {"fc1": tuple(self.inputs.fc1), "fc2": tuple(self.inputs.fc2)}
        self.factors: dict[str, torch.Tensor] = {}
        self.sums = {}
        for kind, matrices in self.kinds.items():
            outputs, width = matrices[0].shape
            for name, shape in (("down", (RANK, width)), ("up", (outputs, RANK))):
                is_shared = form == "shared" or (
                    form == "shared outer" and (kind, name) in (("fc1", "down"), ("fc2", "up"))
                )
                drawn = torch.randn(
                    *(() if is_shared else (len(matrices),)),
                    *shape,
                    generator=generator,
                    device=device(),
                )
                self.factors[f"{kind}_{name}"] = (drawn * 0.1).to(dtype).requires_grad_()
            down, up = (
                self.factors[f"{kind}_{name}"].detach().expand(len(matrices), -1, -1)
                for name in ("down", "up")
            )
            self.sums[kind] = [
                torch.addmm(one, b, a, alpha=SCALE).requires_grad_()
                for one, a, b in zip(matrices, down, up, strict=True)
            ]
        stacks = {
            kind: (torch.stack(each),) if is_stack else each for kind, each in self.kinds.items()
        }
        self.adapted = AdaptedWeights(
            **stacks,
            **{name: (one,) for name, one in self.factors.items()},
            fc1_scale=SCALE,
            fc2_scale=SCALE,
        )

    def step(self, weights: ExpertWeights) -> tuple[torch.Tensor | None, ...]:
        """Returns the output, and the gradients of tokens and of probabilities."""
        inputs = self.inputs
        x, probs = (each[0].clone().requires_grad_() for each in (inputs.x, inputs.probs))
        out = moe_apply(self.backend, x, probs, inputs.routing_map[0], weights)
        out.backward(inputs.grad_out[0])
        return out.detach(), x.grad, probs.grad

    def check(self, rel_l2: float = 1e-2) -> None:
        """Compares a step with one of the sums: outputs by their bits, and all factors."""
        found = self.step(self.adapted)
        for got, want in zip(found, self.step(ExpertWeights(**self.sums)), strict=True):
            assert torch.equal(got, want)
        for kind, of_kind in self.sums.items():
            grads = [one.grad for one in of_kind]
            self.check_factors(kind, torch.stack(grads).double(), rel_l2)

    def check_factors(self, kind: str, of_sums: torch.Tensor, rel_l2: float) -> None:
        """Compares factors' gradients with products of the gradients of the sums."""
        down, up = (self.factors[f"{kind}_{name}"] for name in ("down", "up"))
        for factor, grad in (
            (down, up.detach().double().mT @ of_sums),
            (up, of_sums @ down.detach().double().mT),
        ):
            want = SCALE * (grad if factor.dim() > 2 else grad.sum(0))
            assert factor.grad is not None
            assert_close(kind, factor.grad.double(), want, rel_l2=rel_l2)


@pytest.mark.parametrize("is_stack", [False, True], ids=["each", "stack"])
@pytest.mark.parametrize("form", ["shared", "stack", "shared outer"])
@pytest.mark.parametrize("keep", ["auto", "all", "preactivations", "inputs"])
def test_sums_and_their_factors_gradients(keep: KeepOption, form: str, is_stack: bool) -> None:
    """The sums' bits are those of a call with sums; factors have products of their gradients."""
    layer = Layer(form, is_stack=is_stack, options=BackendOptions(keep=keep))
    layer.check()
    counters = layer.backend.weight_grads
    assert counters.left_out == 2 * (1 if is_stack else len(layer.kinds["fc1"]))
    # Factors of fc1 take rows, which narrow experts keep for them by default, and else do not.
    assert layer.backend.reads_tokens
    assert (counters.row_bytes > 0) == (keep in ("auto", "all"))


@pytest.mark.parametrize(
    "changes",
    [
        {"intermediate": 768},
        {"intermediate": 2048, "hidden": 512},
        {"intermediate": 768, "options": BackendOptions(row_bound=4.0)},
        {"options": BackendOptions(row_bound=4.0)},
        {"dtype": torch.float16},
        {"dtype": torch.float16, "intermediate": 768},
    ],
    ids=["copied", "wide", "copied bounded", "in place bounded", "float16", "float16 copied"],
)
def test_where_rows_lie(changes: dict[str, Any]) -> None:
    """Gradients of outputs are copied, or read at their tokens; bounds leave unused rows."""
    Layer("stack", **changes).check()


def test_a_captured_graph() -> None:
    """Its replays make the gradients that a step makes, as no host waits in one."""
    layer = Layer("shared outer", options=BackendOptions(row_bound=4.0))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer.step(layer.adapted)
    torch.cuda.synchronize()
    want = {name: one.grad for name, one in layer.factors.items()}
    for one in layer.factors.values():
        one.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        layer.step(layer.adapted)
    graph.replay()
    torch.cuda.synchronize()
    for name, one in layer.factors.items():
        assert torch.equal(one.grad, want[name]), name


def test_no_gradient_of_a_matrix_is_made() -> None:
    """A backward's peak has the sums of both stacks once, and nothing else of their size."""
    layer = Layer("shared", hidden=1024, intermediate=2048)
    stacks = sum(one.nbytes for kind in layer.kinds.values() for one in kind)
    layer.step(layer.adapted)
    inputs = layer.inputs
    x, probs = (each[0].clone().requires_grad_() for each in (inputs.x, inputs.probs))
    out = moe_apply(layer.backend, x, probs, inputs.routing_map[0], layer.adapted)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = torch.cuda.memory_allocated()
    out.backward(inputs.grad_out[0])
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - begin
    assert stacks <= peak < 1.5 * stacks


def test_factors_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside products of the matrices' gradients, which the same backward writes."""
    config = make_config(4)
    layer = VirtualLayer(config)
    inputs = steps.make_inputs(config, zipf, TOKENS[4])
    weights = steps.weights_of(config, inputs)
    grads = steps.make_grads(layer, weights)
    _, saved = layer.forward(inputs.x, inputs.probs, inputs.routing_map, weights)
    generator = torch.Generator(device()).manual_seed(3)
    made: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for share in weights:
        sides = []
        for outputs, width in (share.fc1[0].shape, share.fc2[0].shape):
            down, up = (
                torch.randn(
                    config.num_local_experts, *shape, generator=generator, device=device()
                ).bfloat16()
                for shape in ((RANK, width), (outputs, RANK))
            )
            sides.append((down, up))
        made.append(sides)
    factors = [
        Factors(*(FactorGrads((down,), (up,), 1.0, [True, True]) for down, up in sides))
        for sides in made
    ]
    # On one GPU a rank's products would load kernels, which wait for its launch to end; and that
    # waits for later ranks' launches.
    given: list[tuple[BackwardRows, Factors]] = []
    give = BackwardRows.give
    with monkeypatch.context() as patch:
        patch.setattr(BackwardRows, "give", lambda left, _, of: given.append((left, of)))
        layer.backward(inputs.grad_out, saved, weights, *grads, factors=factors)
    torch.cuda.synchronize()
    assert [of for _, of in given] == factors
    for rank, (left, of_factors) in enumerate(given):
        give(left, config, of_factors)
        shares = zip(of_factors, made[rank], strict=True)
        for place, (of_side, (down, up)) in enumerate(shares):
            full = torch.stack([one.buffer.double() for one in grads[place][rank]])
            wanted = up.double().mT @ full, full @ down.double().mT
            for got, want in zip(of_side.grads(), wanted, strict=True):
                assert_close(f"fc{place + 1} of rank {rank}", got.double(), want, rel_l2=1e-2)
    layer.check_guards()
