"""``geomesh emulate``: one command in every region of an emulated WAN, as one job.

`run_in_regions` starts a command once a region, the way torchrun is started on one machine a
region, and ends all of them together. Knows processes, signals and output; regions and links are
`torch_geomesh.emulation`'s, whose names are offered here too.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from torch_geomesh.emulation import (
    MASTER_PORT,
    Counters,
    Emulation,
    EmulationError,
    EmulationUnavailable,
    Health,
)
from torch_geomesh.topology import Topology, TopologyError, shipped

__all__ = [
    "Counters",
    "Emulation",
    "EmulationError",
    "EmulationUnavailable",
    "Health",
    "add_arguments",
    "main",
    "run",
    "run_in_regions",
    "summary",
]


def run_in_regions(
    wan: Emulation,
    command: Sequence[str],
    *,
    ranks_per_region: int = 1,
    master_port: int = MASTER_PORT,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str, str, bool], None] | None = None,
    grace_s: float = 10.0,
) -> int:
    """Run a command once in every region, as one job, to its end.

    When one region's command fails, the others have `grace_s` to end by themselves, then they are
    ended as by SIGTERM. SIGINT and SIGTERM to this process are handed on to all of them; a second
    one kills. Whatever the job left inside the regions is killed before this returns.

    Parameters
    ----------
    wan : Emulation
        Running.
    command : sequence of str
        Usually ``torchrun script.py ...``.
    ranks_per_region, master_port : int
        For torchrun, through the environment.
    env : mapping, optional
        Added to the environment.
    on_line : callable, optional
        Gets each line of output: region, line, whether it was written to stderr. None: lines are
        printed with the region before them.
    grace_s : float
        Between the first failure, or a signal, and the end of the others.

    Returns
    -------
    int
        0, or the first exit status that was not 0 (128 + n for a command ended by signal n).
    """
    job = _Job(wan, on_line or _print_line, grace_s)
    with job.signals_handed_on():
        try:
            for region in wan.topology.regions:
                job.start(
                    region,
                    command,
                    {
                        **wan.environment(
                            region, ranks_per_region=ranks_per_region, master_port=master_port
                        ),
                        **(env or {}),
                    },
                )
            job.wait()
        finally:
            try:
                if wan.alive():
                    wan.kill_processes()
            finally:
                job.finish()
    return job.status


class _Job:
    """The commands of all regions, from start to end; one thread, one loop."""

    def __init__(
        self, wan: Emulation, on_line: Callable[[str, str, bool], None], grace_s: float
    ) -> None:
        self.status = 0
        self._wan = wan
        self._on_line = on_line
        self._grace_s = grace_s
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._running: set[str] = set()
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        # The next step towards the end, and when: SIGTERM, then SIGKILL.
        self._next_signal: int | None = None
        self._next_signal_at = math.inf

    @contextlib.contextmanager
    def signals_handed_on(self) -> Iterator[None]:
        # Handlers belong to the main thread; elsewhere the caller's stay.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, lambda number, _: self._signals.append(number))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def start(self, region: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        # A session of its own, so that signals reach it once: from here.
        process = self._wan.popen(
            region,
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._processes[region] = process
        self._running.add(region)
        for stream, is_error in ((process.stdout, False), (process.stderr, True)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            reader = _LineReader(stream, region, is_error, self._on_line)
            self._selector.register(stream, selectors.EVENT_READ, reader)

    def wait(self) -> None:
        while self._running:
            self._read(0.1)
            self._reap()
            self._steps()

    def finish(self) -> None:
        """Read what is left of the output; every process is dead by now."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        deadline = time.monotonic() + 2
        while self._selector.get_map() and time.monotonic() < deadline:
            self._read(0.1)
        for key in list(self._selector.get_map().values()):
            self._close(key)
        self._selector.close()

    def _read(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if not key.data.read():
                self._close(key)

    def _close(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fileobj)
        key.data.close()

    def _reap(self) -> None:
        for region in sorted(self._running):
            status = self._processes[region].poll()
            if status is None:
                continue
            self._running.discard(region)
            if status != 0 and self.status == 0:
                self.status = status if status > 0 else 128 - status
                if self._running and self._next_signal is None:
                    self._plan(signal.SIGTERM, self._grace_s)
        if self._running and not self._wan.alive():
            raise EmulationError("geomesh-wan has ended; the job cannot go on")

    def _steps(self) -> None:
        for number in self._take_signals():
            if self._next_signal == signal.SIGKILL:
                self._send(signal.SIGKILL)
                continue
            self.status = self.status or 128 + number
            self._send(number)
            self._plan(signal.SIGKILL, self._grace_s)
        if self._next_signal is not None and time.monotonic() >= self._next_signal_at:
            self._send(self._next_signal)
            self._plan(signal.SIGKILL, self._grace_s)

    def _take_signals(self) -> list[int]:
        taken, self._signals = self._signals, []
        return taken

    def _plan(self, number: int, after_s: float) -> None:
        self._next_signal = number
        self._next_signal_at = time.monotonic() + after_s

    def _send(self, number: int) -> None:
        for region in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._processes[region].pid, number)


