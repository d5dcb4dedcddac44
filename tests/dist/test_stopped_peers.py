"""A rank that is stopped and not gone: those that live end, and begin anew, without it."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any

import pytest
import torch
import torch.distributed as dist
from provoked_errors import Logged, error_of
from ranks import World, started

from torch_geomesh.backend import backend_of

ABORT_S = 2.0
# The reason has two seconds to leave this process, the engine's last words three; one more is for a
# machine with other work.
DESTROY_S = 2.0 + 3.0 + 1.0
SOON_S = 1.0
BUSY = 2.0  # all ranks share two cores with the test
HOUR = timedelta(hours=1)
REGIONS = [{"GEOMESH_REGION": name} for name in ("eastus", "brazilsouth", "eastasia")]
BIG = 16_000_001  # 64 MB of float32: much is under way at any moment


def control() -> dist.Store:
    """Return the store by which the test speaks to the ranks."""
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore(os.environ["MASTER_ADDR"], port, None, False)


def join(port: int, rank: int, world: int, limit: timedelta) -> None:
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("geomesh", store=store, rank=rank, world_size=world, timeout=limit)


def threads() -> dict[str, str]:
    """Return this process's threads: their names by their numbers."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            found[task.name] = (task / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    return found


def new_threads(before: dict[str, str]) -> list[str]:
    """Return the names of threads that are not of before, but for those about to end.

    The one that writes the last events down is nobody's to wait for.
    """
    deadline = time.monotonic() + 2
    while True:
        new = [name for number, name in threads().items() if number not in before]
        if not new or time.monotonic() > deadline:
            return new
        time.sleep(0.01)


def timed(call: Callable[[], Any]) -> float:
    begin = time.monotonic()
    call()
    return time.monotonic() - begin


def moved() -> int:
    """Return the bytes that came from and went to the other ranks so far."""
    return sum(
        int(peer["bytes_sent"]) + int(peer["bytes_received"]) for peer in backend_of().stats()
    )


def stop_in_the_middle(work: dist.Work, tell: Callable[[object], None]) -> None:
    """Stop this process when some of an operation's bytes have moved, and not all."""
    begin = moved()
    while not begin < moved() - BIG // 8:
        if work.is_completed():  # too late: in the next one
            return
    tell("stopping")
    os.kill(os.getpid(), SIGSTOP)


@dataclass
class Ended:
    """How a rank came out of the group with the stopped one."""

    error: str = ""
    error_at: float = 0.0
    wrong: int = 0  # all-reduces that were done and whose result was wrong
    abort_s: float = 0.0
    destroy_s: float = 0.0
    threads_left: list[str] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    again_destroy_s: float = 0.0


def loses_and_begins_anew(second_store: int, tell: Callable[[object], None]) -> Ended:
    rank, store = int(os.environ["RANK"]), control()
    # Whatever PyTorch starts once a process is there already.
    torch.ones(8).add_(1)
    before = threads()
    join(int(os.environ["MASTER_PORT"]), rank, 3, HOUR)
    ended = Ended()
    first = threading.Event()

    def reduce() -> None:
        try:
            while True:
                tensor = torch.full((BIG,), rank + 1.0)
                work = dist.all_reduce(tensor, async_op=True)
                if rank == 2 and first.is_set():
                    stop_in_the_middle(work, tell)
                work.wait()
                ended.wrong += not bool(tensor.eq(6).all())
                first.set()
        except RuntimeError as error:
            ended.error, ended.error_at = str(error), time.monotonic()

    if rank == 2:
        reduce()
        with pytest.raises(RuntimeError, match=r"all_reduce\(.*refused"):
            dist.all_reduce(torch.ones(8))
        dist.destroy_process_group()
        return ended

    reducing = threading.Thread(target=reduce)
    reducing.start()
    store.wait(["stopped"], HOUR)
    ended.abort_s = timed(backend_of().abort)
    reducing.join(30)
    ended.destroy_s = timed(dist.destroy_process_group)
    ended.threads_left = new_threads(before)

    join(second_store, rank, 2, HOUR)
    for turn in range(3):
        tensor = torch.full((BIG,), 10.0**turn * (rank + 1))
        dist.all_reduce(tensor)
        assert tensor.eq(tensor[0]).all()
        ended.again.append(tensor[0].item())
        if turn == 0:
            tell("began anew")
            store.wait(["continued"], HOUR)
    ended.again_destroy_s = timed(dist.destroy_process_group)
    return ended


def await_stop(world: World, rank: int) -> None:
    stat = Path(f"/proc/{world.pid(rank)}/stat")
    while stat.read_text().rsplit(")", 1)[1].split()[0] != "T":
        time.sleep(0.01)


@dataclass
class Job:
    """A world whose rank 2 was stopped for a while."""

    ended: list[Ended]
    continued: float


@pytest.fixture(scope="module", params=["across_regions", "inside_a_host"])
def job(request: pytest.FixtureRequest) -> Job:
    regions = REGIONS if request.param == "across_regions" else None
    second = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with started(
        3, loses_and_begins_anew, second.port, initialize=False, per_rank_environment=regions
    ) as world:
        assert world.receive(2) == "stopping"
        await_stop(world, 2)
        world.store.set("stopped", "")  # type: ignore[attr-defined]
        for rank in range(2):
            assert world.receive(rank) == "began anew"
        world.signal(2, SIGCONT)
        continued = time.monotonic()
        world.store.set("continued", "")  # type: ignore[attr-defined]
        outcomes = world.join()
    for outcome in outcomes:
        assert not outcome.error, outcome.error
    return Job([outcome.value for outcome in outcomes], continued)


