"""The transport against its bars: lanes, long paths, several paths, PIN, STORM, rest and memory.

Peers run in the same turn as geomesh, sides alternating; each figure is the median over turns.
Needs root (namespaces), iperf3 and a build with tests. Usage:

    python benchmarks/transport.py [--rows lane,long,paths,tls,pin,storm,latency,idle,many]
        [--turns 3] [--build build] [--json FILE]
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch_geomesh.emulation import Emulation
from torch_geomesh.topology import Link, Topology
from torch_geomesh.topology import Path as NetworkPath

GBIT = 1e9 / 8
HERE = Path(__file__).parent
Popen = Callable[..., "subprocess.Popen[str]"]
Row = tuple[str, float, float, bool]  # what, figure, bar, whether more is better


class Bench:
    """Where the programs are, and what has been measured."""

    def __init__(self, build: Path, turns: int) -> None:
        # Not those that a sanitizer's build may have left in a folder of its own.
        self.peer = str(next((build / "csrc").rglob("transport_peer")))
        self.sim = str(next((build / "csrc").rglob("transport_sim")))
        self.turns = turns
        self.rows: list[Row] = []
        self.notes: list[str] = []

    def add(self, what: str, figure: float, bar: float, *, more: bool = True) -> None:
        self.rows.append((what, figure, bar, more))
        met = figure >= bar if more else figure <= bar
        print(f"{what:<78} {figure:>8.3f}  bar {bar:<5} {'met' if met else 'NOT MET'}", flush=True)

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"  {text}", flush=True)

    def median(self, *sides: Callable[[], float]) -> list[float]:
        """Measure the sides in turn; return each one's median."""
        turns = [[side() for side in sides] for _ in range(self.turns)]
        return [statistics.median(side) for side in zip(*turns, strict=True)]

    def peers(
        self, places: Sequence[tuple[Popen, str]], mode: str, **arguments: object
    ) -> list[dict[str, Any]]:
        """Run one process of transport_peer in each place (how to start there, its address)."""
        with tempfile.TemporaryDirectory() as folder:
            processes = [
                popen(
                    [self.peer, folder, str(rank), str(len(places)), mode, f"address={address}"]
                    + [f"{name}={value}" for name, value in arguments.items()],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for rank, (popen, address) in enumerate(places)
            ]
            outputs = [process.communicate(timeout=180)[0] for process in processes]
            for process in processes:
                if process.returncode != 0:
                    sys.exit(f"transport_peer ended with {process.returncode}")
        return [json.loads(output) for output in outputs]

    def stream(self, places: Sequence[tuple[Popen, str]], **arguments: object) -> dict[str, Any]:
        """Return what rank 1 of a stream says, with `lanes` of rank 0."""
        sender, receiver = self.peers(places, "stream", **arguments)
        return receiver | {
            "lanes": sender["lanes"],
            "lanes_lost": sender["lanes_lost"],
            "sender_cpu_s": sender["cpu_s"],
        }


def rate(samples: list[list[float]], after_s: float, until_s: float = math.inf) -> float:
    """Return bytes a second between two times of a stream, from samples of [time, bytes]."""
    begin = samples[0][0]
    inside = [(t, b) for t, b in samples if after_s <= t - begin <= until_s]
    (first, bytes_before), (last, bytes_after) = inside[0], inside[-1]
    return (bytes_after - bytes_before) / (last - first)


# Two namespaces over a pair of virtual Ethernet devices


@contextlib.contextmanager
def veth() -> Iterator[list[tuple[Popen, str]]]:
    names = [f"gmb{os.getpid()}{side}" for side in "ab"]
    addresses = ["10.213.7.1", "10.213.7.2"]

    def ip(command: str) -> None:
        subprocess.run(["ip", *command.split()], check=True)

    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}")
        for name, address in zip(names, addresses, strict=True):
            ip(f"-n {name} addr add {address}/24 dev eth0")
            ip(f"-n {name} link set eth0 up")
            ip(f"-n {name} link set lo up")

        for name in names:  # the kernel takes a moment
            while (
                "LOWER_UP"
                not in subprocess.run(
                    ["ip", "-n", name, "link", "show", "eth0"], capture_output=True, text=True
                ).stdout
            ):
                time.sleep(0.01)

        def starter(name: str) -> Popen:
            def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
                return subprocess.Popen(["ip", "netns", "exec", name, *command], **options)

            return start

        yield [(starter(name), address) for name, address in zip(names, addresses, strict=True)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def iperf(places: Sequence[tuple[Popen, str]], seconds: int, *options: str) -> float:
    """Return what iperf3 carries from the first place to the second, in bytes a second."""
    (client, _), (server, address) = places
    serving = server(["iperf3", "-s", "-1", "--forceflush"], stdout=subprocess.PIPE, text=True)
    assert serving.stdout is not None
    while "Server listening" not in serving.stdout.readline():
        if serving.poll() is not None:
            sys.exit("iperf3 -s ended")
    sending = client(
        ["iperf3", "-c", address, "-t", str(seconds), "-J", *options],
        stdout=subprocess.PIPE,
        text=True,
    )
    output = sending.communicate(timeout=120)[0]
    serving.communicate(timeout=20)
    return json.loads(output)["end"]["sum_received"]["bits_per_second"] / 8


def gloo(places: Sequence[tuple[Popen, str]], seconds: float, size: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            popen(
                [
                    sys.executable,
                    str(HERE / "gloo_peer.py"),
                    *(f"{folder}/store", str(rank), "eth0", str(seconds), str(size)),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, (popen, _) in enumerate(places)
        ]
        outputs = [process.communicate(timeout=180)[0] for process in processes]
    said = json.loads(outputs[1])
    return said["bytes"] / said["seconds"]


def row_lane(bench: Bench) -> None:
    with veth() as places:

        def one_lane() -> float:
            said = bench.stream(places, lanes=1, seconds=3, region="one")
            return rate(said["samples"], 0.5)

        ours, iperf3, theirs = bench.median(
            one_lane, lambda: iperf(places, 3), lambda: gloo(places, 3, 64 << 20)
        )
    bench.note(
        f"Gbit/s: geomesh {8e-9 * ours:.2f}, iperf3 {8e-9 * iperf3:.2f}, Gloo {8e-9 * theirs:.2f}"
    )
    bench.add("one lane, 64 MB messages, veth: of iperf3 with one stream", ours / iperf3, 1.0)
    bench.add("one lane, 64 MB messages, veth: of Gloo's send/recv", ours / theirs, 1.5)


# Emulated paths


@contextlib.contextmanager
def emulated(*links: Link) -> Iterator[list[tuple[Popen, str]]]:
    """Rank 0's region with one link to each other rank's."""
    regions = ("hub", *(f"r{i}" for i in range(len(links))))
    topology = Topology(
        name="bench",
        regions=regions,
        links={("hub", region): link for region, link in zip(regions[1:], links, strict=True)}
        | {(region, "hub"): link for region, link in zip(regions[1:], links, strict=True)}
        | {(a, b): Link.of(GBIT, 0.001) for a in regions[1:] for b in regions[1:] if a != b},
    )
    with Emulation(topology) as wan:

        def starter(region: str) -> Popen:
            return lambda command, **options: wan.popen(region, command, **options)

        yield [(starter(region), wan.address(region)) for region in regions]


def row_long(bench: Bench) -> None:
    for loss, bar in ((0.0, 0.92), (0.001, 0.8)):
        with emulated(Link.of(GBIT, 0.1, loss=loss)) as places:
            lanes = []

            def ours(places: Any = places, lanes: Any = lanes) -> float:
                said = bench.stream(places, seconds=12)
                lanes.append(said["lanes"])
                return rate(said["samples"], 3.0)

            mine, iperf3 = bench.median(ours, lambda places=places: iperf(places, 9, "-O", "3"))
        bench.note(f"share of the rate: iperf3, one stream: {iperf3 / GBIT:.3f}; lanes {lanes}")
        what = f"1 Gbit/s, 100 ms one way, {100 * loss:g} % loss: of the rate, after 3 s"
        bench.add(what, mine / GBIT, bar)


def paths(*megabits: float, delays_ms: Sequence[float] = (20, 20, 20, 20)) -> Link:
    return Link(
        tuple(
            NetworkPath(rate * 1e6 / 8, delay / 1e3)
            for rate, delay in zip(megabits, delays_ms, strict=False)
        )
    )


def row_paths(bench: Bench) -> None:
    with (
        emulated(paths(100)) as one,
        emulated(paths(100, 100, 100, 100)) as four,
        emulated(paths(100, 100, 100, 25)) as unequal,
    ):

        def ours(places: Any) -> Callable[[], float]:
            return lambda: rate(bench.stream(places, seconds=14)["samples"], 6.0)

        single, all_four, throttled = bench.median(ours(one), ours(four), ours(unequal))
    bench.note(f"Mbit/s: {8e-6 * single:.1f}, {8e-6 * all_four:.1f}, {8e-6 * throttled:.1f}")
    bench.add("four paths of 100 Mbit/s by flow hash: of one path", all_four / single, 3.6)
    bench.add("the same with one throttled to a quarter: of the sum", throttled / (325e6 / 8), 0.9)


def row_tls(bench: Bench) -> None:
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder, "key")
        key.touch(mode=0o600)
        key.write_text(base64.b64encode(os.urandom(32)).decode())
        for what, link, after_s in (
            ("1 Gbit/s, 100 ms one way", Link.of(GBIT, 0.1), 3.0),
            ("the same with 0.1 % loss", Link.of(GBIT, 0.1, loss=0.001), 3.0),
            ("100 Mbit/s, 160 ms one way", Link.of(GBIT / 10, 0.16), 3.0),
            ("four paths of 100 Mbit/s by flow hash", paths(100, 100, 100, 100), 6.0),
        ):
            with emulated(link) as places:

                def side(places: Any, after_s: float, **wire: str) -> Callable[[], float]:
                    return lambda: rate(
                        bench.stream(places, seconds=12, **wire)["samples"], after_s
                    )

                ucx, tls = bench.median(side(places, after_s), side(places, after_s, psk=str(key)))
            bench.note(f"Mbit/s: {8e-6 * ucx:.1f}, {8e-6 * tls:.1f}")
            bench.add(f"wire/tls over {what}: of wire/ucx", tls / ucx, 0.95)


def times(results: list[dict[str, Any]]) -> dict[int, tuple[int, float]]:
    """Return size and seconds from send to arrival of each message of a plan."""
    sent = {message[0]: message[2] for message in results[0]["messages"]}
    return {
        message[0]: (message[1], message[2] - sent[message[0]])
        for result in results[1:]
        for message in result["messages"]
    }


def percentile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def row_pin(bench: Bench) -> None:
    sides = {
        "pin": {},
        "spray": {"pin": 0},
        "robin": {"pin": 0, "balancer": "robin"},
    }
    with emulated(paths(100, 100, 100, 100, delays_ms=(10, 30, 60, 100))) as places:

        def one(**arguments: object) -> tuple[float, float, float]:
            results = bench.peers(
                places, "plan", plan="pin", seconds=15, load=42e6, lanes=16, **arguments
            )
            done = times(results)
            late = {id: v for id, v in done.items() if id > len(done) // 4}
            short = [seconds for size, seconds in late.values() if size == 64 << 10]
            sent = {m[0]: m[2] for m in results[0]["messages"]}
            ends = {m[0]: m[2] for m in results[1]["messages"]}
            bulk = sum(size for size, _ in done.values() if size != 64 << 10)
            whole = bulk / (max(ends.values()) - min(sent.values()))
            return statistics.fmean(short), percentile(short, 0.99), whole

        turns = [{name: one(**side) for name, side in sides.items()} for _ in range(bench.turns)]
    figures = {
        name: [statistics.median(turn[name][i] for turn in turns) for i in range(3)]
        for name in sides
    }
    for name, (mean, p99, bulk) in figures.items():
        short = f"mean {1e3 * mean:.1f} ms, p99 {1e3 * p99:.1f} ms"
        bench.note(f"{name:<6} {short}, bulk {bulk / 1e6:.1f} MB/s")
    mean, p99, bulk = figures["pin"]
    for other, name in (("robin", "round-robin"), ("spray", "rate-weighted")):
        theirs = figures[other]
        bar = 2.0 if other == "robin" else 1.0
        bench.add(
            f"PIN: 64 KB under bulk, mean, times quicker than {name} spraying",
            theirs[0] / mean,
            bar,
        )
        bench.add(f"PIN: the same, 99th percentile, {name}", theirs[1] / p99, bar)
        bench.add(f"PIN: bulk, of {name}", bulk / theirs[2], 0.97)


def row_storm(bench: Bench) -> None:
    megabits = 200
    with emulated(*(Link.of(megabits * 1e6 / 8, 0.01) for _ in range(3))) as places:

        def one(scheduler: str, turn: int) -> tuple[float, float]:
            results = bench.peers(
                places,
                "plan",
                plan="storm",
                seed=turn + 1,
                seconds=60,
                load=0.8 * 3 * megabits * 1e6 / 8,
                scheduler=scheduler,
            )
            done = times(results)
            largest = max(size for size, _ in done.values())
            return (
                statistics.fmean(seconds for _, seconds in done.values()),
                statistics.fmean(seconds for size, seconds in done.values() if size == largest),
            )

        storm, fifo, fair = ([], [], [])
        for turn in range(bench.turns):
            for figures, name in ((storm, "storm"), (fifo, "fifo"), (fair, "fair")):
                figures.append(one(name, turn))

    def median(values: list[tuple[float, float]], index: int) -> float:
        return statistics.median(value[index] for value in values)

    for name, values in (("storm", storm), ("fifo", fifo), ("fair", fair)):
        bench.note(f"{name:<6} mean {median(values, 0):.3f} s, 64 MB {median(values, 1):.3f} s")

    def ratio(above: list[tuple[float, float]], below: list[tuple[float, float]], i: int) -> float:
        return statistics.median(a[i] / b[i] for a, b in zip(above, below, strict=True))

    bench.add("STORM: mean, times quicker than FIFO", ratio(fifo, storm, 0), 2.0)
    bench.add("STORM: mean, times quicker than fair", ratio(fair, storm, 0), 1.3)
    bench.add("STORM: 64 MB, of FIFO's time", ratio(storm, fifo, 1), 1.2, more=False)


# Rest, memory and latency


def local(command: list[str], **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(command, **options)


def row_idle(bench: Bench) -> None:
    places = [(local, "127.0.0.1")] * 4
    results = bench.peers(places, "idle", seconds=10)
    worst = max(result["cpu_s"] / result["seconds"] for result in results)
    bench.add("blocked and idle for 10 s, 4 processes: share of a core", worst, 0.01, more=False)


def row_many(bench: Bench) -> None:
    places = [(local, "127.0.0.1")] * 2
    for result in bench.peers(places, "many", count=1_000_000, region="one"):
        held = result["held"][2:]  # after warm-up
        growth = held[-1][1] - held[0][1]
        rank = result["rank"]
        bench.add(f"10^6 messages, rank {rank}: growth of memory, MB", growth / 1024, 4, more=False)
        spread = max(h[2] for h in held) - min(h[2] for h in held)
        bench.add(f"10^6 messages, rank {rank}: descriptors more", spread, 0, more=False)


def _ping(rank: int, backend: str, file: str, queue: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group(backend, store=dist.FileStore(file, 2), rank=rank, world_size=2)
    data = torch.zeros(2)
    times = []
    for _ in range(6000):
        begin = time.perf_counter()
        if rank == 0:
            dist.send(data, 1)
            dist.recv(data, 1)
        else:
            dist.recv(data, 0)
            dist.send(data, 0)
        times.append(time.perf_counter() - begin)
    if rank == 0:
        queue.put(statistics.median(times[1000:]))
    dist.barrier()
    dist.destroy_process_group()


def row_latency(bench: Bench) -> None:
    import torch.multiprocessing as mp

    def side(backend: str) -> float:
        context = mp.get_context("spawn")
        queue = context.SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_ping, (backend, f"{folder}/store", queue), nprocs=2)
        return queue.get()

    ours, theirs = bench.median(lambda: side("geomesh"), lambda: side("gloo"))
    bench.note(f"round trip: geomesh {1e6 * ours:.1f} us, Gloo {1e6 * theirs:.1f} us")
    bench.add("8 bytes there and back on loopback: of Gloo's time", ours / theirs, 0.7, more=False)


ROWS: dict[str, Callable[[Bench], None]] = {
    "lane": row_lane,
    "latency": row_latency,
    "idle": row_idle,
    "long": row_long,
    "paths": row_paths,
    "pin": row_pin,
    "tls": row_tls,
    "storm": row_storm,
    "many": row_many,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--build", type=Path, default=HERE.parent / "build")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    bench = Bench(arguments.build, arguments.turns)
    print(f"{platform.machine()}: {os.cpu_count()} cores, Linux {platform.release()}")
    for name in arguments.rows.split(","):
        print(f"-- {name}", flush=True)
        ROWS[name](bench)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": bench.rows, "notes": bench.notes}, indent=1))


if __name__ == "__main__":
    main()
