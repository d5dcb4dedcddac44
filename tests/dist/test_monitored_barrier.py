"""The monitored barrier names who is missing, and leaves the group as it was."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, start_ranks
from versions import needs_torch

pytestmark = needs_torch(14, "monitored_barrier is Gloo's alone before")

SHORT = timedelta(seconds=1)


def passes() -> None:
    for _ in range(20):
        dist.monitored_barrier()
    dist.monitored_barrier(wait_all_ranks=True)
    # With a group that does not have all ranks, and with other things under way.
    group = dist.new_group([0, 2])
    work = dist.all_reduce(torch.ones(100_000), async_op=True)
    if dist.get_rank() in (0, 2):
        dist.monitored_barrier(group)
    work.wait()


def test_passes_when_all_come():
    run_ranks(3, passes)


def one_is_missing(tell) -> str:
    rank = dist.get_rank()
    message = ""
    if rank != 1:
        with pytest.raises(RuntimeError) as error:
            dist.monitored_barrier(timeout=SHORT if rank == 0 else timedelta(seconds=30))
        message = str(error.value)
        tell("failed")
    else:
        tell("absent")
        dist.barrier()  # the others' next operation: only then does it come
        begin = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            dist.monitored_barrier()
        assert time.monotonic() - begin < 10  # told at once, not at a timeout
        message = str(error.value)
    if rank != 1:
        dist.barrier()
    # The group is whole: the next one passes, and so do collectives.
    dist.monitored_barrier()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor == 3).all()
    return message


def test_a_missing_rank_is_named_and_may_come_late():
    messages = run_ranks(3, one_is_missing)
    assert "Rank 1 failed to pass monitoredBarrier in 1000 ms (rank 1 on host" in messages[0]
    for rank in (1, 2):
        assert f"[Rank {rank}]: Rank {rank} successfully reached monitoredBarrier" in messages[rank]
        assert "Rank 1 failed to pass monitoredBarrier" in messages[rank]


def several_are_missing() -> list[str]:
    texts = []
    if dist.get_rank() == 0:
        for all_ranks in (False, True):
            with pytest.raises(RuntimeError) as error:
                dist.monitored_barrier(timeout=timedelta(seconds=0.2), wait_all_ranks=all_ranks)
            texts.append(str(error.value))
        with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier"):
            dist.distributed_c10d._get_default_group().monitored_barrier(timedelta(0))
    dist.barrier()
    return texts


def test_all_missing_ranks_are_named_where_asked():
    first, every = run_ranks(4, several_are_missing)[0]
    assert "Rank 1 failed to pass" in first
    assert "Ranks 1, 2, 3 failed to pass" in every


def one_dies(tell) -> str:
    dist.barrier()
    tell(os.getpid())
    if dist.get_rank() == 2:
        signal.pause()
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        dist.monitored_barrier()
    assert time.monotonic() - begin < 15  # long before the timeout
    return str(error.value)


def test_a_dead_rank_is_not_waited_for():
    world = start_ranks(3, one_dies)
    for rank in range(3):
        world.receive(rank)
    world.signal(2, signal.SIGKILL)
    outcomes = world.join(expect_dead=(2,))
    assert "Rank 2 failed to pass monitoredBarrier" in outcomes[0].value, outcomes[0].error
    assert "Rank 2 failed to pass monitoredBarrier" in outcomes[1].value, outcomes[1].error
