"""What a callback of a work's future may do: start other operations, and wait for them."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks


def chained() -> None:
    """A callback starts the next operation; nobody waits in it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    total = sum(range(1, world + 1))
    seen: list[torch.Tensor] = []
    done = threading.Event()

    def last(future: torch.futures.Future) -> None:
        seen.append(future.value()[0])
        done.set()

    def following(future: torch.futures.Future) -> None:
        work = dist.all_reduce(future.value()[0], async_op=True)
        work.get_future().add_done_callback(last)

    first = dist.all_reduce(torch.full((5,), float(rank + 1)), async_op=True)
    first.get_future().add_done_callback(following)
    assert done.wait(20)
    assert torch.equal(seen[0], torch.full((5,), float(world * total)))


def test_a_callback_starts_an_operation() -> None:
    run_ranks(2, chained)


def nested(wait: str) -> None:
    """A callback waits for an operation of its own, as PyTorch's PowerSGD does."""
    world = dist.get_world_size()
    seen: list[torch.Tensor] = []
    done = threading.Event()

    def inside(future: torch.futures.Future) -> None:
        tensor = future.value()[0]
        work = dist.all_reduce(tensor, async_op=True)
        if wait == "future":
            work.get_future().wait()
        else:
            work.wait()
        seen.append(tensor)
        done.set()

    work = dist.all_reduce(torch.ones(5), async_op=True)
    work.get_future().add_done_callback(inside)
    assert done.wait(4), "the callback did not come back"
    assert torch.equal(seen[0], torch.full((5,), float(world * world)))


@pytest.mark.parametrize("backend", ["geomesh", "gloo"])
@pytest.mark.parametrize("wait", ["work", "future"])
def test_a_callback_waits_for_an_operation(backend: str, wait: str, request) -> None:
    if backend == "geomesh":
        request.applymarker(
            pytest.mark.xfail(
                strict=True,
                reason="works complete on one thread, the one that runs callbacks: a callback that "
                "waits for another work keeps it from completing, without a deadline",
            )
        )
    run_ranks(
        2, nested, wait, init={"backend": backend, "timeout": timedelta(seconds=2)}, timeout=6
    )
