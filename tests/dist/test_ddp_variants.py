"""What DistributedDataParallel offers beside the plain step, and the optimizers made for it.

Each is compared with the same training written out in one process.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small_model import batch, make_model, reference, sgd, together, train, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel

close = torch.testing.assert_close


def gradients_alone(model: nn.Module, rank: int, step: int) -> list[torch.Tensor]:
    x, y = batch(rank, step)
    return list(torch.autograd.grad(nn.functional.mse_loss(model(x), y), list(model.parameters())))


def uneven_inputs() -> None:
    """Rank r has 2 + r batches: those that are through add zeros, divided by all as before."""
    from torch.distributed.algorithms.join import Join

    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model())
    with Join([model]):
        train(model, [batch(rank, step) for step in range(2 + rank)])

    alone = make_model()
    optimizer = sgd(alone)
    for step in range(1 + world):
        active = [gradients_alone(alone, r, step) for r in range(world) if step < 2 + r]
        for parameter, each in zip(alone.parameters(), zip(*active, strict=True), strict=True):
            parameter.grad = sum(each) / world
        optimizer.step()
    close(weights(model), weights(alone))


def sharded_optimizer() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    rank, world = dist.get_rank(), dist.get_world_size()
    for as_view in (False, True):
        model = DistributedDataParallel(make_model())
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, parameters_as_bucket_view=as_view, lr=0.01
        )
        train(model, [batch(rank, step) for step in range(4)], optimizer)

        alone = make_model()
        plain = torch.optim.Adam(alone.parameters(), lr=0.01)
        train(alone, [together(world, step) for step in range(4)], plain)
        close(weights(model), weights(alone))

        assert 0 < len(optimizer.optim.state) < len(plain.state)  # each keeps a part only
        optimizer.consolidate_state_dict(to=1)
        if rank == 1:
            got, want = optimizer.state_dict()["state"], plain.state_dict()["state"]
            assert got.keys() == want.keys()
            for key in want:
                close(got[key], want[key])


def accumulation() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model())

    def backward(step: int) -> None:
        x, y = batch(rank, step)
        nn.functional.mse_loss(model(x), y).backward()

    with model.no_sync():
        backward(0)
        backward(1)
    own = [
        sum(g) for g in zip(*(gradients_alone(model.module, rank, s) for s in (0, 1)), strict=True)
    ]
    close([p.grad for p in model.parameters()], own)
    backward(2)  # brings what has been gathered to all
    every = [gradients_alone(model.module, r, s) for r in range(world) for s in range(3)]
    close([p.grad for p in model.parameters()], [sum(g) / world for g in zip(*every, strict=True)])


class Branches(nn.Module):
    """A stem that is used twice, a branch of the caller's choice, and one that nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(6, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](self.stem(torch.tanh(self.stem(x))))


def branches_of(choose: Callable[[int, int], int], **options: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Branches(), **options)
    alone = Branches()
    for step in range(3):
        for r in range(world):
            x, y = batch(r, step)
            (nn.functional.mse_loss(alone(x, choose(r, step)), y) / world).backward()
        x, y = batch(rank, step)
        nn.functional.mse_loss(model(x, choose(rank, step)), y).backward()
        for ours, want in zip(model.parameters(), alone.parameters(), strict=True):
            close(
                torch.zeros_like(ours) if ours.grad is None else ours.grad,
                torch.zeros_like(want) if want.grad is None else want.grad,
            )
        model.zero_grad()
        alone.zero_grad()


def low_rank_gradients() -> None:
    """With as many columns as a matrix has, PowerSGD is exact: the reference needs none."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    signal.alarm(8)  # it hangs where it does not work
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model())
    state = power.PowerSGDState(
        None, matrix_approximation_rank=10, start_powerSGD_iter=2, min_compression_rate=0.001
    )
    model.register_comm_hook(state, power.powerSGD_hook)
    train(model, [batch(rank, step) for step in range(6)])
    close(weights(model), reference(world, 6), rtol=1e-4, atol=1e-5)
    assert state.compression_stats()[2] > 0  # matrices went through it


def averaged_now_and_then() -> None:
    """Post-local SGD: all gradients for two steps, then own ones, and weights every second step."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    rank, world = dist.get_rank(), dist.get_world_size()
    alone, _ = dist.new_subgroups(group_size=1)
    model = DistributedDataParallel(make_model())
    state = local.PostLocalSGDState(
        None, alone, start_localSGD_iter=2, post_local_gradient_allreduce=False
    )
    model.register_comm_hook(state, local.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(period=2, warmup_steps=2))
    train(model, [batch(rank, step) for step in range(5)], optimizer)

    models = [make_model() for _ in range(world)]
    for each in models:
        train(each, [together(world, step) for step in range(2)])
    for step in range(2, 5):
        for r, each in enumerate(models):
            train(each, [batch(r, step)])
        if step % 2 == 0:
            mean = [sum(each) / world for each in zip(*map(weights, models), strict=True)]
            for each in models:
                nn.utils.vector_to_parameters(
                    nn.utils.parameters_to_vector(mean), each.parameters()
                )
    close(weights(model), weights(models[rank]))


def variants() -> None:
    uneven_inputs()
    accumulation()
    branches_of(lambda rank, step: (rank + step) % 2, find_unused_parameters=True)
    branches_of(lambda rank, step: 1, static_graph=True)


def sharded_and_local() -> None:
    sharded_optimizer()
    averaged_now_and_then()


def test_joins_accumulation_and_unused_parameters() -> None:
    run_ranks(3, variants)


def test_sharded_optimizer_and_post_local_sgd() -> None:
    run_ranks(3, sharded_and_local)


@pytest.mark.parametrize("backend", ["geomesh", "gloo"])
def test_powersgd(backend: str) -> None:
    run_ranks(2, low_rank_gradients, init={"backend": backend})
