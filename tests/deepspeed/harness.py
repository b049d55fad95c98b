"""Trains with DeepSpeed on processors, with its own MoE layers or with ours, in one process pool.

Functions that a :class:`~tests.distributed.RankPool` runs: each takes the group first.
"""

import gc
import os
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported, also with a GPU present

import torch
import torch.distributed as dist

from flashmoe_megatron.hosts.backend import HostsBackend
from flashmoe_megatron.hosts.grid import HOST_VARIABLE
from tests.deepspeed.models import HIDDEN, AutoEPModel, NativeModel
from tests.side_by_side import Framework, Outcome, Tolerance, Training

FUSED = "fused, backend reference"
TAG = "halfway"
"""The name of a checkpoint in its folder."""


@dataclass(frozen=True)
class Case(Training):
    """One training with a DeepSpeed engine.

    Attributes:
        family: "native" or "autoep".
        model: Arguments of the model.
        zero: ZeRO stage.
        ep_size: AutoEP's expert-parallel size.
        expert_parallel: Further keys of AutoEP's section.
        config: Further keys of the DeepSpeed configuration, nested ones replaced as a whole.
        tokens: Each rank's number of tokens in one micro-batch, repeated over ranks.
        used: Share of the tokens that are in use, per rank; ``None`` gives no mask.
    """

    family: str = "native"
    model: dict[str, Any] = field(default_factory=dict)
    zero: int = 0
    ep_size: int = 2
    expert_parallel: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = (24,)
    used: tuple[float, ...] | None = None


def prepare() -> None:
    """Makes this process one of DeepSpeed's; the process group is there already."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_SIZE=size)
    import deepspeed

    # An operator for inference that DeepSpeed would compile at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("WARNING")
    # Who has built a ZeRO-3 engine leaves a linear function of its own behind, which rounds
    # differently; a case is to have the same numbers whatever ran before.
    torch.nn.functional.linear = torch._C._nn.linear


def ds_config(case: Case, *, fused: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.micro_batches,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "optimizer": {
            "type": "Adam",
            # With the usual eps, what rounding makes of a gradient of 0 is a direction.
            "params": {"lr": 1e-2, "eps": 1e-3, "torch_adam": True},
        },
        "zero_optimization": {"stage": case.zero},
        **case.config,
    }
    if case.family == "autoep":
        config["expert_parallel"] = {
            "enabled": True,
            "autoep_size": case.ep_size,
            "preset_model": case.model.get("preset", "mixtral"),
            "use_grouped_mm": False,
            **case.expert_parallel,
        }
    if fused:
        config["flashmoe"] = {"enabled": True, **case.settings}
    return config


def build(case: Case, *, fused: bool) -> Any:
    """An engine, through our door, which leaves it alone unless ``fused``."""
    prepare()
    import deepspeed

    from flashmoe_megatron.deepspeed import initialize

    if "fp16" in case.config:
        # DeepSpeed asks for a processor with instructions for it; torch computes in it on any.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(11)
    if case.family == "native":
        model: torch.nn.Module = NativeModel(**{"ep_sizes": (2, 2), **case.model})
    else:
        model = AutoEPModel(**case.model)
    engine, *_ = initialize(model=model, config=ds_config(case, fused=fused))
    return engine


def batch(case: Case, step: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """This rank's tokens, targets and mask, the same for both kinds of layers."""
    rank = dist.get_rank()
    num_tokens = case.tokens[rank % len(case.tokens)]
    g = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(num_tokens, HIDDEN, generator=g).to(dtype)
    y = torch.randn(num_tokens, HIDDEN, generator=g).to(dtype)
    if case.used is None:
        return x, y
    share = case.used[rank % len(case.used)]
    return x, y, (torch.rand(num_tokens, generator=g) < share).to(torch.int64)


def train_engine(engine: Any, case: Case) -> Outcome:
    """Trains, then evaluates once."""
    names = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = next((names[key] for key in case.config if key in names), torch.float32)
    losses = []
    gradients: dict[str, torch.Tensor] = {}
    engine.train()
    for step in range(case.first_step, case.first_step + case.steps):
        for micro in range(case.micro_batches):
            torch.manual_seed(77 + step)  # random token selection and noise of the gate
            loss = engine(*batch(case, 10 * step + micro, dtype))
            engine.backward(loss)
            if step == case.first_step and engine.is_gradient_accumulation_boundary():
                gradients = full_gradients(engine)
            engine.step()
            losses.append(float(loss))
    engine.eval()
    with torch.no_grad():
        torch.manual_seed(5)
        eval_losses = [float(engine(*batch(case, 999, dtype)))]
    fused = [
        module.flashmoe.experts for module in engine.module.modules() if hasattr(module, "flashmoe")
    ]
    return Outcome(
        losses=losses,
        eval_losses=eval_losses,
        gradients=gradients,
        parameters=full_parameters(engine),
        layers=report_of(engine) if "flashmoe" in engine.config else {},
        calls=[experts.num_calls for experts in fused],
        keeps={experts.backend.keep for experts in fused},
        over_hosts=any(isinstance(experts.backend, HostsBackend) for experts in fused),
    )


def report_of(engine: Any) -> dict[str, str]:
    from flashmoe_megatron.deepspeed import attach

    return attach(engine)


def full_gradients(engine: Any) -> dict[str, torch.Tensor]:
    """The reduced gradients of this rank's parameters by name, between backward and step."""
    from deepspeed.utils import safe_get_full_grad

    return {
        name: safe_get_full_grad(parameter).detach().clone()
        for name, parameter in engine.module.named_parameters()
    }


def full_parameters(engine: Any) -> dict[str, torch.Tensor]:
    """This rank's parameters by name, whole."""
    if engine.zero_optimization_stage() < 3:
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    from deepspeed.runtime.zero import GatheredParameters

    found = {}
    for name, parameter in engine.module.named_parameters():
        with GatheredParameters([parameter]):
            found[name] = parameter.detach().clone()
    return found


_AROUND_DATA = "use_data_before_expert_parallelism"


def forget_expert_groups() -> None:
    """Has DeepSpeed make its expert groups anew, which it knows by their size alone."""
    from deepspeed.utils import groups

    for name in ("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP"):
        getattr(groups, name).clear()
        getattr(groups, f"{name}_RANKS").clear()


def train(group: dist.ProcessGroup, case: Case, is_fused: bool) -> Outcome:
    """Trains a model from one seed, with flashmoe or with DeepSpeed's own experts."""
    if _AROUND_DATA in case.config:
        forget_expert_groups()
    host = dist.get_rank() * case.hosts // dist.get_world_size()
    with mock.patch.dict(os.environ, {HOST_VARIABLE: f"host{host}"}):
        engine = build(case, fused=is_fused)
        if case.load_from is not None:
            _load(engine, case.load_from)
        outcome = train_engine(engine, case)
        if case.save_to is not None:
            engine.save_checkpoint(case.save_to, tag=TAG)
        del engine
    gc.collect()  # engines hold themselves in cycles
    if _AROUND_DATA in case.config:
        forget_expert_groups()
    return outcome


def _load(engine: Any, folder: str) -> None:
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.add_(1)  # what is not loaded shows
    path, _ = engine.load_checkpoint(folder, tag=TAG)
    assert path is not None


DEEPSPEED = Framework(
    train,
    serves=FUSED,
    # Both sides differ in the order of their sums.
    tolerance=Tolerance(losses=1e-5, gradients=1e-5, parameters=1e-5),
)
