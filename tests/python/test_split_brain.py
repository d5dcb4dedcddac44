"""A job that is cut into two halves: never two that each go on as if they were the job."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from torch_geomesh.emulation import Emulation, EmulationUnavailable
from torch_geomesh.topology import Link, Topology

pytestmark = pytest.mark.wan

SCRIPT = Path(__file__).parents[1] / "dist" / "scripts" / "two_halves.py"
MBIT = 125_000.0  # bytes/s
SIDES = {"east": (0, 1), "west": (2, 3)}
LIMITS = {"GEOMESH_SUSPECT_AFTER": "1s", "GEOMESH_DEAD_AFTER": "4s"}
STOPPED_WITHIN_S = 4.0 + 3.0  # the second one for a machine with other work
CUTS = ["both_ways", "east_to_west"]
LIVES = len(CUTS) + 1
TOKENS = 4 * 2  # of all ranks in a round: each counts its steps

# A round's signs go in an instant, or take a second or more and can be cut off on their way.
FAST, SLOW = (Link.of(rate * MBIT, 0.01, queue_s=0.1) for rate in (200, 2))


@dataclass
class Cut:
    """When the link was cut and healed, by the clock of ``time.monotonic`` and of the log."""

    at: float
    begin: datetime
    end: datetime


@dataclass
class Halves:
    """What each of the four ranks noted and each side logged, and the cut in each life but one."""

    notes: list[list[dict[str, Any]]]
    logs: dict[str, str]
    cuts: list[Cut]

    def of(
        self, what: str, life: int, ranks: tuple[int, ...] = (0, 1, 2, 3)
    ) -> dict[int, list[dict[str, Any]]]:
        """Return the notes of one kind and life, by rank."""
        return {
            rank: [n for n in self.notes[rank] if (n["what"], n["life"]) == (what, life)]
            for rank in ranks
        }

    def cut_round(self, life: int) -> int:
        """Return the number of the round that was cut: the one after the life's first."""
        return self.of("committed", life)[0][0]["round"] + 1

    def logged(self, side: str, life: int) -> list[str]:
        """Return what a side logged during a cut, but for its first half second.

        What came before the cut may be read that late.
        """
        cut = self.cuts[life]
        found = []
        for line in self.logs[side].splitlines():
            if match := re.match(r"geomesh [EWI] (\d\d):(\d\d):(\d\d\.\d+) ", line):
                hours, minutes, seconds = map(float, match.groups())
                midnight = cut.begin.replace(hour=0, minute=0, second=0, microsecond=0)
                at = midnight + timedelta(hours=hours, minutes=minutes, seconds=seconds)
                if cut.begin + timedelta(seconds=0.5) < at < cut.end:
                    found.append(line)
        return found


class Job:
    """The ranks, while they run."""

    def __init__(self, wan: Emulation, folder: Path, stack: ExitStack) -> None:
        self.wan, self.folder = wan, folder
        self.processes = []
        for region in SIDES:
            command = [sys.executable, str(SCRIPT), str(folder), str(LIVES)]
            log = stack.enter_context((folder / f"{region}.log").open("w"))
            process = wan.popen(region, command, env=LIMITS, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(process.kill)
            self.processes.append(process)

    def notes(self) -> list[list[dict[str, Any]]]:
        found = []
        for rank in range(4):
            file = self.folder / f"rank{rank}"
            lines = file.read_text().splitlines() if file.exists() else []
            found.append([json.loads(line) for line in lines])
        return found

    def await_all(self, condition: Callable[[], bool], timeout_s: float = 40) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            failed = any(process.poll() for process in self.processes)
            if failed or time.monotonic() > deadline:
                logs = "\n".join((self.folder / f"{side}.log").read_text() for side in SIDES)
                pytest.fail(
                    f"{'a rank failed' if failed else 'not in time'}: {self.notes()}\n{logs}"
                )
            time.sleep(0.01)

    def await_notes(self, what: str, life: int) -> None:
        self.await_all(
            lambda: all(
                any((note["what"], note["life"]) == (what, life) for note in rank)
                for rank in self.notes()
            )
        )

    def set_links(self, link: Link) -> None:
        self.wan.set_link("east", "west", link)
        self.wan.set_link("west", "east", link)

    def cut(self, how: str) -> None:
        if how == "both_ways":
            self.wan.cut("east", "west")
        else:
            self.wan.cut(*how.split("_to_"), one_way=True)

    def live(self, life: int, how: str) -> Cut:
        """Cut the link in the middle of a round, and heal it when all have stopped."""
        self.await_notes("ready", life)
        self.set_links(SLOW)
        self.wan.reset_counters()
        (self.folder / f"go{life}").touch()
        # A part of one rank's signs: each side needs those of two.
        self.await_all(
            lambda: all(counters.bytes > 60_000 for counters in self.wan.counters().values())
        )
        self.cut(how)
        at, begin = time.monotonic(), datetime.now()
        self.await_notes("refused", life)
        end = datetime.now()
        self.wan.restore("east", "west")
        self.set_links(FAST)
        (self.folder / f"healed{life}").touch()
        return Cut(at, begin, end)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Halves]:
    folder = tmp_path_factory.mktemp("halves")
    topology = Topology("halves", tuple(SIDES), {("east", "west"): FAST, ("west", "east"): FAST})
    try:
        wan = Emulation(topology)
        wan.start()
    except EmulationUnavailable as reason:
        pytest.skip(str(reason))
    with ExitStack() as stack:
        stack.callback(wan.close)
        job = Job(wan, folder, stack)
        cuts = [job.live(life, how) for life, how in enumerate(CUTS)]
        job.await_all(lambda: all(process.poll() is not None for process in job.processes))
        logs = {side: (folder / f"{side}.log").read_text() for side in SIDES}
        yield Halves(job.notes(), logs, cuts)


