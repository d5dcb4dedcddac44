"""A job under torchrun that loses a rank: torchrun starts it again, and it goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from small_model import reference

SCRIPT = Path(__file__).parent / "scripts" / "restarted.py"


def test_restarts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = subprocess.run(
        [*command, "--max-restarts=1", str(SCRIPT), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert job.returncode == 0, job.stderr
    for rank in range(2):
        life, done, weights = torch.load(tmp_path / f"end_{rank}")
        assert (life, done) == (1, 2)  # the second life, from the checkpoint on
        torch.testing.assert_close(weights, reference(2, 5))
