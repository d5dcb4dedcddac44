"""The sampler, driven by a fleet of simulated ranks in one process with a virtual clock."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from torch_geomesh.sampler import GeoMeshSampler, RankReport

Speed = Callable[[int, int], float]  # (rank, round) -> samples a second


def make_samplers(length: int, limits: list[int], **arguments: int) -> list[GeoMeshSampler]:
    samplers = []
    for rank, limit in enumerate(limits):
        with mock.patch.object(GeoMeshSampler, "_meet", lambda self, group, r=rank: (r, limits)):
            samplers.append(GeoMeshSampler(length, max_batch_size=limit, **arguments))
    return samplers


class Fleet:
    """Trains all ranks round by round; rank r's loader draws up to prefetch[r] batches ahead."""

    def __init__(
        self,
        samplers: list[GeoMeshSampler],
        speed: Speed,
        prefetch: list[int] | None = None,
        step_s: float = 0.0,
    ) -> None:
        self.samplers = samplers
        self.speed = speed
        self.prefetch = prefetch or [1] * len(samplers)
        self.step_s = step_s
        self.round = 0
        self.rounds_of: list[int] = [0] * len(samplers)
        self.spreads: list[float] = []
        self.steps: list[list[int]] = []
        self.trained: list[list[int]] = [[] for _ in samplers]
        self._drawn: list[list[list[int]]] = [[] for _ in samplers]
        self._batches: list[Iterator[list[int]] | None] = [None] * len(samplers)
        self._waiting: list[int] = []
        for rank, sampler in enumerate(samplers):
            sampler.attach(lambda epoch, rank=rank: self._waiting.append(rank))

    def fill(self, rank: int) -> None:
        """What a loader does when its next batch is asked for."""
        batches = self._batches[rank]
        assert batches is not None
        while len(self._drawn[rank]) < self.prefetch[rank]:
            batch = next(batches, None)
            if batch is None:
                return
            self._drawn[rank].append(batch)

    def begin_epoch(self) -> None:
        self._drawn = [[] for _ in self.samplers]
        self._batches = [iter(sampler) for sampler in self.samplers]
        for rank in range(len(self.samplers)):
            self.fill(rank)

    def run_round(self, steps: list[int] | None = None) -> None:
        """Train all ranks up to the round's end, or by ``steps`` steps and no further."""
        times, counts = [], []
        shares = self.samplers[0].shares
        assert all(sampler.shares == shares for sampler in self.samplers)
        for rank, sampler in enumerate(self.samplers):
            took = 0.0
            todo = sampler.share.steps - sampler.inner_step if steps is None else steps[rank]
            counts.append(todo)
            for _ in range(todo):
                self.fill(rank)
                batch = self._drawn[rank].pop(0)
                assert len(batch) <= sampler.max_batch_size
                seconds = self.step_s + len(batch) / self.speed(rank, self.round)
                assert sampler.step_done() == len(batch)
                sampler.observe(len(batch), seconds, 0.0)
                self.trained[rank].extend(batch)
                took += seconds
            times.append(took)
        if steps is not None:
            return
        reports = [RankReport.from_list(s.report().to_list()) for s in self.samplers]
        for sampler in self.samplers:
            sampler.check(reports)
            sampler.round_done(reports)
        self.spreads.append((max(times) - min(times)) / max(times))
        self.steps.append(counts)
        self.round += 1

    def run_epoch(self, begin: bool = True) -> list[int]:
        """Train one epoch; return how often each index was drawn."""
        epoch = self.samplers[0].epoch
        if begin:
            self.begin_epoch()
        while self.samplers[0].epoch == epoch and self.samplers[0].length:
            self.run_round()
        assert {sampler.epoch for sampler in self.samplers} == {self.samplers[0].epoch}
        assert all(next(batches, None) is None for batches in self._batches if batches)
        counts = [0] * self.samplers[0].length
        for rank in range(len(self.samplers)):
            for index in self.trained[rank]:
                counts[index] += 1
            self.trained[rank] = []
        return counts


def constant(*speeds: float) -> Speed:
    return lambda rank, round_: speeds[rank]


@pytest.mark.parametrize("length", [0, 1, 2, 3, 10, 97, 1000])
@pytest.mark.parametrize("prefetch", [[1, 1, 1], [2, 8, 4], [1, 300, 1]])
def test_each_index_once_an_epoch(length: int, prefetch: list[int]) -> None:
    samplers = make_samplers(length, [8, 4, 6], inner_steps=5)
    fleet = Fleet(samplers, constant(1, 2, 3), prefetch)
    for _ in range(3):
        assert fleet.run_epoch() == [1] * length
    assert samplers[0].epoch == (3 if length else 0)


