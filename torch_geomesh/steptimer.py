"""Measures inner steps: time in compute, and time spent waiting for the next batch.

Knows clocks only. A step computes from the model's first forward call to the end of the
optimizer's step; what lies between a step's end and the next forward call is waiting (for data,
mostly). On a GPU both are measured on the device's own time line, without stopping it.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepTime:
    """One measured inner step."""

    batch_size: int
    compute_s: float
    wait_s: float


class _CpuMark:
    def __init__(self) -> None:
        self._at = time.monotonic()

    def reached(self) -> bool:
        return True

    def seconds_to(self, later: _CpuMark) -> float:
        return later._at - self._at


class _CudaMark:
    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.current_stream(device))

    def reached(self) -> bool:
        return self._event.query()

    def seconds_to(self, later: _CudaMark) -> float:
        return self._event.elapsed_time(later._event) / 1e3


class StepTimer:
    """Times the steps between `restart` calls.

    Parameters
    ----------
    device
        Where the model's parameters are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: deque[tuple[int, _CpuMark, _CpuMark, _CpuMark]] = deque()
        self.restart()

    def _mark(self) -> _CpuMark:
        if self._device.type == "cuda":
            return _CudaMark(self._device)  # type: ignore[return-value]  # same methods
        return _CpuMark()

    def restart(self) -> None:
        """Begin a step now: what went before belongs to none."""
        self._ended = self._mark()
        self._forward: _CpuMark | None = None

    def forward(self) -> None:
        """Note that the model runs forward; the first time in a step counts."""
        if self._forward is None:
            self._forward = self._mark()

    def step(self, batch_size: int) -> None:
        """End the step in progress and begin the next."""
        end = self._mark()
        # Without a forward call seen (a compiled model may hide it), all of it counts as compute.
        self._pending.append((batch_size, self._ended, self._forward or self._ended, end))
        self._ended, self._forward = end, None

    def take(self) -> list[StepTime]:
        """Return the steps that ended since the last call."""
        times = []
        while self._pending and self._pending[0][3].reached():
            batch_size, begin, forward, end = self._pending.popleft()
            times.append(StepTime(batch_size, forward.seconds_to(end), begin.seconds_to(forward)))
        return times
