"""Emulated GPU speeds: pads a rank's compute to the time a GPU of a stated relative speed takes.

A step on a batch of b samples takes ``(step_s + sample_s * b) / speed``.  The padding is slept off
inside the forward and the backward pass, after each transformer block, so that gradients become
ready one after the other as on a real GPU, and communication can overlap with what is left of the
backward pass.  Knows clocks and module hooks; nothing of communication.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from torch import nn

# HALoS (arXiv 2506.04531), public simulator: relative speed of each worker, region by region.
HALOS_SPEEDS = (
    (0.232, 0.907, 0.828, 0.347),
    (0.574, 0.531, 0.722, 0.194),
    (0.852, 0.132, 0.896, 0.107),
    (0.827, 0.515, 0.527, 0.788),
)
_FORWARD_SHARE = 1 / 3  # of a step's time; the backward pass does twice the work


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Time of a step on a GPU of relative speed 1: ``step_s + sample_s * batch``."""

    step_s: float
    sample_s: float

    def seconds(self, batch: int, speed: float = 1.0) -> float:
        """Time of one step of `batch` samples at `speed`."""
        return (self.step_s + self.sample_s * batch) / speed

    def scaled(self, factor: float) -> StepCost:
        """Return the same cost, all times multiplied by `factor`."""
        return StepCost(self.step_s * factor, self.sample_s * factor)


class Pacer:
    """Paces a model with a list of ``blocks`` to an emulated speed.

    Steps that follow each other keep to one timetable: what the operating system delays in one
    step is caught up in the next.  `restart` says that the next step starts afresh, after waiting
    for other ranks.

    Parameters
    ----------
    model
        Has ``blocks``; its first argument has the batch as its first dimension.
    cost, speed
        The emulated GPU.
    now, sleep
        The clock; tests give their own.
    """

    def __init__(
        self,
        model: nn.Module,
        cost: StepCost,
        speed: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not speed > 0:
            raise ValueError(f"expected speed > 0, got {speed}")
        self._cost = cost
        self._speed = speed
        self._now = now
        self._sleep = sleep
        self._due: float | None = None  # when the last step was to end
        self._start = 0.0
        self._step_s = 0.0
        self.computed_at = 0.0
        """When the last step's backward pass was done, communication apart."""
        self._late_s = 0.0  # of timetables given up, and those of earlier rounds

        blocks = list(model.blocks)  # type: ignore[arg-type]
        self._hooks = [model.register_forward_pre_hook(self._begin)]
        for index, block in enumerate(blocks):
            forward = _FORWARD_SHARE * (index + 1) / (len(blocks) + 1)
            # Block 0 comes last in the backward pass; what follows it takes next to no time.
            done = (len(blocks) - index) / len(blocks)
            backward = _FORWARD_SHARE + (1 - _FORWARD_SHARE) * done
            self._hooks += [
                block.register_forward_hook(self._at(forward)),
                block.register_full_backward_hook(self._at(backward)),
            ]

    @property
    def late_s(self) -> float:
        """Time lost because this machine was slower than the emulated GPU, in all."""
        return self._late_s + (0.0 if self._due is None else max(0.0, self.computed_at - self._due))

    def restart(self) -> None:
        """Start the next step when its forward pass begins, not when the last one was due."""
        self._late_s = self.late_s
        self._due = None

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not model.training:
            return
        now = self._now()
        self._step_s = self._cost.seconds(inputs[0].shape[0], self._speed)
        self._start = now if self._due is None else self._due
        if now - self._start > self._step_s:  # hopelessly behind: count it and go on from here
            self._late_s += now - self._start
            self._start = now
        self._due = self._start + self._step_s

    def _at(self, fraction: float) -> Callable[..., None]:
        def wait(module: nn.Module, *_: Any) -> None:
            if not module.training:
                return
            left = self._start + fraction * self._step_s - self._now()
            if left > 0:
                self._sleep(left)
            if fraction == 1.0:
                self.computed_at = self._now()

        return wait


def measure(
    step: Callable[[int], None],
    batches: tuple[int, int],
    repeats: int,
    now: Callable[[], float] = time.thread_time,
) -> StepCost:
    """Fit a step's cost to the processor time it takes on this machine, from two batch sizes.

    The quickest of `repeats` runs each, since others may be at work here; `step` is run once
    before for each size.
    """
    seconds = []
    for batch in batches:
        step(batch)
        times = []
        for _ in range(repeats):
            begin = now()
            step(batch)
            times.append(now() - begin)
        seconds.append(min(times))
    small, large = batches
    sample_s = max(seconds[1] - seconds[0], 1e-9) / (large - small)
    return StepCost(max(seconds[0] - sample_s * small, 0.0), sample_s)