def test_each_index_once_whatever_the_speeds_do() -> None:
    rng = random.Random(0)
    for _ in range(25):
        ranks = rng.randint(1, 6)
        samplers = make_samplers(
            rng.randint(0, 3000),
            [rng.randint(1, 16) for _ in range(ranks)],
            inner_steps=rng.randint(1, 12),
            seed=rng.randint(0, 99),
        )
        speeds = [[10 ** rng.uniform(-1, 1) for _ in range(7)] for _ in range(ranks)]
        fleet = Fleet(
            samplers,
            lambda rank, round_, s=speeds: s[rank][round_ % 7],
            [rng.randint(1, 12) for _ in range(ranks)],
        )
        for _ in range(2):
            assert fleet.run_epoch() == [1] * samplers[0].length


def test_order_depends_on_seed_and_epoch_only() -> None:
    def order(seed: int, limits: list[int], epochs: int = 1) -> list[int]:
        fleet = Fleet(make_samplers(50, limits, seed=seed, inner_steps=3), constant(1, 2, 3))
        for _ in range(epochs - 1):
            fleet.run_epoch()
        fleet.begin_epoch()
        found, epoch = [], fleet.samplers[0].epoch
        while fleet.samplers[0].epoch == epoch:
            fleet.run_round()
            for trained in fleet.trained:
                found.extend(trained)
                trained.clear()
        return found

    assert order(0, [4]) == order(0, [7, 2, 5])
    assert order(0, [4], epochs=2) == order(0, [7, 2, 5], epochs=2)
    assert order(0, [4]) != order(1, [4])
    assert order(0, [4]) != order(0, [4], epochs=2)


def test_ranks_finish_together_from_the_second_round_on() -> None:
    samplers = make_samplers(100_000, [64, 64, 32, 64], inner_steps=16)
    fleet = Fleet(samplers, constant(100, 900, 400, 250), step_s=0.05)
    fleet.begin_epoch()
    for _ in range(6):
        fleet.run_round()
    assert fleet.steps[0] == [2, 2, 2, 2]  # short and equal: nothing is known yet
    assert max(fleet.spreads[1:]) < 0.06  # step and sample time are still being told apart
    assert max(fleet.spreads[3:]) < 0.01
    assert 15 * 4 <= sum(fleet.steps[-1]) <= 16 * 4


@pytest.mark.parametrize(("prefetch", "late"), [([1, 1], 1), ([4, 4], 2), ([30, 2], 3)])
def test_a_speed_flip_is_followed_within_three_rounds(prefetch: list[int], late: int) -> None:
    samplers = make_samplers(200_000, [32, 32], inner_steps=12)

    def flip(rank: int, round_: int) -> float:
        return 1000.0 if (rank == 0) == (round_ < 20) else 100.0

    fleet = Fleet(samplers, flip, prefetch)
    fleet.begin_epoch()
    for _ in range(26):
        fleet.run_round()
    assert fleet.spreads[19] < 0.02
    assert fleet.spreads[20] > 0.9
    assert all(spread < 0.02 for spread in fleet.spreads[20 + late :])


def test_last_round_is_shared_out_and_may_leave_a_rank_without_steps() -> None:
    samplers = make_samplers(2, [4, 4, 4], inner_steps=4)
    fleet = Fleet(samplers, constant(1, 1, 1))
    fleet.begin_epoch()
    assert [s.share.samples for s in samplers] == [1, 1, 0]
    fleet.run_round()
    assert fleet.steps == [[1, 1, 0]]
    assert [s.epoch for s in samplers] == [1, 1, 1]


def test_a_small_rest_joins_the_round_before() -> None:
    # The first round takes 3 steps of 4 samples on 2 ranks: 24.
    for length, rounds in ((24, 1), (30, 1), (31, 2), (48, 2)):
        fleet = Fleet(
            make_samplers(length, [4, 4], inner_steps=3, min_inner_steps=3), constant(1, 1)
        )
        fleet.run_epoch()
        assert fleet.round == rounds
    # Not where the bound on steps would break.
    fleet = Fleet(
        make_samplers(30, [4, 4], inner_steps=3, min_inner_steps=3, max_inner_steps=3),
        constant(1, 1),
    )
    fleet.run_epoch()
    assert fleet.steps == [[3, 3], [1, 1]]


def test_bounds_are_kept() -> None:
    samplers = make_samplers(
        20_000, [8, 8, 8], inner_steps=8, min_inner_steps=3, max_inner_steps=12
    )
    fleet = Fleet(samplers, constant(1, 50, 50))
    fleet.run_epoch()
    inner = [steps for counts in fleet.steps[:-1] for steps in counts]
    assert min(inner) == 3
    assert max(inner) == 12

    samplers = make_samplers(20_000, [8, 8], inner_steps=8, max_global_batch=60)
    fleet = Fleet(samplers, constant(1, 2))
    fleet.begin_epoch()
    for _ in range(5):
        assert sum(share.samples for share in samplers[0].shares) <= 60
        fleet.run_round()


