"""Trains small GPT models with Megatron on gloo processes. Runs inside the ranks of a pool.

Megatron is imported inside the functions: in a rank it has to come after the CPU bridge.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import os
import queue
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.megatron import dispatcher as dispatcher_module
from flashmoe_megatron.hosts.backend import HostsBackend
from flashmoe_megatron.hosts.grid import HOST_VARIABLE
from tests.megatron.graphed import graph_layers
from tests.megatron.grouped import grouped_experts
from tests.megatron.muon import muon_optimizer
from tests.megatron.sequences import forward_step, shared_batches
from tests.side_by_side import Framework, Outcome, Tolerance, Training

VOCABULARY = 128
SEQ_LENGTH = 16
HEAD_SIZE = 16
MICRO_BATCH = 2
NEWER = {"moe_expert_rank_capacity_factor", "moe_mlp_glu_interleave_size"}
"""Fields that the oldest TransformerConfig does not have; they are put there when it is made."""


@dataclass(frozen=True)
class Layout:
    """How the world is divided; the rest is data parallelism."""

    expert: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    expert_tensor: int = 1


@dataclass(frozen=True)
class Case(Training):
    """One training of Megatron's.

    ``config``, ``ddp`` and ``optimizer`` override fields of Megatron's configurations, ``later``
    those of its TransformerConfig once Megatron has checked it. The last rank writes the layers'
    metrics to ``metrics_to``. ``experts`` is a kind of grouped ones, ``graphs`` the number of CUDA
    graphs of each layer, ``lengths`` says how long sequences are, ``muon`` takes Muon in place of
    Adam. ``replaces`` is the dispatcher that flashmoe takes the place of; stock trainings opt out.
    """

    layout: Layout
    _: KW_ONLY
    micro_batches: int = 2
    config: dict[str, Any] = field(default_factory=dict)
    later: dict[str, Any] = field(default_factory=dict)
    experts: str | None = None
    replaces: str = ""
    graphs: int = 0
    lengths: Literal["equal", "any", "packed", "shared"] = "equal"
    muon: bool = False
    ddp: dict[str, Any] = field(default_factory=dict)
    fuse_main_grad: bool = False
    loads_optimizer: bool = True
    metrics_to: str | None = None
    initial_loss_scale: float = 2.0**32


class Norm(torch.nn.RMSNorm):
    """Megatron's own norms for sequence parallelism need Apex or Transformer Engine."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def prepare(layout: Layout, *, hosts: int = 1, **settings: Any) -> None:
    """Brings Megatron up in this rank, once, and divides the world, on so many hosts, as wanted."""
    from examples import cpu_bridge
    from flashmoe_megatron.adapters import megatron as adapter

    cpu_bridge.enable()
    _stand_in_for_transformer_engine()
    adapter.install()
    adapter.configure(**{"max_tokens": SEQ_LENGTH * MICRO_BATCH, **settings})
    os.environ[HOST_VARIABLE] = f"host{dist.get_rank() * hosts // dist.get_world_size()}"
    _divide(layout, hosts)
    _reset_loss_scale()


class DuplicatedLinear(torch.nn.Linear):
    """Transformer Engine's linear layer that every tensor-parallel rank has whole."""

    def __init__(
        self, num_in: int, num_out: int, *, init_method: Callable[..., Any], bias: bool, **_: Any
    ) -> None:
        super().__init__(num_in, num_out, bias=bias)
        init_method(self.weight.data)
        if bias:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(x), None


def _stand_in_for_transformer_engine() -> None:
    """Gives Megatron what it takes from Transformer Engine where it computes the same without."""
    from megatron.core.tensor_parallel import RowParallelLinear, random
    from megatron.core.transformer.moe import moe_layer

    if not hasattr(random, "FP8GlobalStateManager"):
        # A recomputation that frees outputs asks whether FP8 is on, in bf16 too.
        random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
        for name in ("activation_recompute_forward", "fp8_autocast"):
            setattr(random, name, lambda **_: contextlib.nullcontext())
    if not hasattr(RowParallelLinear, "backward_dw"):
        # Its gradients are complete by then; only Transformer Engine's layers delay them.
        RowParallelLinear.backward_dw = lambda self: None
    if not moe_layer.HAVE_TE:
        moe_layer.HAVE_TE, moe_layer.TELinear = True, DuplicatedLinear


def _reset_loss_scale() -> None:
    """Megatron's scale of auxiliary losses is the process's, and its shape who sets it first.

    A layer that runs alone makes it a number, into which a training schedule's does not go.
    """
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.main_loss_backward_scale = _first_loss_scale()


