"""Two ranks and the way between them: connecting, round trips, rate.

`Mesh` opens this rank's engine and connects it to the others, each pair a group of its own, so that
a pair that cannot connect takes nothing else with it. `ping` and `echo`, `draw` and `serve` are the
two ends of a measurement. Knows the engine through its groups; who measures when, and what becomes
of the figures, is the caller's.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import statistics
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torch_geomesh import backend
from torch_geomesh.job import Job

__all__ = ["Mesh", "Pair", "PairError", "Pings", "RankInfo", "draw", "echo", "ping", "serve"]

_PING_BYTES = 8
_PINGS_UNDER_WAY = 5  # the kernel sends 10 packets before the first acknowledgement
_PING, _ECHO, _REQUEST, _DATA = range(1, 5)  # tags
_LEAST_CHUNK, _MOST_CHUNK = 16 << 10, 16 << 20
# What is asked for at once: at first little, so that a slow link is not flooded; in the end what
# fills the link and its queue for some round trips.
_FIRST_WINDOW, _MOST_WINDOW = 64 << 10, 1 << 30
_CHUNK_S = 0.02
_WINDOW_S = 0.05
_WINDOW_TRIPS = 3.0
_WARM_UP = 0.4  # the part of the time in which the rate grows, and does not count
_LEAST_CONNECT_S = 5.0  # the engine's


class PairError(RuntimeError):
    """Two ranks cannot connect, or lost their connection; the message is the engine's."""


@dataclass(frozen=True)
class RankInfo:
    """Where a rank runs; `error`: why its engine could not start."""

    rank: int
    host: str
    region: str
    error: str = ""


@dataclass(frozen=True)
class Pings:
    """Round trips of small messages, in seconds, and the other clock against this one."""

    median_s: float
    p99_s: float
    count: int
    clock_ahead_s: float


def _reason(error: BaseException) -> str:
    """Return the engine's reason, without C++'s stack and without what the operation was."""
    text = str(error).split("\nException raised from")[0].strip()
    text = re.sub(r"^geomesh: ", "", text)
    text = re.sub(r"^(send|recv)\(.*?\), sequence \d+: ", "", text)
    return re.sub(r"; \d+ of \d+ bytes sent.*", "", text, flags=re.DOTALL)


class Pair:
    """One end of a connected pair.

    Parameters
    ----------
    group : Backend
        Of the two ranks.
    side : int
        0 or 1: this rank's place in it.
    received : callable
        Bytes that have come from the other rank so far.
    """

    def __init__(self, group: Any, side: int, received: Callable[[], int]) -> None:
        self.group = group
        self.peer = 1 - side
        self.received = received

    def send(self, tensor: torch.Tensor, tag: int) -> Any:
        """Begin to send; the result is waited for with `wait`."""
        return self.group.send([tensor], self.peer, tag)

    def recv(self, tensor: torch.Tensor, tag: int) -> Any:
        """Begin to receive."""
        return self.group.recv([tensor], self.peer, tag)


@contextlib.contextmanager
def _engine_errors() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, PairError):
            raise
        raise PairError(_reason(error)) from error


