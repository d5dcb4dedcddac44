"""Groups of one rank, and messages to oneself."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks


def resident_kb() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def every_operation_gives_back_its_input(group: dist.ProcessGroup) -> None:
    me = dist.get_rank()
    for value in (torch.arange(7.0), torch.arange(7), torch.empty(0), torch.ones(2, 3).bfloat16()):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
            tensor = value.clone()
            dist.all_reduce(tensor, op, group=group)
            assert torch.equal(tensor, value)
            dist.reduce(tensor, me, op, group=group)
            assert torch.equal(tensor, value)
        dist.broadcast(tensor, me, group=group)
        assert torch.equal(tensor, value)
        into = torch.zeros_like(value)
        for call in (
            lambda out, value: dist.all_gather([out], value, group=group),
            lambda out, value: dist.gather(value, [out], me, group=group),
            lambda out, value: dist.scatter(out, [value], me, group=group),
            lambda out, value: dist.reduce_scatter(out, [value], group=group),
            lambda out, value: dist.all_to_all([out], [value], group=group),
            lambda out, value: dist.all_gather_into_tensor(out, value, group=group),
            lambda out, value: dist.reduce_scatter_tensor(out, value, group=group),
            lambda out, value: dist.all_to_all_single(out, value, group=group),
        ):
            into.zero_()
            call(into, value)
            assert torch.equal(into, value)
    dist.barrier(group=group)
    objects = [None]
    dist.all_gather_object(objects, {"rank": me}, group=group)
    assert objects == [{"rank": me}]


def alone_in_both_ways() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    for group in (dist.group.WORLD, dist.new_group([0])):
        every_operation_gives_back_its_input(group)
    assert len(os.listdir("/proc/self/fd")) == descriptors  # no connection


def many(turns: int) -> tuple[int, int]:
    tensor = torch.ones(16)
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for _ in range(turns // 2):  # until its threads have an arena each
        dist.all_reduce(tensor, group=group)
    before = resident_kb()
    for _ in range(turns):
        dist.all_reduce(tensor, group=group)
    assert tensor.eq(1).all()
    return before, resident_kb()


def alone(turns: int) -> tuple[int, int]:
    alone_in_both_ways()
    return many(turns)


def test_a_group_of_one_gives_identical_results_and_keeps_no_memory() -> None:
    before, after = run_ranks(1, alone, 100_000)[0]
    assert after - before < 1500, (before, after)


def messages_to_oneself() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    says = r"rank \d, tag \d+\): a rank can't exchange messages with itself; copy"
    with pytest.raises(ValueError, match="should not be the same as the rank"):  # torch's own
        dist.send(torch.ones(3), rank)
    for call in (dist.isend, dist.irecv, dist.recv):
        with pytest.raises(ValueError, match=says):
            call(torch.ones(3), rank)
    everybody = [dist.P2POp(dist.isend, torch.ones(3), peer) for peer in range(world)]
    if rank == 0:  # refused at once, and nothing was sent before it: rank 0 is the first peer
        with pytest.raises(ValueError, match=says):
            dist.batch_isend_irecv(everybody)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)  # the group goes on
    assert tensor.tolist() == [world] * 2


@pytest.mark.parametrize("world", [1, 2])
def test_messages_to_oneself_are_refused_by_name(world: int) -> None:
    run_ranks(world, messages_to_oneself)
