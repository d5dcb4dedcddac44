"""Collectives on Python objects: pickled, sizes first, then bytes of a different length a rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks


def thing(rank: int) -> dict[str, Any]:
    """Return what rank ``rank`` has: of another kind and length than the others'."""
    return {"rank": rank, "text": "x" * 1000 * rank, "nested": [None, {rank}], "tensor": [rank] * 9}


def everything() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    all_of_them = [thing(r) for r in range(world)]
    nobody = [None] * world

    objects = [thing(1), "one", 1.5] if rank == 1 else [None] * 3
    dist.broadcast_object_list(objects, src=1)
    assert objects == [thing(1), "one", 1.5]

    objects = list(nobody)
    dist.all_gather_object(objects, thing(rank))
    assert objects == all_of_them

    for dst in range(world):
        objects = list(nobody) if rank == dst else None
        dist.gather_object(thing(rank), objects, dst=dst)
        assert objects == (all_of_them if rank == dst else None)

    mine: list[Any] = [None]
    dist.scatter_object_list(mine, all_of_them if rank == 2 else None, src=2)
    assert mine == [thing(rank)]

    # Around a ring, the first sends first.
    received: list[Any] = [None, None]
    if rank == 0:
        dist.send_object_list([thing(0), "end"], dst=1)
    source = dist.recv_object_list(received, src=(rank - 1) % world)
    assert source == (rank - 1) % world
    assert received == [thing((rank - 1) % world), "end"]
    if rank:
        dist.send_object_list([thing(rank), "end"], dst=(rank + 1) % world)

    # In a group whose ranks have other numbers.
    pair = dist.new_group([1, 2])
    if rank in (1, 2):
        objects = [None, None]
        dist.all_gather_object(objects, thing(rank), group=pair)
        assert objects == [thing(1), thing(2)]
        one = [torch.arange(5) if rank == 2 else None]
        dist.broadcast_object_list(one, src=2, group=pair)
        assert torch.equal(one[0], torch.arange(5))


def test_objects() -> None:
    run_ranks(3, everything)
