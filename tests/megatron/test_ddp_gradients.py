"""Experts' gradients behind Megatron's DDP are those of alltoall, however a layer is used."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.errors import ConfigError
from tests.distributed import RankPool
from tests.megatron.grouped import grouped_experts
from tests.megatron.harness import Layout, prepare, transformer_config
from tests.megatron.layers import make_layer

TOLERANCE = 1e-6
"""Relative to a gradient's norm; both sides compute in float32 and sum in other orders."""
ITERATIONS = 3


@dataclasses.dataclass(frozen=True)
class Use:
    """How a model of MoE layers is used in an iteration.

    Attributes:
        calls: How often each layer is called in one graph, by iteration.
        overlap: Whether gradients are reduced while a backward runs.
        penalty: A penalty on the experts' weights joins the loss in every second iteration.
        frozen: One expert of every rank is not trained.
        tied: A second layer has the first one's experts.
        recompute: Each call of a layer is recomputed in backward, as with full recomputation.
        apart: Each micro-batch has one backward for the penalty and one for the rest.
        fused_biases: Experts have biases, which alone have the penalty, and flashmoe's layer is
            told of Megatron's fusion, which would drop a penalty of weights and keeps that one.
    """

    calls: tuple[int, int, int] = (2, 2, 2)
    micro_batches: int = 1
    overlap: bool = True
    distributed: bool = False
    expert: int = 1
    penalty: bool = False
    frozen: bool = False
    tied: bool = False
    recompute: bool = False
    apart: bool = False
    fused_biases: bool = False
    experts: str | None = None
    settings: tuple[tuple[str, Any], ...] = ()


RISING, FALLING, ANY = (1, 2, 3), (3, 2, 1), (2, 1, 2)
USES = {
    "constant": Use(),
    "rising": Use(RISING),
    "falling": Use(FALLING),
    "rising_distributed": Use(RISING, distributed=True),
    "rising_without_overlap": Use(RISING, overlap=False, distributed=True),
    "none_without_overlap": Use((2, 0, 1), overlap=False),
    "any_in_4_micro_batches": Use(ANY, micro_batches=4, distributed=True),
    "any_in_4_without_overlap": Use(ANY, micro_batches=4, overlap=False),
    "rising_ep2": Use(RISING, expert=2),
    "penalty": Use(RISING, penalty=True),
    "penalty_in_4_distributed": Use(penalty=True, micro_batches=4, distributed=True),
    "penalty_in_4_without_overlap": Use(penalty=True, micro_batches=4, overlap=False),
    "penalty_ep2_in_4": Use(penalty=True, micro_batches=4, expert=2, distributed=True),
    "penalty_apart": Use(penalty=True, micro_batches=2, apart=True, overlap=False),
    "penalty_frozen": Use(RISING, penalty=True, frozen=True, micro_batches=2),
    "penalty_frozen_without_overlap": Use(
        penalty=True, frozen=True, micro_batches=2, overlap=False
    ),
    "tied": Use(ANY, tied=True, distributed=True),
    "tied_penalty_in_4": Use(ANY, tied=True, penalty=True, micro_batches=4),
    "grouped": Use(RISING, penalty=True, experts="te_grouped", distributed=True),
    "fused_biases": Use(
        RISING, penalty=True, fused_biases=True, micro_batches=2, experts="te_grouped"
    ),
    "fused_biases_without_overlap": Use(
        penalty=True, fused_biases=True, overlap=False, distributed=True, experts="te_grouped"
    ),
    "recompute": Use(recompute=True, micro_batches=2, distributed=True),
    "recompute_without_overlap": Use(RISING, recompute=True, overlap=False),
    "keep_inputs": Use(RISING, penalty=True, settings=(("keep", "inputs"),)),
    "keep_preactivations": Use(ANY, penalty=True, settings=(("keep", "preactivations"),)),
    "scheduled": Use(
        RISING,
        penalty=True,
        micro_batches=2,
        expert=2,
        settings=(("backend", "scheduled"), ("degree", "2")),
    ),
    "scheduled_keep_inputs": Use(
        ANY, settings=(("backend", "scheduled"), ("keep", "inputs")), distributed=True
    ),
}


