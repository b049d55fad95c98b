"""Lets Megatron run on processors with gloo, for examples and tests on machines without a GPU.

Megatron asks ``torch.cuda`` for streams, devices and generators even where nothing is computed on
a GPU. :func:`enable` answers those questions with the processor: one process, one "device". It
never touches what Megatron computes, and refuses to run on a machine that has a GPU.

As a program it runs another one under the bridge, with torchrun's environment as it is::

    torchrun --nproc_per_node 2 examples/cpu_bridge.py -m flashmoe_megatron.run pretrain_gpt.py ...
    torchrun --nproc_per_node 2 examples/cpu_bridge.py pretrain_gpt.py ...
"""

import contextlib
import functools
import logging
import os
import runpy
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.data

from flashmoe_megatron.adapters.patch import when_imported

CPU = torch.device("cpu")
_MEMORY_BYTES = 1 << 40


class _Event:
    """A CUDA event where every operation has finished when its call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Event") -> float:
        return 0.0


class _Stream:
    """A CUDA stream where every operation has finished when its call returns."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def wait_event(self, event: _Event) -> None:
        pass

    def wait_stream(self, stream: "_Stream") -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


class _Generators(tuple[torch.Generator, ...]):
    """``torch.cuda.default_generators``, where every device is the processor."""

    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator


