"""Runs PyTorch's own DistributedTest against a backend and writes what came of each test.

The tests come from the installed wheel (``torch.testing._internal.distributed.distributed_test``;
it needs the package ``expecttest``) and are rewritten in memory only. Processes are forked.

    python tests/compatibility/torch_suite.py --backend geomesh --world 3 --out FILE

Many of these tests are skipped for any backend whose name PyTorch does not know. By default the
names are widened: what Gloo runs, the backend runs, and the all-to-all tests that PyTorch keeps for
MPI run too. ``--names own`` leaves the module as it is.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import logging
import os
import re
import sys
import tempfile
import time
import traceback
import types
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

MODULE = "torch.testing._internal.distributed.distributed_test"
CPU_CLASSES = re.compile(r"^Test(?!DistBackend)")  # of the module, besides DistributedTest


def set_environment(backend: str, world: int, folder: str, limit: int) -> None:
    """Set what the module reads when it is imported."""
    (Path(folder) / "barrier").mkdir()
    os.environ.update(
        BACKEND=backend,
        WORLD_SIZE=str(world),
        TEMP_DIR=folder,
        INIT_METHOD=f"file://{folder}/init",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(limit),
        OMP_NUM_THREADS="1",
        PYTORCH_PRINT_REPRO_ON_FAILURE="0",
        CUDA_VISIBLE_DEVICES="",
    )


def widen(source: str, backend: str) -> str:
    """Let a backend run what the module keeps for Gloo or MPI, by name.

    Parameters
    ----------
    source
        The module's text.
    backend
        What takes Gloo's place; with ``"gloo"`` only MPI's tests are opened.
    """
    source = source.replace('BACKEND != "mpi"', "False").replace('BACKEND == "mpi"', "False")
    if backend != "gloo":
        source = source.replace('"gloo"', f'"{backend}"')
        source = source.replace("dist.Backend.GLOO", f'dist.Backend("{backend}")')
        source = source.replace("dist.is_gloo_available()", "True")
    return source


def load(names: str, backend: str) -> types.ModuleType:
    """Load PyTorch's module, as it is or with its knowledge of names widened."""
    from torch.testing._internal import common_distributed

    spec = importlib.util.find_spec(MODULE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"This PyTorch has no {MODULE}.")
    source = Path(spec.origin).read_text()
    if names == "widened":
        source = widen(source, backend)
        for feature in ("gpu", "cuda", "ddp", "subgroup"):
            common_distributed.DistTestCases.backend_feature[feature].add(backend)
        if int(os.environ["WORLD_SIZE"]) > 2:  # it asks for eight; the tests use ranks 0 to 2
            common_distributed.skip_if_small_worldsize = lambda function: function
    module = types.ModuleType(MODULE)
    module.__spec__ = importlib.machinery.ModuleSpec(MODULE, None, origin=spec.origin)
    module.__file__ = spec.origin
    sys.modules[MODULE] = module
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def forked(module: Any) -> type[unittest.TestCase]:
    """Return DistributedTest as a class whose ranks are forks of this process."""
    import torch

    class Forked(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Forked


def last_line(error: str) -> str:
    """Return the line of a traceback that says what happened."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    said = [
        line
        for line in lines
        if re.match(r"^[\w.]*(Error|Exception|Interrupt|SkipTest)\b", line)
        and not line.startswith("RuntimeError: Process")
    ]
    return (said or lines or [""])[0 if said else -1][:400]


class Outcomes(unittest.TestResult):
    """Keeps one word and one line a test, and prints them as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.tests: dict[str, dict[str, str]] = {}
        self.texts: dict[str, str] = {}  # whole errors
        self._start = 0.0

    def name(self, test: unittest.TestCase) -> str:
        """Return what the test is called in the results."""
        name = test.id().split(".")[-1]
        return name if type(test).__name__ == "Forked" else f"{type(test).__name__}.{name}"

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self._start = time.monotonic()

    def _set(self, test: unittest.TestCase, outcome: str, reason: str = "") -> None:
        name = self.name(test)
        self.tests[name] = {"outcome": outcome, "reason": reason}
        seconds = time.monotonic() - self._start
        print(f"{outcome:8}{seconds:6.1f} s  {name}  {reason}", file=sys.stderr, flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._set(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._set(test, "skipped", reason)

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802
        self.addError(test, err)

    def addError(self, test: Any, err: Any) -> None:  # noqa: N802
        text = "".join(traceback.format_exception(*err))
        self.texts[self.name(test)] = text
        self._set(test, "failed", last_line(text))
        log = os.environ.get("TORCH_SUITE_LOG")
        if log:
            with open(log, "a") as file:
                file.write(f"=== {test.id()}\n{text}\n")


def cases(module: types.ModuleType, pattern: str) -> unittest.TestSuite:
    """Return the module's tests whose names match."""
    suite = unittest.TestSuite()
    loader = unittest.TestLoader()
    classes = [forked(module)] + [
        value
        for name, value in vars(module).items()
        if CPU_CLASSES.match(name)
        and isinstance(value, type)
        and issubclass(value, unittest.TestCase)
        and value.__module__ == MODULE
    ]
    for case in classes:
        for name in loader.getTestCaseNames(case):
            if re.search(pattern, name):
                suite.addTest(case(name))
    return suite


def main() -> int:
    """Run the suite and write the JSON file; 0 unless nothing ran."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", required=True)
    parser.add_argument("--world", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--names", choices=("widened", "own"), default="widened")
    parser.add_argument("-k", "--match", default="", help="only tests whose names match")
    parser.add_argument("--limit", type=int, default=60, help="seconds a test may take")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        set_environment(options.backend, options.world, folder, options.limit)
        import torch
        import torch.testing._internal.common_distributed

        logging.getLogger("torch.testing._internal.common_distributed").setLevel(logging.CRITICAL)
        suite = cases(load(options.names, options.backend), options.match)
        outcomes = Outcomes()
        suite.run(outcomes)
    counts = Counter(test["outcome"] for test in outcomes.tests.values())
    result = {
        "suite": "DistributedTest",
        "torch": torch.__version__,
        "backend": options.backend,
        "world": options.world,
        "names": options.names,
        "counts": dict(sorted(counts.items())),
        "tests": dict(sorted(outcomes.tests.items())),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(options.backend, options.world, options.names, dict(counts))
    return 0 if outcomes.tests else 1


if __name__ == "__main__":
    sys.exit(main())
