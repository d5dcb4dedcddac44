"""What PyTorch builds on a backend: device meshes, DTensor, FSDP2, the debug wrapper, DDP."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small_model import batch, make_model, reference, train
from torch import nn
from versions import needs_torch

from torch_geomesh.backend import backend_of


def join(backend: str, device_id: torch.device | None = None) -> None:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    dist.init_process_group(
        backend,
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=30),
        device_id=device_id,
    )


def meshes_and_shards(backend: str, device_id: torch.device | None = None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    join(backend, device_id)
    assert dist.group.WORLD.bound_device_id == device_id
    rank = dist.get_rank()
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "inside"))
    for name, want in (("across", [(0, 2), (1, 3)]), ("inside", [(0, 1), (2, 3)])):
        tensor = torch.tensor([10.0**rank])
        dist.all_reduce(tensor, group=square.get_group(name))
        assert tensor.item() == next(sum(10.0**r for r in pair) for pair in want if rank in pair)
        assert square[name].get_local_rank() == (rank // 2 if name == "across" else rank % 2)

    whole = torch.arange(70.0).view(10, 7)  # 10 rows on 4 ranks: uneven shards
    rows = distribute_tensor(whole, line, [Shard(0)])
    assert torch.equal(rows.to_local(), whole.chunk(4)[rank])
    columns = rows.redistribute(line, [Shard(1)])
    assert torch.equal(columns.to_local(), whole.chunk(4, dim=1)[rank])
    assert torch.equal(columns.redistribute(line, [Replicate()]).to_local(), whole)
    both = distribute_tensor(whole, square, [Shard(0), Shard(1)])
    assert torch.equal(both.to_local(), whole.chunk(2)[rank // 2].chunk(2, dim=1)[rank % 2])
    assert torch.equal(both.full_tensor(), whole)
    turned = both.redistribute(square, [Shard(1), Shard(0)])
    assert torch.equal(turned.to_local(), whole.chunk(2, dim=1)[rank // 2].chunk(2)[rank % 2])
    parts = DTensor.from_local(whole * 10**rank, square, [Partial(), Partial()])
    assert torch.equal(parts.full_tensor(), whole * 1111)
    some = parts.redistribute(square, [Shard(0), Replicate()])  # reduce-scatter, all-reduce
    assert torch.equal(some.to_local(), whole.chunk(2)[rank // 2] * 1111)

    for mesh in (line, square):
        model = make_model()
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        train(model, [batch(rank, step) for step in range(3)])
        for ours, want in zip(model.parameters(), reference(4, 3), strict=True):
            torch.testing.assert_close(ours.full_tensor(), want)  # type: ignore[attr-defined]
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["geomesh", "cpu:geomesh"])
def test_device_meshes_dtensor_and_fsdp2(backend: str) -> None:
    run_ranks(4, meshes_and_shards, backend, initialize=False)


def bound_to_a_device(backend: str) -> None:
    with pytest.raises(ValueError, match="valid index"):
        join(backend, torch.device("cpu"))  # refused by PyTorch, whatever the backend
    meshes_and_shards(backend, torch.device("cpu:0"))


@needs_torch(15, "a CPU as device_id")
@pytest.mark.parametrize("backend", ["geomesh", "cpu:geomesh"])
def test_device_meshes_of_a_group_that_is_bound_to_a_device(backend: str) -> None:
    run_ranks(4, bound_to_a_device, backend, initialize=False)


def debug_detail() -> str:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    join("geomesh")
    from torch_geomesh.backend import backend_of, stats

    rank, world = dist.get_rank(), dist.get_world_size()
    tensor = torch.tensor([10.0**rank])
    dist.all_reduce(tensor)
    assert tensor.item() == sum(10.0**r for r in range(world))
    gathered = [torch.empty(2) for _ in range(world)]
    dist.all_gather(gathered, torch.full((2,), float(rank)))
    assert [t.tolist() for t in gathered] == [[float(r)] * 2 for r in range(world)]
    group = dist.new_group([0, 1])
    dist.barrier(group=group)
    assert len(stats()) == world
    out = torch.empty(100)
    work = backend_of().sign_all_reduce([torch.ones(100)], None, out, weight=1, rotation_seed=1)
    work.wait()

    model = nn.parallel.DistributedDataParallel(make_model())
    train(model, [batch(rank, step) for step in range(3)])
    for ours, want in zip(model.parameters(), reference(world, 3), strict=True):
        torch.testing.assert_close(ours.detach(), want)

    with pytest.raises(RuntimeError) as shapes:  # the wrapper's own check, before ours
        dist.all_reduce(torch.ones(3 + rank))
    dist.destroy_process_group()
    return str(shapes.value)


def test_debug_detail_wraps_the_backend() -> None:
    for text in run_ranks(2, debug_detail, initialize=False):
        assert "Detected mismatch between collectives" in text, text  # the wrapper's words


def memory_given_back() -> None:
    backend = backend_of(None)
    peer = 1 - dist.get_rank()
    data = torch.ones(1_000_003)
    dist.all_reduce(data)
    assert torch.equal(data, torch.full_like(data, 2))
    before = backend.memory_stats()
    assert before["used"] == 0
    assert before["kept"] > 0
    waiting = dist.irecv(torch.empty(3), peer)
    with pytest.raises(RuntimeError, match=r"suspend.. with 1 operations pending: wait for them"):
        backend.suspend()
    dist.send(torch.ones(3), peer)
    waiting.wait()
    backend.suspend()
    assert backend.memory_stats()["kept"] == 0
    with pytest.raises(RuntimeError, match="the group is suspended: call resume"):
        dist.all_reduce(data)
    backend.resume()
    dist.all_reduce(data)
    assert torch.equal(data, torch.full_like(data, 4))


@needs_torch(15, "suspend and resume")
def test_suspend_gives_memory_back() -> None:
    run_ranks(2, memory_given_back)
