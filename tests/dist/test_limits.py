"""How long a call may take, and that signals end what blocks."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from signal import SIGINT, SIGSTOP, SIGTERM, Signals
from typing import Any

import pytest
import torch
import torch.distributed as dist
from provoked_errors import error_of
from ranks import World, run_ranks, started
from torch._C import _distributed_c10d as c10d
from versions import TORCH_MINOR

import torch_geomesh as gm
from torch_geomesh.backend import backend_of

HOUR = timedelta(hours=1)
LIMIT_S = 0.2
WITHIN = 1.2
GROUPS_LIMIT_S = 2.0
TRIES = 2  # want of processor time makes a limit late, never early: the best try counts


def limited(options: str, **values: object) -> object:
    """Make the options of a c10d call, with a limit of its own."""
    made = getattr(c10d, options)()
    made.timeout = timedelta(seconds=LIMIT_S)
    for name, value in values.items():
        setattr(made, name, value)
    return made


def calls() -> dict[str, Callable[[dist.ProcessGroup], object]]:
    """Return each collective, called by rank 0 so that it can't end without rank 1."""
    a, b = torch.ones(8), torch.ones(8)
    wide = torch.ones(16)
    found: dict[str, Callable[[dist.ProcessGroup], object]] = {
        "all_reduce": lambda g: g.allreduce([a], limited("AllreduceOptions")),
        "all_reduce_coalesced": lambda g: g.allreduce_coalesced(
            [a, b], limited("AllreduceCoalescedOptions")
        ),
        "all_reduce_sparse": lambda g: g.allreduce([a.to_sparse()], limited("AllreduceOptions")),
        "broadcast": lambda g: g.broadcast([a], limited("BroadcastOptions", rootRank=1)),
        "reduce": lambda g: g.reduce([a], limited("ReduceOptions", rootRank=0)),
        "all_gather": lambda g: g.allgather([[a, b]], [wide[:8]], limited("AllgatherOptions")),
        "all_gather_single": lambda g: g._allgather_base(wide, a, limited("AllgatherOptions")),
        # (PyTorch's ProcessGroup drops this one's limit on the way.)
        "all_gather_coalesced": lambda g: backend_of(g).all_gather_single_coalesced(
            [wide], [a], limited("AllgatherOptions")
        ),
        "gather": lambda g: g.gather([[a, b]], [wide[:8]], limited("GatherOptions", rootRank=0)),
        "scatter": lambda g: g.scatter([a], [], limited("ScatterOptions", rootRank=1)),
        "reduce_scatter": lambda g: g.reduce_scatter(
            [a], [[b, wide[:8]]], limited("ReduceScatterOptions")
        ),
        "reduce_scatter_single": lambda g: g._reduce_scatter_base(
            a, wide, limited("ReduceScatterOptions")
        ),
        "reduce_scatter_coalesced": lambda g: g.reduce_scatter_tensor_coalesced(
            [a], [wide], limited("ReduceScatterOptions")
        ),
        "all_to_all": lambda g: g.alltoall(
            [a, b], [wide[:8], wide[8:]], limited("AllToAllOptions")
        ),
        "all_to_all_single": lambda g: g.alltoall_base(
            wide, wide.clone(), [], [], limited("AllToAllOptions")
        ),
        "barrier": lambda g: g.barrier(limited("BarrierOptions")),
        "sign_all_reduce": lambda g: backend_of(g).sign_all_reduce(
            [a], None, b, weight=1, rotation_seed=1, timeout=timedelta(seconds=LIMIT_S)
        ),
    }
    if TORCH_MINOR >= 14:  # Gloo's alone, or not there, before
        found["monitored_barrier"] = lambda g: dist.monitored_barrier(g, timedelta(seconds=LIMIT_S))
        found["wait_signal"] = lambda g: WINDOWS[g].wait_signal(
            1, True, limited("WaitSignalOptions")
        )
    return found


WINDOWS: dict[dist.ProcessGroup, object] = {}
NAMES = list(calls())


# Of a group (which also has to meet in it), a call and its wait(), in seconds, and which counts.
STRENGTHS = {
    "the_waits_is_the_strongest": (2.0, 1.0, LIMIT_S, LIMIT_S),
    "the_calls_is_stronger_than_a_longer_one_of_the_group": (2.0, LIMIT_S, None, LIMIT_S),
    "the_calls_is_stronger_than_a_shorter_one_of_the_group": (1.0, 1.3, None, 1.3),
    "the_groups_is_stronger_than_the_jobs": (1.0, None, None, 1.0),
}


