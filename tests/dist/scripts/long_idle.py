"""Ranks 0 to 2 in one region, rank 3 in another; pairs (0, 3) and (1, 2) with nothing to do.

    python long_idle.py FOLDER IDLE_S

Run once in each region. 0 and 3 begin to receive from each other what nobody sends. 2 is idle, and
1 too, for IDLE_S seconds; then 1 receives from 2 as well. What happens is written to FOLDER, a line
of JSON at a time, one file a rank.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER, IDLE_S = Path(sys.argv[1]), float(sys.argv[2])
RANKS = {0: (0, 1, 2), 1: (3,)}[int(os.environ["PET_NODE_RANK"])]
PARTNER = {0: 3, 3: 0, 1: 2, 2: 1}


def main(rank: int) -> None:
    def note(what: str, **values: object) -> None:
        with (FOLDER / f"rank{rank}").open("a") as file:
            line = {"what": what, "at": time.monotonic(), "pid": os.getpid(), **values}
            file.write(json.dumps(line) + "\n")

    torch.set_num_threads(1)
    dist.init_process_group("geomesh", rank=rank, world_size=4, timeout=timedelta(minutes=30))
    dist.all_reduce(torch.ones(4))
    pairs = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    pair = pairs[0] if rank in (0, 3) else pairs[1]
    dist.all_reduce(torch.ones(4), group=pair)
    note("ready")
    if rank == 2:
        time.sleep(600)
    if rank == 1:
        time.sleep(IDLE_S)
    work = dist.irecv(torch.empty(4), PARTNER[rank], group=pair)
    note("waits")
    try:
        work.wait()
    except RuntimeError as error:
        note("told", error=str(error))
    start = time.monotonic()
    dist.destroy_process_group()
    note("ended", seconds=time.monotonic() - start)


os.environ["LOCAL_WORLD_SIZE"], os.environ["WORLD_SIZE"] = str(len(RANKS)), "4"
children = []
for number in RANKS:
    if child := os.fork():
        children.append(child)
        continue
    os.environ["RANK"] = str(number)
    main(number)
    sys.exit()
for child in children:
    os.waitpid(child, 0)
