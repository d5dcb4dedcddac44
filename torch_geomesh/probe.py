"""``geomesh probe``: what the ways between a job's ranks carry, measured; a topology file from it.

Every pair is measured alone, pairs without a common rank at once, then all together. Knows the
order of the measurements, what becomes of a pair that cannot connect, how pairs add up to links
between regions, and how it is shown. Measuring itself is `torch_geomesh.pairs`'.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import statistics
import sys
import threading
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from torch_geomesh.job import Job, JobError, how_to_start, rounds, started_by_torchrun
from torch_geomesh.pairs import Mesh, Pair, PairError, Pings, RankInfo, draw, echo, ping, serve
from torch_geomesh.topology import Link, Topology, TopologyError

__all__ = ["Found", "Settings", "add_arguments", "measure", "run", "to_topology"]

_PINGS = 100
# By then the kernel has found the rate of a long way.
_LEAST_TRIPS = 25
_MOST_SHOWN = 16  # ranks in a matrix


@dataclass(frozen=True)
class Settings:
    """What all ranks do alike.

    Parameters
    ----------
    seconds : float
        Of a pair's measurement; long ways take longer, at least 25 round trips a direction.
    connect_s : float
        How long a pair may take to connect.
    """

    seconds: float = 3.0
    connect_s: float = 10.0

    def direction_s(self, rtt_s: float) -> float:
        """Return how long one direction is measured."""
        return max(0.4 * self.seconds, _LEAST_TRIPS * rtt_s)

    @property
    def patience_s(self) -> float:
        """More than any round takes, with pairs that cannot connect."""
        return 4 * self.connect_s + 10 * self.seconds + 30


@dataclass
class Found:
    """What one rank found out.

    ``pings`` (alone and with all ways busy) are those of the pairs in which it comes first;
    ``drawn`` what came to it, in bytes a second; ``failed`` why a pair was not measured.
    """

    pings: dict[int, Pings] = field(default_factory=dict)
    busy_pings: dict[int, Pings] = field(default_factory=dict)
    drawn: dict[int, float] = field(default_factory=dict)
    busy_drawn: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Found:
        """Read what `to_json` returned, after a way through JSON."""

        def by_rank(name: str, make: Callable[[Any], Any]) -> dict[int, Any]:
            return {int(rank): make(value) for rank, value in data[name].items()}

        return cls(
            pings=by_rank("pings", lambda value: Pings(**value)),
            busy_pings=by_rank("busy_pings", lambda value: Pings(**value)),
            drawn=by_rank("drawn", float),
            busy_drawn=by_rank("busy_drawn", float),
            failed=by_rank("failed", str),
        )


@dataclass(frozen=True)
class Results:
    """What all ranks found out together."""

    infos: dict[int, RankInfo]
    found: dict[int, Found]

    def pings(self, a: int, b: int, *, busy: bool = False) -> Pings | None:
        """Return the round trips between two ranks; None: not measured."""
        for first, second in ((a, b), (b, a)):
            if first in self.found:
                found = self.found[first]
                if second in (pings := found.busy_pings if busy else found.pings):
                    return pings[second]
        return None

    def rate(self, source: int, target: int, *, busy: bool = False) -> float | None:
        """Return bytes a second from one rank to another; None: not measured."""
        if target not in self.found:
            return None
        found = self.found[target]
        return (found.busy_drawn if busy else found.drawn).get(source)

    def troubles(self) -> list[str]:
        """Return a sentence for every rank that did not start and every pair that failed."""
        sentences = [
            f"{self.name(rank)} could not start: {info.error}"
            for rank, info in sorted(self.infos.items())
            if info.error
        ]
        present = [rank for rank, info in sorted(self.infos.items()) if not info.error]
        for rank in present:
            if rank not in self.found:
                sentences.append(f"{self.name(rank)} has not told what it found")
        for a in present:
            for b in present:
                if a >= b:
                    continue
                reasons = {
                    here: self.found[here].failed[there]
                    for here, there in ((a, b), (b, a))
                    if here in self.found and there in self.found[here].failed
                }
                if reasons:
                    said = "".join(f"\n  on rank {rank}: {why}" for rank, why in reasons.items())
                    sentences.append(f"{self.name(a)} and {self.name(b)} cannot talk:{said}")
        return sentences

    def name(self, rank: int) -> str:
        """Return a rank with its place: ``rank 2 (host b, oslo)``."""
        info = self.infos[rank]
        place = ", ".join(filter(None, [info.host and f"host {info.host}", info.region]))
        return f"rank {rank} ({place})" if place else f"rank {rank}"


def first_of(a: int, b: int, infos: Mapping[int, RankInfo]) -> int:
    """Return which of two ranks sends first: all pairs of two regions do so in one direction."""
    order = list(dict.fromkeys(info.region for _, info in sorted(infos.items())))
    return min(a, b, key=lambda rank: (order.index(infos[rank].region), rank))


def measure(job: Job, mesh: Mesh, settings: Settings) -> Found:
    """Measure all pairs of this rank, alone and then with all ways busy."""
    found = Found()
    present = mesh.present
    if job.rank not in present:
        return found
    trips: dict[int, float] = {}
    pairs: dict[int, Pair] = {}
    for number, meetings in enumerate(rounds(present)):
        for meeting in meetings:
            if job.rank not in meeting:
                continue
            other = meeting[0] if meeting[1] == job.rank else meeting[1]
            try:
                pair = mesh.connect(other)
                is_first = first_of(*meeting, mesh.infos) == job.rank
                trips[other] = _measure_pair(mesh, pair, other, is_first, settings, found)
                pairs[other] = pair
            except PairError as error:
                found.failed[other] = str(error)
        job.barrier(f"round {number}", present, settings.patience_s)
    job.tell("trip", max(trips.values(), default=0.0))
    longest = max(job.hear("trip", present, settings.patience_s).values(), default=0.0)
    job.barrier("busy", present, settings.patience_s)
    _measure_busy(mesh, pairs, trips, settings.direction_s(longest), found)
    job.barrier("measured", present, settings.patience_s)
    return found


def _measure_pair(
    mesh: Mesh, pair: Pair, other: int, is_first: bool, settings: Settings, found: Found
) -> float:
    """Measure one pair alone; return its round-trip time."""
    word = torch.zeros(1, dtype=torch.float64)
    try:
        if is_first:
            found.pings[other] = ping(pair, 0.15 * settings.seconds, _PINGS)
            word[0] = found.pings[other].median_s
            pair.send(word, 0).wait()
        else:
            echo(pair)
            pair.recv(word, 0).wait()
        rtt_s = word.item()
        for serves in (is_first, not is_first):
            if serves:
                serve(pair, mesh.memory)
            else:
                found.drawn[other] = draw(pair, mesh.landing, settings.direction_s(rtt_s), rtt_s)
    except RuntimeError as error:
        raise PairError(str(error)) from error
    return rtt_s


def _measure_busy(
    mesh: Mesh, pairs: Mapping[int, Pair], trips: Mapping[int, float], seconds: float, found: Found
) -> None:
    """Measure all pairs at once, both ways, each end in threads of its own."""
    rank = mesh.job.rank

    def draws(other: int, pair: Pair) -> None:
        found.busy_drawn[other] = draw(pair, mesh.landing, seconds, trips[other])

    def serves(other: int, pair: Pair) -> None:
        serve(pair, mesh.memory)

    def pings(other: int, pair: Pair) -> None:
        if first_of(rank, other, mesh.infos) == rank:
            found.busy_pings[other] = ping(pair, seconds, _PINGS // 2)
        else:
            echo(pair)

    def guarded(work: Callable[[int, Pair], None], other: int, pair: Pair) -> None:
        try:
            work(other, pair)
        except PairError as error:
            found.failed.setdefault(other, str(error))

    threads = [
        threading.Thread(target=guarded, args=(work, other, pair), name=f"geomesh-probe-{other}")
        for other, pair in pairs.items()
        for work in (draws, serves, pings)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ---- from pairs to links ----


def region_of(infos: Mapping[int, RankInfo]) -> dict[int, str]:
    """Return the region of each rank; a host's name where it has none."""
    return {
        rank: info.region or re.sub(r"[^A-Za-z0-9]+", "-", info.host).strip("-") or f"rank-{rank}"
        for rank, info in sorted(infos.items())
    }


