"""Two ranks of a job of four that trains in two regions, for a link between them that is cut.

    python two_halves.py FOLDER LIVES

Run once in each region. In each of LIVES lives of the job the ranks meet, take the newest
checkpoint, do one round, and wait for the file ``go`` of this life; then they go on until a round
fails, and wait for ``healed``. In the last life they end after the first round. What happens is
written to FOLDER, a line of JSON at a time, one file a rank.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # an optimizer would import it, which takes seconds: once for both ranks
import torch.distributed as dist
from torch import nn

import torch_geomesh as gm
from torch_geomesh.rounds import RoundEvent

FOLDER, LIVES = Path(sys.argv[1]), int(sys.argv[2])
RANKS_HERE = 2
SIDE = 1000  # a million parameters: 125 KB of signs


def await_file(name: str) -> None:
    while not (FOLDER / name).exists():
        time.sleep(0.01)


class Trainer:
    """The model of one rank, in one life of the job."""

    def __init__(self, rank: int, life: int) -> None:
        self.rank, self.life = rank, life
        torch.manual_seed(rank)  # what is not equal at the start is made so
        self.model = nn.Linear(SIDE, SIDE, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.mesh = gm.GeoMesh(
            self.model, self.optimizer, inner_steps=2, form="exchange", on_round=self.committed
        )

    def note(self, what: str, **values: object) -> None:
        line = {"what": what, "life": self.life, "at": time.monotonic(), **values}
        with (FOLDER / f"rank{self.rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def committed(self, event: RoundEvent) -> None:
        self.note(
            "committed", round=event.round, hash=self.mesh.round_hash(), tokens=event.total_tokens
        )
        state = [self.mesh.state_dict(), self.model.state_dict()]
        new = FOLDER / f"writing{self.rank}"
        torch.save(state, new)
        new.rename(FOLDER / f"checkpoint{event.round:03}")

    def load_newest(self) -> None:
        if not (checkpoints := sorted(FOLDER.glob("checkpoint*"))):
            return
        mesh, model = torch.load(checkpoints[-1])
        self.model.load_state_dict(model)
        self.mesh.load_state_dict({**mesh, "rank": self.rank})

    def step(self) -> None:
        self.optimizer.zero_grad()
        x = torch.randn(4, SIDE)
        nn.functional.mse_loss(self.model(x), x).backward()
        self.optimizer.step()

    def live(self) -> None:
        self.load_newest()
        with self.mesh:
            for _ in range(2):
                self.step()
            if self.life == LIVES - 1:
                return
            self.note("ready")
            await_file(f"go{self.life}")
            try:
                for _ in range(8):
                    self.step()
            except RuntimeError as error:
                self.note("stopped", round=self.mesh.round, error=str(error))
            before = self.mesh.round_hash()
            try:
                self.step()
            except RuntimeError as error:
                self.note("refused", error=str(error), hash=before)


def main(rank: int) -> None:
    torch.set_num_threads(1)
    port = int(os.environ["MASTER_PORT"])
    tcp = dist.TCPStore(os.environ["MASTER_ADDR"], port, None, rank == 0)
    for life in range(LIVES):
        dist.init_process_group(
            "geomesh",
            store=dist.PrefixStore(f"life{life}", tcp),
            rank=rank,
            world_size=4,
            timeout=timedelta(seconds=60),
        )
        Trainer(rank, life).live()
        if life < LIVES - 1:
            await_file(f"healed{life}")
        dist.destroy_process_group()
    if rank != 0:
        tcp.set(f"end{rank}", "")
    else:
        tcp.wait([f"end{other}" for other in (1, 2, 3)])


first = RANKS_HERE * int(os.environ["PET_NODE_RANK"])
os.environ["LOCAL_WORLD_SIZE"], os.environ["WORLD_SIZE"] = str(RANKS_HERE), "4"
children = []
for number in range(first, first + RANKS_HERE):
    if child := os.fork():
        children.append(child)
        continue
    os.environ["RANK"] = str(number)
    main(number)
    sys.exit()
statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
sys.exit(any(statuses))
