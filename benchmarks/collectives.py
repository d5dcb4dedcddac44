"""Collectives of geomesh and Gloo in the same processes, sides alternating, on this machine.

Each point's time is the median over turns of the slowest rank's mean time a call; a turn is a block
of calls of one side, then of the other. Usage:

    python benchmarks/collectives.py [--world 4] [--operations all_reduce,broadcast]
        [--sizes 4,1K,1M] [--seconds 0.3] [--turns 5] [--json FILE]

Sizes are bytes of a rank's input (of the output for reduce_scatter).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = "4,64,1K,4K,16K,64K,256K,1M,4M,16M,64M"
OPERATIONS = "all_reduce,all_gather,broadcast,reduce_scatter,all_to_all"
SIDES = ("gloo", "geomesh")


def parse_size(text: str) -> int:
    """Read "64", "1K" or "16M"."""
    factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1].upper(), 1)
    return int(text[:-1] if factor > 1 else text) * factor


def call_of(operation: str, size: int, world: int) -> Callable[[dist.ProcessGroup], None]:
    """Return a function that runs the operation once on a group."""
    elements = max(1, size // 4)
    if operation == "all_to_all":
        elements = -(-elements // world) * world
    one = torch.ones(elements)
    many = torch.ones(world * elements)
    other = torch.empty_like(one)
    calls: dict[str, Callable[[dist.ProcessGroup], None]] = {
        "all_reduce": lambda group: dist.all_reduce(one, group=group, op=dist.ReduceOp.MAX),
        "all_gather": lambda group: dist.all_gather_into_tensor(many, one, group=group),
        "broadcast": lambda group: dist.broadcast(one, 0, group=group),
        "reduce_scatter": lambda group: dist.reduce_scatter_tensor(
            one, many, group=group, op=dist.ReduceOp.MAX
        ),
        "all_to_all": lambda group: dist.all_to_all_single(other, one, group=group),
    }
    return calls[operation]


def block(call: Callable[[], None], count: int, control: dist.ProcessGroup) -> float:
    """Return the slowest rank's mean time of `count` calls."""
    dist.barrier(control)
    begin = time.perf_counter()
    for _ in range(count):
        call()
    seconds = torch.tensor([(time.perf_counter() - begin) / count], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=control)
    return float(seconds)


def measure(
    operation: str, size: int, groups: dict[str, dist.ProcessGroup], args: argparse.Namespace
) -> dict[str, float]:
    """Return each side's median seconds a call."""
    call = call_of(operation, size, dist.get_world_size())
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    counts = {}
    for side in SIDES:
        block(lambda side=side: call(groups[side]), 3, groups["gloo"])
        once = block(lambda side=side: call(groups[side]), 3, groups["gloo"])
        counts[side] = max(2, min(5000, int(args.seconds / once)))
    for turn in range(args.turns):
        for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
            times[side].append(
                block(lambda side=side: call(groups[side]), counts[side], groups["gloo"])
            )
    return {side: statistics.median(times[side]) for side in SIDES}


def run_rank(rank: int, args: argparse.Namespace, init: str) -> None:
    """Measure everything on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "geomesh",
        init_method=f"file://{init}",
        rank=rank,
        world_size=args.world,
        timeout=timedelta(minutes=5),
    )
    groups = {"geomesh": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    rows = []
    if rank == 0:
        print(f"{args.world} ranks on one machine with {os.cpu_count()} cores")
        print(f"{'operation':>15} {'bytes':>10} {'gloo us':>11} {'geomesh us':>11} {'ratio':>7}")
    for operation in args.operations.split(","):
        for size in map(parse_size, args.sizes.split(",")):
            seconds = measure(operation, size, groups, args)
            ratio = seconds["gloo"] / seconds["geomesh"]
            rows.append({"operation": operation, "bytes": size, **seconds, "ratio": ratio})
            if rank == 0:
                print(
                    f"{operation:>15} {size:>10} {1e6 * seconds['gloo']:>11.1f} "
                    f"{1e6 * seconds['geomesh']:>11.1f} {ratio:>7.2f}",
                    flush=True,
                )
    if rank == 0:
        large = [row["ratio"] for row in rows if row["bytes"] >= 1024]
        mean = math.exp(statistics.fmean(math.log(r) for r in large)) if large else float("nan")
        print(f"geometric mean of the ratios from 1 KB on: {mean:.2f}; smallest: {min(large):.2f}")
        if args.json:
            with open(args.json, "w") as file:
                json.dump(rows, file, indent=1)
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--operations", default=OPERATIONS)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a block of calls")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (args, f"{folder}/init"), nprocs=args.world)


if __name__ == "__main__":
    main()
