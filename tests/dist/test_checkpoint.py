"""Distributed checkpoints: what one world saves, another of a different size loads.

The reference is the same training in one process, before and after the checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from small_model import make_model, together, train, weights
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

BEFORE, AFTER = 3, 2


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def steps(count: int, first: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the same batches for every rank: the mean over ranks does not depend on the world."""
    return [together(3, step) for step in range(first, first + count)]


def table() -> torch.Tensor:
    return torch.arange(70.0).view(10, 7)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> dict:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "table": rows}


def save(folder: str, asynchronous: bool) -> None:
    model, optimizer = sharded()
    train(model, steps(BEFORE, 0), optimizer)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = distribute_tensor(table(), mesh, [Shard(0)])
    state = state_of(model, optimizer, rows)
    if asynchronous:
        # Its ranks agree in a thread, over a group of their own, while training goes on.
        group = dist.new_group()
        future = dcp.async_save(state, checkpoint_id=folder, process_group=group)
        train(model, steps(AFTER, BEFORE), optimizer)
        future.result(timeout=60)
    else:
        dcp.save(state, checkpoint_id=folder)


def load(folder: str) -> None:
    model, optimizer = sharded()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = distribute_tensor(torch.zeros(10, 7), mesh, [Shard(1)])  # and split the other way
    state = state_of(model, optimizer, rows)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert torch.equal(rows.full_tensor(), table())

    alone = make_model()
    plain = torch.optim.Adam(alone.parameters(), lr=0.01)
    for count, first in ((BEFORE, 0), (AFTER, BEFORE)):
        train(alone, steps(count, first), plain)
        if first:
            train(model, steps(count, first), optimizer)  # goes on as if nothing had been between
        got = [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
        torch.testing.assert_close([p.detach() for p in got], weights(alone))


@pytest.mark.parametrize(("asynchronous", "worlds"), [(False, (3, 2)), (True, (2, 3))])
def test_another_world_size(tmp_path: Path, asynchronous: bool, worlds: tuple[int, int]) -> None:
    run_ranks(worlds[0], save, str(tmp_path), asynchronous)
    run_ranks(worlds[1], load, str(tmp_path))
