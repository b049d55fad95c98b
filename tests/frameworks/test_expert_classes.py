"""Every expert class of the newest release of transformers is computed or refused, as listed."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.expert_classes import LIST
from tests.frameworks.test_transformers import FOLDERS
from tests.programs import ROOT, run_python

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def test_every_class_does_what_the_list_says(with_torch: Path) -> None:
    """The program compares outputs and gradients with the classes' own."""
    folder = ROOT / "build" / f"transformers-{FOLDERS[-1]}"
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing; tools/setup_env.sh makes it")
    where: dict[str, Any] = {"before": [folder], "forked_from": with_torch}
    ran = run_python("-m", "tests.frameworks.expert_classes", **where, HF_HUB_OFFLINE="1")
    found: dict[str, Any] = json.loads(ran.stdout)
    listed: dict[str, Any] = json.loads(LIST.read_text())
    print(f"{len(found['computed'])} classes computed, {len(found['refused'])} refused")
    assert found["release"] == FOLDERS[-1]
    known = {**listed["computed"], **listed["refused"]}
    new = {**found["computed"], **found["refused"]}
    assert sorted(new.keys() - known.keys()) == [], (
        "classes that are in neither list; python -m tests.frameworks.expert_classes --write"
    )
    assert found == listed
