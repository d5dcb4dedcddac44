"""Many ranks on one machine: what they take of it, and that they end in peace."""

from __future__ import annotations

import os
import resource
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import run_ranks

RANKS = 64
DESCRIPTORS = 256


def within_descriptors(folder: str) -> int:
    errors = os.open(f"{folder}/{os.environ['RANK']}.err", os.O_CREAT | os.O_WRONLY)
    os.dup2(errors, 2)
    os.close(errors)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "geomesh",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
    )
    total = torch.full((100_003,), float(rank))
    dist.all_reduce(total)
    gathered = torch.empty(RANKS, 3)
    dist.all_gather_into_tensor(gathered, torch.full((3,), float(rank)))
    assert torch.equal(gathered, torch.arange(RANKS).float()[:, None].expand(RANKS, 3))
    open_descriptors = len(os.listdir("/proc/self/fd"))
    dist.barrier()
    dist.destroy_process_group()
    assert torch.equal(total, torch.full_like(total, RANKS * (RANKS - 1) / 2))
    return open_descriptors


def test_sixty_four_ranks_within_256_descriptors_each(tmp_path: Path) -> None:
    used = run_ranks(RANKS, within_descriptors, str(tmp_path), initialize=False, timeout=150)
    assert max(used) <= DESCRIPTORS
    said = "".join(file.read_text() for file in tmp_path.glob("*.err"))
    assert "lost rank" not in said  # nobody's leaving looks like a failure