class _LineReader:
    """Cuts one stream of a region into lines."""

    def __init__(
        self,
        stream: IO[bytes],
        region: str,
        is_error: bool,
        on_line: Callable[[str, str, bool], None],
    ) -> None:
        self._stream = stream
        self._region = region
        self._is_error = is_error
        self._on_line = on_line
        self._rest = b""

    def read(self) -> bool:
        """Hand on the complete lines; False at the stream's end."""
        try:
            data = os.read(self._stream.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._emit(line)
        return bool(data)

    def close(self) -> None:
        if self._rest:
            self._emit(self._rest)
        self._stream.close()

    def _emit(self, line: bytes) -> None:
        self._on_line(self._region, line.decode(errors="replace").rstrip("\r"), self._is_error)


def _print_line(region: str, line: str, is_error: bool) -> None:
    print(f"[{region}] {line}", file=sys.stderr if is_error else sys.stdout, flush=True)


def summary(wan: Emulation) -> str:
    """Return a table of what went over each link, and how punctual the emulator was."""
    rows = [("from", "to", "MB", "packets", "lost", "queue drops", "cut drops")]
    counters = wan.counters()
    for (source, target), pair in counters.items():
        rows.append(
            (
                source,
                target,
                f"{pair.bytes / 1e6:.3f}",
                str(pair.packets),
                str(pair.lost_packets),
                str(pair.queue_dropped_packets),
                str(pair.cut_dropped_packets),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        names = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(names + numbers).rstrip())
    health = wan.health()
    total = sum(pair.bytes for pair in counters.values())
    lines.append(
        f"total {total / 1e6:.3f} MB between regions; the emulator delivered "
        f"{health.lateness_p99_s * 1e3:.2f} ms late (99th percentile), "
        f"{health.device_drops} packets dropped by devices, {health.cpu_s:.1f} s of processor"
    )
    if not health.sound:
        lines.append("void: the emulator lacked processor time, figures of this run do not count")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``geomesh emulate`` takes to a parser."""
    parser.add_argument(
        "topology",
        metavar="TOPOLOGY",
        help=f"a topology file, or the name of a shipped one: {', '.join(shipped())}",
    )
    _add_options(parser)
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND...",
        help="what to run in every region, for example: -- torchrun train.py",
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="F", help="multiply all bandwidths by F"
    )
    parser.add_argument(
        "--ranks-per-region",
        type=int,
        default=1,
        metavar="N",
        help="processes that torchrun starts in each region (default 1)",
    )
    parser.add_argument("--ipv6", action="store_true", help="IPv6 addresses in the regions as well")


def _take_options(arguments: argparse.Namespace) -> list[str]:
    """Return the command; argparse leaves options that follow TOPOLOGY before it."""
    words = arguments.command
    if "--" not in words:
        return list(words)
    end = words.index("--")
    parser = argparse.ArgumentParser(prog="geomesh emulate", usage="TOPOLOGY [options] -- COMMAND")
    _add_options(parser)
    parser.set_defaults(**{key: getattr(arguments, key) for key in ("scale", "ranks_per_region")})
    parser.parse_args(words[:end], namespace=arguments)
    return list(words[end + 1 :])


def run(arguments: argparse.Namespace) -> int:
    """Run ``geomesh emulate`` with parsed arguments; return the exit status."""
    try:
        command = _take_options(arguments)
        if not command:
            raise EmulationError("no command: geomesh emulate TOPOLOGY -- COMMAND...")
        if arguments.ranks_per_region < 1:
            raise EmulationError("--ranks-per-region must be at least 1")
        topology = Topology.load(arguments.topology).scaled(arguments.scale)
        with Emulation(topology, ipv6=arguments.ipv6) as wan:
            if wan.warning:
                print(f"geomesh emulate: {wan.warning}", file=sys.stderr)
            status = run_in_regions(wan, command, ranks_per_region=arguments.ranks_per_region)
            print(summary(wan), file=sys.stderr)
            return status
    except (EmulationError, TopologyError) as error:
        print(f"geomesh emulate: {error}", file=sys.stderr)
        return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``geomesh emulate`` with command-line words."""
    parser = argparse.ArgumentParser(
        prog="geomesh emulate", description="Run a command in emulated regions."
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
