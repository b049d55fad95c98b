"""DeepSpeed's own tests of experts' gradients, checkpoints and AutoEP, on the fused layers.

They come from a checkout, named by an environment variable, and are copied for three changes:
widths below 64 become 64, experts get the activation that makes them an FFN, and gradients may be
off by 1e-5, which DeepSpeed's own layers need too at that width. The processes that the
tests start import ``sitecustomize``, which enables flashmoe in every ``deepspeed.initialize``.
"""

import importlib.metadata
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.deepspeed.harness import FUSED
from tests.programs import run_python

CHECKOUT = "FLASHMOE_DEEPSPEED"
"""Environment variable that names a checkout of DeepSpeed, of the installed release."""


SITECUSTOMIZE = """
import json
import os

from flashmoe_megatron.adapters.patch import when_imported


def patch(deepspeed):
    from flashmoe_megatron import deepspeed as door

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    original = deepspeed.initialize

    def initialize(*args, **kwargs):
        config = {**kwargs["config"], "flashmoe": {"enabled": True, "fallback": "warn"}}
        outcome = original(*args, **{**kwargs, "config": config})
        report = door.attach(outcome[0])
        with open(os.environ["FLASHMOE_REPORT"], "a") as file:
            file.write(json.dumps(report) + "\\n")
        return outcome

    deepspeed.initialize = initialize


when_imported("deepspeed", patch)
"""

EXPERT = '''

class Expert(torch.nn.Sequential):
    """Two linear layers, under the names that the tests know, with an activation between."""

    def forward(self, x):
        return self[1](torch.nn.functional.gelu(self[0](x)))

'''

SELECTED = {
    "expert gradients": ["unit/v1/moe/test_moe.py::TestExpertWeightGradWithZero"],
    "checkpoints": ["unit/checkpoint/test_moe_checkpoint.py"],
    "autoep parity": ["unit/v1/moe/test_autoep_grad_parity.py"],
    "autoep training": [
        "unit/v1/moe/test_autoep_integration.py::TestAutoEPOnly",
        "unit/v1/moe/test_autoep_integration.py::TestAutoEPZero3ReplicaGroups",
        "--deselect=unit/v1/moe/test_autoep_integration.py"
        "::TestAutoEPOnly::test_zero3_native_moe_rejected_2gpu",
    ],
}


def release_problem(checkout: Path) -> str | None:
    """What is wrong with a checkout whose tests are to run on the installed DeepSpeed."""
    theirs = (checkout / "version.txt").read_text().strip()
    installed = importlib.metadata.version("deepspeed")
    if theirs == installed.split("+")[0]:
        return None
    return (
        f"{CHECKOUT}={checkout} is DeepSpeed {theirs}, installed is {installed}: wanted the tests "
        f"of what is installed, check out v{installed.split('+')[0]}"
    )


def test_a_checkout_of_another_release_is_refused(tmp_path: Path) -> None:
    installed = importlib.metadata.version("deepspeed").split("+")[0]
    (tmp_path / "version.txt").write_text("0.9.1\n")
    problem = release_problem(tmp_path)
    assert problem is not None
    assert f"is DeepSpeed 0.9.1, installed is {installed}" in problem
    assert f"check out v{installed}" in problem
    (tmp_path / "version.txt").write_text(f"{installed}\n")
    assert release_problem(tmp_path) is None


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A changed copy of the checkout's tests."""
    named = os.environ.get(CHECKOUT)
    if not named:
        pytest.skip(f"{CHECKOUT} names no checkout of DeepSpeed")
    source = Path(named).resolve() / "tests"
    if not (source / "unit" / "simple_model.py").is_file():
        pytest.fail(f"{CHECKOUT}={named}: wanted a checkout with tests/unit/simple_model.py")
    problem = release_problem(source.parent)
    if problem is not None:
        pytest.fail(problem)
    copy = tmp_path_factory.mktemp("deepspeed") / "tests"
    shutil.copytree(source, copy)
    models = copy / "unit" / "simple_model.py"
    text, changes = re.subn(
        r"expert = torch\.nn\.Sequential\(", "expert = Expert(", models.read_text()
    )
    assert changes
    models.write_text(text.replace("\nclass SimpleModel(", f"{EXPERT}\nclass SimpleModel(", 1))
    for name in ("unit/v1/moe/test_moe.py", "unit/checkpoint/test_moe_checkpoint.py"):
        path = copy / name
        text = re.sub(r"hidden_dim = \d+", "hidden_dim = 64", path.read_text())
        # Half precision is bfloat16 here; processors do not have the other.
        text = text.replace("torch.float16", "torch.bfloat16")
        text = text.replace("atol=0, rtol=1e-4", "atol=1e-5, rtol=1e-4")
        text = re.sub(r'"fp16": \{[^}]*\}', '"bf16": {"enabled": True}', text)
        path.write_text(text)
    (copy / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return copy


@pytest.mark.parametrize("selection", SELECTED)
def test_deepspeeds_own(selection: str, upstream: Path, tmp_path: Path) -> None:
    report = tmp_path / "report"
    run_python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", *SELECTED[selection]),
        before=[upstream],
        folder=upstream,
        DS_ACCELERATOR="cpu",
        LOCAL_SIZE="4",  # as many devices, for tests that count them
        PYTHONHASHSEED="0",
        FLASHMOE_REPORT=str(report),
    )
    outcomes = [
        outcome for line in report.read_text().splitlines() for outcome in json.loads(line).values()
    ]
    assert outcomes
    assert set(outcomes) == {FUSED}
