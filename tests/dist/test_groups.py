"""Subgroups: who may create them how, several at once, and what is left when they are gone."""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import torch_geomesh as gm


def total(group: dist.ProcessGroup, value: float) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def own_groups_only() -> None:
    """Each rank creates its own group and no other: with and without a word to the others."""
    rank = dist.get_rank()
    for local in (False, True):
        mine = [0, 3] if rank in (0, 3) else [1, 2]
        group = dist.new_group(mine, use_local_synchronization=local)
        assert total(group, 10.0**rank) == sum(10.0**r for r in mine)
    # Rank 0 has made more groups than the others by now and later.
    if rank != 3:
        first = dist.new_group([0, 1, 2], use_local_synchronization=True)
        assert total(first, 10.0**rank) == 111
    if rank in (0, 3):
        second = dist.new_group([3, 0], use_local_synchronization=True)
        assert total(second, 10.0**rank) == 1001
    again = dist.new_group([0, 1, 2, 3])
    assert total(again, 10.0**rank) == 1111


def two_threads() -> None:
    """Two threads create groups at the same time and use them."""
    rank = dist.get_rank()
    wrong: list[str] = []

    def work(members: list[int]) -> None:
        try:
            for turn in range(4):
                group = dist.new_group(members, use_local_synchronization=True)
                got, want = total(group, 10.0**rank * (turn + 1)), sum(10.0**r for r in members)
                if got != want * (turn + 1):
                    wrong.append(f"{members}, turn {turn}: {got}")
                dist.destroy_process_group(group)
        except Exception as error:
            wrong.append(repr(error))

    lists = [members for members in ([0, 1, 2], [1, 2, 3]) if rank in members]
    threads = [threading.Thread(target=work, args=(members,)) for members in lists]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []


def three_busy_groups() -> None:
    """Three groups of the same ranks and of others, in another order of calls on each rank."""
    rank = dist.get_rank()
    lists = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 2] if rank in (0, 2) else [1, 3]]
    groups = [dist.new_group(m, use_local_synchronization=len(m) == 2) for m in lists]
    tensors, works = {}, []
    for turn in range(12):
        for place in range(3):
            which = (place + rank) % 3
            tensor = torch.full((501 + 4000 * which,), 10.0**rank * (1 + turn + 100 * which))
            tensors[turn, which] = tensor
            works.append(dist.all_reduce(tensor, group=groups[which], async_op=True))
    for work in works:
        work.wait()
    for (turn, which), tensor in tensors.items():
        want = sum(10.0**r for r in lists[which]) * (1 + turn + 100 * which)
        assert tensor.eq(want).all(), (turn, which)


def legal_patterns() -> None:
    own_groups_only()
    two_threads()
    three_busy_groups()


def test_legal_patterns_work_without_cross_talk() -> None:
    run_ranks(4, legal_patterns)


def unequal_lists() -> tuple[str, float]:
    rank = dist.get_rank()
    mine = [[0, 1, 2], [0, 1], [0, 1, 2]][rank]
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        dist.new_group(mine, timeout=timedelta(seconds=2))
    took = time.monotonic() - start
    dist.barrier()  # the default group goes on
    return str(caught.value), took


def test_unequal_lists_are_told_in_time() -> None:
    texts, seconds = zip(*run_ranks(3, unequal_lists), strict=True)
    assert all(1.9 < s < 4 for s in seconds), seconds
    for rank in (0, 2):
        assert re.search(rf"rank {rank} waited .* group of \[0, 1, 2\] to meet", texts[rank])
        assert re.search(r"missing: rank 1 of 3; rank 1 waits for a group of \[0, 1\]", texts[rank])
    assert re.search(r"missing: rank 0 of 2; rank 0 waits for a group of \[0, 1, 2\]", texts[1])
    assert "the same list of the job's ranks" in texts[1]


def another_groups_options() -> None:
    with pytest.raises(ValueError, match=r"lanes='2'.*lanes='3'.*leave lanes out.*GEOMESH_LANES"):
        dist.new_group(pg_options=gm.Options(lanes=2))
    with pytest.raises(ValueError, match=r"rank \d: .*dead_after='1m'.*dead_after='20s'"):
        dist.new_group(pg_options=gm.Options(lanes=3, dead_after="60s"))
    # The same value said in another way, or nothing said.
    for options in (gm.Options(lanes=3, dead_after="20000ms", ports="24000-24999"), gm.Options()):
        group = dist.new_group(pg_options=options)
        assert total(group, 1.0) == 2


def options_of_a_second_group() -> None:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    dist.init_process_group(
        "geomesh",
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=2,
        pg_options=gm.Options(lanes=3, ports="24000-24999"),
    )
    another_groups_options()


