"""``geomesh probe``: what it measures in emulated regions, what it says of pairs that are cut."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from job_processes import Ended, run_job

from torch_geomesh import backend, job, pairs, probe
from torch_geomesh.emulate import Emulation, EmulationUnavailable
from torch_geomesh.pairs import Pings, RankInfo
from torch_geomesh.probe import Found, Results
from torch_geomesh.topology import Link, Topology, TopologyError

MBIT = 125_000.0  # bytes/s


# ---- the order of measurements ----


@pytest.mark.parametrize("count", range(10))
def test_each_pair_meets_once_and_no_rank_twice_in_a_round(count: int) -> None:
    ranks = range(3, 3 + count)
    schedule = job.rounds(ranks)
    assert sorted(pair for meetings in schedule for pair in meetings) == list(
        combinations(ranks, 2)
    )
    for meetings in schedule:
        busy = [rank for pair in meetings for rank in pair]
        assert len(busy) == len(set(busy))
    assert len(schedule) == (0 if count < 2 else count - 1 + count % 2)


def test_pairs_of_two_regions_send_in_one_direction() -> None:
    infos = {
        rank: RankInfo(rank, f"host{rank}", region)
        for rank, region in enumerate(["oslo", "osaka", "osaka", "oslo"])
    }
    assert [probe.first_of(a, b, infos) for a, b in ((0, 1), (2, 3), (1, 2), (0, 3))] == [
        0,
        3,
        1,
        0,
    ]


# ---- from pairs to links ----


def _results(regions: Sequence[str], drawn: dict[tuple[int, int], float], rtt_s: float) -> Results:
    """Results with these rates alone, a quarter with all ways busy, and about one round trip."""
    found = {rank: Found() for rank in range(len(regions))}
    for (source, target), rate in drawn.items():
        found[target].drawn[source] = rate
        found[target].busy_drawn[source] = rate / 4
        found[source].pings[target] = Pings(rtt_s + source / 1000, 2 * rtt_s, 100, 0.0)
    infos = {rank: RankInfo(rank, f"host{rank}", region) for rank, region in enumerate(regions)}
    return Results(infos, found)


def test_pairs_at_once_add_up_to_a_link() -> None:
    # Two rounds have pairs of both regions: (0, 3) and (1, 2), then (0, 2) and (1, 3).
    ways = {
        (a, b): 1e6 * (10 * a + b + 1) for a in range(4) for b in range(4) if (a < 2) != (b < 2)
    }
    results = _results(["a", "a", "b", "b"], ways, 0.1)
    topology = probe.to_topology(results, "measured")
    assert topology.regions == ("a", "b")
    # 0 to 3 with 1 to 2: 4 + 13; 0 to 2 with 1 to 3: 3 + 14. Busy all four: 8.5.
    assert topology.link("a", "b").bytes_per_s == pytest.approx(17e6)
    assert topology.link("b", "a").bytes_per_s == pytest.approx((21 + 32) * 1e6)
    assert topology.link("a", "b").delay_s == pytest.approx(0.05)
    assert topology.inside == Topology.inside  # nothing was measured inside a region


def test_the_middle_pair_of_different_hosts_is_a_regions_inside() -> None:
    ways = {(0, 1): 3e6, (1, 0): 3e6, (1, 2): 5e6, (2, 1): 7e6, (0, 2): 9e6, (2, 0): 9e6}
    results = _results(["a", "a", "a"], ways, 0.002)
    results.infos[1] = RankInfo(1, "host0", "a")  # with rank 0: its pair does not count
    inside = probe.to_topology(results).inside
    assert inside.bytes_per_s == pytest.approx(8e6)
    assert inside.delay_s == pytest.approx(0.00175)  # half of between 3 and 4 ms


def test_regions_without_a_measured_pair_make_no_file() -> None:
    results = _results(["a", "b", "c"], {(0, 1): 1e6, (1, 0): 1e6, (0, 2): 1e6, (2, 0): 1e6}, 0.1)
    with pytest.raises(TopologyError, match=r"^no rank of b could be measured with one of c$"):
        probe.to_topology(results)


def test_hosts_are_regions_where_none_is_set() -> None:
    infos = {0: RankInfo(0, "node_1.example", ""), 1: RankInfo(1, "b", "oslo")}
    assert probe.region_of(infos) == {0: "node-1-example", 1: "oslo"}


def test_what_went_wrong_is_said_with_both_sides_reasons() -> None:
    results = _results(["a", "b", ""], {}, 0.1)
    results.infos[2] = RankInfo(2, "c", "", "no interface eth9")
    results.found[0].failed[1] = "lost"
    results.found[1].failed[0] = "no connection"
    assert results.troubles() == [
        "rank 2 (host c) could not start: no interface eth9",
        "rank 0 (host host0, a) and rank 1 (host host1, b) cannot talk:\n"
        "  on rank 0: lost\n  on rank 1: no connection",
    ]


def test_found_goes_through_json() -> None:
    found = Found({1: Pings(0.1, 0.2, 3, 0.4)}, {}, {2: 5.0}, {2: 6.0}, {3: "why"})
    assert Found.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_the_engines_reason_stands_alone() -> None:
    text = (
        "send(Byte[8], to rank 1, tag 0), sequence 0: no connection with rank 2 on host r2 (r2) "
        "within 10s; 0 of 8 bytes sent, 0 of 0 received; not yet able\nException raised from X"
    )
    assert (
        pairs._reason(RuntimeError(text)) == "no connection with rank 2 on host r2 (r2) within 10s"
    )


def test_many_ranks_are_shown_by_region(capsys: pytest.CaptureFixture[str]) -> None:
    regions = ["a"] * 10 + ["b"] * 10
    ways = {(x, y): 12.5e6 for x in range(20) for y in range(20) if x != y}
    probe.show(_results(regions, ways, 0.05))
    shown = capsys.readouterr().out
    assert "20 ranks in 2 regions" in shown
    assert re.search(r"^a +2,500$", shown, re.M), shown  # a hundred busy pairs


# ---- the command ----


def test_alone_it_says_how_to_start_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe.run(argparse.Namespace()) == 2
    shown = capsys.readouterr().out
    assert shown.startswith("geomesh probe: measures between the ranks of a job: start it as ")
    assert "torchrun --nnodes 4 --node-rank 0" in shown
    assert "--no-python geomesh probe" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds", "0.4"], "--seconds 0.4: must be from 0.5 to 60"),
        (["--seconds", "nan"], "--seconds nan: must be from 0.5 to 60"),
        (["--connect-seconds", "4"], "--connect-seconds 4: must be from 5 to 60"),
        (["--out", ""], "--out: an empty path"),
        (["--out", "/proc/none/f"], "--out /proc/none/f: no file can be written there"),
        (["--json", "/"], "--json /: no file can be written there"),
    ],
)
def test_wrong_arguments_end_all_ranks(words: list[str], message: str) -> None:
    parser = argparse.ArgumentParser()
    probe.add_arguments(parser)
    assert probe._refusal(parser.parse_args(words)) == message


def _probe(count: int, folder: Path, words: Sequence[str] = (), **options: Any) -> list[Ended]:
    command = [sys.executable, "-m", "torch_geomesh.cli", "probe", "--seconds", "0.5"]
    files = ["--out", str(folder / "out.toml"), "--json", str(folder / "out.json")]
    return run_job(count, [*command, *files, *words], **options)


def test_one_rank_has_nothing_to_measure(tmp_path: Path) -> None:
    (ended,) = _probe(1, tmp_path)
    assert ended.status == 0, ended
    assert ended.out == "geomesh probe: the job has one rank: there is nothing to measure\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", [2, 5])
def test_ranks_of_one_host(tmp_path: Path, count: int) -> None:
    ends = _probe(count, tmp_path)
    assert [ended.status for ended in ends] == [0] * count, ends
    assert all(ended.out == "" for ended in ends[1:])  # rank 0 speaks
    data = json.loads((tmp_path / "out.json").read_text())
    ways = [(pair["from"], pair["to"]) for pair in data["pairs"]]
    assert ways == [(a, b) for a in range(count) for b in range(count) if a != b]
    for pair in data["pairs"]:
        assert pair["bytes_per_s"] > 1e6
        assert pair["busy_bytes_per_s"] > 1e5
        assert 0 < pair["rtt_median_s"] <= pair["rtt_p99_s"] < 1
    shown = ends[0].out
    assert "\x1b" not in shown  # plain where it is not a terminal
    assert "no rank has GEOMESH_REGION" in shown
    assert len(Topology.load(tmp_path / "out.toml").regions) == 1


def test_torchrun_starts_it(tmp_path: Path) -> None:
    tool = tmp_path / "geomesh"
    tool.write_text(
        f"#!{sys.executable}\nimport sys\nfrom torch_geomesh.cli import main\nsys.exit(main())\n"
    )
    tool.chmod(0o755)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "3", "--no-python", "geomesh", "probe", "--seconds", "0.5"),
        ],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "3 ranks: 3 rounds of about 0.5 s, then all at once" in done.stdout
    assert "wrote topology.toml" in done.stdout


# ---- in emulated regions ----


@pytest.fixture(scope="module")
def _regions() -> None:
    try:
        with Emulation(_three()):
            pass
    except EmulationUnavailable as reason:
        pytest.skip(str(reason))


def _three() -> Topology:
    """Links of 40, 60 and 80 Mbit/s with round trips of 30, 50 and 70 ms."""
    names = ("oslo", "osaka", "quito")
    links = {}
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            if i != j:
                links[a, b] = Link.of((20 + 20 * (i + j)) * MBIT, (5 + 10 * (i + j)) / 1e3)
    return Topology("three", names, links)


def _probe_in(wan: Emulation, folder: Path, words: Sequence[str]) -> list[Ended]:
    regions = wan.topology.regions

    def start(rank: int, command: list[str], env: dict[str, str], **options: Any) -> Any:
        return wan.popen(regions[rank], command, env=env, **options)

    address = wan.address(regions[0])
    return _probe(len(regions), folder, words, master=address, start=start, hosts=len(regions))


def _wrong(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pairs whose figures are not what the emulator was set to."""
    names = _three().regions
    wrong = []
    for pair in data["pairs"]:
        a, b = names[pair["from"]], names[pair["to"]]
        rate, rtt_s = _three().link(a, b).bytes_per_s, _three().rtt_s(a, b)
        # Payload is 96.5 % of the packets, and TCP loses more to a queue of one round trip; above
        # it is what had waited when the measurement began.
        if not (
            0.7 < pair["bytes_per_s"] / rate < 1.05
            and pair["busy_bytes_per_s"] / rate < 1.05
            and 0 <= pair["rtt_median_s"] - rtt_s < 0.005
            and pair["busy_rtt_median_s"] > rtt_s
        ):
            wrong.append(pair)
    return wrong