@dataclass
class Took:
    """How long the tries of a call took until they failed, and with what."""

    limit_s: float
    seconds: list[float]
    text: str


def made(limit_s: float) -> list[dist.ProcessGroup]:
    return [dist.new_group(timeout=timedelta(seconds=limit_s)) for _ in range(TRIES)]


def limits_of_all() -> dict[str, Took]:
    """Return how long each call took on rank 0, while rank 1 sleeps."""
    groups = {name: made(GROUPS_LIMIT_S) for name in NAMES}
    for group in groups.get("wait_signal", []):
        WINDOWS[group] = dist.distributed_c10d._new_window(torch.zeros(1), group)
    strengths = {name: made(limits[0]) for name, limits in STRENGTHS.items()}
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["done"], HOUR)
        return {}
    try:
        took = {n: until_in_time(call, groups[n], LIMIT_S) for n, call in calls().items()}
        for name, (_, of_call, of_wait, counts) in STRENGTHS.items():
            options = c10d.AllreduceOptions()
            if of_call is not None:
                options.timeout = timedelta(seconds=of_call)

            def call(group: dist.ProcessGroup, options=options) -> dist.Work:
                return group.allreduce([torch.ones(8)], options)

            took[name] = until_in_time(call, strengths[name], counts, of_wait)
        return took
    finally:
        store.set("done", "")


def until_in_time(
    call: Callable[[dist.ProcessGroup], Any],
    groups: list[dist.ProcessGroup],
    limit_s: float,
    of_wait: float | None = None,
) -> Took:
    """Call until it takes no more than it should; each group can fail once."""

    def to_its_end(group: dist.ProcessGroup) -> None:
        work = call(group)
        if of_wait is not None:
            work.wait(timedelta(seconds=of_wait))
        elif work is not None:
            work.wait()

    took = Took(limit_s, [], "")
    for group in groups:
        begin = time.monotonic()
        took.text = error_of(to_its_end, group)
        took.seconds.append(time.monotonic() - begin)
        if took.seconds[-1] < limit_s * WITHIN:
            break
    return took


