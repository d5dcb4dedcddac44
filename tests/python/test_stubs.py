"""The typed stubs of the compiled module name what it has, no more and no less."""

from __future__ import annotations

import ast
from pathlib import Path

import torch_geomesh
from torch_geomesh import _C


def public(names: object) -> set[str]:
    return {name for name in names if not name.startswith("_")}  # type: ignore[attr-defined]


def test_stubs_name_what_the_module_has() -> None:
    stub = ast.parse(Path(torch_geomesh.__file__).with_name("_C.pyi").read_text())
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    functions = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert functions | set(classes) == public(dir(_C))
    for name, node in classes.items():
        told = {
            part.name if isinstance(part, ast.FunctionDef) else part.target.id  # type: ignore[union-attr]
            for part in node.body
            if isinstance(part, ast.FunctionDef | ast.AnnAssign)
        }
        has = public(vars(getattr(_C, name)))
        if name != "TopologySpec":  # its fields are for the engine only
            assert public(told) == has, name
