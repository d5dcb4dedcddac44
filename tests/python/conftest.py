"""Puts this folder and tests/dist on the path, here and in the processes that tests start.

Also holds tests to leaving the environment as it was: commands that later tests start would inherit
it, and fail far from the cause.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "dist")]
sys.path[:0] = _FOLDERS
os.environ["PYTHONPATH"] = os.pathsep.join([*_FOLDERS, os.environ.get("PYTHONPATH", "")]).strip(
    os.pathsep
)

from ranks import _context  # noqa: E402 (needs the path)

# Making an optimizer imports torch._dynamo, which takes seconds: once, in the fork server.
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "numpy"])


# Of UCX's library and of PyTorch's, which set them once when they are first used.
_SET_ONCE = ("UCX_", "TORCH", "PYTORCH", "TRITON_", "CUDA_", "KMP_", "OMP_", "PYTEST_")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_SET_ONCE)}


@pytest.fixture(autouse=True)
def _environment_is_left_alone() -> Iterator[None]:
    before = _environment()
    yield
    assert _environment() == before, "this test leaves the environment changed"