def enable() -> None:
    """Answers Megatron's questions to ``torch.cuda`` with the processor, once per process.

    Call it before anything of Megatron is imported.

    Raises:
        RuntimeError: The machine has a GPU, or Megatron has been imported already.
    """
    if getattr(torch.cuda, "_answered_by_cpu_bridge", False):
        return
    if torch.cuda.is_available():
        raise RuntimeError(
            f"the CPU bridge is for machines without a GPU, found {torch.cuda.get_device_name()}; "
            "run Megatron as it is"
        )
    if "megatron.core" in sys.modules:
        raise RuntimeError("enable the CPU bridge before importing megatron.core")
    # Megatron compiles small functions at import; on a processor that costs more than it gives.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch.cuda._answered_by_cpu_bridge = True  # type: ignore[attr-defined]
    _replace_cuda()
    _redirect_devices()
    _redirect_process_groups()
    when_imported("megatron.core.transformer.moe.token_dispatcher", _fix_split_sizes)
    when_imported("megatron.legacy.fused_kernels", _build_no_kernels)
    # Megatron warns when work for the GPU draws from the processor's generator; here all work does.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def _replace_cuda() -> None:
    stream = _Stream()
    properties = SimpleNamespace(
        name="processor",
        major=9,
        minor=0,
        multi_processor_count=1,
        total_memory=_MEMORY_BYTES,
    )
    answers: dict[str, Any] = {
        "Event": _Event,
        "Stream": _Stream,
        "current_device": lambda: CPU,
        "current_stream": lambda *_: stream,
        "default_generators": _Generators(),
        "default_stream": lambda *_: stream,
        "device": lambda *_: contextlib.nullcontext(),
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "empty_cache": lambda: None,
        "get_device_capability": lambda *_: (properties.major, properties.minor),
        "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: True,
        "manual_seed": torch.manual_seed,
        "max_memory_allocated": lambda *_, **__: 0,
        "max_memory_reserved": lambda *_, **__: 0,
        "mem_get_info": lambda *_, **__: (_MEMORY_BYTES, _MEMORY_BYTES),
        "memory_allocated": lambda *_, **__: 0,
        "memory_reserved": lambda *_, **__: 0,
        "memory_stats": lambda *_, **__: defaultdict(int),
        "reset_peak_memory_stats": lambda *_, **__: None,
        "set_device": lambda *_: None,
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "set_stream": lambda *_: None,
        "stream": lambda *_: contextlib.nullcontext(),
        "synchronize": lambda *_: None,
        "_lazy_call": lambda function, **_: function(),
        "_lazy_init": lambda: None,
    }
    for kind in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Byte", "Bool"):
        answers[f"{kind}Tensor"] = getattr(torch, f"{kind}Tensor")
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        setattr(torch.cuda.random, name, answers[name])
    for name in ("empty_cache", "memory_allocated", "memory_stats", "max_memory_allocated"):
        setattr(torch.cuda.memory, name, answers[name])
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *_: None)
    # An optimizer asks whether a CUDA graph is being captured as soon as CUDA is "available".
    for name in ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check"):
        if hasattr(torch.optim.Optimizer, name):
            setattr(torch.optim.Optimizer, name, lambda self: None)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces every CUDA device among a function's arguments by the processor."""

    @functools.wraps(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        args = tuple(CPU if _is_cuda(arg) else arg for arg in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return function(*args, **kwargs)

    return redirected


def _redirect_devices() -> None:
    factories = """
        arange as_tensor empty empty_like eye full full_like linspace logspace ones ones_like rand
        rand_like randint randn randn_like randperm tensor tril_indices triu_indices zeros
        zeros_like
    """
    for name in factories.split():
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor, module = torch.Tensor, torch.nn.Module
    name_type = tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron's optimizers recognise the parameters that they own by this name.
        result = name_type(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    for name in ("to", "new_empty", "new_zeros", "new_full", "new_ones", "new_tensor"):
        setattr(tensor, name, _on_cpu(getattr(tensor, name)))
    tensor.type = type_name  # type: ignore[assignment, method-assign]
    tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
    tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
    tensor.record_stream = lambda self, *_: None  # type: ignore[assignment, method-assign]
    module.cuda = lambda self, *_: self  # type: ignore[assignment, method-assign]
    module.to = _on_cpu(module.to)  # type: ignore[method-assign]
    loader = torch.utils.data.DataLoader
    make_loader = loader.__init__

    @functools.wraps(make_loader)
    def make_unpinned_loader(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["pin_memory"] = False
        make_loader(self, *args, **kwargs)

    loader.__init__ = make_unpinned_loader  # type: ignore[method-assign]


def _redirect_process_groups() -> None:
    """Sends what is meant for NCCL over gloo."""

    def over_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def redirected(*args: Any, **kwargs: Any) -> Any:
            args = tuple("gloo" if isinstance(a, str) and a == "nccl" else a for a in args)
            if kwargs.get("backend") in ("nccl", "cpu:gloo,cuda:nccl"):
                kwargs["backend"] = "gloo"
            kwargs.pop("device_id", None)
            kwargs.pop("pg_options", None)
            return function(*args, **kwargs)

        return redirected

    def without_devices(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def redirected(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("device_ids", None)
            return function(*args, **kwargs)

        return redirected

    dist.init_process_group = over_gloo(dist.init_process_group)
    dist.new_group = over_gloo(dist.new_group)
    dist.barrier = without_devices(dist.barrier)


def _fix_split_sizes(token_dispatcher: ModuleType) -> None:
    """Makes numbers of an exchange's sizes, as Megatron does where these come from a GPU."""

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    if not hasattr(token_dispatcher, "maybe_move_tensor_to_cpu"):
        raise RuntimeError(
            f"{token_dispatcher.__name__} has no maybe_move_tensor_to_cpu; the CPU bridge knows "
            "Megatron-Core 0.16.1 to 0.19.2"
        )
    token_dispatcher.maybe_move_tensor_to_cpu = move  # type: ignore[attr-defined]


def _build_no_kernels(fused_kernels: ModuleType) -> None:
    """Skips the build of kernels, which needs the CUDA compiler in Megatron-Core 0.16.1."""
    fused_kernels.load = lambda args: None  # type: ignore[attr-defined]


def main() -> None:
    """Runs a script, or with ``-m`` a module, under the bridge."""
    arguments = sys.argv[1:]
    if not arguments or arguments == ["-m"]:
        sys.exit("usage: cpu_bridge.py [-m MODULE | SCRIPT] [ARGUMENTS]")
    is_module = arguments[0] == "-m"
    target = arguments[1] if is_module else arguments[0]
    if is_module:
        sys.path[0] = str(Path.cwd())
    else:
        sys.path[0] = str(Path(target).resolve().parent)
    enable()
    sys.argv = arguments[1:] if is_module else arguments
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main()
