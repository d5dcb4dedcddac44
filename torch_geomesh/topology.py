"""Topology files: regions and what the links between them carry.

Knows the file format (TOML), its checks and its units; imports neither torch nor the extension.
A file looks like this; quantities are for each direction, a link sets both unless it says
``from`` and ``to`` instead of ``between``::

    name = "two-sites"
    regions = ["oslo", "osaka"]

    [inside]                     # between ranks of one region; optional
    gbit_per_s = 100
    rtt_ms = 0.1

    [[link]]
    between = ["oslo", "osaka"]
    gbit_per_s = 0.4
    rtt_ms = 210
    jitter_ms = 1                # optional: up to this much more delay, one way
    loss = 0.0001                # optional: share of packets lost
    queue_ms = 100               # optional: what may wait, in time at the link's rate

    [[link.path]]                # optional: several paths, each flow on one of them;
    gbit_per_s = 0.2             # what a path leaves out it takes from its link
    [[link.path]]
    gbit_per_s = 0.2
    rtt_ms = 250
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

__all__ = ["Link", "Path", "Topology", "TopologyError", "shipped"]

_REGION_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_MAX_REGIONS = 250
# No network is slower or faster; times computed from such rates stay sensible numbers.
_LEAST_GBIT, _MOST_GBIT = 1e-9, 1e6
_PATH_KEYS = ("gbit_per_s", "rtt_ms", "jitter_ms", "loss", "queue_ms")


class TopologyError(ValueError):
    """A topology that cannot be used; the message says which file and key, and what is wrong."""


@dataclass(frozen=True)
class Path:
    """One way that packets of a link may take, in one direction.

    Parameters
    ----------
    bytes_per_s : float
        Rate of IP bytes.
    delay_s : float
        One-way delay.
    jitter_s : float
        Adds 0 to this much to the delay; packets keep their order.
    loss : float
        Probability that a packet is lost.
    queue_s : float, optional
        How much may wait, in time at the path's rate. None: one round trip, at least 50 ms.
    """

    bytes_per_s: float
    delay_s: float
    jitter_s: float = 0.0
    loss: float = 0.0
    queue_s: float | None = None

    @property
    def queue_bytes(self) -> int:
        """The queue in bytes; never so small that one super-packet of 64 KB cannot wait in it."""
        queue_s = max(2 * self.delay_s, 0.05) if self.queue_s is None else self.queue_s
        return max(int(queue_s * self.bytes_per_s), 2 * 65536 if self.queue_s is None else 3000)


@dataclass(frozen=True)
class Link:
    """One direction between two regions: one or more paths, each flow on one of them."""

    paths: tuple[Path, ...]

    @classmethod
    def of(cls, bytes_per_s: float, delay_s: float, **more: Any) -> Link:
        """Make a link of a single path."""
        return cls((Path(bytes_per_s, delay_s, **more),))

    @property
    def bytes_per_s(self) -> float:
        """Rate of all paths together."""
        return sum(path.bytes_per_s for path in self.paths)

    @property
    def delay_s(self) -> float:
        """One-way delay of the quickest path."""
        return min(path.delay_s for path in self.paths)

    def scaled(self, factor: float) -> Link:
        """Return the same link with all rates multiplied."""
        return Link(
            tuple(
                dataclasses.replace(path, bytes_per_s=_rounded(path.bytes_per_s * factor))
                for path in self.paths
            )
        )


@dataclass(frozen=True)
class Topology:
    """Regions, and a link for each ordered pair of them.

    Parameters
    ----------
    name : str
        Shown to people.
    regions : tuple of str
        In the order that the file gives; the first hosts the rendezvous.
    links : mapping
        From (region, other region) to the link in that direction; every pair is there.
    inside : Link
        Between ranks of the same region.
    scale : float
        What the rates were multiplied by since the original; information only.
    """

    name: str
    regions: tuple[str, ...]
    links: Mapping[tuple[str, str], Link]
    inside: Link = Link((Path(12.5e9, 50e-6),))
    scale: float = 1.0

    @classmethod
    def load(cls, source: str | os.PathLike[str]) -> Topology:
        """Read a topology that ships with the package, by name, or a file, by path.

        Raises
        ------
        TopologyError
            If there is no such topology or file, or its content is wrong.
        """
        file = _find(source)
        try:
            data = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise TopologyError(f"{file}: cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise TopologyError(f"{file}: is not TOML: {error}") from error
        return cls.parse(data, where=str(file), name=file.stem)

    @classmethod
    def parse(cls, data: Mapping[str, Any], where: str = "topology", name: str = "") -> Topology:
        """Build a topology from the parsed content of a file; `where` begins error messages."""
        table = _Table(data, where, ("name", "regions", "inside", "link", "scale"))
        regions = _regions(table)
        inside = cls.inside
        if "inside" in data:
            inside = _link(_Table(data["inside"], f"{where}: inside", (*_PATH_KEYS, "path")))
        return cls(
            name=table.text("name", name or "topology"),
            regions=regions,
            links=_links(table, regions),
            inside=inside,
            scale=table.number("scale", default=1.0, above=0.0),
        )

    def index(self, region: str) -> int:
        """Return the position of `region`; an unknown one is an error that lists those known."""
        if region not in self.regions:
            raise TopologyError(
                f"topology {self.name} has no region '{region}'; it has {', '.join(self.regions)}"
            )
        return self.regions.index(region)

    def link(self, source: str, target: str) -> Link:
        """Return the link from `source` to `target`; within a region it is `inside`."""
        self.index(source)
        self.index(target)
        return self.inside if source == target else self.links[source, target]

    def rtt_s(self, a: str, b: str) -> float:
        """Round-trip time between two regions, without queues."""
        return self.link(a, b).delay_s + self.link(b, a).delay_s

    def scaled(self, factor: float) -> Topology:
        """Return the same topology with all rates multiplied by `factor`; delays stay."""
        if not (math.isfinite(factor) and factor > 0):
            raise TopologyError(f"the scale factor must be a positive number, not {factor}")
        rates = [
            path.bytes_per_s * factor
            for link in (*self.links.values(), self.inside)
            for path in link.paths
        ]
        for rate in (min(rates), max(rates)):
            if not _LEAST_GBIT <= rate * 8e-9 <= _MOST_GBIT:
                raise TopologyError(
                    f"{self.name} scaled by {factor:g}, a path would carry {rate:g} bytes a second"
                )
        return dataclasses.replace(
            self,
            links={pair: link.scaled(factor) for pair, link in self.links.items()},
            inside=self.inside.scaled(factor),
            scale=_rounded(self.scale * factor),
        )

    def fingerprint(self) -> str:
        """Return 16 hex digits, equal for equal regions and links, whatever the name."""
        content = json.dumps(
            [
                self.regions,
                [[dataclasses.astuple(p) for p in self.link(a, b).paths] for a, b in self._pairs()],
            ]
        )
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def plan(self, region_of: Sequence[str]) -> dict[str, Any]:
        """Return what plan::Topology::Create takes, as plain lists.

        Parameters
        ----------
        region_of : sequence of str
            The region of each rank.

        Returns
        -------
        dict
            ``regions`` (names), ``region_of`` (an index a rank), ``links``: (bytes a second,
            one-way delay in seconds) from region a to region b at ``a * len(regions) + b``.
        """
        pairs = [self.link(a, b) for a, b in self._pairs()]
        return {
            "regions": list(self.regions),
            "region_of": [self.index(region) for region in region_of],
            "links": [(link.bytes_per_s, link.delay_s) for link in pairs],
        }

    def to_toml(self) -> str:
        """Return the text of a topology file that loads as an equal topology."""
        lines = [
            f"name = {json.dumps(self.name)}",
            f"regions = {json.dumps(list(self.regions))}",
            f"scale = {self.scale:.15g}",
            "",
            "[inside]",
            *_path_lines(self.inside),
        ]
        for a, b in self._pairs():
            if a == b:
                continue
            link = self.links[a, b]
            if link == self.links[b, a]:
                if self.index(a) > self.index(b):
                    continue
                ends = [f"between = {json.dumps([a, b])}"]
            else:
                ends = [f"from = {json.dumps(a)}", f"to = {json.dumps(b)}"]
            lines += ["", "[[link]]", *ends, *_path_lines(link)]
        return "\n".join(lines) + "\n"

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write `to_toml()` to a file."""
        FilePath(file).write_text(self.to_toml(), encoding="utf-8")

    def _pairs(self) -> list[tuple[str, str]]:
        return [(a, b) for a in self.regions for b in self.regions]