@pytest.mark.parametrize("name", USES)
def test_gradients_are_those_of_alltoall(name: str, two_ranks: RankPool) -> None:
    for errors in two_ranks.run(compare, USES[name]):
        assert len(errors) > ITERATIONS * 2 * 4  # two projections, four experts
        assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize(("calls", "came", "wanted"), [(RISING, 2, 1), (FALLING, 2, 3)])
def test_recomputed_calls_whose_number_varies_are_an_error(
    calls: tuple[int, int, int], came: int, wanted: int, two_ranks: RankPool
) -> None:
    """Autograd tells DDP of each call by itself then, with alltoall, too."""
    for said in two_ranks.run(refusal, Use(calls, recompute=True)):
        assert f"came {came} times in this iteration's last micro-batch and {wanted} times" in said


def test_buckets_are_reduced_before_the_next_layers_backward(two_ranks: RankPool) -> None:
    for happened in two_ranks.run(order_of_reductions):
        assert happened == ["backward of 1", "reduction of 1", "backward of 0", "reduction of 0"]


@pytest.mark.parametrize("name", ["grad", "unused", "inputs", "accumulator", "late", "behind"])
def test_who_asks_autograd_sees_what_alltoall_gives(name: str, two_ranks: RankPool) -> None:
    for stock, fused in two_ranks.run(seen_by, name):
        assert len(fused) == len(stock)
        for got, want in zip(fused, stock, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


class Model(torch.nn.Module):
    """MoE layers whose outputs are added to what they get, called several times in a row."""

    def __init__(self, layers: list[Any], *, recompute: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.recompute = recompute

    def forward(self, x: torch.Tensor, calls: int) -> torch.Tensor:
        from megatron.core.tensor_parallel import checkpoint

        out = x
        for _ in range(calls):
            for layer in self.layers:
                given = out
                if self.recompute:
                    out = given + checkpoint(lambda h, one=layer: one(h)[0], False, given)
                else:
                    out = given + layer(given)[0]
        return out


def make_model(use: Use, dispatcher: str, *, overlap: bool, num_layers: int = 1) -> Any:
    """The model in Megatron's DDP."""
    layout = Layout(expert=use.expert)
    prepare(layout, **dict(use.settings))
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = transformer_config(
        layout, dispatcher, moe_aux_loss_coeff=0.0, add_bias_linear=use.fused_biases
    )
    experts = use.experts and grouped_experts(use.experts)
    layers = [make_layer(config, experts) for _ in range(2 if use.tied else num_layers)]
    if use.tied:
        for name, owner in layers[0].experts.named_modules():
            layers[1].experts.get_submodule(name)._parameters.update(owner._parameters)
    if use.fused_biases:
        with torch.no_grad():
            for bias in biases_of(layers[0].experts):
                bias.fill_(0.1)
        for layer in layers:
            layer.config.gradient_accumulation_fusion = dispatcher == "flashmoe"
    if use.frozen:
        next(layers[0].experts.parameters()).requires_grad = False
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=use.distributed,
        bucket_size=5000,
    )
    return DistributedDataParallel(config, ddp_config, Model(layers, recompute=use.recompute))


def tokens(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(8, 2, 64, generator=generator).requires_grad_()


def biases_of(experts: Any) -> list[torch.Tensor]:
    return [each for name, each in experts.named_parameters() if ".bias" in name]


def penalty_of(use: Use, ddp: Any) -> torch.Tensor:
    experts = ddp.module.layers[0].experts
    params = biases_of(experts) if use.fused_biases else experts.parameters()
    squares = [each.square().sum() for each in params if each.requires_grad]
    return 0.5 * torch.stack(squares).sum()


def gradients(use: Use, dispatcher: str, *, overlap: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Every parameter's gradient after each iteration's reduction."""
    ddp = make_model(use, dispatcher, overlap=overlap)
    for iteration, calls in enumerate(use.calls):
        ddp.zero_grad_buffer()
        for micro_batch in range(use.micro_batches):
            is_last = micro_batch == use.micro_batches - 1
            with contextlib.nullcontext() if is_last or not overlap else ddp.no_sync():
                x = tokens(10 * iteration + micro_batch)
                losses = [ddp(x, calls).square().mean()]
                if use.penalty and iteration % 2 == 0:
                    losses.append(penalty_of(use, ddp))
                for loss in losses if use.apart else [torch.stack(losses).sum()]:
                    loss.backward()
        ddp.finish_grad_sync()
        if use.distributed:
            gather_buckets(ddp)
        named = ddp.module.named_parameters()
        if dispatcher == "flashmoe":
            assert all(one.flashmoe_routed_experts.num_calls for one in ddp.module.layers)
        yield {name: each.main_grad.clone() for name, each in named if each.requires_grad}


def gather_buckets(ddp: Any) -> None:
    """Puts the parts of all buckets together, of which each rank has reduced one."""
    for group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups:
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            own = bucket.grad_data.view(ranks.size(), -1)[ranks.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=ranks)


def compare(group: dist.ProcessGroup, use: Use) -> dict[str, float]:
    """The relative error of every parameter's gradient, by iteration and name."""
    stock = list(gradients(use, "alltoall", overlap=False))
    fused = list(gradients(use, "flashmoe", overlap=use.overlap))
    return {
        f"{iteration} {name}": float((got - want[name]).norm() / (want[name].norm() or 1.0))
        for iteration, (ours, want) in enumerate(zip(fused, stock, strict=True))
        for name, got in ours.items()
    }


def refusal(group: dist.ProcessGroup, use: Use) -> str:
    try:
        list(gradients(use, "flashmoe", overlap=True))
    except ConfigError as error:
        return str(error)
    return "accepted"


def order_of_reductions(group: dist.ProcessGroup) -> list[str]:
    """What happens in the second iteration, in which DDP knows when a bucket is complete."""
    ddp = make_model(Use(), "flashmoe", overlap=True, num_layers=2)
    happened: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for number, layer in enumerate(ddp.module.layers):
            backend = layer.flashmoe_routed_experts.backend
            params = set(layer.experts.parameters())
            groups = {ddp.param_to_bucket_group[param] for param in params}
            assert groups, "there is nothing to reduce"
            last = [each for each in ddp.bucket_groups if each in groups][-1]
            patch.setattr(last, "start_grad_sync", noting(last.start_grad_sync, happened, number))
        original = backend.backward
        numbers = iter([1, 0])

        def backward(*args: Any, **kwargs: Any) -> Any:
            happened.append(f"backward of {next(numbers)}")
            return original(*args, **kwargs)

        for iteration in range(2):
            ddp.zero_grad_buffer()
            if iteration:
                patch.setattr(backend, "backward", backward)
                happened.clear()
            ddp(tokens(iteration), 1).square().mean().backward()
            seen = list(happened)
            ddp.finish_grad_sync()
    return seen


def noting(original: Callable[..., Any], happened: list[str], number: int) -> Callable[..., Any]:
    def start_grad_sync(*args: Any, **kwargs: Any) -> Any:
        happened.append(f"reduction of {number}")
        return original(*args, **kwargs)

    return start_grad_sync


def seen_by(group: dist.ProcessGroup, name: str) -> list[list[torch.Tensor]]:
    """What somebody sees of one expert's gradient, with alltoall and with flashmoe."""
    found = []
    for dispatcher in ("alltoall", "flashmoe"):
        ddp = make_model(Use(expert=2), dispatcher, overlap=False)
        param = ddp.module.layers[0].experts.local_experts[0].linear_fc1.weight
        ddp.zero_grad_buffer()
        seen: list[torch.Tensor] = []
        if name == "accumulator":
            node = param.expand_as(param).grad_fn.next_functions[0][0]
            node.register_hook(lambda _, grads: seen.append(grads[0].clone()))  # noqa: B023
        loss = ddp(tokens(1), 1).square().mean()
        if name in ("grad", "unused"):
            seen += torch.autograd.grad(loss, [param], allow_unused=name == "unused")
        elif name == "inputs":
            loss.backward(inputs=list(ddp.module.parameters()))
        else:
            if name == "late":
                param.register_hook(lambda grad: grad * 2)
            elif name == "behind":
                param.register_post_accumulate_grad_hook(
                    lambda param: seen.append(param.grad.clone())  # noqa: B023
                )
            loss.backward()
        found.append([*seen, param.main_grad.clone()])
    return found
