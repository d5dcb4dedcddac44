"""Puts this folder and tests/dist on the path, here and in the processes that tests start."""

import os
import sys
from pathlib import Path

_FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "dist")]
sys.path[:0] = _FOLDERS
os.environ["PYTHONPATH"] = os.pathsep.join([*_FOLDERS, os.environ.get("PYTHONPATH", "")]).strip(
    os.pathsep
)

from ranks import _context  # noqa: E402 (needs the path)

# Making an optimizer imports torch._dynamo, which takes seconds: once, in the fork server.
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "numpy"])