def test_another_groups_options_are_checked() -> None:
    run_ranks(2, options_of_a_second_group, initialize=False)


Held = dict[str, tuple[int, int]]  # of each kind, before and after


def held() -> dict[str, int]:
    """Return what this process holds while all ranks are at rest."""
    dist.barrier()
    dist.barrier()
    with open("/proc/self/statm") as file:
        resident_pages = int(file.read().split()[1])
    counts = {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "keys": dist.distributed_c10d._get_default_store().num_keys(),
        "resident KB": resident_pages * os.sysconf("SC_PAGE_SIZE") // 1024,
    }
    dist.barrier()
    return counts


def before_and_after(warm_up: Callable[[], None], work: Callable[[], None]) -> Held:
    warm_up()
    before = held()
    work()
    return {name: (before[name], after) for name, after in held().items()}


def check_flat(result: Held, resident_kb: int) -> None:
    for name in ("descriptors", "threads", "keys"):
        before, after = result[name]
        assert before == after, result
    before, after = result["resident KB"]
    assert after - before < resident_kb, result


def many_groups(turns: int) -> Held:
    def make(count: int) -> None:
        for _ in range(count):
            group = dist.new_group([0, 1])
            assert total(group, 1.0) == 2
            dist.destroy_process_group(group)

    return before_and_after(lambda: make(20), lambda: make(turns))


def test_groups_come_and_go_without_a_trace() -> None:
    for result in run_ranks(2, many_groups, 200):
        check_flat(result, resident_kb=4000)


def many_collectives(count: int) -> Held:
    rank = dist.get_rank()
    draws = random.Random(5)  # the same on both ranks

    def run(calls: int) -> None:
        works: list[tuple[dist.Work, torch.Tensor, float]] = []
        for _ in range(calls):
            # From nothing to above what is read in place; small ones most often.
            size = int(2 ** draws.uniform(0, 16)) * draws.randint(0, 4) // 4
            kind = draws.randint(0, 3)
            if kind == 0:
                tensor = torch.full((size,), float(rank))
                works.append((dist.all_reduce(tensor, async_op=True), tensor, 1.0))
            elif kind == 1:
                tensor = torch.full((size,), float(rank))
                works.append((dist.broadcast(tensor, 1, async_op=True), tensor, 1.0))
            elif kind == 2:
                tensor = torch.empty(2 * size)
                own = torch.full((size,), 3.0)
                works.append((dist.all_gather_into_tensor(tensor, own, async_op=True), tensor, 3.0))
            else:
                tensor = torch.empty(size)
                own = torch.full((2 * size,), 2.0)
                works.append((dist.reduce_scatter_tensor(tensor, own, async_op=True), tensor, 4.0))
            if len(works) == 50:
                for work, result, want in works:
                    work.wait()
                    assert torch.equal(result, torch.full_like(result, want))
                works.clear()

    return before_and_after(lambda: run(5000), lambda: run(count))


def test_fifty_thousand_collectives_leave_nothing_behind() -> None:
    for result in run_ranks(2, many_collectives, 50_000, timeout=170):
        check_flat(result, resident_kb=8000)


def texts_of_a_subgroup() -> dict[str, str]:
    """Rank 2 of the job is rank 1 of the group: texts have the job's numbers."""
    groups = [dist.new_group([1, 2], timeout=timedelta(seconds=0.5)) for _ in range(3)]
    store = dist.distributed_c10d._get_default_store()
    texts: dict[str, str] = {}
    if dist.get_rank() == 1:
        calls: dict[str, Callable[[dist.ProcessGroup], object]] = {
            "broadcast": lambda group: dist.broadcast(torch.ones(3), 2, group=group),
            "reduce": lambda group: dist.reduce(torch.ones(3), 1, group=group),
            "recv": lambda group: dist.recv(torch.ones(3), 2, group=group),
        }
        for (name, call), group in zip(calls.items(), groups, strict=True):
            with pytest.raises(RuntimeError) as error:
                call(group)
            texts[name] = str(error.value)
        store.set("seen", "")
    store.wait(["seen"])
    return texts


def test_texts_of_a_subgroup_have_the_jobs_rank_numbers() -> None:
    texts = run_ranks(3, texts_of_a_subgroup)[1]
    assert texts["broadcast"].startswith("broadcast(Float[3], root 2), sequence 1: not done")
    assert texts["reduce"].startswith("reduce(Float[3], SUM, root 1), sequence 1: not done")
    assert texts["recv"].startswith("recv(Float[3], from rank 2, tag 0), sequence 0: not done")
    for text in texts.values():
        assert "waiting for 1 message from rank 2 on host" in text
