"""Collectives on CUDA tensors: ordered by streams, whoever holds up whom. Needs a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def delayed_sum() -> tuple[bool, float, float]:
    """Reduce what a long kernel has yet to write, and read it on the same stream."""
    rank = dist.get_rank()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(100_003, device="cuda")
        torch.cuda._sleep(500_000_000)
        tensor.fill_(rank + 1.0)
        work = dist.all_reduce(tensor, async_op=True)
        returned_early = not stream.query()
        work.wait()
        doubled = tensor * 2
    stream.synchronize()
    return (returned_early, float(doubled.min()), float(doubled.max()))


def test_a_call_returns_before_the_gpu_comes_to_it() -> None:
    for returned_early, low, high in run_ranks(2, delayed_sum):
        assert returned_early
        assert low == high == 6.0


def future_and_order() -> tuple[float, list[float]]:
    """Use a future's value in a callback, and CPU calls issued behind a slow CUDA one."""
    rank = dist.get_rank()
    tensor = torch.zeros(1000, 3, device="cuda").t()  # not contiguous
    torch.cuda._sleep(200_000_000)
    tensor += rank + 1
    work = dist.all_reduce(tensor, async_op=True)
    behind = [torch.full((5,), float(rank + i)) for i in range(100)]
    works = [dist.all_reduce(t, async_op=True) for t in behind]
    future = work.get_future().then(lambda f: f.value()[0] + 1)
    value = float(future.wait().sum())
    for each in works:
        each.wait()
    return (value, [float(t[0]) for t in behind])


def test_futures_are_ordered_and_later_calls_come_behind() -> None:
    for value, behind in run_ranks(2, future_and_order):
        assert value == 4.0 * 3000
        assert behind == [2.0 * i + 1 for i in range(100)]
