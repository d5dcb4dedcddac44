"""The ranks of a job and what they tell each other through its store, for tools under torchrun.

Knows torchrun's environment and the rendezvous store; no backend. Nothing here waits without a
deadline: a rank that is silent is missing from the answer, and the caller goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["Job", "JobError", "how_to_start", "rounds", "started_by_torchrun"]

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PAUSE_S = 0.01


class JobError(RuntimeError):
    """The ranks cannot meet; the message says why and what to do."""


def started_by_torchrun(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether this process is a rank of a job."""
    environment = os.environ if environment is None else environment
    return all(environment.get(name) for name in _NEEDED)


def how_to_start(command: str) -> str:
    """Return the lines that start ``geomesh COMMAND`` as a job."""
    return (
        "start it as your training is started, on every machine, with its own GEOMESH_REGION and "
        "--node-rank:\n"
        "  GEOMESH_REGION=eastus torchrun --nnodes 4 --node-rank 0 --nproc-per-node 1 \\\n"
        f"      --master-addr 10.0.0.1 --master-port 29500 --no-python geomesh {command}"
    )


def rounds(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return rounds in which each pair of `ranks` meets once and no rank has two partners.

    A tournament by the circle method: one rank stays, the others move on; with an odd number of
    ranks one rests in each round.
    """
    circle: list[int | None] = list(ranks)
    if len(circle) < 2:
        return []
    if len(circle) % 2:
        circle.append(None)
    result = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        meetings = zip(circle[:half], reversed(circle[half:]), strict=True)
        result.append(
            sorted((min(a, b), max(a, b)) for a, b in meetings if a is not None and b is not None)
        )
        circle.insert(1, circle.pop())
    return result


@dataclass(frozen=True)
class Job:
    """One rank of a job: this process.

    Parameters
    ----------
    rank, world : int
        As torchrun numbers them.
    store : Store
        Of this run of the job alone.
    """

    rank: int
    world: int
    store: dist.Store

    @classmethod
    def join(cls, tool: str, timeout_s: float = 60.0) -> Job:
        """Join the job that the environment describes.

        Raises
        ------
        JobError
            If its store cannot be reached.
        """
        from torch.distributed.rendezvous import rendezvous

        master = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        try:
            store, rank, world = next(
                rendezvous("env://", timeout=timedelta(seconds=timeout_s))  # type: ignore[no-untyped-call]
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise JobError(
                f"rank {os.environ['RANK']} cannot reach the job's store at {master} "
                f"({str(error).splitlines()[0]}): is that the first machine's address, and is its "
                "port open to this one?"
            ) from error
        run = os.environ.get("TORCHELASTIC_RUN_ID", "")
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(rank, world, dist.PrefixStore(f"geomesh/{tool}/{run}/{life}", store))

    def tell(self, subject: str, value: Any) -> None:
        """Let all ranks hear `value`, as JSON."""
        self.store.set(f"{subject}/{self.rank}", json.dumps(value))

    def hear(self, subject: str, ranks: Iterable[int], timeout_s: float) -> dict[int, Any]:
        """Return what `ranks` told on a subject; those silent until the deadline are left out."""
        deadline = time.monotonic() + timeout_s
        values: dict[int, Any] = {}
        for rank in sorted(set(ranks)):
            key = f"{subject}/{rank}"
            # Asked again and again: the store's own waits print warnings when they run out.
            while not (told := self.store.check([key])) and time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
            if told:
                values[rank] = json.loads(self.store.get(key))
        return values

    def barrier(self, name: str, ranks: Iterable[int], timeout_s: float) -> bool:
        """Wait until all `ranks` are here; False: some were not within the time."""
        ranks = set(ranks)
        came = self.store.add(f"{name}/came", 1)
        if came >= len(ranks):
            self.store.set(f"{name}/all", "")
        deadline = time.monotonic() + timeout_s
        while not self.store.check([f"{name}/all"]):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_S)
        return True

    def leave(self, status: int, patience_s: float = 60.0) -> int:
        """End with rank 0's status on all ranks, rank 0 last: it may hold the store."""
        if self.rank == 0:
            self.tell("status", status)
            with contextlib.suppress(RuntimeError):
                self.hear("left", range(1, self.world), 5.0)
            return status
        try:
            told = self.hear("status", [0], patience_s)
            self.tell("left", 0)
        except RuntimeError:  # the store has gone, and rank 0 with it
            return 1
        return int(told.get(0, 1))