def test_abort_returns_though_a_peer_is_stopped(job: Job) -> None:
    for ended in job.ended[:2]:
        assert ended.abort_s < ABORT_S


def test_what_was_under_way_ends_because_of_the_abort(job: Job) -> None:
    for ended in job.ended[:2]:
        why = r"all_reduce\(.*\brank [01]\b.* aborted the group"
        assert re.search(why, ended.error, re.S), ended.error


def test_destroy_after_abort_does_not_wait_for_a_stopped_peer(job: Job) -> None:
    for ended in job.ended[:2]:
        assert ended.destroy_s < DESTROY_S


def test_no_thread_is_left_of_an_aborted_group(job: Job) -> None:
    for ended in job.ended[:2]:
        assert ended.threads_left == []


def test_those_that_live_begin_anew_and_a_peer_that_wakes_does_not_disturb_them(job: Job) -> None:
    for ended in job.ended[:2]:
        assert ended.again == [3.0, 30.0, 300.0]
        assert ended.again_destroy_s < DESTROY_S


def test_a_peer_that_wakes_gets_an_error_and_no_data(job: Job) -> None:
    woken = job.ended[2]
    assert woken.wrong == 0
    assert re.search(r"all_reduce\(Float\[16000001\], SUM\), sequence \d+: ", woken.error)
    assert woken.error_at - job.continued < SOON_S * BUSY


def test_a_peer_that_wakes_is_told_who_went(job: Job) -> None:
    """Why, only where the connection had room for their last words."""
    text = job.ended[2].error
    told = r"\brank [01] on host \S+ .*(aborted the group|left the)|lost rank [01] on host"
    assert re.search(told, text, re.S), text


# At default limits: suspected, named in the log, and given up at the operation's deadline.

SUSPECTED_S = 3.0
DEADLINE_S = 4.5
LINGER_S = 1.0  # the end is not what is looked at here


@dataclass
class Waited:
    """What a rank read and was told while it waited for the stopped one."""

    log: str
    error: str
    seconds: float
    destroy_s: float


def waits(tell: Callable[[object], None]) -> Waited | None:
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=DEADLINE_S))
    dist.all_reduce(torch.ones(8), group=group)
    if rank == 2:
        tell("ready")
        threading.Event().wait()
    with Logged() as log:
        begin = time.monotonic()
        work = dist.all_reduce(torch.ones(8), group=group, async_op=True)
        tell("ready")
        with pytest.raises(RuntimeError) as caught:
            work.wait()
        seconds = time.monotonic() - begin
        destroy_s = timed(dist.destroy_process_group)
    return Waited(log.text, str(caught.value), seconds, destroy_s)


def test_a_stopped_peer_is_suspected_by_name_and_given_up_at_the_deadline() -> None:
    linger = {"GEOMESH_LINGER": f"{LINGER_S}s"}
    with started(3, waits, per_rank_environment=REGIONS, environment=linger) as world:
        for rank in range(3):
            assert world.receive(rank) == "ready"
        world.signal(2, SIGSTOP)
        stopped = datetime.now()
        outcomes = world.join(expect_dead=(2,))
    name = rf"rank 2 on host {socket.gethostname()} \(eastasia\)"
    for outcome in outcomes[:2]:
        assert not outcome.error, outcome.error
        waited: Waited = outcome.value
        # Not given up as dead: that takes 20 s.
        warning = re.search(
            rf"geomesh W (\d\d:\d\d:\d\d\.\d+) .*{name} has been silent for [23](\.\d)?s; "
            r"it will be given up after 20s",
            waited.log,
        )
        assert warning, waited.log
        at = datetime.strptime(warning[1], "%H:%M:%S.%f")
        after = (at - stopped.replace(year=1900, month=1, day=1)) % timedelta(days=1)
        assert after.total_seconds() < SUSPECTED_S + 0.5, waited.log
        assert not re.search(rf"lost {name}", waited.log), waited.log
        # The first of the two tells the other.
        assert DEADLINE_S - 0.5 < waited.seconds < DEADLINE_S + 0.5
        assert re.search(rf"not done within its timeout of 4\.5 s.*{name}", waited.error, re.S)
        assert re.search(rf"not known \(no answer\) of {name}|reported:", waited.error)
        assert waited.destroy_s < LINGER_S + DESTROY_S


# Whoever was stopped itself.

SLEEP_S = 1.5


def sleeps(tell: Callable[[object], None]) -> str:
    store = control()
    dist.barrier()
    if dist.get_rank() == 0:
        store.wait(["stopped"], HOUR)
        dist.send(torch.ones(8), 1)  # is there to be read when it wakes
        tell("sent")
        store.wait(["woken"], HOUR)
        return ""
    tell("stopping")
    os.kill(os.getpid(), SIGSTOP)
    # Nothing of it comes, and nobody is asked about it.
    error = error_of(dist.irecv(torch.ones(8), 0, tag=1).wait, timedelta(seconds=0.2))
    store.set("woken", "")
    return error


def test_a_rank_does_not_take_its_own_sleep_for_anothers_silence() -> None:
    with started(2, sleeps) as world:
        assert world.receive(1) == "stopping"
        await_stop(world, 1)
        world.store.set("stopped", "")  # type: ignore[attr-defined]
        assert world.receive(0) == "sent"
        time.sleep(SLEEP_S)
        world.signal(1, SIGCONT)
        outcomes = world.join()
    for outcome in outcomes:
        assert not outcome.error, outcome.error
    match = re.search(r"from rank 0 on host \S+, silent for (\S+) s", outcomes[1].value)
    assert match, outcomes[1].value
    assert 0 <= float(match[1]) < SLEEP_S, outcomes[1].value
