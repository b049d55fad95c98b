r"""Runs NVIDIA's own tests of the MoE layer on a dispatcher. A program for torchrun.

NVIDIA's tests name their dispatcher in the TransformerConfig that they make, so the dispatcher
under test is put there, whichever a test asked for. Each rank runs pytest over the given files and
writes what came out of each case, with how often Megatron's ``MoELayer.forward`` was called in it
and how often the fused experts were::

    PYTHONPATH=MEGATRON_LM:. torchrun --nproc_per_node 4 \
        examples/cpu_bridge.py tests/megatron/nvidia_cases.py flashmoe REPORTS TEST_FILES...

NVIDIA's package is named ``tests`` like ours, so the checkout of Megatron-LM comes first on the
path. On a machine with GPUs leave the bridge out.
"""

import functools
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

MAX_TOKENS = 4096


@dataclass
class Case:
    """What one rank saw of one case.

    Attributes:
        outcome: "passed", "failed" or "skipped".
        reason: Why it failed or was skipped.
        forwards: Calls of ``MoELayer.forward``.
        fused: Calls of the fused experts within those.
    """

    outcome: str = "not run"
    reason: str = ""
    forwards: int = 0
    fused: int = 0


class Recorder:
    """A plugin of pytest that keeps what came out of each case."""

    def __init__(self) -> None:
        self.cases: dict[str, Case] = {}
        self.now = Case()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Opens a case."""
        self.now = self.cases[nodeid.rpartition("/")[2]] = Case()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a phase: a case has passed if its test did and nothing around it failed."""
        if report.passed and report.when != "call":
            return
        if self.now.outcome == "failed":
            return
        self.now.outcome = report.outcome
        if not report.passed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.now.reason = str(report.longrepr if crash is None else crash.message)[:1000]


def put_in_place(dispatcher: str, recorder: Recorder) -> None:
    """Makes every MoE layer of this process one of the dispatcher, and counts its calls."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    from flashmoe_megatron.adapters.megatron.shape import ROUTED
    from tests.megatron.harness import destroy_groups

    post_init, forward = TransformerConfig.__post_init__, MoELayer.forward
    divide, undo = (
        parallel_state.initialize_model_parallel,
        parallel_state.destroy_model_parallel,
    )

    @functools.wraps(post_init)
    def chosen_post_init(self: Any) -> None:
        self.moe_token_dispatcher_type = dispatcher
        # Experts are whole here, for either dispatcher; attention keeps its tensor parallelism.
        self.expert_tensor_parallel_size = 1
        post_init(self)

    @functools.wraps(divide)
    def divide_with_whole_experts(*args: Any, **kwargs: Any) -> Any:
        return divide(*args, **{**kwargs, "expert_tensor_parallel_size": 1})

    @functools.wraps(undo)
    def destroy_groups_too(*args: Any, **kwargs: Any) -> None:
        undo(*args, **kwargs)
        destroy_groups(frozenset([dist.group.WORLD]))

    @functools.wraps(forward)
    def counted_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        routed = getattr(self, ROUTED, None)
        before = routed.num_calls if routed is not None else 0
        output = forward(self, *args, **kwargs)
        recorder.now.forwards += 1
        recorder.now.fused += routed.num_calls - before if routed is not None else 0
        return output

    TransformerConfig.__post_init__ = chosen_post_init
    parallel_state.initialize_model_parallel = divide_with_whole_experts
    parallel_state.destroy_model_parallel = destroy_groups_too
    MoELayer.forward = counted_forward


def main(dispatcher: str, reports: str, *arguments: str) -> None:
    """Runs the files in this rank and writes its report."""
    from flashmoe_megatron.adapters import megatron as adapter

    adapter.install()
    adapter.configure(max_tokens=MAX_TOKENS)
    import torch.distributed as dist
    from megatron.core import utils
    from packaging.version import Version

    if utils.get_te_version() is None:
        # Some of the modules ask for a minimum at import, also where Transformer Engine is missing.
        utils._te_version = Version("0")
    recorder = Recorder()
    put_in_place(dispatcher, recorder)
    # Their conftest fetches data sets that none of these tests reads.
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "--import-mode=importlib"]
    pytest.main([*options, *arguments], plugins=[recorder])
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    cases = {name: asdict(case) for name, case in recorder.cases.items()}
    Path(reports, f"{os.environ['RANK']}.json").write_text(json.dumps(cases, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
