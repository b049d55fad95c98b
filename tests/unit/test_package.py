"""The package's face: its public names, and what importing it costs."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import flashmoe_megatron
from flashmoe_megatron import errors
from flashmoe_megatron.errors import MissingError
from flashmoe_megatron.releases import DEEPSPEED


def test_public_names_resolve():
    for name in flashmoe_megatron.__all__:
        assert getattr(flashmoe_megatron, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = flashmoe_megatron.nonsense


def test_dir_shows_the_public_names():
    assert dir(flashmoe_megatron) == flashmoe_megatron.__all__
    assert {"MoEConfig", "FlashMoELayer", "moe_forward", "__version__"} <= set(
        flashmoe_megatron.__all__
    )


def test_every_error_is_public():
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes <= set(flashmoe_megatron.__all__)


def test_import_and_planning_need_no_torch():
    code = (
        "import sys; from flashmoe_megatron import MoEConfig, plan_capacity; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


WITHOUT = """
import sys

class Hider:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {framework!r}:
            raise ModuleNotFoundError("it is hidden", name={framework!r})

sys.meta_path.insert(0, Hider())
import flashmoe_megatron.{module}
"""


def run_code(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words] if words else [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("module", "framework", "name"),
    [
        ("automodel", "nemo_automodel", "NeMo Automodel"),
        ("torchtitan", "torchtitan", "torchtitan"),
        ("transformers", "transformers", "transformers"),
    ],
)
def test_a_missing_framework_names_its_extra(module: str, framework: str, name: str):
    done = run_code(WITHOUT.format(framework=framework, module=module))
    sentence = f'{name} is not installed: pip install "flashmoe-megatron[{module}]"'
    assert done.stderr.endswith(f"MissingError: {sentence}\n"), done.stderr


def test_a_missing_deepspeed_names_its_extra(monkeypatch: pytest.MonkeyPatch):
    from flashmoe_megatron.deepspeed import initialize, install

    monkeypatch.setitem(sys.modules, "deepspeed", None)
    for call in (initialize, install):
        with pytest.raises(MissingError, match=r'pip install "flashmoe-megatron\[deepspeed\]"'):
            call()


def test_another_missing_module_keeps_its_error():
    with pytest.raises(ModuleNotFoundError, match="no_such_module") as caught, DEEPSPEED.needed():
        import no_such_module  # noqa: F401
    assert not isinstance(caught.value, MissingError)


@pytest.mark.parametrize("door", ["FlashMoELayer", "select_backend", "moe_apply"])
def test_a_torch_that_is_too_old_is_refused_at_the_import(door: str):
    code = f"import torch; torch.__version__ = '2.7.0'; from flashmoe_megatron import {door}"
    sentence = "torch 2.7.0 is older than the tested releases 2.11 and newer; install one of these"
    assert run_code(code).stderr.endswith(f"ConfigError: {sentence}\n")


@pytest.mark.parametrize("module", ["automodel", "deepspeed", "torchtitan", "transformers"])
@pytest.mark.parametrize("words", [[], ["--help"]], ids=["plain", "help"])
def test_a_door_says_what_it_is(module: str, words: list[str]):
    done = run_code("", "-m", f"flashmoe_megatron.{module}", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: import flashmoe_megatron.{module}\n")
    assert "A training program imports this module" in done.stdout


def test_an_older_python_is_named_when_the_package_is_built(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    monkeypatch.setattr(sys, "version", "3.9.18 (main)")
    with pytest.raises(
        SystemExit, match=r"^flashmoe-megatron needs Python 3.10 or newer, got 3.9.18$"
    ):
        runpy.run_path(str(Path(__file__).parents[2] / "setup.py"))
