"""Trains under torchrun; in the job's first life, rank 1 dies after two steps."""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from small_model import batch, make_model, weights
from torch import nn

STEPS = 5


def take_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Take an SGD step with all ranks' gradients: DDP and optimizers are slow to import."""
    nn.functional.mse_loss(model(x), y).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        parameter.data -= 0.1 * parameter.grad
        parameter.grad = None


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("geomesh", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    checkpoint = folder / "checkpoint"
    done, model = 0, make_model()
    if life:
        done, state = torch.load(checkpoint)
        model.load_state_dict(state)
    for step in range(done, STEPS):
        take_step(model, *batch(rank, step))
        if rank == 0:
            torch.save((step + 1, model.state_dict()), checkpoint)
        dist.barrier()
        if life == 0 and step == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    torch.save((life, done, weights(model)), folder / f"end_{rank}")
    dist.destroy_process_group()


main(Path(sys.argv[1]))