class Mesh:
    """The engine of this rank, and its pairs.

    Parameters
    ----------
    job : Job
        Whose ranks are to be connected.
    connect_s : float
        How long a pair may take to connect, at least 5; all connect at once.
    """

    def __init__(self, job: Job, connect_s: float) -> None:
        self.job = job
        self.connect_s = max(connect_s, _LEAST_CONNECT_S)
        self.infos: dict[int, RankInfo] = {}
        self.error = ""
        self._groups: list[Any] = []
        self._pairs: dict[int, Pair] = {}
        self.memory = torch.zeros(_MOST_CHUNK, dtype=torch.uint8)
        self.landing = torch.empty(_MOST_CHUNK, dtype=torch.uint8)

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def open(self) -> dict[int, RankInfo]:
        """Start this rank's engine and learn of the others'; return what they say.

        A rank that cannot start, or is not there within the time, has an `error`.
        """
        job = self.job
        try:
            # A group of this rank alone: keeps the engine until `close`.
            self._make(dist.HashStore(), [job.rank], "alone", self.connect_s)
        except (PairError, ImportError) as error:
            self.error = str(error)
        told = {
            "host": socket.gethostname(),
            "region": os.environ.get("GEOMESH_REGION", ""),
            "error": self.error,
        }
        job.tell("open", told)
        heard = job.hear("open", range(job.world), 3 * self.connect_s)
        for rank in range(job.world):
            silent = {"host": "", "region": "", "error": "it did not come"}
            self.infos[rank] = RankInfo(rank, **heard.get(rank, silent))
        # All begin to connect at once, and are numbered as in the job.
        present = self.present
        if job.rank in present and len(present) > 1:
            with contextlib.suppress(PairError):  # each pair will say it
                self._make(job.store, present, "all", 3 * self.connect_s)
        return self.infos

    @property
    def present(self) -> list[int]:
        """The ranks whose engines have started."""
        return [rank for rank, info in sorted(self.infos.items()) if not info.error]

    def connect(self, other: int) -> Pair:
        """Connect to another rank, which does the same; the second call returns the same pair.

        Raises
        ------
        PairError
            If that does not succeed.
        """
        if other not in self._pairs:
            members = sorted([self.job.rank, other])
            side = members.index(self.job.rank)
            # Longer than the engine tries, whose reason says more than a deadline does.
            group = self._make(self.job.store, members, "pair", 1.5 * self.connect_s + 5)
            pair = Pair(group, side, lambda: self._received(other))
            word = torch.zeros(_PING_BYTES, dtype=torch.uint8)
            with _engine_errors():
                for work in (pair.send(word, 0), pair.recv(torch.empty_like(word), 0)):
                    work.wait()
            self._pairs[other] = pair
        return self._pairs[other]

    def _received(self, other: int) -> int:
        # The engine numbers its peers as the first group that has them does: that of all present.
        begin = f"rank {self.present.index(other)} on "
        rows = self._groups[0].stats()
        return sum(row["bytes_received"] for row in rows if row["peer"].startswith(begin))

    def close(self) -> None:
        """End all groups, and the engine with the last of them."""
        while self._groups:
            with contextlib.suppress(RuntimeError):
                self._groups.pop().shutdown()

    def _make(self, store: dist.Store, members: list[int], name: str, timeout_s: float) -> Any:
        with _engine_errors():
            module = backend.extension()
            options = module.Options(dead_after=f"{self.connect_s:g}s", linger="1s")
            options.set_meeting(members, "tool", f"{name}/{'-'.join(map(str, members))}")
            options.set_timeout(timeout_s)
            group = module.ProcessGroupGeoMesh(
                store, members.index(self.job.rank), len(members), options
            )
        self._groups.append(group)
        return group


def ping(pair: Pair, seconds: float, most: int) -> Pings:
    """Time up to `most` small messages there and back; the other end calls `echo`.

    A few are on their way at a time, so that a long way gets many too: no more than a connection
    carries that has only just begun, or they would wait for each other. On a very long way there
    are fewer, and at least 20 (or `most`) even if that takes longer than `seconds`.
    """
    word = torch.zeros(_PING_BYTES, dtype=torch.uint8)
    answer = torch.empty_like(word)
    trips: list[float] = []
    ahead: list[tuple[float, float]] = []  # for each, how long it took and their clock
    wall = time.time() - time.perf_counter()

    def returned(left: float) -> None:
        now = time.perf_counter()
        trips.append(now - left)
        theirs = struct.unpack("<d", answer.numpy().tobytes())[0]
        ahead.append((now - left, theirs - (wall + (left + now) / 2)))

    with _engine_errors():
        for _ in range(3):
            left = time.perf_counter()
            pair.send(word, _PING)
            pair.recv(answer, _ECHO).wait()
            returned(left)
        interval = max(seconds / most, min(trips) / _PINGS_UNDER_WAY)
        count = max(min(20, most), round(seconds / interval))
        trips.clear()
        _ping_at_times(pair, count, interval, answer, returned)
        pair.send(torch.ones_like(word), _PING).wait()  # enough
    trips.sort()
    return Pings(
        median_s=statistics.median(trips),
        p99_s=trips[math.ceil(0.99 * count) - 1],
        count=count,
        clock_ahead_s=min(ahead)[1],  # of the quickest, which waited least anywhere
    )


def _ping_at_times(
    pair: Pair,
    count: int,
    interval: float,
    answer: torch.Tensor,
    returned: Callable[[float], None],
) -> None:
    """Send `count` messages, one every `interval`; call `returned` with when each had left."""
    sent: deque[float] = deque()
    failed: list[BaseException] = []

    def receive() -> None:
        try:
            for _ in range(count):
                pair.recv(answer, _ECHO).wait()
                returned(sent.popleft())
        except BaseException as error:
            failed.append(error)

    receiver = threading.Thread(target=receive, name="geomesh-ping")
    receiver.start()
    word = torch.zeros(_PING_BYTES, dtype=torch.uint8)
    works = []
    begin = time.perf_counter()
    try:
        for number in range(count):
            time.sleep(max(0.0, begin + number * interval - time.perf_counter()))
            if failed:
                break
            sent.append(time.perf_counter())
            works.append(pair.send(word, _PING))
        for work in works:
            work.wait()
    finally:
        receiver.join()
    if failed:
        raise failed[0]


