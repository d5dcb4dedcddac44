"""Splits the work of a round so that ranks of different speed finish together.

Pure arithmetic on cost models: no tensors, no communication, no clock. Every rank computes the
split for all ranks from the same numbers and must get the same integers, so only operations that
IEEE 754 fixes exactly are used (no logarithms, no powers).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

# A step count may exceed a whole number by this much, relatively, and still count as that number.
_ROUNDING = 1e-9
_BISECTIONS = 48  # to a relative 1e-14 of the longest time


@dataclass(frozen=True)
class RankCost:
    """What an inner step costs on one rank: ``step_s + sample_s * batch_size`` seconds.

    Parameters
    ----------
    step_s
        Seconds a step takes whatever its batch.
    sample_s
        Seconds each sample of the batch adds; positive.
    max_batch_size
        The largest batch that fits into the rank's memory.
    """

    step_s: float
    sample_s: float
    max_batch_size: int

    def seconds(self, steps: int, samples: int) -> float:
        """Time of ``steps`` inner steps on ``samples`` samples in all."""
        return steps * self.step_s + samples * self.sample_s

    @property
    def full_step_s(self) -> float:
        """Time of one step on the largest batch."""
        return self.step_s + self.sample_s * self.max_batch_size


@dataclass(frozen=True)
class Share:
    """One rank's part of a round: ``samples`` samples in ``steps`` inner steps.

    Batches are as equal as can be: sizes differ by at most one, larger ones first.
    """

    steps: int
    samples: int

    @property
    def batch_size(self) -> int:
        """Size of the largest batch; 0 without steps."""
        return -(-self.samples // self.steps) if self.steps else 0

    def batch(self, step: int) -> tuple[int, int]:
        """Begin and end of the batch of inner step ``step`` within the rank's samples."""
        size, larger = divmod(self.samples, self.steps)
        begin = step * size + min(step, larger)
        return begin, begin + size + (step < larger)


def balance(
    costs: Sequence[RankCost],
    *,
    inner_steps: int,
    min_inner_steps: int = 1,
    max_inner_steps: int | None = None,
    min_samples: int | None = None,
    max_samples: int | None = None,
) -> list[Share]:
    """Split one round so that all ranks finish together.

    The round's length T is the largest for which the inner steps average at most ``inner_steps``
    over the ranks. Within T a rank takes as few steps as its memory allows, since large batches
    are efficient, and then exactly as many samples as fill T: so its batch may be a little
    below the largest, and the finishing times differ by at most about one sample's time.

    Bounds on steps win over finishing together, and over the bounds on samples.

    Parameters
    ----------
    costs
        One cost model a rank.
    inner_steps
        Mean number of inner steps over the ranks.
    min_inner_steps, max_inner_steps
        Bounds on each rank's steps.
    min_samples, max_samples
        Bounds on the samples of the round, over all ranks.
    """
    ranks = len(costs)
    most_steps = max_inner_steps if max_inner_steps is not None else inner_steps * ranks
    if not 1 <= min_inner_steps <= inner_steps <= most_steps:
        raise ValueError(
            f"expected 1 <= min_inner_steps <= inner_steps <= max_inner_steps, got "
            f"{min_inner_steps}, {inner_steps}, {max_inner_steps}"
        )
    if max_samples is not None and max_samples < ranks * min_inner_steps:
        raise ValueError(
            f"at most {max_samples} samples a round are too few for {ranks} ranks with at least "
            f"{min_inner_steps} inner steps each"
        )

    def shares(round_s: float) -> list[Share]:
        return [_share_within(cost, round_s, min_inner_steps, most_steps) for cost in costs]

    def pairs(round_s: float) -> Iterator[tuple[RankCost, Share]]:
        return zip(costs, shares(round_s), strict=True)

    def steps(round_s: float) -> int:
        return sum(_steps_within(c, round_s, min_inner_steps, most_steps) for c in costs)

    def samples(round_s: float) -> int:
        return sum(share.samples for share in shares(round_s))

    longest_s = max(most_steps * cost.full_step_s for cost in costs)
    # Nobody can finish before its fewest steps on single samples: the others may use that time.
    shortest_s = max(cost.seconds(min_inner_steps, min_inner_steps) for cost in costs)
    round_s = _largest(longest_s, lambda t: steps(t) <= inner_steps * ranks)
    round_s = max(round_s, shortest_s)
    if min_samples is not None and samples(round_s) < min_samples:
        round_s = _largest(longest_s, lambda t: samples(t) < min_samples) * (1 + _ROUNDING)
    if max_samples is not None and samples(round_s) > max_samples:
        round_s = _largest(round_s, lambda t: samples(t) <= max_samples)
        # Same samples, without a step begun for the fraction of a sample that was rounded off.
        round_s = min(round_s, max(c.seconds(s.steps, s.samples) for c, s in pairs(round_s)))
    return shares(round_s)


def balance_rest(costs: Sequence[RankCost], samples: int) -> list[Share]:
    """Split exactly ``samples`` samples so that all ranks finish together; some may get none."""
    if samples < 0:
        raise ValueError(f"expected samples >= 0, got {samples}")

    def counts(round_s: float) -> list[int]:
        return [_samples_within(cost, round_s) for cost in costs]

    longest_s = max(cost.seconds(_steps_for(cost, samples), samples) for cost in costs)
    split = counts(_largest(longest_s, lambda t: sum(counts(t)) <= samples))
    # What is left is less than a sample a rank: to whoever would finish it first.
    for _ in range(samples - sum(split)):
        rank = min(
            range(len(costs)),
            key=lambda r: costs[r].seconds(_steps_for(costs[r], split[r] + 1), split[r] + 1),
        )
        split[rank] += 1
    return [Share(_steps_for(cost, count), count) for cost, count in zip(costs, split, strict=True)]