@functools.lru_cache(maxsize=1)
def _first_loss_scale() -> torch.Tensor | None:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    return MoEAuxLossAutoScaler.main_loss_backward_scale


def destroy_groups(kept: frozenset[dist.ProcessGroup]) -> None:
    """Ends all process groups but some. A layout has some thirty, whose threads poll with gloo."""
    for group in set(dist.distributed_c10d._world.pg_map) - kept:
        dist.destroy_process_group(group)


@functools.cache
def _groups_before() -> frozenset[dist.ProcessGroup]:
    """The groups that there were before the first layout."""
    return frozenset(dist.distributed_c10d._world.pg_map)


@functools.lru_cache(maxsize=1)
def _divide(layout: Layout, hosts: int) -> None:
    """Makes the groups of a layout, anew where hosts differ: layers of a group share a backend."""
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
        gc.collect()  # groups end with the last model that has them
        destroy_groups(_groups_before())
    _groups_before()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )


def transformer_config(layout: Layout, dispatcher: str, **overrides: Any) -> Any:
    """A small MoE transformer in float32 that needs neither Transformer Engine nor Apex."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": max(2, layout.pipeline * (layout.virtual or 1)),
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "moe_ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": dispatcher,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.tensor > 1,
        "pipeline_dtype": torch.float32,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": 0.1,
    }
    settings.update(overrides)
    if settings["activation_func"] == "quick_gelu":  # which is Megatron's own
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        settings["activation_func"] = quick_gelu
    known = {each.name for each in dataclasses.fields(TransformerConfig)}
    newer = {name: settings.pop(name) for name in NEWER - known if name in settings}
    config = TransformerConfig(**settings)
    vars(config).update(newer)
    return config


@contextlib.contextmanager
def replacing(dispatchers: str) -> Iterator[None]:
    """Runs a part of a test as a process in which the environment replaces dispatchers."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(dispatcher_module.REPLACES, dispatchers)
        dispatcher_module.replaced.cache_clear()
        yield
    dispatcher_module.replaced.cache_clear()


def train(group: dist.ProcessGroup, case: Case, is_fused: bool) -> Outcome:
    """Trains a model from one seed, with flashmoe or with Megatron's alltoall dispatcher."""
    with replacing(case.replaces):
        return _train(case, is_fused)


def _train(case: Case, is_fused: bool) -> Outcome:
    dispatcher = (case.replaces or "flashmoe") if is_fused else "alltoall"
    prepare(case.layout, hosts=case.hosts, **case.settings)
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    forget_metrics()
    config = transformer_config(case.layout, dispatcher, **case.config)
    vars(config).update(case.later)
    if not is_fused:
        dispatcher_module.keep_dispatcher(config)
    chunks = [_in_half(config, chunk) for chunk in build_model(config, case.layout, case.experts)]
    # Megatron's own fusion is a CUDA extension that its linears ask for when they are built; the
    # routed experts ask the configuration at each call.
    config.gradient_accumulation_fusion = case.fuse_main_grad
    ddp_config = DistributedDataParallelConfig(
        **{"use_distributed_optimizer": True, "bucket_size": 10_000, **case.ddp}
    )
    model = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    graph_layers(model, case.graphs)
    config.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:
        syncs = [chunk.no_sync for chunk in model]
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    make_optimizer = muon_optimizer if case.muon else get_megatron_optimizer
    optimizer = make_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=5e-3,
            weight_decay=0.01,
            clip_grad=1.0,
            params_dtype=config.params_dtype,
            fp16=config.fp16,
            bf16=config.params_dtype == torch.bfloat16,
            initial_loss_scale=case.initial_loss_scale,
            hysteresis=1,
            use_distributed_optimizer=ddp_config.use_distributed_optimizer,
            overlap_param_gather=ddp_config.overlap_param_gather,
        ),
        model,
    )
    config.grad_scale_func = optimizer.scale_loss
    if case.load_from is not None:
        _load(case.load_from, model, optimizer if case.loads_optimizer else None)
    step = get_forward_backward_func()
    report = _metrics(case.metrics_to, chunks)
    losses, grad_norms, skipped = [], [], []
    for iteration in range(case.first_step, case.first_step + case.steps):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = _run(step, model, case, iteration, forward_only=False)
        if is_fused:  # Megatron's mark is left where Megatron's layers leave it
            for layer in _moe_layers(chunks):
                for name, each in layer.experts.named_parameters():  # the fusion is of weights
                    is_fused_here = case.fuse_main_grad and "bias" not in name
                    assert each.grad_added_to_main_grad == is_fused_here, name
        is_updated, grad_norm, _ = optimizer.step()
        losses.append(_mean(reduced))
        skipped.append(not is_updated)
        if is_updated:
            grad_norms.append(float(grad_norm))
        report(iteration + 1, is_last=iteration + 1 == case.first_step + case.steps)
    if ddp_config.overlap_param_gather:
        for chunk in model:
            chunk.disable_forward_pre_hook(param_sync=True)
    for chunk in model:
        chunk.eval()
    with torch.no_grad():
        eval_loss = _mean(_run(step, model, case, 1000, forward_only=True))
    if case.save_to is not None:
        _save(case.save_to, model, optimizer)
    # The optimizer's views of float32 parameters hold, unseen by the garbage collector, what holds
    # DDP, whose configuration would hold the optimizer: nothing of this training would be freed.
    config.grad_scale_func = None
    assert config.moe_token_dispatcher_type == dispatcher
    experts = _routed_experts(chunks)
    over_hosts = {isinstance(each.backend, HostsBackend) for each in experts}
    assert len(over_hosts) <= 1
    return Outcome(
        losses=[loss for loss in losses if loss is not None],
        skipped=skipped,
        grad_norms=grad_norms,
        eval_losses=[] if eval_loss is None else [eval_loss],
        parameters={
            f"{index}.{name}": parameter.detach().clone()
            for index, chunk in enumerate(chunks)
            for name, parameter in chunk.named_parameters()
        },
        layers={
            f"{number}": type(layer.token_dispatcher).__name__
            for number, layer in enumerate(_moe_layers(chunks))
        },
        calls=[each.num_calls for each in experts],
        keeps={each.backend.keep for each in experts},
        over_hosts=True in over_hosts,
    )


