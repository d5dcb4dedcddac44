"""Ranks that end as they are told, while others wait for them, without destroying their groups.

    python leaves.py FOLDER WAY...

One rank for each way, from rank 2 on: forks of this process, which load PyTorch once and end as
interpreters do. Prints each one's way, exit status and end; what it wrote to stderr is in FOLDER.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main(way: str, rank: int, world: int) -> None:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    limit = timedelta(minutes=30)
    dist.init_process_group("geomesh", store=store, rank=rank, world_size=world, timeout=limit)
    for leaver in range(2, world):
        dist.new_group([0, 1, leaver], timeout=limit)
    sending = dist.new_group([0, 4], timeout=limit)
    if way == "returns":
        dist.isend(torch.arange(8_000_000, dtype=torch.float32), 0, group=sending)
    store.wait([f"leave {way}"], limit)
    if way == "raises":
        raise ValueError("no more data")
    if way == "exits":
        os._exit(0)


ways = {}
for number, name in enumerate(sys.argv[2:]):
    if child := os.fork():
        ways[child] = name
        continue
    os.dup2(os.open(Path(sys.argv[1]) / name, os.O_WRONLY | os.O_CREAT), 2)
    main(name, 2 + number, int(os.environ["WORLD_SIZE"]))
    sys.exit()
while ways:
    child, status = os.wait()
    print(ways.pop(child), os.waitstatus_to_exitcode(status), time.monotonic(), flush=True)
