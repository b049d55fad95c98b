"""Trains torchtitan's debug Qwen3-MoE by torchtitan's own Trainer, with its experts and with ours.

Run: ``python -m torch.distributed.run --nproc_per_node 2 -m tests.frameworks.titan_trainer --out
FILE``. torchtitan takes a machine without a GPU for one with CUDA, and its wheel has no data, so
that this gives its Trainer what it lacks there: processors as its devices, and words drawn from a
seed. All else is the Trainer's: meshes, FSDP, the override, optimizer and steps.
"""

import argparse
import dataclasses
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torchtitan.tools.utils as titan_utils

from tests.side_by_side import FUSED, OWN, note

OVERRIDE = "flashmoe_megatron.torchtitan.routed_experts"
VOCABULARY, SEQUENCES, LENGTH = 2048, 2, 32


def use_processors() -> None:
    """Makes processors torchtitan's devices; before anything else of torchtitan is imported."""
    functions = {
        name: getattr(torch.cpu, name)
        for name in ("set_device", "synchronize", "device_count", "Stream")
    }
    properties = SimpleNamespace(total_memory=2**30)
    titan_utils.device_type = "cpu"
    titan_utils.device_module = SimpleNamespace(
        **functions,
        current_device=lambda: 0,
        get_device_name=lambda *_: "a processor",
        get_device_properties=lambda *_: properties,
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        memory_stats=lambda *_: {},
    )
    if not hasattr(torch.distributed, "set_timeout"):  # torchtitan 0.3.0 is ahead of torch 2.13
        torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout
    if importlib.util.find_spec("datasets") is None:  # imported, but nothing here reads one
        for name in ("datasets", "datasets.distributed"):
            sys.modules[name] = mock.MagicMock(__spec__=None)


def make_config(experts: str, steps: int, folder: Path) -> Any:
    """The Trainer's configuration of its debug model, for one or more processors."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import OverrideConfig
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
    from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

    class Words(BaseDataLoader):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, dp_rank: int = 0, **_: Any) -> None:
            generator = torch.Generator().manual_seed(2 + dp_rank)
            self.words = torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            positions = torch.arange(LENGTH).expand(SEQUENCES, -1)
            while True:
                yield {"input": self.words[:, :-1], "positions": positions}, self.words[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            del state_dict

    class NoTokenizer(BaseTokenizer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        def encode(self, *_: Any, **__: Any) -> list[int]:
            raise NotImplementedError

        def decode(self, *_: Any, **__: Any) -> str:
            raise NotImplementedError

        def get_vocab_size(self) -> int:
            return VOCABULARY

    world = int(os.environ["WORLD_SIZE"])
    config = qwen3_moe_debug()
    spec = config.model_spec
    spec.model.layers = spec.model.layers[:2]
    for _, _, parent, name in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    parallelize = spec.parallelize_fn

    def parallelize_for_gloo(*args: Any, **kwargs: Any) -> Any:
        model = parallelize(*args, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # gloo has no sums with a factor
                module.set_force_sum_reduction_for_comms(True)
        return model

    config.model_spec = dataclasses.replace(spec, parallelize_fn=parallelize_for_gloo)
    config.dataloader, config.tokenizer = Words.Config(), NoTokenizer.Config()
    config.checkpoint = CheckpointManager.Config(enable=False)
    config.activation_checkpoint = None
    training = config.training
    training.local_batch_size, training.seq_len, training.steps = SEQUENCES, LENGTH, steps
    training.disable_cuda_graphs = True
    config.parallelism.expert_parallel_degree = world
    config.parallelism.spmd_backend = "partial_dtensor"
    config.debug.seed = 1
    config.dump_folder = str(folder)
    if experts == FUSED:
        config.override = OverrideConfig(imports=[(OVERRIDE, {})])
    return config


def train(experts: str, steps: int, folder: Path) -> dict[str, Any]:
    """One training: its losses, and the classes of its modules."""
    from torchtitan.trainer import Trainer

    trainer = Trainer(make_config(experts, steps, folder))
    losses: list[float] = []
    log = trainer.metrics_processor.log

    def note(step: int, loss: float, *rest: Any, **more: Any) -> None:
        losses.append(loss)
        log(step, loss, *rest, **more)

    trainer.metrics_processor.log = note
    trainer.train()
    trainer.close()
    names = sorted({type(module).__name__ for module in trainer.model_parts[0].modules()})
    return {
        "ranks": torch.distributed.get_world_size(),
        "losses": losses,
        "modules": names,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    use_processors()
    for experts in (OWN, FUSED):
        note(args.out, "qwen3", experts, **train(experts, args.steps, args.out.parent))
        leave(experts)


def leave(experts: str) -> None:
    """Ends the process group once all ranks are done: gloo drops what a rank has not sent yet."""
    store = torch.distributed.distributed_c10d._get_default_store()
    store.set(f"{experts} ended on {torch.distributed.get_rank()}", "")
    store.wait([f"{experts} ended on {rank}" for rank in range(torch.distributed.get_world_size())])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