@pytest.mark.wan
@pytest.mark.usefixtures("_regions")
def test_measures_what_the_emulator_was_set_to(tmp_path: Path) -> None:
    for _ in range(3):  # a run in which the emulator or TCP lacked processor time is void
        with Emulation(_three()) as wan:
            ends = _probe_in(wan, tmp_path, ["--seconds", "6"])
        assert [ended.status for ended in ends] == [0, 0, 0], ends
        data = json.loads((tmp_path / "out.json").read_text())
        if not _wrong(data):
            break
    assert _wrong(data) == []
    assert len(data["pairs"]) == 6
    names = _three().regions
    measured = Topology.load(tmp_path / "out.toml")
    assert measured.regions == names
    for a, b in combinations(names, 2):
        assert 0 <= measured.rtt_s(a, b) - _three().rtt_s(a, b) < 0.005
        assert 0.7 < measured.link(a, b).bytes_per_s / _three().link(a, b).bytes_per_s < 1.05
    # What GEOMESH_TOPOLOGY makes of it.
    assert backend._topology_spec(str(tmp_path / "out.toml")) is not None


def _cut_by_the_network(wan: Emulation) -> None:
    wan.cut("osaka", "quito")


def _cut_by_a_rule(wan: Emulation) -> None:
    for here, there in (("osaka", "quito"), ("quito", "osaka")):
        wan.run(here, ["ip", "route", "add", "unreachable", wan.address(there)], check=True)


