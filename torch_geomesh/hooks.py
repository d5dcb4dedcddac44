"""The DDP communication hook: one bit a gradient element.

Knows DDP's buckets and the backend's sign all-reduce. What is kept between steps is kept by
parameter, never by bucket: DDP rebuilds its buckets after the first step.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with its types.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_geomesh import backend
from torch_geomesh.arguments import decay, whole_number
from torch_geomesh.seeds import derive_seed
from torch_geomesh.train import row_elements

_STATE_VERSION = 1


class SignHookState:
    """What `sign_hook` keeps between calls; pass it to ``register_comm_hook``.

    It can be pickled into a checkpoint, without the process group; every rank's belongs there if
    a residual is kept. After loading it uses the default group.

    Parameters
    ----------
    process_group
        Of the geomesh backend, the same as DDP's; the default group if None.
    seed
        Of the codec's rotations; the same on all ranks.
    residual_decay
        None: no error feedback (the codec is unbiased and needs none). A number: what coding lost
        is kept for each parameter, times this, and added in the next step.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        seed: int = 0,
        residual_decay: float | None = None,
    ) -> None:
        self.process_group = process_group
        self.seed = whole_number("SignHookState", "seed", seed)
        self.residual_decay = decay("SignHookState", "residual_decay", residual_decay)
        self.step = 0
        self.bytes_sent = 0
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1:
            backend.backend_of(process_group)  # refuses other backends here and now
        # Parameters are numbered as they are first seen: alike on all ranks and in every run,
        # because DDP starts from the same buckets and calls their hooks in order.
        self._numbers: dict[Tensor, int] = {}
        self._residuals: dict[int, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "seed": self.seed,
            "residual_decay": self.residual_decay,
            "step": self.step,
            "bytes_sent": self.bytes_sent,
            "residuals": self._residuals,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["version"] != _STATE_VERSION:
            raise ValueError(f"SignHookState of version {state['version']}, not {_STATE_VERSION}")
        self.process_group = None
        self.seed = state["seed"]
        self.residual_decay = state["residual_decay"]
        self.step = state["step"]
        self.bytes_sent = state["bytes_sent"]
        self._numbers = {}
        self._residuals = state["residuals"]

    def _number(self, parameter: Tensor) -> int:
        return self._numbers.setdefault(parameter, len(self._numbers))

    def _residual(self, parameter: Tensor) -> Tensor:
        number = self._number(parameter)
        residual = self._residuals.get(number)
        if residual is None:
            return torch.zeros(parameter.numel())
        if residual.numel() != parameter.numel():
            raise RuntimeError(
                f"sign_hook: parameter {number} has {parameter.numel()} elements, the residual "
                f"in its state {residual.numel()}: the state is of another model"
            )
        return residual

    def _keep(self, parameters: list[Tensor], residual: Tensor) -> None:
        for parameter, part in zip(
            parameters, residual.split([p.numel() for p in parameters]), strict=True
        ):
            self._residuals[self._number(parameter)] = part.clone()


def sign_hook(state: SignHookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over the ranks by their signs.

    Register with ``model.register_comm_hook(SignHookState(), sign_hook)``. The exchange goes on
    while the backward pass computes the next buckets. A NaN or infinity raises, from
    ``backward()``, before anything is sent. Rows of gradients that are zero on all ranks stay
    exactly zero.
    """
    if not isinstance(bucket, dist.GradBucket):
        raise TypeError(
            f"sign_hook is a hook for DistributedDataParallel and takes its GradBucket, got "
            f"{type(bucket).__name__}; FullyShardedDataParallel is not supported"
        )
    if not isinstance(state, SignHookState):
        raise TypeError(
            f"sign_hook needs its state: register_comm_hook(gm.SignHookState(), gm.sign_hook), "
            f"got {type(state).__name__}"
        )
    buffer = bucket.buffer()
    parameters = bucket.parameters()
    for parameter in parameters:
        state._number(parameter)
    step = state.step
    if bucket.is_last():
        state.step += 1
    if dist.get_world_size(state.process_group) == 1:
        return _completed(buffer)
    out = torch.empty(buffer.numel())
    residual = None
    if state.residual_decay is not None:
        residual = torch.cat([state._residual(p) for p in parameters])
    work = backend.backend_of(state.process_group).sign_all_reduce(
        _flat_gradients(bucket),
        None,
        out,
        weight=1,
        rotation_seed=derive_seed(state.seed, step, bucket.index()),
        names=[f"gradient {state._number(p)} of shape {tuple(p.shape)}" for p in parameters],
        row_elements=[row_elements(p.shape) for p in parameters],
        residual=residual,
        residual_decay=1.0 if state.residual_decay is None else state.residual_decay,
    )

    def finish(future: torch.futures.Future[Any]) -> Tensor:
        future.value()  # raises what the exchange raised
        state.bytes_sent += work.bytes_sent
        if residual is not None:
            state._keep(parameters, residual)
        return buffer.copy_(out)

    return work.get_future().then(finish)


def _flat_gradients(bucket: dist.GradBucket) -> list[Tensor]:
    """Return each gradient as it lies in the bucket's memory, whatever its strides."""
    buffer = bucket.buffer()
    offset = buffer.storage_offset()
    return [
        buffer.narrow(0, gradient.storage_offset() - offset, gradient.numel())
        for gradient in bucket.gradients()
    ]


def _completed(tensor: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
