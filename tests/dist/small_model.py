"""A small model, its batches, and the same training in one process, for tests to compare with."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def batch(rank: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def together(world: int, step: int) -> Batch:
    """Return the batches of all ranks as one."""
    x, y = zip(*(batch(rank, step) for rank in range(world)), strict=True)
    return torch.cat(x), torch.cat(y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(
    model: nn.Module, batches: Iterable[Batch], optimizer: torch.optim.Optimizer | None = None
) -> list[float]:
    """Take a step on each batch; return the losses."""
    optimizer = optimizer or sgd(model)
    losses = []
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def reference(world: int, steps: int) -> list[torch.Tensor]:
    """Return the weights after training on all ranks' batches in one process."""
    model = make_model()
    train(model, [together(world, step) for step in range(steps)])
    return weights(model)
