"""What a run of the demo writes down: JSON lines from each rank, and their reading.

A rank appends one line an event to ``<arm>/rank<r>.jsonl``; times are seconds of the machine's
monotonic clock, which all ranks share, until `read_arm` makes them relative to the arm's start.
Knows files and arithmetic on times; nothing of torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO


class RecordWriter:
    """Appends events to a file, each line complete as soon as it is written."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event."""
        self._file.write(json.dumps({"kind": kind, **fields}) + "\n")
        self._file.flush()


class RecordTail:
    """Reads the lines that were added to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the new complete lines."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                lines = file.read()
        except FileNotFoundError:
            return
        complete = lines[: lines.rfind(b"\n") + 1]
        self._position += len(complete)
        for line in complete.splitlines():
            yield json.loads(line)


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of one rank; of DDP, one step. Times in seconds from the arm's start."""

    number: int
    begin: float
    ready: float
    end: float
    steps: int
    samples: int
    tokens: int
    loss: float
    hash: str
    bytes_sent: int | None = None
    fp32_bytes: int | None = None
    late_s: float = 0.0
    """Behind the pace of the emulated GPU, from the arm's start on."""


@dataclasses.dataclass(frozen=True)
class Waits:
    """How a rank's time divides, in seconds."""

    compute_s: float
    straggler_wait_s: float
    wan_wait_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.compute_s + self.straggler_wait_s + self.wan_wait_s


def divide(rounds: Sequence[Sequence[Round]]) -> list[list[Waits]]:
    """Divide the time of each rank's rounds; the same number of rounds for every rank.

    Straggler wait is what a rank would wait on an instant network: the slowest rank's time in
    compute less its own.  The rest of its wait is for the WAN: bytes under way, and ranks that
    began the round late because the last round's bytes reached them late.
    """
    divided: list[list[Waits]] = [[] for _ in rounds]
    for same in zip(*rounds, strict=True):
        slowest_s = max(round_.ready - round_.begin for round_ in same)
        for rank, round_ in enumerate(same):
            compute_s, wait_s = round_.ready - round_.begin, round_.end - round_.ready
            straggler_s = min(slowest_s - compute_s, wait_s)
            divided[rank].append(Waits(compute_s, straggler_s, wait_s - straggler_s))
    return divided


def total(waits: Sequence[Waits]) -> Waits:
    """Add up."""
    return Waits(
        sum(w.compute_s for w in waits),
        sum(w.straggler_wait_s for w in waits),
        sum(w.wan_wait_s for w in waits),
    )


def complete_rounds(rounds: Sequence[Sequence[Round]], until: float) -> list[list[Round]]:
    """Return the rounds that every rank has completed, the last one ended by `until`."""
    count = min((len(own) for own in rounds), default=0)
    while count and max(own[count - 1].end for own in rounds) > until:
        count -= 1
    return [list(own[:count]) for own in rounds]


def identical(rounds: Sequence[Sequence[Round]]) -> bool:
    """Whether all ranks held the same parameters, bit for bit, after every round.

    False for no rounds at all: nothing was compared.
    """
    turns = list(zip(*rounds, strict=False))
    return bool(turns) and all(len({round_.hash for round_ in same}) == 1 for same in turns)
