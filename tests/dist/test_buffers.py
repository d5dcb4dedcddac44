"""Memory let go of while it is in use, large blocking calls on few cores, ranks that do not fit."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from torch_geomesh.backend import backend_of

# ---- the caller lets go of everything ----


def value(rank: int, turn: int) -> float:
    """Return a whole number that is another for each rank and turn, exact in sums of three."""
    return float(100 * (turn % 97) + 10 * rank + 1)


def tensor(rank: int, turn: int, size: int) -> torch.Tensor:
    """Return values of which no other tensor of that size has many."""
    return torch.arange(size, dtype=torch.float32).remainder_(7).add_(value(rank, turn))


def strided(rank: int, turn: int, size: int) -> torch.Tensor:
    """Return the same values, between others."""
    wide = torch.full((size, 2), -1.0)
    wide[:, 1] = tensor(rank, turn, size)
    return wide[:, 1]


Make = Callable[[int, int, int], torch.Tensor]
Works = list[tuple[dist.Work, Callable[[], list[torch.Tensor]]]]


class Dropped:
    """Starts operations on tensors that nobody but they have, and knows their results."""

    def __init__(self, make: Make, turn: int, size: int) -> None:
        self.make, self.turn, self.size = make, turn, size
        self.rank, self.ranks = dist.get_rank(), range(dist.get_world_size())
        self.root = turn % len(self.ranks)
        self.keep: list[torch.Tensor] | None = None

    def mine(self, parts: int = 1) -> torch.Tensor:
        return self.held(self.make(self.rank, self.turn, parts * self.size))

    def held(self, given: torch.Tensor) -> torch.Tensor:
        if self.keep is not None:
            self.keep.append(given)
        return given

    def of(self, rank: int) -> torch.Tensor:
        return tensor(rank, self.turn, self.size)

    def total(self) -> torch.Tensor:
        return sum(self.of(rank) for rank in self.ranks)

    def new(self, parts: int = 1) -> torch.Tensor:
        return torch.full((parts * self.size,), -2.0)

    def part(self, rank: int) -> torch.Tensor:
        """Return what rank ``rank`` gives to this one of ``mine(3)``."""
        whole = tensor(rank, self.turn, len(self.ranks) * self.size)
        return whole[self.rank * self.size :][: self.size]

    def send_and_receive(self) -> Works:
        count = len(self.ranks)
        right, left = (self.rank + 1) % count, (self.rank - 1) % count
        return [
            (dist.isend(self.mine(), right), list),
            (dist.irecv(self.new(), left), lambda: [self.of(left)]),
        ]

    def broadcast(self) -> Works:
        work = dist.broadcast(self.mine(), self.root, async_op=True)
        return [(work, lambda: [self.of(self.root)])]

    def all_reduce(self) -> Works:
        return [(dist.all_reduce(self.mine(), async_op=True), lambda: [self.total()])]

    def all_reduce_coalesced(self) -> Works:
        tensors = [self.mine(), self.mine()]
        return [(dist.group.WORLD.allreduce_coalesced(tensors), lambda: [self.total()] * 2)]

    def reduce(self) -> Works:
        work = dist.reduce(self.mine(), self.root, async_op=True)
        mine = self.rank == self.root
        return [(work, lambda: [self.total() if mine else self.of(self.rank)])]

    def all_gather(self) -> Works:
        work = dist.all_gather([self.new() for _ in self.ranks], self.mine(), async_op=True)
        return [(work, lambda: [self.of(rank) for rank in self.ranks])]

    def all_gather_into_tensor(self) -> Works:
        output = self.new(len(self.ranks))
        work = dist.all_gather_into_tensor(output, self.mine(), async_op=True)
        return [(work, lambda: [torch.cat([self.of(rank) for rank in self.ranks])])]

    def gather(self) -> Works:
        mine = self.rank == self.root
        outputs = [self.new() for _ in self.ranks] if mine else None
        work = dist.gather(self.mine(), outputs, self.root, async_op=True)
        return [(work, lambda: [self.of(rank) for rank in self.ranks] if mine else [])]

    def scatter(self) -> Works:
        inputs = [self.held(self.make(rank, self.turn, self.size)) for rank in self.ranks]
        given = inputs if self.rank == self.root else None
        work = dist.scatter(self.new(), given, self.root, async_op=True)
        return [(work, lambda: [self.of(self.rank)])]

    def reduce_scatter_tensor(self) -> Works:
        work = dist.reduce_scatter_tensor(self.new(), self.mine(len(self.ranks)), async_op=True)
        return [(work, lambda: [sum(self.part(rank) for rank in self.ranks)])]

    def all_to_all_single(self) -> Works:
        count = len(self.ranks)
        work = dist.all_to_all_single(self.new(count), self.mine(count), async_op=True)
        return [(work, lambda: [torch.cat([self.part(rank) for rank in self.ranks])])]


OPERATIONS = [
    "send_and_receive",
    "broadcast",
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
]
AT_ONCE = 16


def lets_go(turns: dict[int, int]) -> dict[str, int]:
    """Keep the work, only its future, or neither, by turns; return the results compared."""
    rank = dist.get_rank()
    compared = dict.fromkeys(OPERATIONS, 0)
    for name in OPERATIONS:
        for size, count in turns.items():
            pending: deque[tuple[Any, Callable[[], list[torch.Tensor]], int]] = deque()

            def check(name: str = name, size: int = size, pending: deque = pending) -> None:
                kept, wanted, turn = pending.popleft()
                if kept is None:
                    return
                value = kept.wait()
                got = kept.result() if isinstance(kept, dist.Work) else value
                wants = wanted()
                for output, want in zip(got, wants, strict=False):
                    assert torch.equal(output, want), (name, size, turn)
                compared[name] += len(wants)
                assert len(got) >= len(wants), (name, size, turn)

            for turn in range(count):
                call = Dropped(strided if turn % 4 == 3 else tensor, turn, size)
                for work, wanted in getattr(call, name)():
                    kept = (work, work.get_future(), None)[(turn // 3 + rank) % 3]
                    pending.append((kept, wanted, turn))
                del work, kept
                # What comes to lie where the tensors lay, if they were freed.
                garbage = [torch.full((n * size,), -9.0) for n in (1, 1, 1, 2, 3)]
                while len(pending) > AT_ONCE:
                    check()
            while pending:
                check()
            del garbage
    dist.barrier()
    return compared


def test_tensors_live_as_long_as_their_operation() -> None:
    for compared in run_ranks(3, lets_go, {1: 150, 1000: 150, 100_003: 18}):
        assert set(compared) == set(OPERATIONS)
        assert min(compared.values()) > 150, compared


def overwrites(turns: dict[int, int]) -> None:
    """Use the memory again as soon as this rank's own work is done; others may be behind."""
    for name in OPERATIONS:
        for size, count in turns.items():
            for turn in range(count):
                call = Dropped(strided if turn % 4 == 3 else tensor, turn, size)
                call.keep = []
                started = getattr(call, name)()
                for work, _ in started:
                    work.wait()
                got = [[output.clone() for output in work.result()] for work, _ in started]
                for used in [
                    *call.keep,
                    *(output for work, _ in started for output in work.result()),
                ]:
                    used.fill_(-9)
                for outputs, (_, wanted) in zip(got, started, strict=True):
                    for output, want in zip(outputs, wanted(), strict=False):
                        assert torch.equal(output, want), (name, size, turn)
    dist.barrier()


