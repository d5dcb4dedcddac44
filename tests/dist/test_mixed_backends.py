"""geomesh beside other backends: per device, per mesh dimension, per group; beside another UCX."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

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


def one_half_cannot_be_made(backend: str) -> str:
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)nccl") as refused:
        dist.init_process_group(backend)
    assert not dist.is_initialized()
    dist.init_process_group("cpu:geomesh")
    sums()
    return str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("backend", ["cpu:geomesh,cuda:nccl", "cuda:nccl,cpu:geomesh"])
def test_a_refused_other_half_names_itself_and_leaves_nothing_behind(backend: str) -> None:
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    texts = run_ranks(
        2, one_half_cannot_be_made, backend, initialize=False, environment=environment
    )
    # The reason is PyTorch's, not hidden by ours.
    assert all("geomesh" not in text for text in texts), texts


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


# Stands before the real library, as another one would that comes first in the library path.
OTHER_UCX = """
extern "C" void ucp_get_version(unsigned* major, unsigned* minor, unsigned* patch) {
  *major = MAJOR, *minor = MINOR, *patch = 0;
}
#define TEXT(number) #number
#define VERSION(major, minor) TEXT(major) "." TEXT(minor) ".0"
extern "C" const char* ucp_get_version_string() { return VERSION(MAJOR, MINOR); }
"""

ALONE = """
import torch, torch.distributed as dist
dist.init_process_group("geomesh", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
"""

COMPILER = os.environ.get("CXX", "g++")


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("major", "minor", "fits"), [(1, 1, False), (2, 0, False), (1, 99, True)])
def test_a_ucx_that_was_not_built_for_is_refused_by_its_version(
    major: int, minor: int, fits: bool, tmp_path: Path
) -> None:
    source, library = tmp_path / "ucx.cc", tmp_path / "ucx.so"
    source.write_text(OTHER_UCX)
    numbers = [f"-DMAJOR={major}", f"-DMINOR={minor}"]
    command = [COMPILER, "-shared", "-fPIC", *numbers, str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "GEOMESH_LOG_LEVEL": "info"}
    run = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=90, env=environment
    )
    assert (run.returncode == 0) == fits, run.stderr
    if fits:
        assert f"UCX {major}.{minor}.0 listens on" in run.stderr
    else:
        last = run.stderr.rstrip().splitlines()[-1]
        assert f"the UCX library that is loaded is {major}.{minor}.0, but this was built " in last
        assert "another UCX comes first in the library path" in last


# Of other programs, misspelt, and such as would lead UCX to other transports, devices and ports.
STRAY = {
    "UCX_PREFIX": "/x",
    "UCX_NET_DEVICE": "nosuch0",
    "UCX_NET_DEVICES": "nosuch0",
    "UCX_TLS": "shm",
    "UCX_TCP_PORT_RANGE": "1-1",
    "UCX_RNDV_THRESH": "8192",
    "UCX_IB_GPU_DIRECT_RDMA": "n",
    "UCX_WARN_UNUSED_ENV_VARS": "y",
}


def silently(folder: str) -> str:
    """Return all that is written while a group is made and used, by C's own functions too."""
    path = Path(folder) / os.environ["RANK"]
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    dist.init_process_group("geomesh")
    assert all(os.environ[name] == value for name, value in STRAY.items())
    tensor = torch.ones(100_003)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full_like(tensor, 2))
    dist.destroy_process_group()
    return path.read_text()


def test_stray_ucx_variables_change_nothing_and_print_nothing(tmp_path: Path) -> None:
    environment = {**STRAY, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    written = run_ranks(2, silently, str(tmp_path), initialize=False, environment=environment)
    assert written == ["", ""]