def shipped() -> list[str]:
    """Return the names of the topologies that come with the package."""
    return sorted(file.stem for file in _shipped_folder().glob("*.toml"))


def _shipped_folder() -> FilePath:
    return FilePath(__file__).parent / "topologies"


def _find(source: str | os.PathLike[str]) -> FilePath:
    text = os.fspath(source)
    if text in shipped():
        return _shipped_folder() / f"{text}.toml"
    file = FilePath(text)
    if not file.exists():
        raise TopologyError(
            f"{text}: no such file, and no topology of this name is shipped "
            f"(there are: {', '.join(shipped())})"
        )
    return file


class _Table:
    """A TOML table with the place it stands at, for error messages."""

    def __init__(self, data: Any, where: str, keys: Sequence[str]) -> None:
        if not isinstance(data, Mapping):
            raise TopologyError(f"{where}: must be a table, not {data!r}")
        self.data = data
        self.where = where
        for key in data:
            if key not in keys:
                raise TopologyError(f"{where}: unknown key '{key}'; known are {', '.join(keys)}")

    def error(self, key: str, what: str) -> TopologyError:
        return TopologyError(f"{self.where}: {key}: {what}")

    def text(self, key: str, default: str) -> str:
        value = self.data.get(key, default)
        if not isinstance(value, str) or not value:
            raise self.error(key, f"must be a text, not {value!r}")
        return value

    def number(
        self,
        key: str,
        *,
        default: float | None,
        above: float | None = None,
        least: float = 0.0,
        most: float = math.inf,
    ) -> float:
        """Read a number >= `least`, or > `above`, and at most `most`; None: it has no default."""
        value = self.data.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"must be a number, not {value!r}")
        try:
            number = float(value)
        except OverflowError:  # a whole number beyond floats
            number = math.inf if value > 0 else -math.inf
        low_enough = math.isfinite(number) and number <= most
        if not low_enough or (number < least if above is None else number <= above):
            bound = f"at least {least:g}" if above is None else f"above {above:g}"
            limit = "" if math.isinf(most) else f" and at most {most:g}"
            raise self.error(key, f"must be {bound}{limit}, not {number:.15g}")
        return number

    def tables(self, key: str) -> list[Any]:
        value = self.data.get(key, [])
        if not isinstance(value, list):
            raise self.error(key, f"must be written as [[{key}]]")
        return value