def test_len_counts_what_is_left() -> None:
    samplers = make_samplers(10_000, [8, 8], inner_steps=8)
    fleet = Fleet(samplers, constant(1, 3))
    fleet.begin_epoch()
    for _ in range(3):
        fleet.run_round()
    estimate = len(samplers[1])
    steps = sum(counts[1] for counts in fleet.steps)
    fleet.run_epoch(begin=False)
    assert sum(counts[1] for counts in fleet.steps) - steps == pytest.approx(estimate, rel=0.05)


def test_a_loader_that_draws_further_ahead_than_planned_is_told_so() -> None:
    samplers = make_samplers(10_000, [8, 8], inner_steps=8)
    fleet = Fleet(samplers, constant(1, 1), [2, 2])
    fleet.begin_epoch()
    fleet.run_round()
    fleet.run_round()
    fleet.prefetch = [2, 40]
    with pytest.raises(RuntimeError, match=r"num_workers \*\s+prefetch_factor|num_workers"):
        fleet.run_round()


def test_different_plans_are_noticed() -> None:
    samplers = make_samplers(100, [8, 8])
    reports = [sampler.report() for sampler in samplers]
    reports[1] = RankReport(1.0, 1.0, 0.0, 1, reports[1].plan ^ 1)
    with pytest.raises(RuntimeError, match=r"rank 0 and ranks \[1\] hold different plans"):
        samplers[0].check(reports)


def test_steps_without_batches_are_refused() -> None:
    sampler = make_samplers(100, [8])[0]
    sampler.attach(lambda epoch: None)
    with pytest.raises(RuntimeError, match="batch_sampler"):
        sampler.step_done()
    next(iter(sampler))
    sampler.step_done()
    with pytest.raises(RuntimeError, match="batch_sampler"):
        sampler.step_done()


# Resuming.


@pytest.mark.parametrize("prefetch", [[1, 1, 1], [3, 9, 2]])
def test_resume_in_the_middle_of_a_round_is_exact(prefetch: list[int]) -> None:
    def fleet_of(samplers: list[GeoMeshSampler]) -> Fleet:
        return Fleet(samplers, constant(3, 5, 7), prefetch)

    arguments = {"length": 2000, "limits": [8, 8, 8], "inner_steps": 6, "seed": 5}
    whole = fleet_of(make_samplers(**arguments))
    whole.begin_epoch()
    broken = fleet_of(make_samplers(**arguments))
    broken.begin_epoch()
    for fleet in (whole, broken):
        for _ in range(3):
            fleet.run_round()
        fleet.run_round(steps=[2, 0, 1])
    states = [copy.deepcopy(sampler.state_dict()) for sampler in broken.samplers]
    assert [state["steps_done"] for state in states] == [2, 0, 1]

    fresh = make_samplers(**arguments)
    for sampler, state in zip(fresh, states, strict=True):
        sampler.load_state_dict(state)
    resumed = fleet_of(fresh)
    resumed.begin_epoch()
    for trained in whole.trained:
        trained.clear()
    whole.run_round()
    resumed.run_round()
    assert resumed.trained == whole.trained
    # Costs measured before are part of the state, the step times that led to them are not: from
    # here on plans may differ, but every index still comes once.
    for before, after in zip(broken.trained, resumed.trained, strict=True):
        after.extend(before)
    assert resumed.run_epoch(begin=False) == [1] * 2000


def test_resume_at_another_world_size_repeats_only_the_round_in_progress() -> None:
    fleet = Fleet(make_samplers(1000, [8, 8, 8], inner_steps=4), constant(3, 5, 7))
    fleet.begin_epoch()
    for _ in range(3):
        fleet.run_round()
    committed = [list(trained) for trained in fleet.trained]
    fleet.run_round(steps=[1, 2, 0])
    state = fleet.samplers[1].state_dict()

    samplers = make_samplers(1000, [8, 16], inner_steps=4)
    for sampler in samplers:
        sampler.load_state_dict(state)
    resumed = Fleet(samplers, constant(1, 3))
    resumed.trained[0] = [index for trained in committed for index in trained]
    assert resumed.run_epoch() == [1] * 1000
    assert resumed.run_epoch() == [1] * 1000


