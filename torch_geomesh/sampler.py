"""The GeoMesh batch sampler: who draws which samples, in batches of which size, in which round.

All ranks hold the same plan: an epoch is one shuffled list of indices, cut into rounds, and each
round into one contiguous slice a rank. Slices are sized by the ranks' measured speed (balance.py),
so that all finish a round together. The plan is a pure function of what the ranks reported at the
ends of earlier rounds, so it needs no coordinator, and each index is drawn exactly once an epoch
whatever the speeds.

Knows indices, times and the ranks' reports; nothing of models. The training loop (rounds.py) says
when an inner step is done and carries the reports between ranks.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from torch_geomesh.arguments import check_state, whole_number
from torch_geomesh.balance import CostModel, RankCost, Share, balance, balance_rest

# A rest of an epoch smaller than this part of a round joins the round before it.
_SMALL_REST = 0.25
# Inner steps of a run's first round: the first may warm the process up.
_FIRST_STEPS = 2
_STATE_VERSION = 1


@dataclass(frozen=True)
class RankReport:
    """What a rank tells the others once a round; travels as a few numbers.

    Parameters
    ----------
    step_s, sample_s
        The rank's fitted cost of a step: compute only. ``sample_s`` 0: nothing measured yet.
    wait_s
        Median time a step waited for its data.
    drawn_ahead
        The most batches that the rank's loader has drawn and the rank not trained on, at any time.
    plan
        Checksum of the round in progress: must be the same on all ranks.
    """

    step_s: float
    sample_s: float
    wait_s: float
    drawn_ahead: int
    plan: int

    FIELDS = 5

    def to_list(self) -> list[float]:
        """Return the numbers that travel."""
        return [self.step_s, self.sample_s, self.wait_s, float(self.drawn_ahead), float(self.plan)]

    @staticmethod
    def from_list(numbers: Sequence[float]) -> RankReport:
        """Invert `to_list`."""
        step_s, sample_s, wait_s, drawn_ahead, plan = numbers
        return RankReport(step_s, sample_s, wait_s, int(drawn_ahead), int(plan))


@dataclass(frozen=True)
class _Round:
    begin: int  # first sample, as a position in the epoch's order
    shares: tuple[Share, ...]

    @property
    def samples(self) -> int:
        return sum(share.samples for share in self.shares)

    def slice_begin(self, rank: int) -> int:
        return self.begin + sum(share.samples for share in self.shares[:rank])


def _length(dataset: Sized | int) -> int:
    try:
        # A number is the length itself; a tensor, which counts as a number too, is a data set.
        return len(dataset) if hasattr(dataset, "__len__") else whole_number("", "", dataset)
    except TypeError:
        raise TypeError(
            f"GeoMeshSampler: expected a data set with a length, or the length itself, got "
            f"{dataset!r}"
        ) from None


class GeoMeshSampler(Sampler[list[int]]):
    """A batch sampler that gives each rank the work it can do in the time all ranks have.

    Pass it to any DataLoader as ``batch_sampler``, and to `GeoMesh` as ``sampler``. Each round,
    rank r trains ``h_r`` inner steps on batches of ``b_r`` samples (some one sample smaller, so
    that all ranks finish together to within a sample's time). The first round of a run is a short
    one with equal steps, to learn the ranks' speeds. In the last round of an epoch, what is left
    is shared out by speed; some ranks may get nothing there, and still take part in the round. A
    rest smaller than a quarter of a round joins the round before it.

    Every iteration continues where training stopped: a finished epoch is followed by the next
    (reshuffled), an iteration that was broken off goes on with the first batch not trained on.
    Without a `GeoMesh` around the training, a batch counts as trained on once the next is drawn,
    and all ranks keep equal steps.

    The constructor is collective when torch.distributed is initialised: all ranks of the group
    must make the sampler, with the same arguments except ``max_batch_size``.

    Parameters
    ----------
    dataset
        Anything with a length, or the length itself.
    max_batch_size
        The largest batch that fits into this rank's memory. Ranks may differ.
    seed
        Of the order of samples; the order depends on the seed and the epoch only.
    inner_steps
        Mean number of inner steps a round over the ranks: faster ranks do more.
    min_inner_steps, max_inner_steps
        Bounds on every rank's inner steps. The last round of an epoch may have fewer.
    min_global_batch, max_global_batch
        Bounds on the samples of a round over all ranks; bounds on steps win. The last round of an
        epoch, and the first of a run, may have fewer.
    process_group
        The ranks that share the data set; the default group if None. Without torch.distributed
        the sampler works alone.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        max_batch_size: int,
        seed: int = 0,
        inner_steps: int = 32,
        min_inner_steps: int = 1,
        max_inner_steps: int | None = None,
        min_global_batch: int | None = None,
        max_global_batch: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.length = _length(dataset)
        if self.length < 0:
            raise ValueError(f"expected a data set of length >= 0, got {self.length}")

        def whole(name: str, value: int | None) -> Any:
            return None if value is None else whole_number("GeoMeshSampler", name, value)

        self.seed = whole_number("GeoMeshSampler", "seed", seed)
        max_batch_size = whole_number("GeoMeshSampler", "max_batch_size", max_batch_size)
        if max_batch_size < 1:
            raise ValueError(f"expected max_batch_size >= 1, got {max_batch_size}")
        self.max_batch_size = max_batch_size
        self._bounds: dict[str, Any] = {
            "inner_steps": whole_number("GeoMeshSampler", "inner_steps", inner_steps),
            "min_inner_steps": whole_number("GeoMeshSampler", "min_inner_steps", min_inner_steps),
            "max_inner_steps": whole("max_inner_steps", max_inner_steps),
            "min_samples": whole("min_global_batch", min_global_batch),
            "max_samples": whole("max_global_batch", max_global_batch),
        }
        self.rank, limits = self._meet(process_group)
        self.world_size = len(limits)
        # Nothing measured yet: as if a full step took the same time everywhere.
        self._costs = [RankCost(0.0, 1.0 / limit, limit) for limit in limits]
        self._measured = False
        self._full: list[Share] | None = None  # a whole round at the present costs
        balance(self._costs, **self._bounds)  # refuses impossible bounds here and now
        self._model = CostModel(max_batch_size)
        self._waits: list[float] = []
        self._on_iteration: Callable[[int], None] | None = None

        self._epoch = 0
        self._rounds: deque[_Round] = deque()  # planned, from the one in progress on
        self._open = True  # until the epoch's first reports: rounds are added as they are drawn
        self._steps_done = 0  # in the round in progress
        self._drawn = 0  # batches drawn by the live iterator, counted like _steps_done
        self._drawn_ahead = 1
        self._iterator = 0  # only the youngest iterator may draw
        self._order: tuple[int, torch.Tensor] | None = None
        self._begin_epoch(begin=0)

    # What users see.

    @property
    def epoch(self) -> int:
        """The epoch in progress, from 0; counts up when an epoch's last round is done."""
        return self._epoch

    @property
    def inner_step(self) -> int:
        """Inner steps done in the round in progress."""
        return self._steps_done

    @property
    def share(self) -> Share:
        """Part of this rank in the round in progress."""
        return self._rounds[0].shares[self.rank] if self._rounds else Share(0, 0)

    @property
    def shares(self) -> tuple[Share, ...]:
        """All ranks' parts of the round in progress."""
        return self._rounds[0].shares if self._rounds else ()

    def __len__(self) -> int:
        """Batches that this rank has still to train on in this epoch: an estimate.

        Exact for the rounds that are planned, at the present speeds for the others.
        """
        steps = sum(r.shares[self.rank].steps for r in self._rounds) - self._steps_done
        if self._rounds and (rest := self.length - self._planned_end()):
            shares = self._full_round()
            steps += -(-rest * shares[self.rank].steps // sum(s.samples for s in shares))
        return steps

    def __iter__(self) -> Iterator[list[int]]:
        """Draw this rank's batches from the first one not trained on to the end of the epoch."""
        self._iterator += 1
        iterator = self._iterator
        if self._on_iteration is None:
            self._drawn_ahead = 1
        self._drawn = self._steps_done
        epoch = self._epoch
        if self._on_iteration is not None:
            self._on_iteration(epoch)  # may take part in rounds in which this rank has no step
        while self._epoch == epoch and self._iterator == iterator:
            batch = self._draw()
            if batch is None:
                self._finish_alone()
                return
            yield batch
            self._finish_alone()

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to go on with the first batch not trained on.

        Every rank's state goes into the checkpoint. At another world size the states of the old
        ranks agree on the round that was in progress, so any of them will do.
        """
        return {
            "version": _STATE_VERSION,
            "seed": self.seed,
            "length": self.length,
            "world_size": self.world_size,
            "rank": self.rank,
            "epoch": self._epoch,
            "begin": self._rounds[0].begin if self._rounds else 0,
            "steps_done": self._steps_done,
            "open": self._open,
            "rounds": [[(s.steps, s.samples) for s in r.shares] for r in self._rounds],
            "costs": [(c.step_s, c.sample_s, c.max_batch_size) for c in self._costs],
            "measured": self._measured,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken.

        With the same number of ranks every batch that was not trained on follows, in the same
        sizes. With another number of ranks the round that was in progress starts again, from the
        same samples: an index is part of one completed round an epoch.
        """
        check_state("GeoMeshSampler", state, _STATE_VERSION, self.state_dict())
        for key, mine in (("length", self.length), ("seed", self.seed)):
            if state[key] != mine:
                raise ValueError(
                    f"the state is of a sampler with {key} {state[key]}, this one has {mine}: "
                    f"the order of samples would differ"
                )
        epoch, begin, done = state["epoch"], state["begin"], state["steps_done"]
        if epoch < 0 or not 0 <= begin <= self.length or done < 0:
            raise ValueError(
                f"the state is damaged: epoch {epoch}, sample {begin} of {self.length}, {done} "
                f"steps done"
            )
        same_world = state["world_size"] == self.world_size
        rounds, costs = deque[_Round](), self._costs
        if same_world:
            if state["rank"] != self.rank and done:
                raise ValueError(
                    f"the state was taken by rank {state['rank']} in the middle of a round, this "
                    f"is rank {self.rank}: only states of the ends of rounds are common to all "
                    f"ranks"
                )
            end = begin
            for shares in state["rounds"]:
                rounds.append(_Round(end, tuple(Share(*share) for share in shares)))
                end += rounds[-1].samples
            if (
                end > self.length
                or (not rounds and begin < self.length)
                or any(len(round_.shares) != self.world_size for round_ in rounds)
                or len(state["costs"]) != self.world_size
                or done > (rounds[0].shares[self.rank].steps if rounds else 0)
            ):
                raise ValueError(
                    f"the state is damaged: {len(rounds)} rounds from sample {begin} to {end} of "
                    f"{self.length}, {done} steps done, {len(state['costs'])} ranks' costs"
                )
            costs = [
                RankCost(step_s, sample_s, mine.max_batch_size)
                for (step_s, sample_s, _), mine in zip(state["costs"], self._costs, strict=True)
            ]
        # All is well: nothing below fails.
        self._epoch = epoch
        self._iterator += 1
        if not same_world:
            self._steps_done = self._drawn = 0
            self._begin_epoch(begin=begin)
            return
        self._rounds = rounds
        self._costs = costs
        self._measured = state["measured"]
        self._full = None
        self._open = state["open"]
        self._steps_done = self._drawn = done

    # What the training loop calls.

    def attach(self, on_iteration: Callable[[int], None]) -> None:
        """Let a training loop say which steps are done.

        ``on_iteration`` is called with the epoch whenever an iteration starts: a rank may have no
        step in an epoch's first round, and nothing else tells it to take part.
        """
        if self._on_iteration is not None:
            raise RuntimeError("the sampler already belongs to another GeoMesh that is running")
        self._on_iteration = on_iteration
        self._drawn = self._steps_done

    def detach(self) -> None:
        """End what `attach` began."""
        self._on_iteration = None

    def step_done(self) -> int:
        """Count an inner step; return the samples it was trained on."""
        if self._steps_done >= self.share.steps:
            raise RuntimeError(
                f"the optimizer stepped more often than the sampler drew batches in the epoch "
                f"({self._steps_done + 1} steps in a round of {self.share.steps})"
            )
        if self._drawn <= self._steps_done:
            raise RuntimeError(
                "the optimizer stepped without a batch from the sampler: pass the sampler to the "
                "DataLoader as batch_sampler, and step once a batch"
            )
        begin, end = self.share.batch(self._steps_done)
        self._steps_done += 1
        return end - begin

    def observe(self, batch_size: int, compute_s: float, wait_s: float) -> None:
        """Learn how long an inner step computed and how long it waited for its data."""
        self._model.observe(batch_size, compute_s)
        self._waits.append(wait_s)

    def report(self) -> RankReport:
        """Return what this rank tells the others in this round."""
        cost = self._model.fit() or RankCost(0.0, 0.0, self.max_batch_size)
        waits, self._waits = sorted(self._waits), []
        return RankReport(
            cost.step_s,
            cost.sample_s,
            waits[(len(waits) - 1) // 2] if waits else 0.0,
            self._drawn_ahead,
            self._checksum(),
        )

    def check(self, reports: Sequence[RankReport]) -> None:
        """Raise if the ranks are not in the same round of the same plan."""
        odd = [r for r, report in enumerate(reports) if report.plan != self._checksum()]
        if odd:
            raise RuntimeError(
                f"rank {self.rank} and ranks {odd} hold different plans (epoch {self._epoch}, "
                f"sample {self._rounds[0].begin if self._rounds else 0} on rank {self.rank}): "
                f"were different sampler states loaded?"
            )

    def round_done(self, reports: Sequence[RankReport]) -> None:
        """End the round in progress and plan on from all ranks' reports."""
        if self._steps_done != self.share.steps:
            raise RuntimeError(
                f"a round of {self.share.steps} steps ended after {self._steps_done}"
            )
        done = self._rounds.popleft()
        self._steps_done = 0
        self._drawn -= done.shares[self.rank].steps
        end = done.begin + done.samples
        ahead = [report.drawn_ahead - 1 for report in reports]
        if self._open and end < self.length:
            # Rounds that some rank has drawn from already stay as they are, on all ranks.
            self._extend(end, ahead, exactly=True)
            self._open = False
        self._learn(reports)
        if end == self.length:
            self._epoch += 1
            self._drawn = 0
            self._begin_epoch(begin=0)
            return
        if not self._rounds:
            self._plan_round(end)
        first = self._rounds[0].shares
        self._extend(end, [a + share.steps for a, share in zip(ahead, first, strict=True)])

    # The plan.

    def _begin_epoch(self, begin: int) -> None:
        self._rounds.clear()
        self._open = True
        self._drawn_ahead = 1
        if begin < self.length:
            self._plan_round(begin)

    def _plan_round(self, begin: int) -> None:
        shares = self._full_round()
        rest = self.length - begin
        samples = sum(share.samples for share in shares)
        if rest <= samples or (rest <= (1 + _SMALL_REST) * samples and self._has_room(rest)):
            shares = balance_rest(self._costs, rest)
        self._rounds.append(_Round(begin, tuple(shares)))

    def _full_round(self) -> list[Share]:
        if self._full is None:
            self._full = self._balance_full_round()
        return self._full

    def _balance_full_round(self) -> list[Share]:
        if self._measured:
            return balance(self._costs, **self._bounds)
        # The first round: equal steps, so mostly waiting; just enough to tell the ranks apart.
        most, least = self._bounds["inner_steps"], self._bounds["min_inner_steps"]
        steps = min(max(_FIRST_STEPS, least), most)
        return balance(self._costs, **{**self._bounds, "inner_steps": steps, "min_samples": None})

    def _has_room(self, samples: int) -> bool:
        most = self._bounds["max_inner_steps"]
        fits = most is None or all(
            share.steps <= most for share in balance_rest(self._costs, samples)
        )
        return fits and samples <= (self._bounds["max_samples"] or samples)

    def _planned_end(self) -> int:
        return self._rounds[-1].begin + self._rounds[-1].samples if self._rounds else self.length

    def _extend(self, begin: int, steps: Sequence[int], exactly: bool = False) -> None:
        """Plan until each rank r has ``steps[r]`` steps from ``begin`` on, or the epoch ends."""

        def enough(rounds: Sequence[_Round]) -> bool:
            return all(
                sum(round_.shares[rank].steps for round_ in rounds) >= least
                for rank, least in enumerate(steps)
            )

        planned, self._rounds = self._rounds, deque()
        end = begin
        while end < self.length:
            if enough(self._rounds) and (exactly or not planned):
                break
            if planned:
                self._rounds.append(planned.popleft())
            else:
                self._plan_round(end)
            end = self._planned_end()
        if self._drawn > sum(round_.shares[self.rank].steps for round_ in self._rounds):
            raise RuntimeError(self._too_far_ahead())

    def _learn(self, reports: Sequence[RankReport]) -> None:
        known = [r.sample_s > 0 for r in reports]
        if not any(known):
            return
        limits = [cost.max_batch_size for cost in self._costs]
        fresh = [
            RankCost(r.step_s + r.wait_s, r.sample_s, limit) if r.sample_s > 0 else None
            for r, limit in zip(reports, limits, strict=True)
        ]
        steps_s = [cost.full_step_s for cost in fresh if cost is not None]
        mean_s = sum(steps_s) / len(steps_s)
        for rank, cost in enumerate(fresh):
            if cost is not None:
                self._costs[rank] = cost
            elif not self._measured:
                self._costs[rank] = RankCost(0.0, mean_s / limits[rank], limits[rank])
        self._measured = True
        self._full = None

    def _checksum(self) -> int:
        if not self._rounds:
            return 0
        text = repr((self.seed, self._epoch, self._rounds[0]))
        return zlib.crc32(text.encode())

    # Drawing.

    def _draw(self) -> list[int] | None:
        step = self._drawn
        position = 0
        while True:
            if position == len(self._rounds):
                if not self._rounds or self._planned_end() == self.length:
                    if self._open:  # seeing the end fixes the plan up to there: see _extend
                        self._note_drawn(self._drawn + 1)
                    return None
                if not self._open:
                    raise RuntimeError(self._too_far_ahead())
                self._plan_round(self._planned_end())
            share = self._rounds[position].shares[self.rank]
            if step < share.steps:
                break
            step -= share.steps
            position += 1
        self._drawn += 1
        self._note_drawn(self._drawn)
        begin, end = share.batch(step)
        first = self._rounds[position].slice_begin(self.rank)
        return self._epoch_order()[first + begin : first + end].tolist()

    def _note_drawn(self, drawn: int) -> None:
        self._drawn_ahead = max(self._drawn_ahead, drawn - self._steps_done)

    def _epoch_order(self) -> torch.Tensor:
        if self._order is None or self._order[0] != self._epoch:
            generator = torch.Generator()
            generator.manual_seed((self.seed * 0x9E3779B97F4A7C15 + self._epoch) % (1 << 63))
            self._order = (self._epoch, torch.randperm(self.length, generator=generator))
        return self._order[1]

    def _too_far_ahead(self) -> str:
        planned = sum(round_.shares[self.rank].steps for round_ in self._rounds)
        return (
            f"the DataLoader asks for a batch {self._drawn + 1 - self._steps_done} ahead of "
            f"training, but rounds are planned for {planned - self._steps_done} batches ahead, "
            f"from the {self._drawn_ahead} that it drew ahead before: keep num_workers * "
            f"prefetch_factor the same during an epoch, or lower it; or raise inner_steps"
        )

    def _finish_alone(self) -> None:
        """Without a training loop: what was drawn counts as trained on."""
        if self._on_iteration is not None:
            return
        while self._rounds and self._steps_done < self._drawn:
            self._steps_done += 1
            self._end_round_alone()
        self._end_round_alone()

    def _end_round_alone(self) -> None:
        while self._rounds and self._steps_done == self.share.steps:
            done = self._rounds.popleft()
            self._drawn -= self._steps_done
            self._steps_done = 0
            if (end := done.begin + done.samples) == self.length:
                self._epoch += 1
                self._begin_epoch(begin=0)
                return
            if not self._rounds:
                self._plan_round(end)

    def _meet(self, group: dist.ProcessGroup | None) -> tuple[int, list[int]]:
        """Compare the arguments with the other ranks'; return the rank and all memory limits."""
        if group is None and not (dist.is_available() and dist.is_initialized()):
            return 0, [self.max_batch_size]
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process is not in the sampler's process group")
        shared = repr((self.length, self.seed, sorted(self._bounds.items())))
        mine = torch.tensor(
            [self.max_batch_size, self.length, self.seed % (1 << 62), zlib.crc32(shared.encode())]
        )
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, mine, group=group)
        numbers = [tensor.tolist() for tensor in everyone]
        for other, (_, length, seed, checksum) in enumerate(numbers):
            if checksum != numbers[0][3]:
                raise ValueError(
                    f"ranks 0 and {other} made different samplers: length {numbers[0][1]} and "
                    f"{length}, seed {numbers[0][2]} and {seed}, or other bounds on steps or the "
                    f"global batch (all arguments but max_batch_size must be equal)"
                )
        return rank, [limits[0] for limits in numbers]
