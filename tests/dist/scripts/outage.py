"""One of two ranks of a job that sums until rank 0 finds the file ``stop``.

    python outage.py FOLDER

What happens is written to FOLDER, a line of JSON at a time, one file a rank.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER = Path(sys.argv[1])
os.environ["WORLD_SIZE"], os.environ["RANK"] = "2", os.environ["PET_NODE_RANK"]
rank = int(os.environ["RANK"])


def note(what: str, **values: object) -> None:
    with (FOLDER / f"rank{rank}").open("a") as file:
        file.write(json.dumps({"what": what, "at": time.monotonic(), **values}) + "\n")


torch.set_num_threads(1)
dist.init_process_group("geomesh", rank=rank, world_size=2, timeout=timedelta(minutes=30))
rounds, wrong, longest_s = 0, 0, 0.0
stop = torch.zeros(1)
while stop[0] == 0:
    begin = time.monotonic()
    tensor = torch.full((40_000,), float(rounds + rank))
    dist.all_reduce(tensor)
    wrong += int(not torch.equal(tensor, torch.full_like(tensor, 2.0 * rounds + 1)))
    rounds += 1
    stop[0] = rank == 0 and (FOLDER / "stop").exists()
    dist.all_reduce(stop)
    longest_s = max(longest_s, time.monotonic() - begin)
    if rounds == 3:
        note("ready")
dist.destroy_process_group()
note("ended", rounds=rounds, wrong=wrong, longest_s=longest_s)
