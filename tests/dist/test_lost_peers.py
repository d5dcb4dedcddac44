"""A rank whose process is gone: every rank that needs it is told within a second, by name.

At default limits: nothing here waits for silence, a closed connection is seen at once.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch
import torch.distributed as dist
from provoked_errors import Logged, error_of, meet
from ranks import start_ranks
from versions import TORCH_MINOR

SOON_S = 1.0
# Here all ranks share two cores with the test, and the kernel closes a dead process's connections
# only when that process has run once more.
BUSY = 2.0
LIMIT = {"timeout": timedelta(minutes=30)}  # no test lives to see a deadline
REGIONS = [{"GEOMESH_REGION": name} for name in ("eastus", "brazilsouth", "eastasia")]
BIG = 16_000_000  # 64 MB of float32

# What a call is named in errors, and the ranks that can't do their part of it without rank 2.
CALLS = {
    "all_reduce": (r"all_reduce\(Float\[16000000\], SUM\)", (0, 1)),
    "broadcast": (r"broadcast\(Float\[8\], root 2\)", (0, 1)),
    "reduce": (r"reduce\(Float\[8\], SUM, root 0\)", (0,)),
    "all_gather": (r"all_gather\(Float\[8\]\)", (0, 1)),
    "gather": (r"gather\(Float\[8\], root 0\)", (0,)),
    "scatter": (r"scatter\(Float\[8\], root 2\)", (0, 1)),
    "reduce_scatter": (r"reduce_scatter\w*\(Float\[8\], SUM\)", (0, 1)),
    "all_to_all": (r"all_to_all\w*\(Float\[24\]\)", (0, 1)),
    "recv": (r"recv\(Float\[8\], from rank 2, tag 0\)", (0, 1)),
    "send": (r"send\(Float\[16000000\], to rank 2, tag 0\)", (0, 1)),
    "recv_from_the_last_one": (r"recv\(Float\[8\], from any rank, tag 0\)", (0, 1)),
    "barrier": (r"barrier\(\)", (0, 1)),
}
if TORCH_MINOR >= 14:  # versions.py: Gloo's alone, or not there, before
    CALLS["monitored_barrier"] = (r"monitored_?[bB]arrier", (0, 1))
    CALLS["wait_signal"] = (r"wait_signal\(from rank 2\)", (0, 1))
UCX_LINE = r"\bUCX +(FATAL|ERROR|WARN|DIAG)"


@dataclass
class Told:
    """What a rank was told, and when."""

    text: str
    at: float  # of time.monotonic, which all processes of a machine share

    @classmethod
    def by(cls, call: Callable[[], Any]) -> Told:
        text = error_of(call)
        return cls(text, time.monotonic())


@dataclass
class Survivor:
    """What came of one of the ranks that live on."""

    blocked: dict[str, Told] = field(default_factory=dict)
    later: dict[str, Told] = field(default_factory=dict)
    log: str = ""
    from_any: float = 0.0  # what the other living rank sent
    any_was_waiting: bool = False
    destroy_s: float = 0.0


def posted(name: str, group: dist.ProcessGroup) -> dist.Work:
    """Call what ends only with rank 2."""
    rank, ones = dist.get_rank(), torch.ones(8)
    here = {"group": group, "async_op": True}
    rows = [torch.empty(8) for _ in range(3)]
    match name:
        case "all_reduce":
            return dist.all_reduce(torch.ones(BIG), **here)
        case "broadcast":
            return dist.broadcast(ones, 2, **here)
        case "reduce":
            return dist.reduce(ones, 0, **here)
        case "all_gather":
            return dist.all_gather(rows, ones, **here)
        case "gather":
            return dist.gather(ones, rows if rank == 0 else None, 0, **here)
        case "scatter":
            return dist.scatter(ones, None, 2, **here)
        case "reduce_scatter":
            return dist.reduce_scatter_tensor(ones, torch.ones(24), **here)
        case "all_to_all":
            return dist.all_to_all_single(torch.empty(24), torch.ones(24), **here)
        case "recv":
            return dist.irecv(ones, 2, group=group)
        case "send":
            return dist.isend(torch.ones(BIG), 2, group=group)
        case "recv_from_the_last_one":
            return dist.irecv(ones, group=group)
        case "barrier":
            return dist.barrier(**here)
    raise AssertionError(name)


def stands(thread: threading.Thread) -> None:
    """Wait until a thread has stood in one call for long: it blocks, and holds no lock."""
    last, looks = None, 0
    while looks < 20:
        time.sleep(0.01)
        frame = sys._current_frames()[thread.ident or 0]
        now = (frame.f_code.co_name, frame.f_lasti)
        looks = looks + 1 if now == last else 0
        last = now


def outlives(tell: Callable[[object], None]) -> Survivor:
    """Block in every call at once, each in a group and a thread of its own."""
    rank = dist.get_rank()
    groups = {name: dist.new_group(timeout=LIMIT["timeout"]) for name in CALLS}
    pairs = [dist.new_group([r, 2], timeout=LIMIT["timeout"]) for r in (0, 1)]
    from_any = dist.new_group(timeout=LIMIT["timeout"])
    window = None
    if "wait_signal" in CALLS:
        window = dist.distributed_c10d._new_window(torch.zeros(3), groups["wait_signal"])
    tell("ready")
    if rank == 2:
        threading.Event().wait()
    groups["recv_from_the_last_one"] = pairs[rank]

    survivor = Survivor()
    with Logged() as log:
        waits: dict[str, Callable[[], Any]] = {}
        for name in CALLS:
            group = groups[name]
            if name == "monitored_barrier":
                waits[name] = lambda group=group: dist.monitored_barrier(group)
            elif name == "wait_signal":
                waits[name] = window.wait_signal(2, True).wait
            elif rank in CALLS[name][1]:
                waits[name] = posted(name, group).wait
            else:
                posted(name, group).wait()
        into = torch.zeros(8)
        any_work = dist.irecv(into, group=from_any) if rank == 0 else None

        def block(name: str) -> None:
            survivor.blocked[name] = Told.by(waits[name])

        threads = {name: threading.Thread(target=block, args=(name,)) for name in waits}
        for thread in threads.values():
            thread.start()
        if "monitored_barrier" in threads:  # all others are under way when they are posted
            stands(threads["monitored_barrier"])
        tell("blocked")
        for thread in threads.values():
            thread.join(20)
        for name in CALLS:
            if name != "recv_from_the_last_one":
                group = groups[name]
                survivor.later[name] = Told.by(lambda group=group: dist.barrier(group))

        # One of the others is still there: its message may come.
        survivor.any_was_waiting = any_work is None or not any_work.is_completed()
        meet("told", 0, 1)
        if rank == 1:
            dist.send(torch.full((8,), 7.0), 0, group=from_any)
        else:
            any_work.wait()
            survivor.from_any = into.sum().item()
        meet("received", 0, 1)
        begin = time.monotonic()
        dist.destroy_process_group()
        survivor.destroy_s = time.monotonic() - begin
    survivor.log = log.text
    return survivor


@dataclass
class Lost:
    """One world that lost rank 2, and when that was."""

    killed: float
    killed_unix: float
    survivors: list[Survivor]

    def told(self, name: str) -> list[Told]:
        """Return what those were told who can't do their part of this call."""
        blocked = [self.survivors[rank].blocked for rank in CALLS[name][1]]
        assert all(name in those for those in blocked), f"somebody still waits in {name} after 20 s"
        return [those[name] for those in blocked]