def test_states_that_do_not_fit_are_refused() -> None:
    sampler = make_samplers(100, [8, 8])[0]
    with pytest.raises(ValueError, match="seed"):
        make_samplers(100, [8, 8], seed=1)[0].load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match="length 100, this one has 90"):
        make_samplers(90, [8, 8])[0].load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match="version"):
        sampler.load_state_dict({})
    sampler.attach(lambda epoch: None)
    next(iter(sampler))
    sampler.step_done()
    with pytest.raises(ValueError, match=r"taken by rank 0 .* this is rank 1"):
        make_samplers(100, [8, 8])[1].load_state_dict(sampler.state_dict())


@pytest.mark.parametrize("key", ["length", "seed", "rounds", "costs", "measured"])
def test_a_state_that_lacks_something_is_refused(key: str) -> None:
    sampler = make_samplers(100, [8, 8])[0]
    state = sampler.state_dict()
    del state[key]
    with pytest.raises(ValueError, match=rf"GeoMeshSampler: the state has no \['{key}'\]"):
        sampler.load_state_dict(state)
    with pytest.raises(TypeError, match="GeoMeshSampler: expected a state_dict, got NoneType"):
        sampler.load_state_dict(None)  # type: ignore[arg-type]


# Alone, with a real DataLoader.


@pytest.mark.parametrize("workers", [0, 2])
def test_works_alone_with_any_data_loader(workers: int) -> None:
    data = torch.arange(103)
    sampler = GeoMeshSampler(data, max_batch_size=8, seed=3)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
    assert len(loader) == 13
    epochs = [torch.cat(list(loader)).tolist() for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(103))
    assert epochs[0] != epochs[1]
    assert sampler.epoch == 2


def test_an_empty_data_set_gives_no_batch() -> None:
    assert list(DataLoader([], batch_sampler=GeoMeshSampler(0, max_batch_size=8))) == []


def test_broken_off_iteration_goes_on_with_what_was_not_trained_on() -> None:
    sampler = GeoMeshSampler(40, max_batch_size=4, inner_steps=3)
    sampler.attach(lambda epoch: None)
    batches = iter(sampler)
    first = [next(batches), next(batches), next(batches)]
    sampler.step_done()  # two of the three were only prefetched
    assert [batch for batch, _ in zip(sampler, range(2), strict=False)] == first[1:]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_batch_size": 4, "inner_steps": 0}, "inner_steps"),
        ({"max_batch_size": 4, "min_inner_steps": 9, "inner_steps": 8}, "min_inner_steps"),
    ],
)
def test_bad_arguments_are_refused(bad: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        GeoMeshSampler(10, **bad)
    with pytest.raises(ValueError, match="length"):
        GeoMeshSampler(-1, max_batch_size=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_batch_size", 2.5),
        ("max_batch_size", "4"),
        ("max_batch_size", True),
        ("seed", "x"),
        ("seed", 1.5),
        ("inner_steps", 2.5),
        ("min_inner_steps", 1.5),
        ("max_inner_steps", "many"),
        ("min_global_batch", 1.5),
        ("max_global_batch", 12.0),
    ],
)
def test_what_is_no_whole_number_is_refused_by_name(name: str, value: object) -> None:
    arguments = {"max_batch_size": 4, name: value}
    text = f"GeoMeshSampler: expected a whole number for {name}, got {value!r}"
    with pytest.raises(TypeError, match=re.escape(text)):
        GeoMeshSampler(100, **arguments)  # type: ignore[arg-type]


def test_whole_numbers_of_other_types_are_taken() -> None:
    plain = GeoMeshSampler(100, max_batch_size=4, seed=3, inner_steps=8)
    other = GeoMeshSampler(
        np.int64(100), max_batch_size=np.int32(4), seed=torch.tensor(3), inner_steps=np.int64(8)
    )
    assert other.state_dict() == plain.state_dict()
    assert list(other) == list(plain)


@pytest.mark.parametrize("data", [10.5, None, True, iter([])])
def test_a_data_set_without_a_length_is_refused(data: object) -> None:
    with pytest.raises(TypeError, match="GeoMeshSampler: expected a data set with a length"):
        GeoMeshSampler(data, max_batch_size=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "damage",
    [
        {"begin": -5},
        {"begin": 1000},
        {"epoch": -1},
        {"steps_done": 999},
        {"rounds": []},
        {"costs": []},
        {"rounds": [[(1, 4)]]},
        {"rank": 1, "steps_done": 1},
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage: dict[str, Any]) -> None:
    sampler, untouched = (make_samplers(100, [4, 4], inner_steps=4)[0] for _ in range(2))
    with pytest.raises(ValueError, match=r"damaged|middle of a round"):
        sampler.load_state_dict({**sampler.state_dict(), **damage})
    assert sampler.state_dict() == untouched.state_dict()
    assert list(sampler) == list(untouched)
