"""One-sided access: what is put is there when the signal is, and what is refused."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from versions import needs_torch

pytestmark = needs_torch(14, "windows")


def window(tensor: torch.Tensor | None = None):
    return dist.distributed_c10d._new_window(tensor)


def puts_and_signals(elements: int) -> None:
    """Each rank puts a block into each other's memory, then signals; several times."""
    rank, world = dist.get_rank(), dist.get_world_size()
    memory = torch.full((world * elements,), -1.0)
    shared = window(memory)
    for turn in range(5):
        works = []
        for peer in range(world):
            block = torch.full((elements,), 100.0 * turn + 10 * rank + peer)
            works.append(shared.put(block, peer, rank * elements, True))
            works.append(shared.signal(peer, True))
            del block  # the put keeps it
        for peer in range(world):
            shared.wait_signal(peer, False)
            got = memory[peer * elements : (peer + 1) * elements]
            assert (got == 100.0 * turn + 10 * peer + rank).all()
        for work in works:
            work.wait()
        dist.barrier()  # before the next turn overwrites
    shared.tensor_deregister()


@pytest.mark.parametrize("elements", [0, 1, 1000, 700_001])
def test_puts_are_there_when_their_signal_is(elements):
    run_ranks(3, puts_and_signals, elements)


def several_windows() -> None:
    """Windows of one group do not mix their signals; sizes may differ by rank."""
    rank = dist.get_rank()
    a = window(torch.zeros(4, dtype=torch.int64))
    mine = torch.zeros(2 + rank, dtype=torch.int64)
    b = window()
    b.tensor_register(mine)
    other = 1 - rank
    b.signal(other, False)
    with pytest.raises(RuntimeError, match="no signal from rank"):
        opts = torch._C._distributed_c10d.WaitSignalOptions()
        opts.timeout = timedelta(milliseconds=200)
        a.wait_signal(other, False, opts)
    b.wait_signal(other, False)
    b.put(torch.tensor([5]), other, 1, False)
    dist.barrier()
    assert mine[1] == 5
    with pytest.raises(RuntimeError, match=f"the window there has {2 + other} elements"):
        b.put(torch.tensor([1, 2]), other, 1 + other, False)
    with pytest.raises(RuntimeError, match="differ in dtype"):
        b.put(torch.tensor([1.0]), other, 0, False)
    with pytest.raises(RuntimeError, match="registered already"):
        b.tensor_register(mine)
    assert b.map_remote_tensor(rank).data_ptr() == mine.data_ptr()
    with pytest.raises(NotImplementedError, match="in another process"):
        b.map_remote_tensor(other)
    b.tensor_deregister()
    with pytest.raises(RuntimeError, match="no tensor is registered"):
        b.signal(other, False)
    b.tensor_register(torch.zeros(1))
    assert dist.distributed_c10d._supports_window()
    dist.barrier()


def test_windows_of_one_group():
    run_ranks(2, several_windows)