def to_topology(results: Results, name: str = "measured") -> Topology:
    """Add pairs up to links between regions.

    A link's rate is the most that all its pairs together carried at once, alone in their round or
    with all others; its round-trip time is that of the quickest pair. Inside a region it is the
    middle pair's, of different hosts where there are any.

    Raises
    ------
    TopologyError
        If two regions have no pair that was measured.
    """
    present = {rank: info for rank, info in results.infos.items() if not info.error}
    regions_of = region_of(present)
    regions = tuple(dict.fromkeys(regions_of.values()))
    links: dict[tuple[str, str], Link] = {}
    for a in regions:
        for b in regions:
            if a == b:
                continue
            ways = [
                (x, y)
                for x in present
                for y in present
                if regions_of[x] == a and regions_of[y] == b
            ]
            trips = [p.median_s for x, y in ways if (p := results.pings(x, y)) is not None]
            rate = _together(results, list(present), ways)
            if not trips or rate <= 0:
                raise TopologyError(f"no rank of {a} could be measured with one of {b}")
            links[a, b] = Link.of(_rounded(rate), _rounded(min(trips) / 2))
    inside = _inside(results, present, regions_of)
    topology = Topology(name, regions, links, inside or Topology.inside)
    # As written and read: what a reader of the file would refuse is refused here.
    return Topology.parse(tomllib.loads(topology.to_toml()), where="what was measured")


