"""Training across regions: GeoMesh, a context manager around a user's own training loop.

The rounds are rounds.py's; here is their exchange: one bit an element through the geomesh backend,
weighted by tokens. Knows process groups and the backend's sign all-reduce.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_geomesh import backend
from torch_geomesh.arguments import decay, whole_number
from torch_geomesh.rounds import OuterLoop, RoundEvent
from torch_geomesh.sampler import GeoMeshSampler
from torch_geomesh.seeds import derive_seed

# Rows shorter than this aren't looked at one by one; the whole tensor is then one row.
_SHORTEST_ROW = 16


def row_elements(shape: torch.Size) -> int:
    """Return the length of a tensor's rows (all but the first dimension), or 0: all is one row.

    Rows that are entirely zero in every rank's tensor stay exactly zero: rows of an embedding
    that no batch used do not drift.
    """
    row = shape[1:].numel() if len(shape) >= 2 else 0
    return row if row >= _SHORTEST_ROW else 0


class GeoMesh(OuterLoop):
    """Trains a model on ranks of different speed in several regions.

    Inside the ``with`` block the user's loop stays as it is. Each call of ``optimizer.step()`` is
    an inner step; after as many as this rank's share of the round has, all ranks exchange the
    signs of their pseudo-gradients (anchor - parameters), weighted by their tokens, take one outer
    Nesterov step from the anchor, and go on from there: with bit-identical parameters. The round
    commits everywhere or nowhere: after an error in the exchange, parameters, anchor, momentum and
    residual are as before it. (Not seen: a rank that dies after the exchange, in the instant
    before its own commit; the others notice in the next round.)

    At entry, rank 0's parameters and buffers are given to all ranks. Frozen parameters are not
    touched after that. Buffers stay local too (BatchNorm statistics follow each rank's own data);
    so does the inner optimizer's state.

    With bfloat16 or float16 parameters the anchor is kept in float32; what the cast of the
    parameters lost is part of the next pseudo-gradient.

    The loop must call ``optimizer.step()`` once for each batch of the sampler (see `skip_step` for
    gradient scalers), and use the sampler's epochs or ``round`` to end: ranks do different numbers
    of steps.

    Parameters
    ----------
    model
        Any module with dense parameters on one device, not wrapped in DDP or FSDP.
    optimizer
        Any torch optimizer over the model's parameters.
    sampler
        Gives each rank its batches and the number of its inner steps.
    inner_steps
        Without a sampler: inner steps a round, the same on all ranks.
    outer_lr, outer_momentum
        Of the outer Nesterov step.
    seed
        Of the codec's rotations; the same on all ranks.
    residual_decay
        None: no error feedback (the codec is unbiased and needs none). A number: what coding lost
        is kept, times this, and added in the next round.
    form
        ``"exchange"``: each rank's code goes to all; ``"recode"``: codes are summed by parts and
        coded again; ``"auto"``: by the plan's cost.
    timeout
        Of an exchange; the process group's if None.
    process_group
        Made by the geomesh backend; the default group if None. Without torch.distributed, or
        alone, the pseudo-gradient is used as it is.
    on_round
        Called on every rank after each round, with its `RoundEvent`; ranks hold equal parameters
        then, so this is the place to evaluate, save, or use collectives.

    Raises
    ------
    TypeError, ValueError
        For a combination that can't work, with the reason.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        sampler: GeoMeshSampler | None = None,
        inner_steps: int | None = None,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        seed: int = 0,
        residual_decay: float | None = None,
        form: str = "auto",
        timeout: timedelta | None = None,
        process_group: dist.ProcessGroup | None = None,
        on_round: Callable[[RoundEvent], None] | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            sampler=sampler,
            inner_steps=inner_steps,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            process_group=process_group,
            on_round=on_round,
        )
        if form not in ("auto", "exchange", "recode"):
            raise ValueError(f"expected form 'auto', 'exchange' or 'recode', got {form!r}")
        self._residual_decay = decay(self._name, "residual_decay", residual_decay)
        if timeout is not None and not isinstance(timeout, timedelta):
            raise TypeError(f"{self._name}: expected a timedelta for timeout, got {timeout!r}")
        if timeout is not None and timeout <= timedelta(0):
            raise ValueError(f"{self._name}: expected a timeout above 0, got {timeout}")
        self._seed = whole_number(self._name, "seed", seed)
        self._backend = backend.backend_of(process_group) if self.world_size > 1 else None
        self._form = form
        self._timeout = timeout
        self._residual = torch.zeros_like(self._mean) if residual_decay is not None else None
        self._next_residual: Tensor | None = None

    def _settings(self) -> tuple[object, ...]:
        return (*super()._settings(), self._seed, self._residual_decay, self._form)

    def _exchange(self, weight: int) -> tuple[int, int | None]:
        assert self._backend is not None
        residual = self._residual.clone() if self._residual is not None else None
        work = self._backend.sign_all_reduce(
            [parameter.detach() for parameter in self._parameters.values()],
            self._anchor,
            self._mean,
            weight=weight,
            rotation_seed=derive_seed(self._seed, self._round),
            names=list(self._parameters),
            row_elements=[row_elements(anchor.shape) for anchor in self._anchor],
            residual=residual,
            residual_decay=1.0 if self._residual_decay is None else self._residual_decay,
            form=self._form,
            timeout=self._timeout,
        )
        work.wait()
        self._next_residual = residual
        return work.total_weight, work.bytes_sent

    def _committed(self) -> None:
        if self._next_residual is not None:
            self._residual, self._next_residual = self._next_residual, None

    def state_dict(self) -> dict[str, Any]:  # noqa: D102 (inherited)
        state = super().state_dict()
        if self._residual is not None:
            parts = self._views(self._residual)
            state["residual"] = dict(zip(self._parameters, parts, strict=True))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: D102 (inherited)
        super().load_state_dict(state)
        if self._residual is None:
            return
        own = state["world_size"] == self.world_size and state["rank"] == self.rank
        if own and "residual" in state:
            self._load_views(self._residual, state["residual"])
        else:
            self._residual.zero_()
            warnings.warn(
                f"rank {self.rank} has no residual of its own in the state (taken by rank "
                f"{state['rank']} of {state['world_size']}): error feedback starts from zero",
                stacklevel=2,
            )