@pytest.fixture(scope="module")
def took() -> dict[str, Took]:
    return run_ranks(2, limits_of_all, init={"timeout": HOUR})[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_calls_own_limit_is_kept_within_a_fifth(took: dict[str, Took], name: str) -> None:
    one = took[name]
    assert min(one.seconds) >= LIMIT_S - 0.001, one.text
    assert min(one.seconds) < LIMIT_S * WITHIN, one
    assert re.search(r"\brank 1\b", one.text, re.I), one.text


@pytest.mark.parametrize("name", STRENGTHS)
def test_of_several_limits(took: dict[str, Took], name: str) -> None:
    one = took[name]
    assert min(one.seconds) >= one.limit_s - 0.001, one.text
    assert min(one.seconds) < one.limit_s * WITHIN, one


# Signals while something blocks.

SOON_S = 1.0
BUSY = 2.0  # all ranks share two cores with the test
PLACES = ["wait", "barrier", "destroy", "init"]
PARTNER = len(PLACES)  # the rank whom the others wait for in vain
ALONE = PLACES.index("init")
# So that what goes to the partner goes through a connection and waits there.
APART = [{"GEOMESH_REGION": "eastasia" if r == PARTNER else "eastus"} for r in range(PARTNER + 1)]


def beats(tell: Callable[[object], None], stop: threading.Event) -> None:
    """Tell when this thread has run for long: the call that blocks has let go of Python's lock."""
    for _ in range(20):
        if stop.wait(0.01):
            return
    tell("blocked")


def blocks(tell: Callable[[object], None]) -> None:
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    options = gm.Options(linger="1h")

    def init(place: str, number: int, size: int) -> None:
        dist.init_process_group(
            "geomesh",
            store=dist.PrefixStore(place, store),
            rank=number,
            world_size=size,
            timeout=HOUR,
            pg_options=options,
        )

    if rank == ALONE:
        call: Callable[[], object] = lambda: init("alone", 0, 2)  # noqa: E731
    else:
        # The partner has no number of its own in PLACES: the one of who is alone.
        init("together", min(rank, ALONE), PARTNER)
        groups = {
            place: dist.new_group([number, ALONE], timeout=HOUR)
            for number, place in enumerate(PLACES)
            if number != ALONE
        }
        dist.barrier()
        if rank == PARTNER:
            return is_told(groups, store, tell)
        place = PLACES[rank]
        group = groups[place]
        work = None
        if place != "barrier":
            work = dist.all_reduce(torch.ones(16_000_000), group=group, async_op=True)
        call = {
            "wait": lambda: work.wait(),
            "barrier": lambda: dist.barrier(group),
            "destroy": dist.destroy_process_group,
        }[place]

    stop = threading.Event()
    beating = threading.Thread(target=beats, args=(tell, stop))
    beating.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    at = time.monotonic()
    stop.set()
    beating.join()
    tell(at)
    threading.Event().wait()  # an end in order would wait for the partner


def is_told(
    groups: dict[str, dist.ProcessGroup], store: dist.Store, tell: Callable[[object], None]
) -> None:
    """Receive from each of the others what they never send; tell what that ends with, and when."""
    told = {}

    def receive(place: str) -> None:
        text = error_of(dist.recv, torch.ones(1), group=groups[place], group_src=0)
        told[place] = (text, time.monotonic())

    threads = [threading.Thread(target=receive, args=(place,), daemon=True) for place in groups]
    for thread in threads:
        thread.start()
    tell("blocked")
    store.wait(["signalled"], HOUR)
    for thread in threads:
        thread.join(20)
    tell(told)
    threading.Event().wait()


@dataclass
class Signalled:
    """Ranks that were sent a signal while each blocked in its place."""

    world: World
    sent: dict[str, float]


@contextmanager
def signalled(number: Signals, *, partner_stands: bool) -> Iterator[Signalled]:
    with started(PARTNER + 1, blocks, initialize=False, per_rank_environment=APART) as world:
        for rank in range(PARTNER + 1):
            assert world.receive(rank) == "blocked"
        if partner_stands:  # why one would press Ctrl-C
            world.signal(PARTNER, SIGSTOP)
        sent = {}
        for rank, place in enumerate(PLACES):
            sent[place] = time.monotonic()
            world.signal(rank, number)
        yield Signalled(world, sent)


@pytest.fixture(scope="module")
def interrupted() -> dict[str, float]:
    """Return in how many seconds each place raised KeyboardInterrupt."""
    with signalled(SIGINT, partner_stands=True) as ranks:
        return {
            place: ranks.world.receive(rank, timeout=40) - ranks.sent[place]
            for rank, place in enumerate(PLACES)
        }


@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_ends_what_blocks_within_a_second(interrupted: dict[str, float], place: str) -> None:
    """Though the rank that is waited for is stopped, as it is when somebody presses Ctrl-C."""
    assert 0 < interrupted[place] < SOON_S * BUSY


def test_sigterm_ends_what_blocks_within_a_second_and_the_others_are_told() -> None:
    with signalled(SIGTERM, partner_stands=False) as ranks:
        for rank, place in enumerate(PLACES):
            process = ranks.world.processes[rank]
            process.join(20)
            assert time.monotonic() - ranks.sent[place] < SOON_S * BUSY, place
            assert process.exitcode == -SIGTERM, place
        ranks.world.store.set("signalled", "")  # type: ignore[attr-defined]
        told = ranks.world.receive(PARTNER)
        assert set(told) == set(PLACES) - {"init"}
        for rank, place in enumerate(PLACES[:ALONE]):
            text, at = told[place]
            assert at - ranks.sent[place] < SOON_S * BUSY, place
            # A group that was being destroyed had left already, or is lost like the others.
            assert re.search(rf"recv\(.*\brank {rank} on host", text, re.S), (rank, text)


def ends_alone(tell: Callable[[object], None]) -> None:
    """End the only group, and so the engine, while the other rank is stopped."""
    dist.all_reduce(torch.ones(8))
    if dist.get_rank() == 1:
        tell("blocked")
        threading.Event().wait()
    dist.all_reduce(torch.ones(16_000_000), async_op=True)
    stop = threading.Event()
    beating = threading.Thread(target=beats, args=(tell, stop))
    beating.start()
    with pytest.raises(KeyboardInterrupt):
        dist.destroy_process_group()
    at = time.monotonic()
    stop.set()
    beating.join()
    tell(at)


def test_ctrl_c_ends_the_end_of_the_last_group_within_a_second() -> None:
    """Last words to a rank that is stopped are nothing to wait for with Ctrl-C pressed."""
    linger = {"GEOMESH_LINGER": "1h"}
    with started(2, ends_alone, environment=linger, init={"timeout": HOUR}) as world:
        assert world.receive(1) == "blocked"
        world.signal(1, SIGSTOP)
        assert world.receive(0) == "blocked"
        sent = time.monotonic()
        world.signal(0, SIGINT)
        took = world.receive(0) - sent
    assert 0 < took < SOON_S * BUSY