def _regions(table: _Table) -> tuple[str, ...]:
    regions = table.data.get("regions")
    if not isinstance(regions, list) or not regions:
        raise table.error("regions", "must be a list of at least one name")
    if len(regions) > _MAX_REGIONS:
        raise table.error("regions", f"at most {_MAX_REGIONS}, not {len(regions)}")
    for region in regions:
        if not isinstance(region, str) or not _REGION_NAME.fullmatch(region):
            raise table.error(
                "regions", f"{region!r} is not a name of letters, digits and hyphens (up to 63)"
            )
    for region in regions:
        if regions.count(region) > 1:
            raise table.error("regions", f"'{region}' is there twice")
    return tuple(regions)


def _links(table: _Table, regions: tuple[str, ...]) -> dict[tuple[str, str], Link]:
    links: dict[tuple[str, str], Link] = {}
    for number, data in enumerate(table.tables("link"), start=1):
        entry = _Table(
            data, f"{table.where}: link {number}", ("between", "from", "to", "path", *_PATH_KEYS)
        )
        for pair in _ends(entry, regions):
            if pair in links:
                raise TopologyError(f"{entry.where}: {pair[0]} to {pair[1]} was set before")
            links[pair] = _link(entry)
    for a in regions:
        for b in regions:
            if a != b and (a, b) not in links:
                raise TopologyError(f"{table.where}: link: there is none from {a} to {b}")
    return links