def test_tensors_are_free_when_their_work_is_done() -> None:
    run_ranks(3, overwrites, {1: 50, 1000: 50, 100_003: 8})


# ---- many large blocking calls, and no core to spare ----


def blocking(cores: int) -> float:
    """Return the seconds that the calls took."""
    os.sched_setaffinity(
        0, sorted(os.sched_getaffinity(0))[:cores]
    )  # threads made later inherit it
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    dist.init_process_group(
        "geomesh", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=20)
    )
    value = torch.arange(1_000_000, dtype=torch.float32).remainder_(1000)
    want = value * world + sum(range(world))
    value += rank
    start = time.monotonic()
    for _ in range(10):
        dist.all_reduce(value)
        assert torch.equal(value, want)
        want *= world
    return time.monotonic() - start


@pytest.mark.parametrize("cores", [1, 2])
def test_large_blocking_calls_end_with_few_cores_and_one_openmp_thread(cores: int) -> None:
    took = run_ranks(
        2, blocking, cores, initialize=False, environment={"OMP_NUM_THREADS": "1"}, timeout=60
    )
    assert max(took) < 15


# ---- ranks that are none, or none of the group ----


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises((RuntimeError, ValueError)) as error:
        call()
    return str(error.value)


def ranks_that_do_not_exist() -> tuple[float, list[int]]:
    """Refused by every rank alike, whoever it is; the groups go on."""
    start = time.monotonic()
    rank, world = dist.get_rank(), dist.get_world_size()
    one = torch.ones(2)
    inside = dist.new_group([1, 2], timeout=timedelta(seconds=5))
    for bad in (world, 7, -1):
        for name, call in {
            "broadcast": lambda bad=bad: dist.broadcast(one, bad),
            "reduce": lambda bad=bad: dist.reduce(one, bad),
            "gather": lambda bad=bad: dist.gather(one, None, bad),
            "scatter": lambda bad=bad: dist.scatter(one, None, bad),
        }.items():
            text = error_of(call)
            assert re.search(rf"{name}.*root rank: {bad}, .*ranks 0 to {world - 1}", text), text
        for name, call in {
            "send": lambda bad=bad: dist.send(one, bad),
            "recv": lambda bad=bad: dist.recv(one, bad),
        }.items():
            text = error_of(call)
            assert re.search(
                rf"{name}.*rank {bad}\b.*the group has ranks 0 to {world - 1}", text
            ), text
        # Nobody may take a list with a bad rank for a list that another rank gives.
        text = error_of(lambda bad=bad: dist.new_group([0, bad], timeout=timedelta(seconds=5)))
        assert re.search(rf" {bad} is out of range|within the world.size", text), text

    numbers = [backend_of()._get_sequence_number_for_group()]
    if rank in (1, 2):
        # Ranks of the job are wanted; 0 is none of the group, and 2 no place in it.
        for call in (
            lambda: dist.broadcast(one, 0, group=inside),
            lambda: dist.reduce(one, 0, group=inside),
            lambda: dist.gather(one, None, 0, group=inside),
            lambda: dist.scatter(one, None, 0, group=inside),
            lambda: dist.send(one, 0, group=inside),
            lambda: dist.recv(one, 0, group=inside),
        ):
            assert "0 is not part of group" in error_of(call)
        for call in (
            lambda: dist.broadcast(one, group_src=2, group=inside),
            lambda: dist.reduce(one, group_dst=2, group=inside),
            lambda: dist.gather(one, None, group_dst=2, group=inside),
            lambda: dist.scatter(one, None, group_src=2, group=inside),
            lambda: dist.send(one, group_dst=2, group=inside),
            lambda: dist.recv(one, group_src=2, group=inside),
        ):
            text = error_of(call)
            assert re.search(r"rank:? 2\b.*the group has ranks 0 to 1", text), text
        numbers.append(backend_of(inside)._get_sequence_number_for_group())
        value = torch.tensor([float(rank)])
        dist.broadcast(value, 2, group=inside)
        assert value.item() == 2
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    assert value.item() == sum(range(world))
    everybody = dist.new_group(list(range(world)), timeout=timedelta(seconds=5))
    dist.all_reduce(value, group=everybody)
    assert value.item() == world * sum(range(world))
    return time.monotonic() - start, numbers


