"""The stock training script and NVIDIA's own tests, from a checkout of Megatron-LM."""

import re
from pathlib import Path

import pytest

from tests.megatron.stock_script import MODEL, TIMEOUT_S, torchrun

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S + 60)


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", output)]


def test_stock_script_trains_with_flashmoe(megatron_lm: Path, tmp_path: Path) -> None:
    script = str(megatron_lm / "pretrain_gpt.py")
    outputs = {
        dispatcher: torchrun(
            megatron_lm,
            tmp_path,
            *("-m", "flashmoe_megatron.run", script, *MODEL),
            *("--moe-token-dispatcher-type", dispatcher),
        )
        for dispatcher in ("alltoall", "flashmoe")
    }
    assert "flashmoe: backend reference, 4 experts on 2 ranks" in outputs["flashmoe"]
    assert "flashmoe: backend" not in outputs["alltoall"]
    assert len(losses(outputs["flashmoe"])) == 3
    # Megatron prints seven digits.
    assert losses(outputs["flashmoe"]) == pytest.approx(losses(outputs["alltoall"]), rel=2e-6)


def test_refusal_reaches_the_user_of_the_stock_script(megatron_lm: Path, tmp_path: Path) -> None:
    arguments = ["-m", "flashmoe_megatron.run", str(megatron_lm / "pretrain_gpt.py"), *MODEL]
    arguments += ["--moe-token-dispatcher-type", "flashmoe", "--glu-linear-offset", "1.0"]
    with pytest.raises(AssertionError, match=r"ConfigError: --glu-linear-offset .*leave it at 0"):
        torchrun(megatron_lm, tmp_path, *arguments)


@pytest.mark.parametrize(("tensor_size", "num_tests"), [(1, 3), (2, 1)])
def test_nvidia_dispatcher_tests_pass(
    tensor_size: int, num_tests: int, megatron_lm: Path, tmp_path: Path
) -> None:
    program = Path(__file__).with_name("nvidia_dispatcher.py")
    output = torchrun(megatron_lm, tmp_path, str(program), "flashmoe", "2", str(tensor_size))
    passed = re.findall(r"PASSED (\w+) (\w+)", output)
    assert len(passed) == num_tests
    assert {dispatcher for _, dispatcher in passed} == {"FlashMoETokenDispatcher"}