def echo(pair: Pair) -> None:
    """Answer `ping`, with this host's time, until it has enough."""
    with _engine_errors():
        word = torch.empty(_PING_BYTES, dtype=torch.uint8)
        while True:
            pair.recv(word, _PING).wait()
            if word[0]:
                return
            stamp = torch.frombuffer(bytearray(struct.pack("<d", time.time())), dtype=torch.uint8)
            pair.send(stamp, _ECHO).wait()


def draw(pair: Pair, landing: torch.Tensor, seconds: float, rtt_s: float) -> float:
    """Take as much as the way gives for some seconds; return bytes a second.

    The other end calls `serve`. This end asks for chunks, each about 20 ms long at the rate so far,
    and for twice as many with every round trip as long as that makes it quicker: what is asked for
    and has not come stays within some round trips at the rate of the link. The rate is that of the
    last three fifths of the time.
    """
    begin = time.perf_counter()
    end = begin + seconds
    waiting: deque[tuple[int, Any]] = deque()
    requests: deque[tuple[torch.Tensor, Any]] = deque()
    recent: deque[tuple[float, int]] = deque()
    in_flight = recent_bytes = all_bytes = 0
    window, chunk = float(_FIRST_WINDOW), _LEAST_CHUNK
    steady = _Meter(pair, begin + _WARM_UP * seconds, end)

    def ask(size: int) -> None:
        word = torch.tensor([size])
        requests.append((word, pair.send(word, _REQUEST)))
        while len(requests) > 64:
            requests.popleft()[1].wait()

    with _engine_errors(), steady:
        while True:
            while time.perf_counter() < end and (in_flight + chunk <= window or not waiting):
                # All land in one place: nobody reads them.
                waiting.append((chunk, pair.recv(landing[:chunk], _DATA)))
                ask(chunk)
                in_flight += chunk
            if not waiting:
                break
            size, work = waiting.popleft()
            work.wait()
            now = time.perf_counter()
            in_flight -= size
            all_bytes += size
            recent.append((now, size))
            recent_bytes += size
            span = min(max(rtt_s, 0.1), now - begin)
            while recent[0][0] < now - span:
                recent_bytes -= recent.popleft()[1]
            rate = recent_bytes / span
            most = min(_WINDOW_TRIPS * rate * (rtt_s + _WINDOW_S), _MOST_WINDOW)
            window = max(window, min(window + size, most))
            chunk = int(min(max(rate * _CHUNK_S, _LEAST_CHUNK), _MOST_CHUNK, window / 4))
        whole = all_bytes / (time.perf_counter() - begin)
        ask(-1)
        while requests:
            requests.popleft()[1].wait()
    return steady.bytes_per_s or whole  # a link may be so slow that nothing came in the time


class _Meter:
    """Reads what has come from the other rank, at two times, in a thread of its own.

    Chunks that have come are no measure: one that is held up lets those behind it wait, and then
    all come at once.
    """

    def __init__(self, pair: Pair, begin: float, end: float) -> None:
        self.bytes_per_s = 0.0
        self._pair = pair
        self._times = (begin, end)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="geomesh-meter")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self._over.set()
        self._thread.join()

    def _run(self) -> None:
        readings = []
        for at in self._times:
            if self._over.wait(max(0.0, at - time.perf_counter())):
                return
            readings.append((time.perf_counter(), self._pair.received()))
        (t0, first), (t1, last) = readings
        self.bytes_per_s = (last - first) / (t1 - t0)


def serve(pair: Pair, memory: torch.Tensor) -> None:
    """Send what `draw` asks for, until it has enough."""
    works: deque[Any] = deque()
    word = torch.empty(1, dtype=torch.int64)
    with _engine_errors():
        while True:
            pair.recv(word, _REQUEST).wait()
            size = int(word)
            if size < 0:
                break
            works.append(pair.send(memory[:size], _DATA))
            while works and works[0].is_completed():
                works.popleft().wait()
        for work in works:
            work.wait()