def _largest(longest_s: float, fits: Callable[[float], bool]) -> float:
    """Return the largest time up to ``longest_s`` that fits; all times below it fit too."""
    if fits(longest_s):
        return longest_s
    low, high = 0.0, longest_s
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _steps_within(cost: RankCost, round_s: float, min_steps: int, max_steps: int) -> int:
    steps = math.ceil(round_s / cost.full_step_s * (1 - _ROUNDING))
    return min(max(steps, min_steps), max_steps)


def _share_within(cost: RankCost, round_s: float, min_steps: int, max_steps: int) -> Share:
    steps = _steps_within(cost, round_s, min_steps, max_steps)
    samples = round((round_s - steps * cost.step_s) / cost.sample_s)
    return Share(steps, min(max(samples, steps), steps * cost.max_batch_size))


def _samples_within(cost: RankCost, round_s: float) -> int:
    steps = math.floor(round_s / cost.full_step_s * (1 + _ROUNDING))
    rest_s = round_s - steps * cost.full_step_s - cost.step_s
    rest = math.floor(rest_s / cost.sample_s * (1 + _ROUNDING)) if rest_s > 0 else 0
    return steps * cost.max_batch_size + min(rest, cost.max_batch_size - 1)


def _steps_for(cost: RankCost, samples: int) -> int:
    return -(-samples // cost.max_batch_size)


class CostModel:
    """Fits ``step_s + sample_s * batch_size`` to one rank's measured steps, online.

    The level follows at once when the speed changes for good (the median of the steps since the
    last fit), single outliers leave no trace, and small jitter is smoothed. The part that does not
    depend on the batch can only be seen when batch sizes differ: until then it counts as zero,
    which predicts well at the batch sizes measured.

    Parameters
    ----------
    max_batch_size
        The largest batch that will be observed.
    """

    _JITTER = 0.2  # level changes up to this are averaged, larger ones followed
    _DISTINCT = 1.2  # batch sizes this far apart tell step and sample time apart
    _FEWEST = 3  # steps a median is taken over
    _WARM = 1.5  # of the first steps, those slower than the quickest by this are left out

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._window: list[tuple[int, float]] = []
        self._last: deque[tuple[int, float]] = deque(maxlen=self._FEWEST)
        self._points: deque[tuple[float, float]] = deque(maxlen=8)  # batch size, seconds a step
        self._overhead = 0.0  # step time in samples: step_s / sample_s
        self._sample_s: float | None = None

    def observe(self, batch_size: int, seconds: float) -> None:
        """Add one measured step."""
        if batch_size > 0 and seconds > 0:
            self._window.append((batch_size, seconds))
            self._last.append((batch_size, seconds))

    def fit(self) -> RankCost | None:
        """Take the steps since the last call into account; ``None`` before any step."""
        if self._window:
            window = self._window if len(self._window) >= self._FEWEST else list(self._last)
            self._window = []
            if len(window) < self._FEWEST:  # a process's first steps: warming up may be in them
                quickest = min(seconds / size for size, seconds in window)
                window = [w for w in window if w[1] / w[0] <= self._WARM * quickest]
            self._update(window)
        if self._sample_s is None:
            return None
        return RankCost(self._overhead * self._sample_s, self._sample_s, self._max_batch_size)

    def _update(self, window: Sequence[tuple[int, float]]) -> None:
        batch_size = statistics.median(b for b, _ in window)
        point = (batch_size, statistics.median(s for _, s in window))
        before, level = self._sample_s, self._level(window)
        followed = before is None or abs(level - before) > self._JITTER * before
        if followed and self._points and not self._differ(self._points[-1][0], batch_size):
            self._points.clear()  # the machine's speed changed: older points no longer compare
        self._points.append(point)
        overhead = self._overhead
        self._overhead = self._fit_overhead()
        if overhead != self._overhead:
            # The old level belongs to another model: carry over what it says about this batch.
            level = self._level(window)
            if before is not None:
                before *= (overhead + batch_size) / (self._overhead + batch_size)
        followed = before is None or abs(level - before) > self._JITTER * before
        self._sample_s = level if before is None or followed else (before + level) / 2

    def _level(self, window: Sequence[tuple[int, float]]) -> float:
        return statistics.median(s / (self._overhead + b) for b, s in window)

    def _differ(self, a: float, b: float) -> bool:
        return max(a, b) >= self._DISTINCT * min(a, b)

    def _fit_overhead(self) -> float:
        found = []
        points = list(self._points)
        for i, (batch_i, seconds_i) in enumerate(points):
            for batch_j, seconds_j in points[:i]:
                if not self._differ(batch_i, batch_j):
                    continue
                slope = (seconds_i - seconds_j) / (batch_i - batch_j)
                limit = 4.0 * self._max_batch_size
                overhead = seconds_i / slope - batch_i if slope > 0 else limit
                found.append(min(max(overhead, 0.0), limit))
        return statistics.median(found) if found else self._overhead
