"""NVIDIA's own tests of the MoE layer pass with flashmoe wherever they pass with alltoall.

They come from a checkout of Megatron-LM and call ``MoELayer.forward``, router included. They are
copied for two changes, which both dispatchers get: widths of 12 and 16 become 64, which the kernel
needs, and what has to be "on cuda" has to be where Megatron puts its tensors, which under the
bridge is the processor.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.nvidia_cases import Case
from tests.megatron.stock_script import torchrun

TIMEOUT_S = 900
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S + 60)

FOLDER = Path("tests/unit_tests/transformer/moe")
FEWEST_FORWARDS = {
    "test_moe_layer": 20,
    "test_sequential_mlp": 1,
    "test_shared_experts": 3,
    "test_routers": 7,
    "test_aux_loss": 0,  # asks routers alone; its layers are built with the dispatcher
}
"""Calls of ``MoELayer.forward`` in each file that there are at least in cases that pass."""

NUM_RANKS = {"test_aux_loss": 8}
"""All cases of a file want as many; elsewhere 4 are enough for the cases that call a layer."""

CHANGES = (
    (r"hidden_size=12\b", "hidden_size=64"),
    (r"Container\(\n", "Container(\n            hidden_size=64,\n"),
    # Numbers of parameters, as the tests count them.
    (r"\b12 \* 4\b", "64 * 4"),
    (r"\b3480\b", str(2 * (64 * 512 + 256 * 64) + 2 * 64)),
    (r"\b1152\b", str(64 * 64 + 32 * 64)),
    (r"\+ 12  #", "+ 64  #"),
    (r"\.device\.type == 'cuda'", ".device == torch.empty(0, device='cuda').device"),
)


def changed(source: Path, directory: Path) -> Path:
    """A copy of a test file with the changes."""
    text = source.read_text()
    for pattern, replacement in CHANGES:
        text = re.sub(pattern, replacement, text)
    copy = directory / source.name
    copy.write_text(text)
    return copy


def run_cases(
    dispatcher: str, file: Path, num_ranks: int, megatron_lm: Path, directory: Path
) -> dict[str, list[Case]]:
    """What every rank saw of each case."""
    reports = directory / dispatcher
    reports.mkdir()
    program = Path(__file__).with_name("nvidia_cases.py")
    # Every layer is one of the dispatcher: cases of another name would be the same again.
    arguments = [dispatcher, str(reports), str(file), "-k", "not allgather"]
    torchrun(
        megatron_lm,
        directory,
        *(str(program), *arguments),
        num_ranks=num_ranks,
        timeout_s=TIMEOUT_S,
    )
    of_ranks: list[dict[str, Any]] = [
        json.loads((reports / f"{rank}.json").read_text()) for rank in range(num_ranks)
    ]
    return {name: [Case(**cases[name]) for cases in of_ranks] for name in of_ranks[0]}


@pytest.mark.parametrize("name", FEWEST_FORWARDS)
def test_cases_that_pass_with_alltoall_pass(name: str, megatron_lm: Path, tmp_path: Path) -> None:
    num_ranks = NUM_RANKS.get(name, 4)
    if num_ranks > max(4, os.cpu_count() or 1):
        pytest.skip(f"{num_ranks} ranks want as many cores, found {os.cpu_count()}")
    file = changed(megatron_lm / FOLDER / f"{name}.py", tmp_path)
    stock, fused = (
        run_cases(dispatcher, file, num_ranks, megatron_lm, tmp_path)
        for dispatcher in ("alltoall", "flashmoe")
    )
    assert fused.keys() == stock.keys()
    forwards = 0
    for case, on_ranks in stock.items():
        if any(one.outcome != "passed" for one in on_ranks):
            continue
        for rank, (want, got) in enumerate(zip(on_ranks, fused[case], strict=True)):
            assert got.outcome == "passed", f"{case} on rank {rank}: {got.reason}"
            # Every call of a layer went through the fused experts.
            assert got.forwards == got.fused == want.forwards, case
            assert want.fused == 0, case
            forwards += got.forwards if rank == 0 else 0
    assert forwards >= FEWEST_FORWARDS[name]
