"""``geomesh doctor``: checks a machine, and under torchrun a whole job, before the run.

Gathers what `torch_geomesh.checks` found on each rank, adds what only ranks together can find out
(unequal settings and versions, clocks, pairs that cannot connect), and prints a line a check. Knows
the order, and no single check of a machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import torch_geomesh
from torch_geomesh.checks import FAILED, OK, WARNING, Check, Machine, local_checks, ucx_version
from torch_geomesh.job import Job, JobError, how_to_start, rounds, started_by_torchrun
from torch_geomesh.pairs import Mesh, PairError, Pings, RankInfo, echo, ping
from torch_geomesh.topology import Topology, TopologyError

__all__ = ["add_arguments", "compare", "run"]

_CONNECT_S = 10.0
_PINGS = 10
_CLOCK_S = 1.0  # apart, and logs of several machines can't be read together
# What may well differ from rank to rank.
_OWN = {
    "GEOMESH_REGION",
    "GEOMESH_TOPOLOGY",  # compared by what is in it
    "GEOMESH_INTERFACE",
    "GEOMESH_PORTS",
    "GEOMESH_LOG_LEVEL",
    "GEOMESH_PSK_FILE",
    "GEOMESH_WAN_CONTROL",
    "GEOMESH_WAN_BINARY",
    "GEOMESH_BUILD_CUDA",
    "GEOMESH_UCX_ROOT",
}


def settings_of(machine: Machine) -> dict[str, str]:
    """Return what must be equal on all ranks."""
    settings = {
        name: value
        for name, value in machine.environment.items()
        if name.startswith("GEOMESH_") and name not in _OWN
    }
    source = machine.environment.get("GEOMESH_TOPOLOGY", "")
    if source:
        try:
            settings["the topology"] = Topology.load(source).fingerprint()
        except TopologyError:  # has a check of its own
            settings["the topology"] = "unreadable"
    if machine.environment.get("GEOMESH_PSK_FILE"):
        settings["a key"] = "set"  # the file's name may differ, what is in it nobody is told
    settings["torch_geomesh"] = torch_geomesh.__version__
    settings["torch"] = torch.__version__
    with suppress(OSError):  # not loaded: has a check of its own
        settings["UCX"] = ucx_version()
    return settings


def compare(settings: Mapping[int, Mapping[str, str]]) -> list[Check]:
    """Return a check for every setting that is not equal on all ranks."""
    checks = []
    for name in sorted({name for one in settings.values() for name in one}):
        ranks_by_value: dict[str, list[int]] = defaultdict(list)
        for rank, one in sorted(settings.items()):
            ranks_by_value[one.get(name, "")].append(rank)
        if len(ranks_by_value) == 1:
            continue
        shown = "; ".join(
            f"{value or 'not set'} on {_ranks(ranks)}" for value, ranks in ranks_by_value.items()
        )
        most = max(ranks_by_value, key=lambda value: (value != "", len(ranks_by_value[value])))
        fix = f"export {name}={most}  # on all" if name.startswith("GEOMESH_") else ""
        if name == "the topology":
            fix = "export GEOMESH_TOPOLOGY=...  # the same file on all"
        elif name == "a key":
            fix = "export GEOMESH_PSK_FILE=...  # the same key on all"
        elif name == "UCX":
            fix = "pip install --force-reinstall libucx-cu13==...  # the same on all"
        elif not fix:
            fix = f"pip install {name}=={most}  # on all"
        # Other PyTorch versions may still work together, and so may UCX's of one major version.
        majors = {value.split(".")[0] for value in ranks_by_value}
        works = name == "torch" or (name == "UCX" and len(majors) == 1)
        state = WARNING if works else FAILED
        checks.append(Check("equal settings", state, f"{name} differs: {shown}", fix))
    return checks or [Check("equal settings", OK, f"the same on {len(settings)} ranks")]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def check_regions(infos: Mapping[int, RankInfo]) -> Check:
    """Check that all ranks have a region, or none."""
    without = [rank for rank, info in sorted(infos.items()) if not info.region]
    if 0 < len(without) < len(infos):
        return Check(
            "regions",
            WARNING,
            f"{_ranks(without)} without a region, the others have one: those count as one more "
            "region, far from the others",
            "export GEOMESH_REGION=...",
        )
    named = ", ".join(dict.fromkeys(info.region for info in infos.values() if info.region))
    return Check("regions", OK, named or "none is set: all ranks count as one region")


def _reach(job: Job, mesh: Mesh) -> tuple[dict[int, str], dict[int, Pings]]:
    """Connect this rank to all others; return reasons of those failed, and pings of the others."""
    failed: dict[int, str] = {}
    pings: dict[int, Pings] = {}
    present = mesh.present
    for meetings in rounds(present) if job.rank in present else []:
        for meeting in meetings:
            if job.rank not in meeting:
                continue
            first, second = meeting
            try:
                pair = mesh.connect(second if job.rank == first else first)
                if job.rank == first:
                    pings[second] = ping(pair, 0.002 * _PINGS, _PINGS)
                else:
                    echo(pair)
            except PairError as error:
                failed[second if job.rank == first else first] = str(error)
    return failed, pings


def check_pairs(
    infos: Mapping[int, RankInfo], failed: Mapping[int, Mapping[int, str]], silent: Iterable[int]
) -> list[Check]:
    """Return a check for every rank that could not start and every pair that cannot connect."""
    checks = [
        Check(
            "engines",
            FAILED,
            f"rank {rank}{_place(info)} could not start: {info.error}",
            "see docs/errors.md",
        )
        for rank, info in sorted(infos.items())
        if info.error
    ]
    for rank in silent:
        checks.append(Check("pairs", FAILED, f"rank {rank} has not told what it found"))
    for a in sorted(infos):
        for b in sorted(infos):
            reasons = [
                f"rank {here}: {failed[here][there]}"
                for here, there in ((a, b), (b, a))
                if there in failed.get(here, {})
            ]
            if a < b and reasons:
                checks.append(
                    Check(
                        "pairs",
                        FAILED,
                        f"rank {a}{_place(infos[a])} and rank {b}{_place(infos[b])} cannot "
                        f"connect: {'; '.join(reasons)}",
                        "open the ports of GEOMESH_PORTS between these two machines, both ways",
                    )
                )
    if checks:
        return checks
    count = len(infos) * (len(infos) - 1) // 2
    which = f"all {count} pairs of {len(infos)} ranks" if count > 1 else "both ranks"
    return [Check("pairs", OK, f"{which} connect")]


def _place(info: RankInfo) -> str:
    place = ", ".join(filter(None, [info.host and f"host {info.host}", info.region]))
    return f" ({place})" if place else ""


def check_clocks(ahead: Mapping[int, float]) -> Check:
    """Check the ranks' clocks against rank 0's."""
    if not ahead:
        return Check("clocks", OK, "nothing to compare with")
    rank, most = max(ahead.items(), key=lambda item: abs(item[1]))
    way = "ahead of" if most > 0 else "behind"
    what = f"rank {rank} is {abs(most):.3f} s {way} rank 0"
    if abs(most) < _CLOCK_S:
        return Check("clocks", OK, f"{what}, and no rank more")
    return Check(
        "clocks", WARNING, f"{what}: logs will be hard to compare", "timedatectl set-ntp true"
    )


def _merged(checks: Mapping[int, Sequence[Check]], world: int) -> list[tuple[Check, str]]:
    """Return each check once, with the ranks that had it where those are not all."""
    ranks: dict[Check, list[int]] = {}
    for rank, some in sorted(checks.items()):
        for check in some:
            ranks.setdefault(check, []).append(rank)
    order = list(dict.fromkeys(check.name for check in ranks))
    return [
        (check, "" if len(of) == world else f"[{_ranks(of)}]")
        for check, of in sorted(ranks.items(), key=lambda item: order.index(item[0].name))
    ]


def render(checks: Sequence[tuple[Check, str]]) -> str:
    """Return the lines: state, name, what was seen, ranks; below it what mends it."""
    width = max((len(check.name) for check, _ in checks), default=0)
    lines = []
    for check, where in checks:
        line = f"{check.state:<8} {check.name:<{width}}  {check.what} {where}".rstrip()
        lines.append(line)
        if check.fix:
            lines.append(f"{'':<8} {'':<{width}}  -> {check.fix}")
    return "\n".join(lines)


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``geomesh doctor`` takes to a parser."""
    parser.add_argument("--json", metavar="FILE", help="write the checks there too, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run ``geomesh doctor`` with parsed arguments; return the exit status."""
    refusal = _refusal(arguments.json)
    if refusal:
        print(f"geomesh doctor: {refusal}", file=sys.stderr)
        return 2
    machine = Machine()
    if not started_by_torchrun():
        status = _conclude(_merged({0: local_checks(machine)}, 1), arguments.json)
        print(f"this machine only; to check a job too, {how_to_start('doctor')}")
        return status
    try:
        job = Job.join("doctor")
    except JobError as error:
        print(f"geomesh doctor: {error}", file=sys.stderr)
        return 1
    return _run_in_job(job, machine, arguments.json)


def _refusal(file: str | None) -> str:
    if file is None:
        return ""
    if not file:
        return "--json: an empty path"
    if Path(file).is_dir() or not os.access(Path(file).absolute().parent, os.W_OK):
        return f"--json {file}: no file can be written there"
    return ""


def _run_in_job(job: Job, machine: Machine, file: str | None) -> int:
    own = local_checks(machine)
    everyone = range(job.world)
    job.tell("checks", [dataclasses.asdict(check) for check in own])
    job.tell("settings", settings_of(machine))
    # The ports are looked at before any rank takes one.
    job.barrier("looked", everyone, 60.0)
    patience_s = 4 * _CONNECT_S + 60
    with Mesh(job, _CONNECT_S) as mesh:
        mesh.open()
        failed, pings = _reach(job, mesh)
        job.tell("reached", [failed, {rank: p.clock_ahead_s for rank, p in pings.items()}])
        status = 0
        if job.rank == 0:
            reached = job.hear("reached", mesh.present, patience_s)
            checks = {
                rank: [Check(**check) for check in told]
                for rank, told in job.hear("checks", everyone, 5.0).items()
            }
            together = [
                *compare(job.hear("settings", everyone, 5.0)),
                check_regions(mesh.infos),
                *check_pairs(
                    mesh.infos,
                    {r: {int(o): why for o, why in told[0].items()} for r, told in reached.items()},
                    [rank for rank in mesh.present if rank not in reached],
                ),
                check_clocks(
                    {int(rank): ahead for rank, ahead in reached.get(0, [{}, {}])[1].items()}
                ),
            ]
            merged = [*_merged(checks, job.world), *((check, "") for check in together)]
            status = _conclude(merged, file)
    return job.leave(status, patience_s)


def _conclude(checks: Sequence[tuple[Check, str]], file: str | None) -> int:
    """Print and write the checks; return the exit status."""
    print(render(checks), flush=True)
    failed = [check for check, _ in checks if check.state == FAILED]
    warned = [check for check, _ in checks if check.state == WARNING]
    print(f"{len(checks)} checks: {len(failed)} failed, {len(warned)} warnings", flush=True)
    if file is not None:
        rows: list[dict[str, Any]] = [
            {
                **dataclasses.asdict(check),
                "ranks": [int(rank) for rank in re.findall(r"\d+", where)] or None,
            }
            for check, where in checks
        ]
        Path(file).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0
