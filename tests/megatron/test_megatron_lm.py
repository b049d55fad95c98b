"""Megatron-LM's stock training script, from a checkout, with flashmoe and with alltoall."""

import re
import shlex
from pathlib import Path

import pytest

from flashmoe_megatron.measured.fit import write_fit
from tests.distributed import PATIENCE_S
from tests.fits import make_fit
from tests.megatron.stock_script import MODEL, SEQUENCE_PARALLEL_BLOCK, torchrun

pytestmark = pytest.mark.timeout(4 * PATIENCE_S)

ITERATIONS = 3

LAYOUTS: dict[str, tuple[int, str]] = {
    "expert": (2, ""),
    "multi_token_prediction": (2, "--mtp-num-layers 1"),
    "pipeline_with_virtual_stages": (
        4,
        "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "tensor_with_sequence": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
        "--spec block submodules",
    ),
}
"""Ranks, and the flags that differ from or follow the model's."""


def train(
    megatron_lm: Path, directory: Path, dispatcher: str, flags: str = "", num_ranks: int = 2
) -> str:
    """What the script says."""
    script = str(megatron_lm / "pretrain_gpt.py")
    return torchrun(
        megatron_lm,
        directory,
        *("-m", "flashmoe_megatron.run", script, *MODEL, *shlex.split(flags)),
        *("--moe-token-dispatcher-type", dispatcher),
        num_ranks=num_ranks,
    )


def losses(output: str, name: str = "lm loss") -> list[float]:
    return [float(loss) for loss in re.findall(rf"{name}: (\S+)", output)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_script_trains_as_with_alltoall(layout: str, megatron_lm: Path, tmp_path: Path) -> None:
    num_ranks, flags = LAYOUTS[layout]
    (tmp_path / "block.py").write_text(SEQUENCE_PARALLEL_BLOCK)
    stock, fused = (
        train(megatron_lm, tmp_path, dispatcher, flags, num_ranks)
        for dispatcher in ("alltoall", "flashmoe")
    )
    assert "flashmoe: backend reference, 4 experts on 2 ranks" in fused
    assert "flashmoe: backend" not in stock
    names = ["lm loss", *(["mtp_1 loss"] if layout == "multi_token_prediction" else [])]
    for name in names:
        assert len(losses(fused, name)) == ITERATIONS
        # Megatron prints seven digits.
        assert losses(fused, name) == pytest.approx(losses(stock, name), rel=2e-6)


@pytest.mark.parametrize(("before", "after"), [("alltoall", "flashmoe"), ("flashmoe", "alltoall")])
def test_a_checkpoint_goes_on_with_the_other_dispatcher(
    before: str, after: str, megatron_lm: Path, tmp_path: Path
) -> None:
    """The optimizer's state is left out, which stock Megatron cannot load on a CPU."""
    folder = tmp_path / "checkpoint"
    train(megatron_lm, tmp_path, before, f"--train-iters 2 --save {folder} --save-interval 2")
    resume = f"--train-iters 4 --load {folder} --no-load-optim"
    unchanged, crossed = (
        losses(train(megatron_lm, tmp_path, dispatcher, resume)) for dispatcher in (before, after)
    )
    assert len(crossed) == 2
    assert crossed == pytest.approx(unchanged, rel=2e-6)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        # Its own size would leave one bucket of each kind: all else, and experts.
        ("", [20864, 16768, 12352, 24576, 24576]),
        ("--ddp-bucket-size 30000", [37632, 12352, 36864, 12288]),
        ("--ddp-num-buckets 3", [37632, 12352, 36864, 12288]),
    ],
)
def test_the_script_cuts_buckets_that_fit(
    flags: str, wanted: list[int], megatron_lm: Path, tmp_path: Path
) -> None:
    fit = tmp_path / "fit.json"
    write_fit(fit, make_fit(product=(1e-6, 1e-10), copy=(1e-6, 1e-10)))
    slices = f"--flashmoe-slice-gradients --flashmoe-degree-fit {fit} --logging-level 20"
    said = train(megatron_lm, tmp_path, "flashmoe", f"{slices} {flags} --train-iters 1")
    found = re.findall(r"Params for bucket \d+ \((\d+) elements", said)
    assert [int(numel) for numel in found] == wanted


def test_refusal_reaches_the_user(megatron_lm: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ConfigError: --glu-linear-offset .*leave it at 0"):
        train(megatron_lm, tmp_path, "flashmoe", "--glu-linear-offset 1.0")
