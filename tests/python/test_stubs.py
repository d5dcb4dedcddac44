"""The typed stubs of the compiled module name what it has, no more and no less.

Types that users meet are checked by mypy; the keys of figures, which have no type, by hand.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks
from torch._C import _distributed_c10d as c10d

import torch_geomesh as gm
from torch_geomesh import _C

PACKAGE = Path(gm.__file__).parent


def public(names: object) -> set[str]:
    return {name for name in names if not name.startswith("_")}  # type: ignore[attr-defined]


def classes_of_the_stub() -> dict[str, ast.ClassDef]:
    stub = ast.parse((PACKAGE / "_C.pyi").read_text())
    return {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}


def told(node: ast.ClassDef) -> set[str]:
    return public(
        part.name if isinstance(part, ast.FunctionDef) else part.target.id  # type: ignore[union-attr]
        for part in node.body
        if isinstance(part, ast.FunctionDef | ast.AnnAssign)
    )


def test_stubs_name_what_the_module_has() -> None:
    stub = ast.parse((PACKAGE / "_C.pyi").read_text())
    functions = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    classes = classes_of_the_stub()
    assert functions | public(classes) == public(dir(_C))
    for name in public(classes) - {"TopologySpec"}:  # its fields are for the engine only
        assert told(classes[name]) == public(vars(getattr(_C, name))), name


def test_stubs_have_the_bases_that_the_classes_have() -> None:
    classes = classes_of_the_stub()
    known = {**vars(c10d), "_Work": c10d.Work}

    def bases(name: str) -> tuple[type, ...]:
        found: list[type] = []
        for base in map(ast.unparse, classes[name].bases):
            # A class of the stub alone stands for its own bases.
            found.extend(bases(base) if base in classes else [eval(base, known)])
        return tuple(found or [object])

    for name in public(classes):
        has = getattr(_C, name).__bases__
        assert bases(name) == (has if has[0].__module__ != "pybind11_builtins" else (object,)), name
    # What the stub alone has for c10d's backends, they have.
    assert told(classes["_Collectives"]) <= public(vars(c10d.Backend))


# What may be written with the backend's types, and, where an error is expected, what may not: if
# types were lost on the way (Any), mypy would complain that nothing is there to be ignored.
EXAMPLE = """
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Work

import torch_geomesh as gm
from torch_geomesh.backend import backend_of

options: Backend.Options = gm.Options(lanes=4)
dist.init_process_group("geomesh", pg_options=options)
group = backend_of()
as_backend: Backend = group
rank: int = group.rank()
ones = torch.ones(3)
works: list[Work] = [
    group.allreduce([ones]),
    group.allreduce([ones], dist.ReduceOp.MAX),
    group.allreduce(ones),
    group.broadcast(ones, 0),
    group.allgather([[ones]], [ones]),
    group.recv_anysource([ones], 0),
    group.barrier(),
]
sign = group.sign_all_reduce([ones], None, torch.empty(3), weight=1, rotation_seed=1)
works.append(sign)
sign.wait(timedelta(seconds=3))
sent: int = sign.bytes_sent
regions: list[str] = group.regions
group.abort()

group.allreduce(3)  # type: ignore[call-overload]
group.allreduces([ones])  # type: ignore[attr-defined]
group.sign_all_reduce([ones], None, ones)  # type: ignore[call-arg]
rank = group.name()  # type: ignore[assignment]
sent = sign.result()  # type: ignore[assignment]
group.barrier().bytes_sent  # type: ignore[attr-defined]
"""


def test_mypy_knows_the_backend_as_one_of_c10ds(tmp_path: Path, cache: pytest.Cache) -> None:
    pytest.importorskip("mypy")
    example = tmp_path / "example.py"
    example.write_text(EXAMPLE)
    options = [
        "--config-file=",
        "--follow-imports=silent",
        "--ignore-missing-imports",
        "--warn-unused-ignores",
        f"--cache-dir={cache.mkdir('mypy')}",  # PyTorch's types take it a while, once
    ]
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(example)],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
    )
    assert run.stdout == "Success: no issues found in 1 source file\n", run.stdout + run.stderr


def keys_of_figures() -> tuple[list[set[str]], list[set[str]]]:
    """Return the keys of each peer's figures and of those of each lane."""
    dist.barrier()
    peers = gm.stats()
    dist.barrier()  # a rank that leaves takes its lanes with it
    return [set(peer) for peer in peers], [
        set(lane) for peer in peers for lane in peer["lane_stats"]
    ]


def test_figures_have_the_keys_that_the_documentation_lists() -> None:
    text = inspect.getdoc(gm.stats)
    assert text is not None
    peer, lane = (
        set(re.findall(r"``(\w+)``", part))
        for part in text.split("One a peer:")[1].split("one a lane:")
    )
    assert "lane_stats" in peer
    for peers, lanes in run_ranks(2, keys_of_figures):
        assert peers
        assert all(keys == peer for keys in peers), peers
        assert lanes
        assert all(keys == lane for keys in lanes), lanes