def _metrics(path: str | None, model: list[Any]) -> Callable[..., None]:
    """Reports as a training loop of one's own does."""
    if path is None:
        return lambda *_, **__: None
    from flashmoe_megatron.adapters.megatron.metrics import MoEMetrics
    from flashmoe_megatron.telemetry.sinks import JsonLines

    is_writer = dist.get_rank() == dist.get_world_size() - 1
    return MoEMetrics([JsonLines(Path(path))] if is_writer else [], model=model)


def forget_metrics() -> None:
    """Drops Megatron's table of auxiliary losses, which has the last model's number of layers."""
    try:
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    except ImportError:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        get_moe_layer_wise_logging_tracker().clear()
    else:
        destroy_moe_metrics_tracker()


def build_model(config: Any, layout: Layout, experts: str | None = None) -> list[Any]:
    """This rank's chunks of a GPT model, with the weights of one seed."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    torch.manual_seed(7 + parallel_state.get_pipeline_model_parallel_rank())
    model_parallel_cuda_manual_seed(7)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
    )
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    if experts is not None:
        mlp = spec.submodules.mlp
        parts = getattr(mlp, "submodules", None) or mlp.keywords["submodules"]
        parts.experts = grouped_experts(experts)
    stages = range(layout.virtual) if layout.virtual else [None]
    later = {}
    if config.mtp_num_layers:
        later["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    place = {"ignore_virtual": False}
    return [
        GPTModel(
            config,
            TransformerBlockSubmodules(
                layer_specs=[spec] * get_num_layers_to_build(config, vp_stage=stage),
                layer_norm=Norm,
            ),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQ_LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(**place, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(**place, vp_stage=stage),
            share_embeddings_and_output_weights=False,
            **({} if stage is None else {"vp_stage": stage}),
            **later,
        )
        for stage in stages
    ]


def _in_half(config: Any, chunk: Any) -> Any:
    if config.params_dtype == torch.float32:
        return chunk
    from megatron.core.transformer.module import Float16Module

    return Float16Module(config, chunk)


def _run(
    step: Any, model: list[Any], case: Case, iteration: int, *, forward_only: bool
) -> list[dict[str, Any]]:
    is_shared = case.lengths == "shared"
    iterators: list[Any] = [
        shared_batches(iteration) if is_shared else _batches(case, iteration) for _ in model
    ]
    return call_schedule(
        step,
        model,
        iterators,
        forward_step_func=forward_step if is_shared else _forward_step,
        num_microbatches=case.micro_batches,
        seq_length=SEQ_LENGTH,
        micro_batch_size=MICRO_BATCH,
        forward_only=forward_only,
    )


def call_schedule(
    schedule: Any, model: list[Any], iterators: list[Any], **arguments: Any
) -> list[dict[str, Any]]:
    """Calls Megatron's schedule with a model's chunks and their batches, each alone if one is."""
    is_one = len(model) == 1
    reduced: list[dict[str, Any]] = schedule(
        data_iterator=iterators[0] if is_one else iterators,
        model=model[0] if is_one else model,
        **arguments,
    )
    return reduced


def _batches(case: Case, iteration: int) -> Iterator[torch.Tensor]:
    """Tokens ``[micro_batch, seq_length + 1]`` that depend on the data-parallel rank alone."""
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(1000 * iteration + rank)
    for _ in range(case.micro_batches):
        num_sequences, length = MICRO_BATCH, SEQ_LENGTH
        if case.lengths != "equal":  # neither on ranks nor in micro-batches
            length = int(torch.randint(3, SEQ_LENGTH + 1, (), generator=generator))
        if case.lengths == "packed":  # Megatron's batches of documents have one row
            num_sequences, length = 1, MICRO_BATCH * length
        # Skewed, so that experts get different numbers of tokens and some none.
        uniform = torch.rand(num_sequences, length + 1, generator=generator)
        yield (uniform.pow(3) * VOCABULARY).long()


def _forward_step(
    batches: Iterator[torch.Tensor], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    tokens = next(batches)
    num_sequences, length = tokens[:, 1:].shape
    position = torch.arange(length).expand(num_sequences, -1)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    if num_sequences == 1:
        position, mask = _within_documents(position, mask)
    labels = tokens[:, 1:].contiguous()
    forward = model.build_schedule_plan if return_schedule_plan else model
    return forward(tokens[:, :-1].contiguous(), position, mask, labels=labels), _loss


def _within_documents(
    position: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and mask of two documents of one row, which see nothing of each other."""
    document = (position[0] >= position.shape[1] // 2).long()
    begins = document * (position.shape[1] // 2)
    return position - begins, mask | (document[:, None] != document[None, :])


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


def _mean(reduced: list[dict[str, Any]]) -> float | None:
    if not reduced:
        return None
    return float(torch.stack([entry["loss"] for entry in reduced]).mean())


def _sharded_state(model: list[Any], optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    from megatron.core import parallel_state

    metadata = {
        "distrib_optim_sharding_type": "dp_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state = {"model": model[0].module.sharded_state_dict(metadata=metadata)}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(
            state["model"], is_loading=is_loading, metadata=metadata
        )
    return state


def _save(directory: str, model: list[Any], optimizer: Any) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Megatron's queue is that of a process that imports torch, for what other processes write.
    filesystem_async._results_queue = queue.Queue()
    if dist.get_rank() == 0:
        Path(directory).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(_sharded_state(model, optimizer, is_loading=False), directory)
    dist.barrier()


def _load(directory: str, model: list[Any], optimizer: Any) -> None:
    from megatron.core import dist_checkpointing

    parts = [] if optimizer is None else getattr(optimizer, "chained_optimizers", [optimizer])
    parts = [part.optimizer for part in parts]
    for part in parts:
        _initialize(part)
    state = dist_checkpointing.load(_sharded_state(model, optimizer, is_loading=True), directory)
    model[0].module.load_state_dict(state["model"])
    if optimizer is None:
        return
    with torch.no_grad():
        optimizer.load_state_dict(state["optimizer"])
    # Without Transformer Engine and Apex the count of steps is restored in the groups alone.
    for part in parts:
        for group in part.param_groups:
            for parameter in group["params"]:
                part.state[parameter]["step"] = torch.tensor(float(group["step"]))


def _initialize(optimizer: torch.optim.Optimizer) -> None:
    """Gives torch's Adam its state, which Megatron expects before it loads one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def _moe_layers(chunks: list[Any]) -> list[Any]:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    return [
        module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)
    ]


def _routed_experts(chunks: list[Any]) -> list[Any]:
    """The routed experts of the layers that are fused."""
    found = (getattr(layer, "flashmoe_routed_experts", None) for layer in _moe_layers(chunks))
    return [routed for routed in found if routed is not None]


def determined(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Returns a parameter without the keys' biases.

    Their gradient is 0, for a softmax does not change with what is added to all its inputs; what
    rounding makes of it, Adam takes for a direction.
    """
    if not name.endswith("linear_qkv.bias"):
        return parameter
    return parameter.view(-1, 3, HEAD_SIZE)[:, (0, 2)]


MEGATRON = Framework(
    train,
    serves="FlashMoETokenDispatcher",
    # Both sides compute in float32 and differ in the order of their sums.
    tolerance=Tolerance(losses=1e-5, gradients=2e-4, parameters=1e-3),
    determined=determined,
)


def megatron_parser() -> argparse.ArgumentParser:
    """The part of the script's parser that flashmoe looks at."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--moe-token-dispatcher-type", choices=["allgather", "alltoall", "flex"], default="alltoall"
    )
    return parser