@pytest.fixture(scope="module", params=["ucx", "tls"])
def lost(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lost:
    environment = {}
    if request.param == "tls":
        key = tmp_path_factory.mktemp("key") / "key"
        key.write_text(secrets.token_hex(32))
        key.chmod(0o600)
        environment["GEOMESH_PSK_FILE"] = str(key)
    world = start_ranks(
        3, outlives, init=LIMIT, environment=environment, per_rank_environment=REGIONS
    )
    for said in ("ready", "blocked"):
        for rank in (0, 1):
            assert world.receive(rank) == said
    world.signal(2, SIGKILL)
    killed, killed_unix = time.monotonic(), time.time()
    outcomes = world.join(expect_dead=(2,))
    for outcome in outcomes[:2]:
        assert not outcome.error, outcome.error
    return Lost(killed, killed_unix, [outcome.value for outcome in outcomes[:2]])


@pytest.mark.parametrize("name", CALLS)
def test_whoever_waits_for_a_killed_rank_is_told_within_a_second(lost: Lost, name: str) -> None:
    for told in lost.told(name):
        assert 0 < told.at - lost.killed < SOON_S * BUSY, told.text


@pytest.mark.parametrize("name", CALLS)
def test_the_error_names_rank_host_region_operation_and_sequence(lost: Lost, name: str) -> None:
    operation = CALLS[name][0]
    if name != "monitored_barrier":  # its texts are those that PyTorch's users know
        operation += r", sequence \d+: "
    for told in lost.told(name):
        who = rf"\brank 2 on host {socket.gethostname()} \(eastasia\)"
        assert re.search(who, told.text), told.text
        assert re.search(operation, told.text), told.text


@pytest.mark.parametrize(
    "name", [name for name in CALLS if name not in ("monitored_barrier", "wait_signal")]
)
def test_the_error_says_what_was_done_and_what_was_waited_for(lost: Lost, name: str) -> None:
    for told in lost.told(name):
        text = told.text
        match = re.search(r"(\d+) of (\d+) bytes sent, (\d+) of (\d+) received; (.*)", text, re.S)
        assert match, text
        sent, to_send, received, to_receive = map(int, match.groups()[:4])
        assert sent <= to_send
        assert received <= to_receive
        # Not all can have been moved: rank 2 had a part in it.
        assert received < to_receive or sent < to_send or name == "barrier", text
        assert re.search(r"waiting for|not yet able to send|not begun", match[5]), text


def test_an_error_that_is_passed_on_says_who_saw_the_failure_first_and_when(lost: Lost) -> None:
    texts = [
        told.text
        for survivor in lost.survivors
        for told in (*survivor.blocked.values(), *survivor.later.values())
        if "reported:" in told.text
    ]
    # Rank 1 has done its part of these, and is told by rank 0.
    told = [lost.survivors[1].later[name].text for name in ("gather", "reduce")]
    assert set(told) <= set(texts), told
    for text in texts:
        assert re.search(r"\brank [01] on host \S+ \(\w+\) reported: ", text), text
        times = re.findall(r"\b\d\d:(\d\d):(\d\d(?:\.\d+)?)\b", text)
        assert times, text
        # Minutes and seconds are the same in every time zone; clocks tick in milliseconds.
        seconds = 60 * int(times[0][0]) + float(times[0][1])
        assert (seconds - lost.killed_unix + 0.01) % 3600 < SOON_S * BUSY, text


def test_a_group_that_lost_a_rank_refuses_at_once_what_is_called_later(lost: Lost) -> None:
    """Also on a rank whose own part of the first call was done, such as a gather's."""
    for survivor in lost.survivors:
        last = max(told.at for told in survivor.blocked.values())
        for later in survivor.later.values():
            assert re.search(r"barrier\(\).*\brank 2 on host", later.text, re.S), later.text
            assert later.at - last < SOON_S * BUSY


def test_a_receive_from_any_rank_waits_for_those_that_live(lost: Lost) -> None:
    assert lost.survivors[0].any_was_waiting
    assert lost.survivors[0].from_any == 8 * 7


def test_nobody_waits_for_the_dead_at_the_end(lost: Lost) -> None:
    for survivor in lost.survivors:
        assert survivor.destroy_s < SOON_S * BUSY


def test_the_log_names_the_lost_rank_once_and_has_no_line_of_ucx(lost: Lost) -> None:
    for survivor in lost.survivors:
        assert not re.search(UCX_LINE, survivor.log), survivor.log
        assert len(re.findall(r"transport: lost rank 2 on host", survivor.log)) == 1, survivor.log


# In the middle of a transfer.


def moves(tell: Callable[[object], None]) -> dict[str, Told]:
    """Two loops, each in a thread: everybody's all-reduce, and 64 MB from 0 over 2 to 1."""
    rank = dist.get_rank()
    groups = [dist.new_group(timeout=LIMIT["timeout"]) for _ in range(2)]
    turns = {"all_reduce": threading.Event(), "relay": threading.Event()}
    told: dict[str, Told] = {}

    def all_reduce() -> None:
        tensor = torch.zeros(BIG)
        while True:
            dist.all_reduce(tensor, group=groups[0])
            turns["all_reduce"].set()

    def relay() -> None:
        tensor = torch.zeros(BIG)
        while True:
            if rank != 0:
                dist.recv(tensor, 2 if rank == 1 else 0, group=groups[1])
            if rank != 1:
                dist.send(tensor, 2 if rank == 0 else 1, group=groups[1])
            turns["relay"].set()

    def until_error(call: Callable[[], None]) -> None:
        told[call.__name__] = Told.by(call)

    with Logged() as log:
        threads = [threading.Thread(target=until_error, args=(c,)) for c in (all_reduce, relay)]
        for thread in threads:
            thread.start()
        for turn in turns.values():
            assert turn.wait(30)
        tell("moving")
        for thread in threads:
            thread.join(20)
    assert not re.search(UCX_LINE, log.text), log.text
    return told


@pytest.mark.parametrize("regions", [REGIONS, None], ids=["across_regions", "inside_a_host"])
def test_a_kill_in_the_middle_of_a_transfer(regions: list[dict[str, str]] | None) -> None:
    """Inside a host and region large messages are read in the dead process's memory."""
    world = start_ranks(3, moves, init=LIMIT, per_rank_environment=regions)
    for rank in range(3):
        assert world.receive(rank) == "moving"
    world.signal(2, SIGKILL)
    killed = time.monotonic()
    outcomes = world.join(expect_dead=(2,))
    for rank, outcome in enumerate(outcomes[:2]):
        assert not outcome.error, outcome.error
        names = {"all_reduce": "all_reduce", "relay": "send" if rank == 0 else "recv"}
        for loop, operation in names.items():
            assert loop in outcome.value, f"rank {rank} still waits in {operation}"
            told = outcome.value[loop]
            assert told.at - killed < SOON_S * BUSY, told.text
            assert re.search(
                rf"{operation}\(Float\[16000000\].*\brank 2 on host", told.text, re.S
            ), told.text


# Ranks that end by themselves, each in its own way, without destroy_process_group.

LEAVES = Path(__file__).parent / "scripts" / "leaves.py"
WAYS = ["raises", "exits", "returns"]


def is_left(tell: Callable[[object], None]) -> tuple[dict[str, Told], str, str, bool]:
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    dist.init_process_group("geomesh", store=store, rank=rank, world_size=2 + len(WAYS), **LIMIT)
    groups = [dist.new_group([0, 1, 2 + n], timeout=LIMIT["timeout"]) for n in range(len(WAYS))]
    sending = dist.new_group([0, 4], timeout=LIMIT["timeout"])
    told: dict[str, Told] = {}
    with Logged() as log:
        works = [dist.all_reduce(torch.ones(8), group=group, async_op=True) for group in groups]

        def wait(way: str, work: dist.Work) -> None:
            told[way] = Told.by(work.wait)

        threads = [
            threading.Thread(target=wait, args=pair) for pair in zip(WAYS, works, strict=True)
        ]
        for thread in threads:
            thread.start()
        tell("blocked")
        for thread in threads:
            thread.join(20)
        error, right = "", False
        if rank == 0:
            store.wait(["receive"])
            into = torch.zeros(BIG // 2)
            try:
                dist.recv(into, 4, group=sending)
                right = torch.equal(into, torch.arange(BIG // 2, dtype=torch.float32))
            except RuntimeError as raised:
                error = str(raised)
            tell("received")
        dist.destroy_process_group()
    return told, log.text, error, right


@dataclass
class Left:
    """What came of ranks 2, 3 and 4, which left, and of ranks 0 and 1, which were left."""

    ended: dict[str, float]
    status: dict[str, int]
    errors: dict[str, str]
    told: list[dict[str, Told]]
    logs: list[str]
    receive_s: float
    receive_error: str
    receive_right: bool


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Left:
    folder = tmp_path_factory.mktemp("left")
    size = {"WORLD_SIZE": str(2 + len(WAYS))}
    world = start_ranks(2, is_left, initialize=False, environment=size)
    store = world.store  # type: ignore[attr-defined]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    command = [sys.executable, str(LEAVES), str(folder), *WAYS]
    leavers = subprocess.Popen(
        command,
        env={**os.environ, **address, **size},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert leavers.stdout is not None
    try:
        for rank in range(2):
            assert world.receive(rank) == "blocked"
        ended, status = {}, {}
        for way in WAYS:
            store.set(f"leave {way}", "")
            said, code, at = leavers.stdout.readline().split()
            assert said == way
            ended[way], status[way] = float(at), int(code)
        store.set("receive", "")
        begin = time.monotonic()
        assert world.receive(0) == "received"
        receive_s = time.monotonic() - begin
        outcomes = world.join()
    finally:
        with suppress(ProcessLookupError):  # its forks too
            os.killpg(leavers.pid, SIGKILL)
        leavers.communicate()
    for outcome in outcomes:
        assert not outcome.error, outcome.error
    told, logs, receive_errors, right = zip(*(outcome.value for outcome in outcomes), strict=True)
    errors = {way: (folder / way).read_text() for way in WAYS}
    return Left(
        ended, status, errors, list(told), list(logs), receive_s, receive_errors[0], right[0]
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_ends_without_destroy_is_named_within_a_second(left: Left, way: str) -> None:
    who = 2 + WAYS.index(way)
    for rank in range(2):
        assert way in left.told[rank], f"rank {rank} still waits for the one that {way}"
        told = left.told[rank][way]
        assert told.at - left.ended[way] < SOON_S * BUSY, told.text
        named = rf"\brank {who} on host {socket.gethostname()}\b"
        assert re.search(
            rf"all_reduce\(Float\[8\], SUM\), sequence \d+: .*{named}", told.text, re.S
        ), told.text
        for other in {2, 3, 4} - {who}:
            assert not re.search(rf"\b{other} on host", told.text), told.text


def test_a_rank_that_ends_without_destroy_keeps_its_exit_status_and_its_error(left: Left) -> None:
    assert left.status == {"raises": 1, "exits": 0, "returns": 0}, left.errors
    assert re.search(r"ValueError: no more data\n$", left.errors["raises"]), left.errors
    for log in (*left.logs, *left.errors.values()):
        assert not re.search(UCX_LINE, log), log


def test_what_a_rank_was_sending_when_it_returned_comes_whole_or_is_an_error(left: Left) -> None:
    assert left.receive_s < SOON_S * BUSY
    if not left.receive_right:
        text = left.receive_error or "wrong data came, and no error"
        assert re.search(r"recv\(Float\[8000000\], from rank 4, tag 0\), sequence \d+: ", text), (
            text
        )
        assert re.search(r"\brank 4 on host", text), text