def _together(results: Results, present: Sequence[int], ways: Sequence[tuple[int, int]]) -> float:
    """Return the most that `ways` carried at one time."""
    sums = [sum(results.rate(x, y, busy=True) or 0.0 for x, y in ways)]
    wanted = set(ways)
    for meetings in rounds(sorted(present)):
        at_once = [*meetings, *((y, x) for x, y in meetings)]
        sums.append(sum(results.rate(x, y) or 0.0 for x, y in at_once if (x, y) in wanted))
    return max(sums)


def _inside(
    results: Results, present: Mapping[int, RankInfo], regions_of: Mapping[int, str]
) -> Link | None:
    near = [
        (x, y)
        for x in present
        for y in present
        if x != y and regions_of[x] == regions_of[y] and results.rate(x, y)
    ]
    apart = [(x, y) for x, y in near if present[x].host != present[y].host]
    ways = apart or near
    rates = [rate for x, y in ways if (rate := results.rate(x, y))]
    trips = [p.median_s for x, y in ways if (p := results.pings(x, y)) is not None]
    if not rates or not trips:
        return None
    return Link.of(_rounded(statistics.median(rates)), _rounded(statistics.median(trips) / 2))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


# ---- showing ----


def _mbit(bytes_per_s: float | None) -> str:
    if bytes_per_s is None:
        return "-"
    mbit = bytes_per_s * 8e-6
    return f"{mbit:,.0f}" if mbit >= 100 else f"{mbit:.3g}"