@pytest.mark.parametrize("life", range(len(CUTS)), ids=CUTS)
def test_at_most_one_side_commits_the_round_that_is_cut(halves: Halves, life: int) -> None:
    cut_round = halves.cut_round(life)
    committed = {
        side: [
            rank
            for rank, notes in halves.of("committed", life, ranks).items()
            if any(note["round"] == cut_round for note in notes)
        ]
        for side, ranks in SIDES.items()
    }
    assert not all(committed.values()), committed


@pytest.mark.parametrize("life", range(len(CUTS)), ids=CUTS)
def test_nobody_goes_on_without_the_other_half(halves: Halves, life: int) -> None:
    for rank, notes in halves.of("committed", life).items():
        assert all(note["round"] <= halves.cut_round(life) for note in notes), (rank, notes)
        assert all(note["tokens"] == TOKENS for note in notes), (rank, notes)


@pytest.mark.parametrize("life", range(len(CUTS)), ids=CUTS)
def test_all_stop_in_time_and_say_who_of_the_other_side_is_lost(halves: Halves, life: int) -> None:
    for side, ranks in SIDES.items():
        other = "west" if side == "east" else "east"
        for rank, notes in halves.of("stopped", life, ranks).items():
            (stopped,) = notes
            assert stopped["at"] - halves.cuts[life].at < STOPPED_WITHIN_S, (rank, stopped)
            # A cut in one direction is first seen by those who hear nothing; they tell the others.
            lost = r"lost rank \d on host \S+ \(\w+\): .*silent for \d"
            assert re.search(lost, stopped["error"]), (rank, stopped)
            assert f"({other})" in stopped["error"], (rank, stopped)


@pytest.mark.parametrize("life", range(len(CUTS)), ids=CUTS)
def test_nobody_is_heard_through_a_cut(halves: Halves, life: int) -> None:
    """Nor taken for alive because this side itself tries to connect: that would cost time."""
    deaf = SIDES if CUTS[life] == "both_ways" else [CUTS[life].split("_to_")[1]]
    for side in deaf:
        lines = halves.logged(side, life)
        assert any("has been silent for" in line for line in lines), lines
        assert not [line for line in lines if "is heard again" in line], lines


@pytest.mark.parametrize("life", range(len(CUTS)), ids=CUTS)
def test_who_has_stopped_stays_so_and_says_why(halves: Halves, life: int) -> None:
    for rank, notes in halves.of("refused", life).items():
        (refused,) = notes
        (stopped,) = halves.of("stopped", life)[rank]
        assert f"round {stopped['round']} failed" in refused["error"], (rank, refused)
        assert "lost rank" in refused["error"], (rank, refused)


def test_all_that_completed_a_round_hold_the_same_bits(halves: Halves) -> None:
    hashes: dict[tuple[int, int], set[str]] = {}
    for life in range(LIVES):
        for notes in halves.of("committed", life).values():
            for note in notes:
                hashes.setdefault((life, note["round"]), set()).add(note["hash"])
    assert all(len(those) == 1 for those in hashes.values()), hashes


def test_when_the_link_is_healed_the_four_go_on_from_the_newest_round(halves: Halves) -> None:
    newest = -1
    for life in range(LIVES):
        committed = halves.of("committed", life)
        firsts = [notes[0]["round"] for notes in committed.values()]
        assert firsts == [newest + 1] * 4, (life, committed)
        newest = max(note["round"] for notes in committed.values() for note in notes)
