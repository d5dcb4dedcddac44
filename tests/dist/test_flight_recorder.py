"""PyTorch's flight recorder: what it keeps of geomesh's operations, and what its analyzer says.

PyTorch attaches its recorder to the group by itself; it counts on the backend for completions,
durations and the call that a failure makes before it is raised.
"""

from __future__ import annotations

import json
import pickle
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from versions import needs_torch

pytestmark = needs_torch(15, "its recorder attaches to its own backends only before")


def analyze(folder: Path, *options: str) -> Any:
    """Return what ``python -m torch.distributed.flight_recorder.fr_trace`` makes of the files."""
    from torch.distributed.flight_recorder import fr_trace

    out = folder.parent / "analysis"
    fr_trace.main([str(folder), "-o", str(out), *options])
    _, database = pickle.loads(out.read_bytes())
    return database


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    return folder


def where(folder: Path) -> dict[str, str]:
    return {"TORCH_FR_DUMP_TEMP_FILE": str(folder / "rank_"), "TORCH_FR_BUFFER_SIZE": "100"}


def some_operations() -> str:
    from torch._C._distributed_c10d import _dump_fr_trace_file, _dump_fr_trace_json

    rank = dist.get_rank()
    dist.all_reduce(torch.ones(3, 2))
    dist.broadcast(torch.ones(7), src=1)
    dist.all_gather([torch.empty(4) for _ in range(3)], torch.ones(4))
    pair = dist.new_group([0, 2], group_desc="the pair")
    if rank != 1:
        dist.all_reduce(torch.ones(6, dtype=torch.int64), group=pair)
    dist.barrier()
    world = dist.distributed_c10d._get_default_group()
    inputs = [torch.ones(2), torch.ones(5, dtype=torch.int32)]
    outputs = [i.repeat(3) for i in inputs]
    world.all_gather_single_coalesced(outputs, inputs).wait()
    world.reduce_scatter_single_coalesced(inputs, outputs).wait()
    # Waiters go on before the recorder is told.
    everybody = dist.distributed_c10d._get_default_group()
    everybody._wait_for_pending_works()
    if rank != 1:
        pair._wait_for_pending_works()
    _dump_fr_trace_file(rank, backend="geomesh")
    # Its analyzer takes a send after a collective for one of its parts: not in the file.
    if rank == 0:
        dist.send(torch.ones(5), dst=2)
    elif rank == 2:
        dist.recv(torch.ones(5), src=0)
    everybody._wait_for_pending_works()
    return _dump_fr_trace_json(backend="geomesh")


def test_a_healthy_run(traces: Path) -> None:
    dumps = run_ranks(3, some_operations, environment=where(traces))
    for rank, text in enumerate(dumps):
        for entry in json.loads(text)["entries"]:
            assert entry["state"] == "completed", (rank, entry)
            assert entry["retired"], (rank, entry)
            assert entry["duration_ms"] > 0, (rank, entry)
            assert entry["timeout_ms"] == (1_800_000 if "pair" in str(entry) else 30_000)

    sent, received = (json.loads(dumps[rank])["entries"][-1] for rank in (0, 2))
    assert (sent["profiling_name"], sent["input_sizes"]) == ("geomesh:send 0->2", [[5]])
    assert (received["profiling_name"], received["output_sizes"]) == ("geomesh:recv 2<-0", [[5]])
    assert sent["is_p2p"]
    assert received["is_p2p"]

    database = analyze(traces)
    seen = {
        (c.collective_name, str(c.input_sizes), tuple(sorted(c.expected_ranks)))
        for c in database.collectives
    }
    assert seen == {
        ("geomesh:all_reduce", "[[3, 2]]", (0, 1, 2)),
        ("geomesh:broadcast", "[[7]]", (0, 1, 2)),
        ("geomesh:all_gather", "[[4]]", (0, 1, 2)),
        ("geomesh:all_reduce", "[[6]]", (0, 2)),
        ("geomesh:barrier", "[]", (0, 1, 2)),
        ("geomesh:all_gather_into_tensor_coalesced", "[[2], [5]]", (0, 1, 2)),
        ("geomesh:reduce_scatter_tensor_coalesced", "[[6], [15]]", (0, 1, 2)),
        ("geomesh:all_gather_into_tensor_coalesced", "[[2], [5]]", (0, 1, 2)),
        ("geomesh:reduce_scatter_tensor_coalesced", "[[6], [15]]", (0, 1, 2)),
    }
    assert all(c.pass_check for c in database.collectives)
    assert {group.desc for group in database.groups} == {"default_pg", "the pair"}


def different_sizes() -> None:
    """Rank 1 calls when the others' calls are under way: each rank has one that fails."""
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        store.wait(["called 0", "called 2"])
    with pytest.raises(RuntimeError):
        work = dist.all_reduce(torch.ones(9 if rank == 1 else 8), async_op=True)
        store.set(f"called {rank}", "")
        work.wait()


def test_a_mismatch_is_dumped_and_found(traces: Path) -> None:
    run_ranks(3, different_sizes, environment=where(traces))
    first, second = analyze(traces).collectives[:2]
    assert (first.collective_name, first.pass_check) == ("geomesh:all_reduce", True)
    assert (second.collective_name, second.pass_check) == ("geomesh:all_reduce", False)
    assert set(second.mismatch_collectives) == {1}
    assert second.mismatch_collectives[1].input_sizes == [[9]]
    assert "SIZE_OR_SYNTAX_MISMATCH" in str(second.mismatch_collectives[1].type_of_mismatch)


def one_stays_away(folder: str) -> bool:
    """Rank 1 is busy elsewhere. Return whether this rank's trace came before its next call."""
    rank = dist.get_rank()
    trace = Path(folder, f"rank_{rank}")
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        deadline = time.monotonic() + 3.5
        while not trace.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        found = trace.exists()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(8))
    return found if rank == 1 else trace.exists()


def traces_with_one_away(folder: Path) -> list[bool]:
    timeout = {"timeout": timedelta(seconds=1)}
    return run_ranks(3, one_stays_away, str(folder), init=timeout, environment=where(folder))


def test_ranks_that_wait_leave_traces(traces: Path) -> None:
    found = traces_with_one_away(traces)
    assert found[0]
    assert found[2]
    seen = analyze(traces, "--allow-incomplete-ranks").collectives
    assert [(c.collective_name, c.input_sizes, c.collective_state) for c in seen] == [
        ("geomesh:all_reduce", [[3]], "completed"),
        ("geomesh:all_reduce", [[8]], "scheduled"),
    ]


def test_a_rank_that_stays_away_leaves_a_trace(traces: Path) -> None:
    assert traces_with_one_away(traces) == [True] * 3
    first, second = analyze(traces).collectives
    assert first.pass_check
    assert second.missing_ranks == {1}
