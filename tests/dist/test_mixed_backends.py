"""geomesh beside other backends: per device, per mesh dimension, per group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

import torch_geomesh as gm
from torch_geomesh.backend import backend_of


def sums(group: dist.ProcessGroup | None = None) -> None:
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    tensor = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == sum(10.0**r for r in members)


def is_geomesh(group: dist.ProcessGroup | None = None) -> bool:
    try:
        return backend_of(group) is not None
    except TypeError:
        return False


def per_device(backend: str) -> None:
    assert is_geomesh()
    config = dist.get_backend_config()
    assert "cpu:geomesh" in str(config)
    sums()
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, dist.get_rank())  # which device objects take is asked for
    assert objects == list(range(dist.get_world_size()))
    dist.barrier()
    everyone = dist.new_group()  # takes the default group's backends
    assert is_geomesh(everyone)
    sums(everyone)
    mesh = init_device_mesh("cpu", (2,))
    assert is_geomesh(mesh.get_group())
    sums(mesh.get_group())


@pytest.mark.parametrize(
    "backend", ["cpu:geomesh", "cpu:geomesh,cuda:gloo", "cuda:gloo,cpu:geomesh"]
)
def test_per_device(backend: str) -> None:
    run_ranks(2, per_device, backend, init={"backend": backend})


def groups_of_the_other() -> None:
    """Groups of another backend than the default one's, in turns and at once."""
    ours = is_geomesh()
    other = dist.new_group(backend="gloo" if ours else "geomesh")
    part = dist.new_group([0, 2], backend="gloo" if ours else "geomesh")
    assert is_geomesh(other) != ours
    for _ in range(3):
        sums()
        sums(other)
        if dist.get_rank() != 1:
            sums(part)
    first, second = torch.ones(1000), torch.ones(1000)
    works = [
        dist.all_reduce(first, async_op=True),
        dist.all_reduce(second, group=other, async_op=True),
    ]
    for work in reversed(works):
        work.wait()
    assert torch.equal(first, torch.full((1000,), 3.0))
    assert torch.equal(second, first)
    dist.destroy_process_group(other)
    sums()


@pytest.mark.parametrize("default", ["geomesh", "gloo"])
def test_a_group_of_another_backend(default: str) -> None:
    run_ranks(3, groups_of_the_other, init={"backend": default})


def mesh_dimensions() -> None:
    ours = is_geomesh()
    mesh = init_device_mesh(
        "cpu",
        (2, 2),
        mesh_dim_names=("across", "inside"),
        backend_override={"across": ("geomesh", gm.Options(lanes=3)), "inside": "gloo"},
    )
    assert is_geomesh(mesh.get_group("across"))
    assert not is_geomesh(mesh.get_group("inside"))
    assert is_geomesh() == ours
    for name in ("across", "inside"):
        sums(mesh.get_group(name))
    # The options came through: the engine, one for all groups, runs with them.
    with pytest.raises(ValueError, match="runs with lanes='3'"):
        dist.new_group(backend="geomesh", pg_options=gm.Options(lanes=2))


@pytest.mark.parametrize("default", ["geomesh", "gloo"])
def test_a_mesh_with_a_backend_a_dimension(default: str) -> None:
    environment = {"GEOMESH_LANES": "3"} if default == "geomesh" else {}
    run_ranks(4, mesh_dimensions, init={"backend": default}, environment=environment)
