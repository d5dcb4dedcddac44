"""torch_geomesh: PyTorch training across regions, almost as fast as inside one.

Importing this package registers the ``"geomesh"`` backend of ``torch.distributed`` and does nothing
else: no thread, no socket, no compiled module. Everything below is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch_geomesh.registration import register as _register

if TYPE_CHECKING:
    from torch_geomesh.backend import Options as Options
    from torch_geomesh.backend import stats as stats
    from torch_geomesh.hooks import SignHookState as SignHookState
    from torch_geomesh.hooks import sign_hook as sign_hook
    from torch_geomesh.sampler import GeoMeshSampler as GeoMeshSampler
    from torch_geomesh.train import GeoMesh as GeoMesh

__version__ = "0.1.0"

_HOMES = {
    "GeoMesh": "torch_geomesh.train",
    "GeoMeshSampler": "torch_geomesh.sampler",
    "Options": "torch_geomesh.backend",
    "SignHookState": "torch_geomesh.hooks",
    "sign_hook": "torch_geomesh.hooks",
    "stats": "torch_geomesh.backend",
}

__all__ = [
    "GeoMesh",
    "GeoMeshSampler",
    "Options",
    "SignHookState",
    "sign_hook",
    "stats",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'torch_geomesh' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


_register()
