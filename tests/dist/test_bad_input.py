"""Wrong settings: an error on every rank that names what is wrong, within the timeout."""

from __future__ import annotations

import os
import signal
import socket
import threading
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks


def join() -> str:
    """Try to join a group of WORLD_SIZE ranks and return the error's text."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        dist.init_process_group(
            "geomesh",
            store=store,
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=5),
        )
    return str(caught.value)


def errors(world: int, *per_rank: dict[str, str], **environment: str) -> list[str]:
    """Let ``world`` ranks try to join with these variables."""
    return run_ranks(
        world,
        join,
        initialize=False,
        environment=environment,
        per_rank_environment=list(per_rank) or None,
    )


def test_missing_topology_file() -> None:
    for text in errors(2, GEOMESH_TOPOLOGY="nowhere.toml", GEOMESH_REGION="eastus"):
        assert "nowhere.toml" in text


def test_region_that_the_topology_does_not_have() -> None:
    regions = [{"GEOMESH_REGION": "eastus"}, {"GEOMESH_REGION": "mars"}]
    for text in errors(2, *regions, GEOMESH_TOPOLOGY="azure-4"):
        assert "rank 1" in text
        assert "'mars'" in text
        assert "brazilsouth" in text


def test_rank_without_a_region() -> None:
    regions = [{"GEOMESH_REGION": "eastus"}, {"GEOMESH_LANES": "1"}]
    for text in errors(2, *regions, GEOMESH_TOPOLOGY="azure-4"):
        assert "rank 1" in text
        assert "set GEOMESH_REGION" in text


def regions_warned_of() -> list[str]:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.init_process_group(
            "geomesh",
            store=store,
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=20),
        )
        dist.new_group()  # said once, not for each group
    return [str(one.message) for one in caught if "GEOMESH_REGION" in str(one.message)]


def test_regions_on_some_ranks_only_are_warned_of() -> None:
    def run(*regions: str) -> list[list[str]]:
        per_rank = [{"GEOMESH_REGION": region} for region in regions]
        return run_ranks(
            len(regions), regions_warned_of, initialize=False, per_rank_environment=per_rank
        )

    first, named, nameless = run("eastus", "eastasia", "")
    assert first == nameless  # rank 0, who is read most, and those that have none
    assert named == []
    (text,) = first
    assert "ranks [2] have no region, the others have eastus, eastasia" in text
    assert "set GEOMESH_REGION on all ranks or on none" in text
    assert run("", "") == run("eastus", "eastasia") == [[], []]


def test_ranks_with_different_topologies() -> None:
    topologies = [{"GEOMESH_TOPOLOGY": "azure-4"}, {"GEOMESH_LANES": "1"}]
    for text in errors(2, *topologies, GEOMESH_REGION="eastus"):
        assert "another topology" in text
        assert "GEOMESH_TOPOLOGY" in text


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("GEOMESH_INTERFACE", "eth99", "lo"),
        ("GEOMESH_INTERFACE", "^lo,docker", "lo"),
        ("GEOMESH_PORTS", "99999", "takes one port or a range"),
        ("GEOMESH_LANES", "many", "whole number"),
        ("GEOMESH_DEAD_AFTER", "soon", "duration"),
        ("GEOMESH_RECORD_FOLDER", "/proc/version", "is no folder that can be written to"),
        ("GEOMESH_SCHEDULER", "lifo", "takes storm, fifo or fair"),
    ],
)
def test_bad_values_are_named(variable: str, value: str, says: str) -> None:
    (text,) = errors(1, **{variable: value})
    assert value in text
    assert says in text


def test_exhausted_port_range() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (text,) = errors(1, GEOMESH_PORTS=f"{port}-{port}")
    assert str(port) in text
    assert "GEOMESH_PORTS" in text


def test_unknown_option_and_wrong_kind_of_options() -> None:
    import torch_geomesh as gm

    with pytest.raises(ValueError, match=r"no option is named 'lane'.*lanes"):
        gm.Options(lane=3)
    with pytest.raises(ValueError, match=r"lanes='-1': takes a whole number"):
        gm.Options(lanes=-1)
    with pytest.raises(TypeError, match=r"torch_geomesh\.Options"):
        dist.init_process_group(
            "geomesh",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            pg_options=dist.ProcessGroupGloo._Options(),
        )


def wrong_calls() -> None:
    with pytest.raises(RuntimeError, match=r"sparse tensors take SUM only"):
        dist.all_reduce(torch.ones(3).to_sparse(), op=dist.ReduceOp.MAX)
    with pytest.raises(RuntimeError, match=r"all_gather.*list of 1: takes 1 for each of 2 ranks"):
        dist.all_gather([torch.ones(3)], torch.ones(3))
    with pytest.raises(RuntimeError, match=r"differ in dtype"):
        dist.all_gather_into_tensor(torch.ones(6), torch.ones(3).double())
    with pytest.raises(RuntimeError, match=r"add up to 3"):
        dist.all_to_all_single(torch.ones(4), torch.ones(4), [2, 1], [2, 2])
    own = [[1, 1], [2, 0]] if dist.get_rank() == 0 else [[1, 1], [0, 2]]
    with pytest.raises(RuntimeError, match=r"own part, .* has 8 bytes, the output's 4"):
        dist.all_to_all_single(torch.ones(2), torch.ones(2), *own)
    value = torch.ones(3)
    dist.all_reduce(value)
    assert value.tolist() == [2.0] * 3  # the group goes on: nothing had left


def test_wrong_arguments_leave_the_group_usable() -> None:
    run_ranks(2, wrong_calls)


def use_in_a_fork() -> None:
    dist.all_reduce(torch.ones(3))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for act in (
            lambda: dist.all_reduce(torch.ones(3)),
            lambda: dist.all_reduce(torch.ones(3), async_op=True),
            dist.destroy_process_group,
        ):
            try:
                act()
                said.append("nothing")
            except RuntimeError as error:
                said.append(str(error).splitlines()[0])
        os.write(writing, "\n".join(said).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as answers:  # closed at the child's end, also if it is killed
        timer = threading.Timer(20, os.kill, (child, signal.SIGKILL))
        timer.start()
        lines = answers.read().splitlines()
        timer.cancel()
    os.waitpid(child, 0)
    assert len(lines) == 3, f"the fork hung: {lines}"
    for line in lines[:2]:
        assert f"is a fork of process {os.getpid()}" in line
    assert lines[2] == "nothing"
    total = torch.ones(3)
    dist.all_reduce(total)
    assert torch.equal(total, torch.full((3,), 2.0))


def test_a_fork_is_told_so_and_does_not_hang() -> None:
    run_ranks(2, use_in_a_fork)