@pytest.mark.wan
@pytest.mark.usefixtures("_regions")
@pytest.mark.skipif(shutil.which("ip") is None, reason="needs ip")
@pytest.mark.parametrize("cut", [_cut_by_the_network, _cut_by_a_rule])
def test_a_pair_that_cannot_connect_is_named_and_the_rest_measured(
    tmp_path: Path, cut: Callable[[Emulation], None]
) -> None:
    with Emulation(_three()) as wan:
        cut(wan)
        ends = _probe_in(wan, tmp_path, ["--connect-seconds", "5"])
    assert [ended.status for ended in ends] == [1, 1, 1], ends
    assert (
        "geomesh probe: rank 1 (host osaka, osaka) and rank 2 (host quito, quito) cannot talk:\n"
        in ends[0].err
    )
    for here, there in ((1, "rank 2 on host quito (quito)"), (2, "rank 1 on host osaka (osaka)")):
        assert re.search(rf"^  on rank {here}: .*{re.escape(there)}", ends[0].err, re.M), ends[
            0
        ].err
    assert (
        f"geomesh probe: {tmp_path}/out.toml is not written: no rank of osaka could be measured "
        "with one of quito\n" in ends[0].err
    )
    assert not (tmp_path / "out.toml").exists()
    data = json.loads((tmp_path / "out.json").read_text())
    ways = [(pair["from"], pair["to"]) for pair in data["pairs"]]
    assert ways == [(0, 1), (0, 2), (1, 0), (2, 0)]
    assert len(data["troubles"]) == 1
