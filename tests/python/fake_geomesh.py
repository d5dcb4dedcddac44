"""Stands in for the compiled part: the reference codec over any process group, and plain torch.

Tests of the training layer run over this and over the real backend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import reference_codec as reference
import torch
import torch.distributed as dist
from torch import Tensor

from torch_geomesh import backend


class FakeWork:
    def __init__(self) -> None:
        self.future: torch.futures.Future[Tensor] = torch.futures.Future()
        self.total_weight = 0
        self.bytes_sent = 0

    def wait(self) -> None:
        self.future.wait()

    def get_future(self) -> torch.futures.Future[Tensor]:
        return self.future


class FakeBackend:
    """``sign_all_reduce`` in the exchange form, over a Gloo group of its own."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self.thread = ThreadPoolExecutor(1)
        self.calls: list[dict[str, object]] = []

    def sign_all_reduce(
        self,
        current: Sequence[Tensor],
        anchor: Sequence[Tensor] | None,
        out: Tensor,
        *,
        weight: int,
        rotation_seed: int,
        names: Sequence[str] = (),
        row_elements: Sequence[int] = (),
        rotate: bool = True,
        residual: Tensor | None = None,
        residual_decay: float = 1.0,
        form: str = "auto",
        timeout: timedelta | None = None,
    ) -> FakeWork:
        work = FakeWork()
        self.calls.append({"names": list(names), "weight": weight, "rotation_seed": rotation_seed})
        values = pseudo_gradients(current, anchor)
        if residual is not None:
            parts = residual.split([v.numel() for v in values])
            values = [v + part.view(v.shape) for v, part in zip(values, parts, strict=True)]
        vector = reference.Vector([v.numpy() for v in values], list(row_elements))

        def run() -> None:
            try:
                bad = [n for n, v in zip(names, values, strict=True) if not v.isfinite().all()]
                code = b"" if bad else encode(vector, rotation_seed, dist.get_rank(), weight)
                sent: list[tuple[list[str], bytes, int]] = [([], b"", 0)] * dist.get_world_size()
                dist.all_gather_object(sent, (bad, code, weight), group=self.group)
                for rank, (bad, _, _) in enumerate(sent):
                    if bad:
                        raise RuntimeError(f"rank {rank}: NaN or infinity in {bad[0]}")
                codes = [code for _, code, _ in sent]
                mean = reference.decode_mean(codes, vector, rotation_seed=rotation_seed)
                out.copy_(torch.from_numpy(mean))
                if residual is not None:
                    own = reference.decode_mean([code], vector, rotation_seed=rotation_seed)
                    lost = torch.from_numpy(vector.values - own)
                    residual.copy_(lost * residual_decay)
                work.total_weight = sum(weight for _, _, weight in sent)
                work.bytes_sent = len(code) * (len(sent) - 1)
            except BaseException as error:
                work.future.set_exception(error)
            else:
                work.future.set_result(out)

        self.thread.submit(run)
        return work


def pseudo_gradients(current: Sequence[Tensor], anchor: Sequence[Tensor] | None) -> list[Tensor]:
    if anchor is None:
        return [c.detach().float().clone() for c in current]
    return [a - c.detach().float() for c, a in zip(current, anchor, strict=True)]


def encode(vector: reference.Vector, rotation_seed: int, rank: int, weight: int) -> bytes:
    return reference.encode(
        vector, rotation_seed=rotation_seed, dither_seed=rotation_seed ^ rank, weight=weight
    )


def outer_step_(
    anchor: Sequence[Tensor],
    current: Sequence[Tensor],
    momentum: Tensor,
    mean: Tensor,
    lr: float,
    mu: float,
    nesterov: bool = True,
) -> None:
    lr32, mu32 = torch.tensor(lr, dtype=torch.float32), torch.tensor(mu, dtype=torch.float32)
    momentum.copy_(mu32 * momentum + mean)
    step = mean + mu32 * momentum if nesterov else momentum
    sizes = [a.numel() for a in anchor]
    for a, c, s in zip(anchor, current, step.split(sizes), strict=True):
        a.sub_(lr32 * s.view(a.shape))
        c.copy_(a)


@contextlib.contextmanager
def fake_geomesh() -> Iterator[FakeBackend | None]:
    """Replace the compiled part; needs a process group unless the test is single-process."""
    fake = FakeBackend() if dist.is_initialized() else None
    module = SimpleNamespace(outer_step_=outer_step_)
    with (
        mock.patch.object(backend, "backend_of", return_value=fake),
        mock.patch.object(backend, "extension", return_value=module),
    ):
        yield fake
