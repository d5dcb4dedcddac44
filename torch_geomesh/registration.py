"""Makes ``"geomesh"`` known to torch.distributed. Imports nothing at its top.

PyTorch's entry points call this module while torch itself is being imported, which may be in the
middle of ``import torch_geomesh``: it must be whole by then.
"""

from __future__ import annotations

from typing import Any


def _create(backend_options: Any, pg_options: Any) -> Any:
    from torch_geomesh.backend import create

    return create(backend_options, pg_options)


def register() -> None:
    """Make ``"geomesh"`` known to torch.distributed; a second call does nothing."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or "GEOMESH" in dist.Backend._plugins:
        return
    # Claiming "cuda" on a machine without a GPU makes parts of PyTorch ask for a current device.
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    dist.Backend.register_backend("geomesh", _create, extended_api=True, devices=devices)


def autoload() -> None:
    """Entry point of ``torch.backends``: runs while torch is imported, so it must not raise."""
    import warnings

    try:
        register()
    except Exception as error:
        warnings.warn(f"torch_geomesh could not register its backend: {error}", stacklevel=1)
