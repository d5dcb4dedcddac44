"""Baselines to compare GeoMesh with, at their best settings: DiLoCo over any c10d backend.

DiLoCo (Douillard et al., 2023; arXiv 2311.08105): equal inner steps on all ranks, pseudo-gradients
averaged in fp32, outer Nesterov step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from torch_geomesh.rounds import OuterLoop, RoundEvent


class DiLoCo(OuterLoop):
    """DiLoCo around a user's training loop; used like `GeoMesh`, and with the same events.

    Parameters
    ----------
    model, optimizer
        As for `GeoMesh`.
    inner_steps
        Inner steps a round, the same on all ranks.
    outer_lr, outer_momentum
        Of the outer Nesterov step; the published setting is the default.
    process_group
        Of any backend; the default group if None.
    parallel_groups
        More groups of the same ranks: the pseudo-gradient is cut into as many parts, which are
        reduced at the same time. On a wide-area network several connections are faster than one.
    on_round
        Called on every rank after each round, with its `RoundEvent`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        inner_steps: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        process_group: dist.ProcessGroup | None = None,
        parallel_groups: Sequence[dist.ProcessGroup] = (),
        on_round: Callable[[RoundEvent], None] | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            sampler=None,
            inner_steps=inner_steps,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            process_group=process_group,
            on_round=on_round,
        )
        self._groups: list[dist.ProcessGroup | None] = [process_group, *parallel_groups]
        for group in parallel_groups:
            if dist.get_world_size(group) != self.world_size:
                raise ValueError(
                    f"a parallel group has {dist.get_world_size(group)} ranks, the process group "
                    f"{self.world_size}"
                )

    def _exchange(self, weight: int) -> tuple[int, int | None]:
        self._write_pseudo_gradient()
        works = [
            dist.all_reduce(part, group=group, async_op=True)
            for part, group in zip(
                torch.tensor_split(self._mean, len(self._groups)), self._groups, strict=True
            )
        ]
        for work in works:
            work.wait()
        self._mean /= self.world_size
        return weight * self.world_size, None  # equal steps on equal batches