def _ms(pings: Pings | None) -> str:
    if pings is None:
        return "-"
    return " / ".join(_digits(1e3 * seconds) for seconds in (pings.median_s, pings.p99_s))


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def show(results: Results, file: IO[str] | None = None) -> None:
    """Print a matrix of the ranks, or of the regions where there are many ranks."""
    from rich.console import Console

    console = Console(file=file)
    if not console.is_terminal:
        console = Console(file=file, width=400)  # of a log file, not of a terminal
    ranks = sorted(results.infos)
    shown = ranks if len(ranks) <= _MOST_SHOWN else []
    if shown:
        label = {rank: _label(results.infos[rank]) for rank in shown}
        tables: list[tuple[str, Callable[[int, int], str]]] = [
            ("round trip, ms: median / 99 % of messages", lambda a, b: _ms(results.pings(a, b))),
            ("the same with all ways busy", lambda a, b: _ms(results.pings(a, b, busy=True))),
            ("Mbit/s from row to column, alone", lambda a, b: _mbit(results.rate(a, b))),
            (
                "Mbit/s from row to column, all ways busy",
                lambda a, b: _mbit(results.rate(a, b, busy=True)),
            ),
        ]
        for title, cell in tables:
            _matrix(console, title, shown, label, cell)
        return
    with contextlib.suppress(TopologyError):
        topology = to_topology(results)
        console.print(f"{len(ranks)} ranks in {len(topology.regions)} regions")
        names = {number: region for number, region in enumerate(topology.regions)}

        def rtt(a: int, b: int) -> str:
            return _digits(1e3 * topology.rtt_s(names[a], names[b]))

        def rate(a: int, b: int) -> str:
            return _mbit(topology.link(names[a], names[b]).bytes_per_s)

        _matrix(console, "round trip, ms", list(names), names, rtt)
        _matrix(console, "Mbit/s from row to column", list(names), names, rate)


def _label(info: RankInfo) -> str:
    return " ".join(filter(None, [str(info.rank), info.region or info.host]))


def _matrix(
    console: Any,
    title: str,
    keys: Sequence[int],
    label: Mapping[int, str],
    cell: Callable[[int, int], str],
) -> None:
    from rich.table import Table

    console.print(title, style="bold")
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for key in keys:
        table.add_column(label[key], justify="right", no_wrap=True)
    for a in keys:
        table.add_row(label[a], *("" if a == b else cell(a, b) for b in keys))
    console.print(table)
    console.print()