def _ends(entry: _Table, regions: tuple[str, ...]) -> list[tuple[str, str]]:
    between = entry.data.get("between")
    if between is not None:
        if "from" in entry.data or "to" in entry.data:
            raise entry.error("between", "stands for both directions, 'from' and 'to' for one")
        if not isinstance(between, list) or len(between) != 2:
            raise entry.error("between", f"must be a list of two regions, not {between!r}")
        ends, key = tuple(between), "between"
    else:
        for key in ("from", "to"):
            if key not in entry.data:
                raise entry.error("between", "is missing (or 'from' and 'to' for one direction)")
        ends, key = (entry.data["from"], entry.data["to"]), "from, to"
    for end in ends:
        if end not in regions:
            raise entry.error(key, f"unknown region {end!r}; regions are {', '.join(regions)}")
    if ends[0] == ends[1]:
        raise entry.error(key, f"'{ends[0]}' to itself is set under [inside]")
    pair = (ends[0], ends[1])
    return [pair] if between is None else [pair, (pair[1], pair[0])]


def _link(entry: _Table) -> Link:
    paths = entry.tables("path")
    if not paths:
        return Link((_path(entry),))
    common = {key: entry.data[key] for key in _PATH_KEYS if key in entry.data}
    link_paths = []
    for number, data in enumerate(paths, start=1):
        where = f"{entry.where}: path {number}"
        own = _Table(data, where, _PATH_KEYS)
        link_paths.append(_path(_Table({**common, **own.data}, where, _PATH_KEYS)))
    return Link(tuple(link_paths))


def _path(table: _Table) -> Path:
    queue_s = None
    if "queue_ms" in table.data:
        queue_s = _rounded(table.number("queue_ms", default=None, above=0.0, most=60_000) / 1e3)
    return Path(
        bytes_per_s=_rounded(
            table.number("gbit_per_s", default=None, least=_LEAST_GBIT, most=_MOST_GBIT) * 1e9 / 8
        ),
        delay_s=_rounded(table.number("rtt_ms", default=None, most=60_000) / 2e3),
        jitter_s=_rounded(table.number("jitter_ms", default=0.0, most=60_000) / 1e3),
        loss=_rounded(table.number("loss", default=0.0, most=1.0)),
        queue_s=queue_s,
    )


def _path_lines(link: Link) -> list[str]:
    lines = []
    for path in link.paths:
        if len(link.paths) > 1:
            lines.append("[[link.path]]")
        lines.append(f"gbit_per_s = {path.bytes_per_s * 8e-9:.15g}")
        lines.append(f"rtt_ms = {path.delay_s * 2e3:.15g}")
        if path.jitter_s:
            lines.append(f"jitter_ms = {path.jitter_s * 1e3:.15g}")
        if path.loss:
            lines.append(f"loss = {path.loss:.15g}")
        if path.queue_s is not None:
            lines.append(f"queue_ms = {path.queue_s * 1e3:.15g}")
    return lines


def _rounded(value: float) -> float:
    """Drop what changes of unit leave behind, so that a saved file reads back equal."""
    return float(f"{value:.12g}")
