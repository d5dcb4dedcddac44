"""Trains under torchrun; in the job's first life, rank 1 dies after two steps."""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from small_model import batch, make_model, sgd, train, weights
from torch.nn.parallel import DistributedDataParallel

STEPS = 5


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("geomesh", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    checkpoint = folder / "checkpoint"
    done, plain = 0, make_model()
    if life:
        done, state = torch.load(checkpoint)
        plain.load_state_dict(state)
    model = DistributedDataParallel(plain)
    optimizer = sgd(model)
    for step in range(done, STEPS):
        train(model, [batch(rank, step)], optimizer)
        if rank == 0:
            torch.save((step + 1, plain.state_dict()), checkpoint)
        dist.barrier()
        if life == 0 and step == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    torch.save((life, done, weights(plain)), folder / f"end_{rank}")
    dist.destroy_process_group()


main(Path(sys.argv[1]))