def to_json(results: Results, settings: Settings) -> dict[str, Any]:
    """Return all figures: ``ranks``, ``pairs`` (from, to) and ``troubles``."""
    ranks = sorted(results.infos)
    pairs = []
    for a in ranks:
        for b in ranks:
            pings, busy = results.pings(a, b), results.pings(a, b, busy=True)
            if a == b or results.rate(a, b) is None:
                continue
            pairs.append(
                {
                    "from": a,
                    "to": b,
                    "bytes_per_s": results.rate(a, b),
                    "busy_bytes_per_s": results.rate(a, b, busy=True),
                    "rtt_median_s": pings and pings.median_s,
                    "rtt_p99_s": pings and pings.p99_s,
                    "busy_rtt_median_s": busy and busy.median_s,
                    "busy_rtt_p99_s": busy and busy.p99_s,
                }
            )
    return {
        "ranks": [dataclasses.asdict(results.infos[rank]) for rank in ranks],
        "pairs": pairs,
        "troubles": results.troubles(),
        "seconds": settings.seconds,
    }


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``geomesh probe`` takes to a parser."""
    parser.add_argument(
        "--out",
        default="topology.toml",
        metavar="FILE",
        help="the topology file that rank 0 writes (default: topology.toml)",
    )
    parser.add_argument("--json", metavar="FILE", help="rank 0 writes all figures there")
    parser.add_argument(
        "--seconds",
        type=float,
        default=Settings.seconds,
        metavar="S",
        help="of a pair's measurement, from 0.5 to 60; long ways take longer (default: 3)",
    )
    parser.add_argument(
        "--connect-seconds",
        type=float,
        default=Settings.connect_s,
        metavar="S",
        help="how long a pair may take to connect, from 5 to 60 (default: 10)",
    )


def _refusal(arguments: argparse.Namespace) -> str:
    """Return what is wrong with the arguments; "" for nothing."""
    for option, value, least, most in (
        ("--seconds", arguments.seconds, 0.5, 60),
        ("--connect-seconds", arguments.connect_seconds, 5, 60),
    ):
        if not least <= value <= most:
            return f"{option} {value:g}: must be from {least:g} to {most:g}"
    for option, file in (("--out", arguments.out), ("--json", arguments.json)):
        if file is None:
            continue
        if not file:
            return f"{option}: an empty path"
        folder = Path(file).absolute().parent
        if Path(file).is_dir() or not os.access(folder, os.W_OK):
            return f"{option} {file}: no file can be written there"
    return ""


def run(arguments: argparse.Namespace) -> int:
    """Run ``geomesh probe`` with parsed arguments, on one rank; return the exit status."""
    if not started_by_torchrun():
        print(f"geomesh probe: measures between the ranks of a job: {how_to_start('probe')}")
        return 2
    try:
        job = Job.join("probe")
    except JobError as error:
        print(f"geomesh probe: {error}", file=sys.stderr)
        return 2
    # Rank 0's settings are everybody's: only its files are written, and all must do alike.
    if job.rank == 0:
        wanted = Settings(arguments.seconds, arguments.connect_seconds)
        job.tell("settings", [_refusal(arguments), dataclasses.asdict(wanted)])
    told = job.hear("settings", [0], 60.0)
    if not told:
        print(f"geomesh probe: rank {job.rank} waited 60 s for rank 0 in vain", file=sys.stderr)
        return 2
    refusal, fields = told[0]
    if refusal:
        if job.rank == 0:
            print(f"geomesh probe: {refusal}", file=sys.stderr)
        return job.leave(2)
    settings = Settings(**fields)
    if job.world == 1:
        print("geomesh probe: the job has one rank: there is nothing to measure")
        return 0
    with Mesh(job, settings.connect_s) as mesh:
        mesh.open()
        if job.rank == 0:
            count = len(rounds(mesh.present))
            print(
                f"{job.world} ranks: {count} rounds of about {settings.seconds:g} s, "
                "then all at once",
                flush=True,
            )
        found = measure(job, mesh, settings)
        job.tell("found", found.to_json())
        status = 0
        if job.rank == 0:
            patience_s = settings.patience_s * (job.world + 2 if mesh.error else 1)
            heard = job.hear("found", mesh.present, patience_s)
            results = Results(
                mesh.infos, {rank: Found.from_json(data) for rank, data in heard.items()}
            )
            status = _conclude(results, settings, arguments)
    return job.leave(status, settings.patience_s * (job.world + 2))


def _conclude(results: Results, settings: Settings, arguments: argparse.Namespace) -> int:
    """Show and write what was found; return the exit status."""
    show(results)
    status = 0
    for sentence in results.troubles():
        print(f"geomesh probe: {sentence}", file=sys.stderr)
        status = 1
    try:
        if arguments.json:
            text = json.dumps(to_json(results, settings), indent=1)
            Path(arguments.json).write_text(text + "\n", encoding="utf-8")
        if not any(info.region for info in results.infos.values()):
            print(
                "no rank has GEOMESH_REGION: each host counts as a region of its name; set it on "
                "each host to one of the file's regions before you use the file"
            )
        topology = to_topology(results, Path(arguments.out).stem)
        head = f"# Measured by geomesh probe: {len(results.infos)} ranks.\n"
        Path(arguments.out).write_text(head + topology.to_toml(), encoding="utf-8")
        print(f"wrote {arguments.out}; use it with GEOMESH_TOPOLOGY={arguments.out}")
    except TopologyError as error:
        print(f"geomesh probe: {arguments.out} is not written: {error}", file=sys.stderr)
        status = 1
    except OSError as error:
        print(f"geomesh probe: {error.filename}: {error.strerror}", file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status
