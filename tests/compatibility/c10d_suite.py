"""Runs test files of PyTorch's repository (test/distributed) with a backend in Gloo's place.

The wheel does not carry these files: give the folder of a PyTorch source tree. They are rewritten
in memory only, and their processes are forked.

    python tests/compatibility/c10d_suite.py --folder PYTORCH/test/distributed --backend geomesh \\
        --out FILE

Some tests compare the text of Gloo's own error messages. They count as "worded" where an error of
the right kind comes in other words: each failure is tried once more without its text.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.abc
import importlib.util
import json
import logging
import os
import re
import sys
import tempfile
import types
import unittest
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch_suite import Outcomes

FILES = (
    "test_c10d_gloo",
    "test_c10d_common",
    "test_c10d_spawn_gloo",
    "test_c10d_object_collectives",
    "test_collective_utils",
    "test_pg_wrapper",
    "test_device_mesh",
    "_tensor/test_redistribute",
    "_tensor/test_init",
    "_tensor/test_embedding_ops",
    "algorithms/test_join",
    "optim/test_zero_redundancy_optimizer",
    "checkpoint/test_file_system_checkpoint_cpu",
    "checkpoint/test_state_dict_utils",
    "checkpoint/test_utils",
)
MOVED = (  # since these files were written
    (r"^from torch.distributed._spmd.*$", ""),  # gone; only CompilerTest needs it
    (r"\btorch\.distributed\._tensor(?=[. ])", "torch.distributed.tensor"),
)
# What only concerns Gloo's own devices or other libraries, or has left PyTorch.
LEFT_OUT = re.compile(
    r"CompilerTest|LocalRankTest|NCCL|Nccl|cuda|_gpu|ExtensionTest|ReduceOpTest|round_robin"
)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the folder's files with the backend's name in Gloo's place."""

    def __init__(self, folder: Path, files: list[str], backend: str) -> None:
        paths = [folder / f"{file}.py" for file in (*files, "test_c10d_common", "test_c10d_spawn")]
        self.files = {path.stem: path for path in paths if path.exists()}
        self.backend = backend

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self.files:
            return None
        return importlib.util.spec_from_file_location(name, self.files[name], loader=self)

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__file__ is not None
        source = Path(module.__file__).read_text()
        for old, new in MOVED:
            source = re.sub(old, new, source, flags=re.M)
        if self.backend != "gloo":
            source = source.replace('"gloo"', f'"{self.backend}"')
            # Looks at the name only, to skip; the group is made by init_pg.
            source = source.replace(
                f'rpc=False, backend="{self.backend}"', 'rpc=False, backend="gloo"'
            )
            source = source.replace("dist.Backend.GLOO", f'"{self.backend}"')
            source = source.replace("c10d.ProcessGroupGloo", "c10d.ProcessGroupInGloosPlace")
            source = source.replace("backend.create_device(interface=LOOPBACK)", "pass")
            source = source.replace("pg_options=self.opts()", "")  # Gloo's own
            source = source.replace("BackendType.GLOO", "BackendType.CUSTOM")
        exec(compile(source, module.__file__, "exec", dont_inherit=True), module.__dict__)


def in_gloos_place(backend: str) -> type:
    """Return a class that is called as ProcessGroupGloo and makes the backend's group."""
    import torch.distributed as dist

    class Place:
        _Options = types.SimpleNamespace
        Options = types.SimpleNamespace

        def __new__(cls, store: Any, rank: int, size: int, opts: Any = None, timeout: Any = None):
            given = dist.distributed_c10d._DistributedBackendOptions()
            given.store, given.group_rank, given.group_size = store, rank, size
            seconds = getattr(opts, "_timeout", None) or timeout or 50.0
            if not isinstance(seconds, timedelta):
                seconds = timedelta(seconds=seconds)
            given.timeout, given.group_id = seconds, "0"
            given.global_ranks_in_group = list(range(size))
            return dist.Backend._plugins[backend.upper()].creator_fn(given, None)

    return Place


def fork_instead_of_spawn() -> None:
    """Start the ranks of all test cases as forks."""
    import torch
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    def start(self: Any) -> None:
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    MultiProcessTestCase._spawn_processes = start
    get_context = torch.multiprocessing.get_context
    torch.multiprocessing.get_context = lambda method=None: get_context("fork")


def use_in_helpers(backend: str) -> None:
    """Let PyTorch's own test cases make groups of the backend, whose name they do not know."""
    import torch.distributed as dist
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed._shard.sharded_tensor import ShardedTensorTestBase
    from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase

    def init_pg(self: Any, *args: Any, **words: Any) -> None:
        dist.init_process_group(
            backend,
            world_size=self.world_size,
            rank=self.rank,
            init_method=f"file://{self.file_name}",
        )

    for case in (ShardedTensorTestBase, DTensorTestBase):
        case.init_pg = init_pg
    DTensorTestBase.backend = property(lambda self: backend)
    common_distributed.skip_if_rocm = lambda function: function  # gone since