def test_ranks_that_do_not_exist_are_refused_at_once() -> None:
    results = run_ranks(3, ranks_that_do_not_exist, init={"timeout": timedelta(seconds=5)})
    for took, numbers in results:
        assert took < 5
        assert set(numbers) == {0}


def lists_that_do_not_fit(lists: list[list[int]], local: bool) -> tuple[str, float]:
    """Create the group that this rank wants; return the error, "" where there is none."""
    rank = dist.get_rank()
    start = time.monotonic()
    text = ""
    try:
        dist.new_group(lists[rank], timeout=timedelta(seconds=1), use_local_synchronization=local)
    except RuntimeError as error:
        text = str(error)
    took = time.monotonic() - start
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)  # the default group goes on
    assert value.item() == 3
    return text, took


@pytest.mark.parametrize("local", [False, True])
def test_places_in_the_group_instead_of_the_jobs_ranks_are_told(local: bool) -> None:
    """Ranks 1 and 2 want a group, and call themselves 0 and 1 in it; rank 0 wants its own."""
    lists = [[0], [0, 1], [0, 1]]
    limit = {"timeout": timedelta(seconds=5)}
    results = run_ranks(3, lists_that_do_not_fit, lists, local, init=limit)
    (alone, _), (text, took), (outside, _) = results
    assert alone == ""
    assert outside == ""  # not in its own list, so c10d gives it no group
    assert 0.9 < took < 4
    assert "rank 1 waited" in text
    assert "group of [0, 1] to meet" in text
    assert "missing: rank 0" in text


def test_lists_in_a_circle_are_all_named() -> None:
    lists = [[0, 1], [1, 2], [0, 2]]
    limit = {"timeout": timedelta(seconds=5)}
    results = run_ranks(3, lists_that_do_not_fit, lists, False, init=limit)
    named = 0
    for rank, (text, took) in enumerate(results):
        other = sum(lists[rank]) - rank
        assert 0.9 < took < 4
        assert f"group of {lists[rank]} to meet" in text
        assert f"missing: rank {other} of 2" in text
        # Of one that has given up already, nobody knows what it waited for.
        named += f"rank {other} waits for a group of {lists[other]}" in text
    assert named >= 1
