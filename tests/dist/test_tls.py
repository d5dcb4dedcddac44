"""Jobs over wire/tls: a shared key in GEOMESH_PSK_FILE, and what ranks say whose keys differ."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, start_ranks

import torch_geomesh as gm


def key_file(path: Path, byte: str) -> str:
    path.write_text(byte * 31 + "00\n")
    path.chmod(0o600)
    return str(path)


def reduce_over_tls() -> tuple[list[float], int]:
    rank = dist.get_rank()
    tensor = torch.arange(1_000_003, dtype=torch.float32) + rank
    dist.all_reduce(tensor)
    assert torch.equal(tensor, 3 * torch.arange(1_000_003, dtype=torch.float32) + 3)
    gathered = [torch.empty(2) for _ in range(3)]
    dist.all_gather(gathered, torch.tensor([rank, 10.0 * rank]))
    peers = gm.stats()
    return [float(t[1]) for t in gathered], sum(peer["bytes_sent"] > 0 for peer in peers)


def test_three_ranks_reduce_exactly(tmp_path: Path) -> None:
    environment = {"GEOMESH_PSK_FILE": key_file(tmp_path / "key", "a7"), "GEOMESH_WIRE": "tls"}
    for values, talked_to in run_ranks(3, reduce_over_tls, environment=environment):
        assert values == [0.0, 10.0, 20.0]
        assert talked_to >= 1


def fail_to_meet() -> tuple[str, float]:
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(4))
    return str(caught.value), time.monotonic() - begin


def test_another_key_on_one_rank_is_an_error_on_each(tmp_path: Path) -> None:
    right = {"GEOMESH_PSK_FILE": key_file(tmp_path / "right", "a7")}
    wrong = {"GEOMESH_PSK_FILE": key_file(tmp_path / "wrong", "b8")}
    world = start_ranks(
        3,
        fail_to_meet,
        per_rank_environment=[right, right, wrong],
        init={"timeout": timedelta(seconds=20)},
    )
    for outcome in world.join(timeout=90):
        text, seconds = outcome.value if outcome.value else (outcome.error, outcome.seconds)
        assert "GEOMESH_PSK_FILE" in text, text
        assert "another key" in text, text
        assert seconds < 20