def without_texts() -> None:
    """Let assertRaisesRegex take any text."""
    from torch.testing._internal.common_utils import TestCase

    def raises(self: Any, kind: Any, pattern: Any, *args: Any, **words: Any) -> Any:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        take = (*kinds, RuntimeError)
        return unittest.TestCase.assertRaises(self, take, *args, **words)  # noqa: PT027

    for case in (TestCase, unittest.TestCase):
        case.assertRaisesRegex = raises  # type: ignore[method-assign]


def cases(files: list[str], pattern: str) -> unittest.TestSuite:
    """Return the tests of the files whose names match and that are not left out."""
    suite = unittest.TestSuite()
    loader = unittest.TestLoader()
    for file in (Path(name).name for name in files):
        try:
            module = importlib.import_module(file)
        except (Exception, SystemExit) as error:
            print(f"{file} can't be imported here: {error}", file=sys.stderr)
            continue
        for case in vars(module).values():
            if not (isinstance(case, type) and issubclass(case, unittest.TestCase)):
                continue
            if case.__module__ != file:
                continue
            for test in loader.getTestCaseNames(case):
                name = f"{file}.{case.__name__}.{test}"
                if re.search(pattern, name) and not LEFT_OUT.search(name):
                    suite.addTest(case(test))
    return suite


class Named(Outcomes):
    """Outcomes by file, class and test."""

    def name(self, test: unittest.TestCase) -> str:
        return test.id()


def run(suite: unittest.TestSuite, outcomes: Named) -> None:
    """Run each test; one that uses this process gets a fork of it."""
    import torch
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    for test in suite:
        assert isinstance(test, unittest.TestCase)
        if isinstance(test, MultiProcessTestCase):
            test.run(outcomes)
            continue
        ours, theirs = torch.multiprocessing.Pipe()

        def alone(test: unittest.TestCase = test, pipe: Any = theirs) -> None:
            inner = Named()
            test.run(inner)
            pipe.send(inner.tests)
            os._exit(0)  # no destructor of a group that the test left behind

        process = torch.multiprocessing.get_context("fork").Process(target=alone)
        process.start()
        theirs.close()
        with contextlib.suppress(EOFError):
            outcomes.tests.update(ours.recv() if ours.poll(60) else {})
        outcomes.tests.setdefault(test.id(), {"outcome": "failed", "reason": "died or hung"})
        process.kill()
        process.join()


def main() -> int:
    """Run the files and write the JSON file; 0 unless nothing ran."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--files", nargs="*", default=FILES)
    parser.add_argument("-k", "--match", default="", help="only tests whose names match")
    parser.add_argument("--limit", type=int, default=60, help="seconds a test may take")
    options = parser.parse_args()
    os.environ.update(
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(options.limit),
        PYTORCH_PRINT_REPRO_ON_FAILURE="0",
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
        TEMP_DIR=tempfile.mkdtemp(),
        BACKEND=options.backend,
    )
    import torch
    import torch.distributed as dist
    import torch.testing._internal.common_distributed

    logging.getLogger("torch.testing._internal.common_distributed").setLevel(logging.CRITICAL)
    dist.ProcessGroupInGloosPlace = in_gloos_place(options.backend)  # type: ignore[attr-defined]
    fork_instead_of_spawn()
    use_in_helpers(options.backend)
    sys.meta_path.insert(0, Finder(options.folder, list(options.files), options.backend))

    outcomes = Named()
    run(cases(list(options.files), options.match), outcomes)
    failed = [name for name, text in outcomes.texts.items() if '" does not match "' in text]
    if failed:
        without_texts()
        again = Named()
        names = "|".join(re.escape(name) + "$" for name in failed)
        run(cases(list(options.files), names), again)
        for name in failed:
            if again.tests.get(name, {}).get("outcome") == "passed":
                outcomes.tests[name]["outcome"] = "worded"
    counts = Counter(test["outcome"] for test in outcomes.tests.values())
    version = options.folder.parents[1] / "version.txt"
    result = {
        "suite": "test/distributed",
        "files": list(options.files),
        "files_version": version.read_text().strip() if version.exists() else "",
        "torch": torch.__version__,
        "backend": options.backend,
        "world": 0,  # the tests' own, 1 to 4
        "names": "widened",
        "counts": dict(sorted(counts.items())),
        "tests": dict(sorted(outcomes.tests.items())),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(options.backend, dict(counts))
    return 0 if outcomes.tests else 1


if __name__ == "__main__":
    sys.exit(main())
