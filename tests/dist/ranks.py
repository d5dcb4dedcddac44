"""Runs a function on several ranks, each a process, and collects what they return or raise.

Processes come from a fork server that has torch loaded: a world of four starts quickly.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "numpy"])


class RankFailedError(AssertionError):
    """One or more ranks raised; the text has each traceback."""


@dataclass
class Outcome:
    """What came of one rank: a value, an error's text, or neither where it was killed."""

    value: Any = None
    error: str = ""
    error_type: str = ""
    seconds: float = 0.0
    finished: bool = False


@dataclass
class World:
    """Ranks under way, for tests that kill or stop some of them."""

    processes: list[mp.Process]
    pipes: list[Connection]
    outcomes: list[Outcome] = field(default_factory=list)

    def pid(self, rank: int) -> int:
        """Return the rank's process id."""
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank."""
        os.kill(self.pid(rank), number)

    def receive(self, rank: int, timeout: float = 60) -> Any:
        """Wait for what the rank's function passed to ``tell``."""
        assert self.pipes[rank].poll(timeout), f"rank {rank} said nothing for {timeout} s"
        kind, value = self.pipes[rank].recv()
        assert kind == "tell", f"rank {rank} ended instead of telling: {value}"
        return value

    def join(self, timeout: float = 60, expect_dead: tuple[int, ...] = ()) -> list[Outcome]:
        """Wait for all ranks but those expected dead; fail when time runs out."""
        deadline = time.monotonic() + timeout
        outcomes = [Outcome() for _ in self.processes]
        open_pipes = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in expect_dead}
        while open_pipes and time.monotonic() < deadline:
            for pipe in wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic())):
                rank = open_pipes[pipe]
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    del open_pipes[pipe]
                    continue
                if kind == "end":
                    outcomes[rank] = value
                    del open_pipes[pipe]
        hung = [rank for pipe, rank in open_pipes.items()]
        for rank, process in enumerate(self.processes):
            if rank not in expect_dead and not hung:
                process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
            process.join()
        if hung:
            raise RankFailedError(f"ranks {hung} did not end within {timeout} s")
        return outcomes


def _main(
    pipe: Connection,
    rank: int,
    world: int,
    port: int,
    init: dict[str, Any] | None,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    outcome = Outcome()
    start = time.monotonic()
    try:
        if init is not None:
            store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=30))
            options = {"backend": "geomesh", "timeout": timedelta(seconds=30), **init}
            dist.init_process_group(store=store, rank=rank, world_size=world, **options)
        start = time.monotonic()
        if "tell" in function.__code__.co_varnames[: function.__code__.co_argcount]:
            outcome.value = function(*args, tell=lambda value: pipe.send(("tell", value)))
        else:
            outcome.value = function(*args)
    except BaseException as error:
        outcome.error = traceback.format_exc()
        outcome.error_type = type(error).__name__
    outcome.seconds = time.monotonic() - start
    outcome.finished = True
    pipe.send(("end", outcome))
    if dist.is_initialized():
        dist.destroy_process_group()


def start_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    init: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    per_rank_environment: list[dict[str, str]] | None = None,
    initialize: bool = True,
) -> World:
    """Start ``function(*args)`` on ``world`` ranks of one geomesh group."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    processes, pipes = [], []
    for rank in range(world):
        ours, theirs = _context.Pipe()
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            **(environment or {}),
            **(per_rank_environment[rank] if per_rank_environment else {}),
        }
        process = _context.Process(
            target=_main,
            args=(
                theirs,
                rank,
                world,
                store.port,
                (init or {}) if initialize else None,
                variables,
                function,
                args,
            ),
            daemon=True,
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    result = World(processes, pipes)
    result.store = store  # type: ignore[attr-defined]  # lives as long as the ranks
    return result


@contextmanager
def started(*args: Any, **options: Any) -> Iterator[World]:
    """Start ranks, and kill those that are left: one that is stopped would never end."""
    world = start_ranks(*args, **options)
    try:
        yield world
    finally:
        for process in world.processes:
            process.kill()
            process.join()


def run_ranks(
    world: int, function: Callable[..., Any], *args: Any, timeout: float = 90, **options: Any
) -> list[Any]:
    """Run ``function(*args)`` on every rank; return their values or raise every traceback."""
    outcomes = start_ranks(world, function, *args, **options).join(timeout)
    errors = [
        f"--- rank {rank}\n{o.error or 'ended without a word'}"
        for rank, o in enumerate(outcomes)
        if o.error or not o.finished
    ]
    if errors:
        raise RankFailedError("\n".join(errors))
    return [o.value for o in outcomes]
