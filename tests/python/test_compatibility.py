"""The compatibility page: its tests exist, and its rows are those of the list it is made from."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "compatibility"))

import features  # noqa: E402 (needs the path)
import probes  # noqa: E402

ROWS = [feature for area in features.FEATURES.values() for feature in area]


@cache
def functions_of(file: Path) -> set[str]:
    """The test functions of a file, read without importing it."""
    body = ast.parse(file.read_text()).body
    return {
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }


@pytest.mark.parametrize("feature", ROWS, ids=lambda feature: feature.name)
def test_every_feature_has_tests_that_exist(feature: features.Feature) -> None:
    assert feature.tests
    for test in feature.tests:
        file, name = test.split("::")
        assert (ROOT / file).exists(), f"{feature.name}: there is no {file}"
        assert name in functions_of(ROOT / file), f"{feature.name}: {file} has no {name}"


def test_the_page_has_the_rows_of_the_list() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    part = page.split("## PyTorch's own tests")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in part.splitlines()
        if line.startswith("| ") and not line.startswith("| feature ")
    ]
    shown = {row[0]: set(re.findall(r"`(\w+)`", row[4])) for row in cells}
    assert list(shown) == [feature.name for feature in ROWS], "make the page anew: see table.py"
    for feature in ROWS:
        names = {test.split("::")[1].removeprefix("test_") for test in feature.tests}
        assert shown[feature.name] == names, f"{feature.name}: make the page anew: see table.py"
    assert {row[3] for row in cells} <= {"yes", "not run"}


def test_each_probe_is_of_a_feature() -> None:
    assert set(probes.PROBES) <= {feature.gloo for feature in ROWS}
    words = {"yes", "no", "–", "yes, of most collectives"}
    assert {feature.gloo for feature in ROWS} <= set(probes.PROBES) | words
    assert {feature.nccl for feature in ROWS} <= words


@pytest.mark.parametrize("name", ["all_reduce", "killed_rank_is_named"])
def test_probes_work_with_geomesh(name: str) -> None:
    command = [sys.executable, str(ROOT / "tests/compatibility/probes.py"), "geomesh", name]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stdout + run.stderr
