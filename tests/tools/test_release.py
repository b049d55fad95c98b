"""A release: its notes, its wheel and the state of the checkout."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from tools.release import __main__ as release
from tools.release import environments, wheel
from tools.release.notes import notes_of
from tools.release.wheel import LIBRARY, ReleaseError, check, make_wheel

CHANGELOG = """# Changelog

## [Unreleased]
{waiting}
## [0.2.0] - 2026-11-28

### Added

- A thing.

## [0.1.0] - 2026-11-24

- The first.
"""


def test_notes_are_those_of_the_version(tmp_path: Path) -> None:
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(CHANGELOG.format(waiting=""))
    assert notes_of("0.2.0", changelog) == "### Added\n\n- A thing."
    assert notes_of("0.1.0", changelog) == "- The first."
    with pytest.raises(ReleaseError, match=r"no dated entry with text for version 0\.3\.0"):
        notes_of("0.3.0", changelog)
    changelog.write_text(CHANGELOG.format(waiting="\n- Not yet.\n"))
    with pytest.raises(ReleaseError, match="changes under Unreleased"):
        notes_of("0.2.0", changelog)


def packed(path: Path, *, names: tuple[str, ...] = (LIBRARY,), size: int = 10) -> Path:
    with zipfile.ZipFile(path, "w") as opened:
        for name in names:
            opened.writestr(name, b"x" * size)
    return path


def test_a_wheel_that_would_run_without_the_kernel_is_no_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(packed(tmp_path / "a-1-py3-none-manylinux_2_34_x86_64.whl"))
    with pytest.raises(ReleaseError, match="would run without the kernel"):
        check(packed(tmp_path / "b-1-py3-none-linux_x86_64.whl", names=("a.py",)))
    with pytest.raises(ReleaseError, match="wanted a platform's tag"):
        check(packed(tmp_path / "c-1-py3-none-any.whl"))
    with pytest.raises(ReleaseError, match="public version"):
        check(packed(tmp_path / "d-1+nokernel-py3-none-linux_x86_64.whl"))
    monkeypatch.setattr(wheel, "MOST_MIB", 0.5)
    with pytest.raises(ReleaseError, match=r"has 1\.0 MiB, wanted at most 0\.5"):
        check(packed(tmp_path / "e-1-py3-none-linux_x86_64.whl", size=2**20))
    monkeypatch.setenv("FLASHMOE_SKIP_CUDA_BUILD", "1")
    with pytest.raises(ReleaseError, match="a release has the kernel"):
        make_wheel(tmp_path)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    monkeypatch.setattr(release, "ROOT", folder)
    for command in (
        ["init", "--quiet"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty", "-m1"],
        ["tag", "v1"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty", "-m2"],
    ):
        subprocess.run(["git", "-C", str(folder), *command], check=True)
    return folder


def test_a_release_is_of_a_commit(checkout: Path) -> None:
    release.check_tree("v2")
    with pytest.raises(ReleaseError, match="the tag v1 is of another commit"):
        release.check_tree("v1")
    (checkout / "new.py").touch()
    with pytest.raises(ReleaseError, match=r"has changes, wanted none: \?\? new\.py"):
        release.check_tree("v2")


def test_an_environment_that_fails_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    no_wheel = tmp_path / "none.whl"
    assert environments.main([str(no_wheel)]) == 2
    assert "is no file, wanted a wheel" in capsys.readouterr().err
    no_wheel.touch()
    assert environments.main([str(no_wheel), "--pythons", "2.9"]) == 1
    assert "not here\n0 of 1 environments are good" in capsys.readouterr().out
