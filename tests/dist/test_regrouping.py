"""Groups made of groups: split, shrink, merge, and a group that is configured anew."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, start_ranks
from versions import needs_torch

import torch_geomesh as gm


def total(group: dist.ProcessGroup | None, value: float) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def splits() -> None:
    rank = dist.get_rank()
    halves = dist.split_group(split_ranks=[[0, 2], [1, 3]])
    assert total(halves, 10.0**rank) == (101 if rank % 2 == 0 else 1010)
    assert dist.get_backend(halves) == "geomesh"
    # Twice the same split, and one that leaves a rank out.
    again = dist.split_group(split_ranks=[[0, 2], [1, 3]])
    assert total(again, 10.0**rank) == total(halves, 10.0**rank)
    some = dist.split_group(split_ranks=[[0, 1, 3]])
    if rank == 2:
        assert some in (None, dist.GroupMember.NON_GROUP_MEMBER)
    else:
        assert total(some, 10.0**rank) == 1011
        # A split of a split, by ranks of that.
        pair = dist.split_group(parent_pg=some, split_ranks=[[1, 2]])
        if rank in (1, 3):
            assert total(pair, 10.0**rank) == 1010
    dist.barrier()


@needs_torch(15, "split_group without a device")
def test_split_groups():
    run_ranks(4, splits)


def options_are_not_shared() -> None:
    group = dist.split_group(split_ranks=[[0, 1]], timeout=timedelta(seconds=7))
    parent, child = gm.backend.backend_of(), gm.backend.backend_of(group)
    assert child.options._timeout == timedelta(seconds=7)
    assert parent.options._timeout == timedelta(seconds=30)


@needs_torch(15, "split_group without a device")
def test_a_split_group_has_options_of_its_own():
    run_ranks(2, options_are_not_shared)


def survivors(tell) -> list[float]:
    rank = dist.get_rank()
    assert total(None, 10.0**rank) == 1111
    tell(os.getpid())
    if rank == 2:
        signal.pause()
    with pytest.raises(RuntimeError, match="rank 2"):
        dist.barrier()
    group = dist.shrink_group([2], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    got = [total(group, 10.0**rank), float(dist.get_world_size()), float(dist.get_rank())]
    # Once more, from the smaller group.
    if rank in (1, 3):
        dist.shrink_group([0])
        got.append(total(None, 10.0**rank))
    return got


def test_the_group_shrinks_when_a_rank_dies():
    world = start_ranks(4, survivors)
    for rank in range(4):
        world.receive(rank)
    world.signal(2, signal.SIGKILL)
    outcomes = world.join(expect_dead=(2,))
    for rank, group_rank in ((0, 0), (1, 1), (3, 2)):
        assert not outcomes[rank].error, outcomes[rank].error
        assert outcomes[rank].value[:3] == [1011.0, 3.0, float(group_rank)]
        assert outcomes[rank].value[3:] == ([] if rank == 0 else [1010.0])


def excludes_itself() -> None:
    if dist.get_rank() == 0:
        backend = gm.backend.backend_of()
        with pytest.raises(RuntimeError, match="excludes itself"):
            backend.shrink([0])
        with pytest.raises(ValueError, match="rank 5 is not one of the group's"):
            backend.shrink([5])


def test_what_shrink_refuses():
    run_ranks(2, excludes_itself)


def configures() -> None:
    """Four processes; first three of them form a group, then two, then all in another order."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    me, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "geomesh",
        store=store,
        rank=me,
        world_size=world,
        timeout=timedelta(seconds=30),
        enable_reconfigure=True,
    )
    with pytest.raises(RuntimeError, match="call reconfigure"):
        dist.all_reduce(torch.ones(1))
    assert dist.distributed_c10d._supports_reconfigure()
    store.set(f"handle{me}", dist.distributed_c10d._get_reconfigure_handle())
    handles = [store.get(f"handle{rank}").decode() for rank in range(world)]
    configure = dist.distributed_c10d._reconfigure
    pg = dist.distributed_c10d._get_default_group()

    if me < 3:
        configure(uuid=1, handles=handles[:3]).wait()
        assert (pg.rank(), pg.size()) == (me, 3)
        assert total(None, 10.0**me) == 111
    if me in (1, 2):
        configure(uuid=2, handles=[handles[2], handles[1]]).wait()
        assert (pg.rank(), pg.size()) == (2 - me, 2)
        gathered = [torch.empty(1) for _ in range(2)]
        dist.all_gather(gathered, torch.tensor([float(me)]))
        assert [int(t) for t in gathered] == [2, 1]
    configure(uuid=3, handles=set(handles)).wait()
    assert pg.size() == 4
    assert total(None, 10.0**me) == 1111
    with pytest.raises(RuntimeError, match="uuid 3 was used before"):
        configure(uuid=3, handles=handles)
    with pytest.raises(RuntimeError, match="own handle is not one of the 1 given"):
        configure(uuid=4, handles=[handles[(me + 1) % 4]])
    with pytest.raises(RuntimeError, match="handle 1 is not one that get_reconfigure_handle"):
        configure(uuid=5, handles=[handles[0], "nonsense"])
    assert total(None, 10.0**me) == 1111  # refused calls change nothing
    store.set(f"rank{me}", str(pg.rank()))
    ranks = [int(store.get(f"rank{rank}")) for rank in range(world)]
    assert sorted(ranks) == [0, 1, 2, 3]
    if os.environ.get("GEOMESH_REGION"):  # ranks 0 and 2 are in one region, 1 and 3 in another
        assert abs(ranks[0] - ranks[2]) == 1
        assert abs(ranks[1] - ranks[3]) == 1
    dist.barrier()


@needs_torch(14, "groups made to be configured anew")
@pytest.mark.parametrize("regions", [None, ["east", "west", "east", "west"]])
def test_a_group_is_configured_anew(regions):
    per_rank = [{"GEOMESH_REGION": region} for region in regions] if regions else None
    run_ranks(4, configures, initialize=False, per_rank_environment=per_rank)


def merges() -> None:
    """Two groups of two become one of four, through a store."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 1] if rank < 2 else [2, 3], use_local_synchronization=True)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    merged = pair.merge_remote_group(store, 4, timedelta(seconds=30), "all")
    assert merged.size() == 4
    tensor = torch.tensor([10.0**rank])
    merged.allreduce([tensor]).wait()
    assert tensor.item() == 1111


def test_groups_merge():
    run_ranks(4, merges)
