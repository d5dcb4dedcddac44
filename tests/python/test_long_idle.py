"""What takes long, at default limits: idleness then a death, links that are gone or come back."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from torch_geomesh.emulation import Emulation, EmulationUnavailable
from torch_geomesh.topology import Link, Topology

pytestmark = pytest.mark.wan

SCRIPTS = Path(__file__).parents[1] / "dist" / "scripts"
REGIONS = ("near", "far", "mid")
LINK = Link.of(25e6, 0.01, queue_s=0.1)
IDLE_S = 60
DEAD_AFTER_S = 20  # GEOMESH_DEAD_AFTER's default
BUSY_S = 3  # for a machine with other work
WIRES = ["ucx", "tls"]
# Links that are gone for a while, between which regions and for how long. TCP by itself tries again
# after 12.6 s and 25 s: over TLS, new connections are there sooner.
OUTAGES = {"ucx": ("far", "mid", 8.0), "tls": ("near", "mid", 15.0)}


@dataclass
class Job:
    """The ranks of one job, while they run and after."""

    folder: Path
    processes: list[subprocess.Popen]
    cut: float = 0.0
    killed: float = 0.0

    def notes(self, rank: int) -> dict[str, dict[str, Any]]:
        """Return what a rank has noted so far, by what it is."""
        file = self.folder / f"rank{rank}"
        lines = file.read_text().splitlines() if file.exists() else []
        return {note["what"]: note for note in map(json.loads, lines)}

    def logs(self) -> str:
        return "".join(file.read_text() for file in self.folder.glob("*.log"))

    def start(
        self,
        wan: Emulation,
        stack: ExitStack,
        port: int,
        wire: str,
        script: str,
        *args: str,
        regions: tuple[str, ...],
    ) -> None:
        env = {"MASTER_PORT": str(port), "MASTER_ADDR": wan.address(regions[0])}
        if wire == "tls":
            key = self.folder / "key"
            key.write_text(secrets.token_hex(32))
            key.chmod(0o600)
            env["GEOMESH_PSK_FILE"] = str(key)
        for number, region in enumerate(regions):
            log = stack.enter_context((self.folder / f"{region}.log").open("w"))
            command = [sys.executable, str(SCRIPTS / script), str(self.folder), *args]
            own = {**env, "PET_NODE_RANK": str(number)}
            process = wan.popen(region, command, env=own, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(process.kill)
            self.processes.append(process)

    def await_note(self, what: str, ranks: tuple[int, ...], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not all(what in self.notes(rank) for rank in ranks):
            if time.monotonic() > deadline:
                noted = [self.notes(rank) for rank in range(4)]
                pytest.fail(f"not {what} in {timeout_s} s: {noted}\n{self.logs()}")
            time.sleep(0.02)


@dataclass
class Jobs:
    """Jobs of the first kind (idle, then a death or a cut) and of the second (an outage)."""

    idle: dict[str, Job]
    outage: dict[str, Job]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    pairs = [(a, b) for a in REGIONS for b in REGIONS if a != b]
    try:
        wan = Emulation(Topology("idle", REGIONS, dict.fromkeys(pairs, LINK)))
        wan.start()
    except EmulationUnavailable as reason:
        pytest.skip(str(reason))
    with ExitStack() as stack:
        stack.callback(wan.close)
        jobs = Jobs({}, {})
        for port, wire in enumerate(WIRES, 29500):
            idle = jobs.idle[wire] = Job(tmp_path_factory.mktemp(wire), [])
            idle.start(wan, stack, port, wire, "long_idle.py", str(IDLE_S), regions=("near", "far"))
            outage = jobs.outage[wire] = Job(tmp_path_factory.mktemp(wire), [])
            outage.start(wan, stack, port + 10, wire, "outage.py", regions=OUTAGES[wire][:2])
        for wire in WIRES:
            jobs.idle[wire].await_note("waits", (0, 3), 60)
            jobs.outage[wire].await_note("ready", (0, 1), 60)
        wan.cut("near", "far")
        begin = time.monotonic()
        for first, second, _ in OUTAGES.values():
            wan.cut(first, second)
        for first, second, seconds in sorted(OUTAGES.values(), key=lambda outage: outage[2]):
            time.sleep(begin + seconds - time.monotonic())
            wan.restore(first, second)
        for job in jobs.outage.values():
            (job.folder / "stop").touch()
        for job in jobs.idle.values():
            job.cut = begin
            job.await_note("waits", (1,), IDLE_S + 10)
            job.killed = time.monotonic()
            os.kill(job.notes(2)["ready"]["pid"], signal.SIGKILL)
        for job in jobs.idle.values():
            job.await_note("ended", (0, 1, 3), 30)
        for job in jobs.outage.values():
            job.await_note("ended", (0, 1), 1)
        yield jobs


@pytest.mark.parametrize("wire", WIRES)
def test_a_rank_that_dies_after_a_minute_of_idleness_is_missed_at_once(
    jobs: Jobs, wire: str
) -> None:
    noted = jobs.idle[wire].notes(1)
    assert noted["waits"]["at"] - noted["ready"]["at"] > IDLE_S
    assert noted["told"]["at"] - jobs.idle[wire].killed < BUSY_S, noted
    assert re.search(r"recv\(Float\[4\], from rank 2.*lost rank 2 on host", noted["told"]["error"])


@pytest.mark.parametrize("wire", WIRES)
def test_ranks_behind_a_link_that_drops_all_are_missed_within_the_default(
    jobs: Jobs, wire: str
) -> None:
    for rank, other in ((0, 3), (3, 0)):
        noted = jobs.idle[wire].notes(rank)
        text = noted["told"]["error"]
        assert noted["told"]["at"] - jobs.idle[wire].cut < DEAD_AFTER_S + BUSY_S, text
        assert re.search(rf"recv\(Float\[4\], from rank {other}.*rank {other} on host", text), text
        assert re.search(r"lost rank \d on host \w+ \(\w+\): silent for 2\d(\.\d)?s", text), text
        assert noted["ended"]["seconds"] < BUSY_S + 2, noted


@pytest.mark.parametrize("wire", WIRES)
def test_the_log_has_no_line_of_ucx(jobs: Jobs, wire: str) -> None:
    assert not re.search(r"\bUCX +(FATAL|ERROR|WARN|DIAG)", jobs.idle[wire].logs())


@pytest.mark.parametrize("wire", WIRES)
def test_a_link_that_comes_back_before_its_ranks_are_given_up_costs_only_time(
    jobs: Jobs, wire: str
) -> None:
    outage_s = OUTAGES[wire][2]
    for rank in (0, 1):
        ended = jobs.outage[wire].notes(rank)["ended"]
        assert ended["wrong"] == 0
        assert ended["rounds"] > 3
        assert outage_s - 1 < ended["longest_s"] < DEAD_AFTER_S + BUSY_S
