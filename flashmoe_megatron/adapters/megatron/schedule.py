"""Keeps what a launch needs where Megatron's schedule or a graph of an iteration runs it.

With ``--overlap-moe-expert-parallel-comm`` a layer is four nodes: attention and routing, dispatch,
experts, combine. The launch is the node of the experts, and the nodes around it hand on what they
get. Megatron frees the storage of a node's inputs after its forward, for its own dispatchers have
copied them by then; here they are what the launch reads, and what its backward reads again.

A launch looks for the faults of those before it. In a graph's replay nothing of the layer runs on
the CPU, which therefore looks before each replay and after it. Nor does a replay find out that the
experts' process group has been destroyed, so that the graph is dropped with the group. At the end
of the process it is dropped first of all.
"""

import atexit
import functools
import gc
import importlib
import logging
from types import ModuleType
from typing import Any

import torch

from flashmoe_megatron.adapters.forwards import with_all_below
from flashmoe_megatron.adapters.megatron.dispatcher import FIELD, is_ours, showing
from flashmoe_megatron.adapters.megatron.repeat.iteration import ITERATIONS
from flashmoe_megatron.adapters.megatron.routed import live_experts
from flashmoe_megatron.adapters.megatron.settings import STOCK_DISPATCHER_TYPE
from flashmoe_megatron.adapters.megatron.shape import ROUTED
from flashmoe_megatron.adapters.patch import Function, patch
from flashmoe_megatron.ending import end_destroyed
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.kernel.captured import Drop, dropped_by
from flashmoe_megatron.repeats import raise_faults

logger = logging.getLogger("flashmoe_megatron")

_FREES = "should_free_input"
"""Megatron's answer to whether a node frees its inputs; its module depends on the release."""

_NODES = "build_transformer_layer_callables"
"""Megatron's function that makes a layer's nodes."""

_POOL = "_shared_graph_pool"
"""The memory pool of all of Megatron's graphs in 0.19.2; older releases have none."""

MODULES = ("core.models.gpt.fine_grained_callables", "core.models.common.utils")
"""The modules of Megatron that may have it: the second one in 0.19."""


def patch_schedule(module: ModuleType) -> None:
    """Lets no node of a fused layer free its inputs, if it is this module that says so.

    Nor does a node of such a layer take its tokens from a library of the flex dispatcher's.
    """
    if hasattr(module, _FREES):
        patch(module, _FREES, _keep_inputs)
    if hasattr(module, _NODES):
        patch(module, _NODES, _as_stock)


def reduce_gradients(experts: torch.nn.Module) -> None:
    """Takes the place of the experts' ``backward_dw``, with ``--delay-wgrad-compute``.

    Their weights' gradients are there by then: the launch has added them. But Transformer Engine
    has marked the weights, so that Megatron's DDP waits for this call to reduce them.
    """
    for module in reversed(with_all_below(experts)):  # fc2's gradients were complete first
        for hook in getattr(module, "wgrad_accumulation_and_reduce_hooks", ()):
            hook()


def check_schedule() -> None:
    """Makes sure, in every release, that the tensors of a launch are kept.

    Raises:
        ConfigError: None of the modules has the function.
    """
    for name in MODULES:
        try:
            module = importlib.import_module(f"megatron.{name}")
        except ModuleNotFoundError:
            continue
        if hasattr(module, _FREES):
            return
    raise ConfigError(
        f"--overlap-moe-expert-parallel-comm: this release of Megatron-Core has no {_FREES} in "
        f"{' or '.join(MODULES)}, which keeps what a backward needs; leave the flag out"
    )


def _keep_inputs(original: Function) -> Function:
    def should_free_input(name: str, is_moe: bool, config: Any, *more: Any, **options: Any) -> bool:
        if is_ours(config):
            return False
        return bool(original(name, is_moe, config, *more, **options))

    return should_free_input


def _as_stock(original: Function) -> Function:
    def build_transformer_layer_callables(layer: Any, *more: Any, **options: Any) -> Any:
        is_fused = hasattr(getattr(layer, "mlp", None), ROUTED)
        with showing(layer.config, {FIELD: STOCK_DISPATCHER_TYPE} if is_fused else {}):
            return original(layer, *more, **options)

    return build_transformer_layer_callables


def patch_full_graph(module: ModuleType) -> None:
    """Makes the wrapper of an iteration raise what the experts' launches have found."""
    wrapper = module.FullCudaGraphWrapper
    drop = functools.partial(_drop_graphs, module)
    patch(wrapper, "__call__", lambda original: _repeated(_raise_faults(original, drop), drop))
    atexit.register(_drop_at_exit, drop)


def _drop_at_exit(drop: Drop) -> None:
    """Drops graphs while the process groups whose collectives they hold are still there.

    A script need not destroy its groups. Their destructors shut communicators down, and NCCL waits
    there, without a bound, until no graph holds one of their collectives (PyTorch's issue 115388);
    Python may destroy groups before graphs. Not collective.
    """
    try:
        drop()
    except Exception as error:  # noqa: BLE001 - a GPU that has failed keeps no process alive
        logger.warning("graphs of iterations could not be dropped at exit: %s", error)


def _drop_graphs(module: Any) -> None:
    """Has Megatron capture its graphs again, after its iterations of warm-up."""
    wrapper = module.FullCudaGraphWrapper
    made = {stage: graph for stage, graph in wrapper.cuda_graph.items() if graph is not None}
    for stage, graph in made.items():
        graph.reset()
        wrapper.cuda_graph[stage] = wrapper.result[stage] = None
        wrapper.curr_iteration[stage] = 0
    if made:
        # PyTorch captures nothing into a pool that no graph has any more but whose memory is not
        # all free, and Megatron would name the pool of all its graphs again.
        if hasattr(module, _POOL):
            setattr(module, _POOL, None)
        gc.collect()
        torch.cuda.empty_cache()  # their pool


def _repeated(original: Function, drop: Drop) -> Function:
    """Repeats an iteration outside of graphs, which are captured again with larger buffers."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        def leave_graphs() -> None:
            drop()
            # Megatron captures in the iteration of a number, which is never less than 0.
            self.curr_iteration["validation" if kwargs.get("forward_only") else "training"] = -1

        run = functools.partial(original, self, *args)
        return ITERATIONS.run(run, kwargs, leave_graphs)

    return call


def _raise_faults(original: Function, drop: Drop) -> Function:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        end_destroyed()
        raise_faults()
        with dropped_by(drop):
            result = original(self, *args, **kwargs)
        if any(routed.backend.config.num_ranks > 1 for routed in live_experts()):
            # Every rank's host learns of a fault here, before it steps, or some would learn of it
            # an iteration later. It waits for the norm of gradients soon anyway.
            torch.cuda.current_stream().synchronize()
        raise_faults()
        return result

    return call
