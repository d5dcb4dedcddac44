"""The split of a round over ranks, and the cost models it works from."""

from __future__ import annotations

import random

import pytest

from torch_geomesh.balance import CostModel, RankCost, Share, balance, balance_rest

HALOS_SPEEDS = [
    *(0.232, 0.907, 0.828, 0.347, 0.574, 0.531, 0.722, 0.194),
    *(0.852, 0.132, 0.896, 0.107, 0.827, 0.515, 0.527, 0.788),
]


def per_sample(*seconds: float, max_batch_size: int = 64) -> list[RankCost]:
    return [RankCost(0.0, s, max_batch_size) for s in seconds]


def spread(costs: list[RankCost], shares: list[Share]) -> float:
    times = [cost.seconds(s.steps, s.samples) for cost, s in zip(costs, shares, strict=True)]
    return (max(times) - min(times)) / max(times)


def test_equal_ranks_get_equal_full_batches() -> None:
    assert balance(per_sample(1.0, 1.0, 1.0), inner_steps=8) == [Share(8, 512)] * 3


def test_steps_follow_speed_one_two_three() -> None:
    shares = balance(per_sample(6.0, 3.0, 2.0), inner_steps=6)
    assert shares == [Share(3, 192), Share(6, 384), Share(9, 576)]


def test_batch_shrinks_where_whole_steps_do_not_fit() -> None:
    # 16 steps in all: T = 9 full steps of rank 0; rank 1 is 1.4 times slower: 6.43 full steps.
    costs = per_sample(1.0, 1.4)
    assert balance(costs, inner_steps=8) == [Share(9, 576), Share(7, 411)]
    assert round(576 / 1.4) == 411


def test_step_time_is_part_of_the_split() -> None:
    costs = [RankCost(64.0, 1.0, 64), RankCost(0.0, 1.0, 64)]
    # Full steps take 128 and 64: of 12 steps 4 and 8, at T = 512.
    assert balance(costs, inner_steps=6) == [Share(4, 256), Share(8, 512)]


def test_memory_limits_differ() -> None:
    costs = [RankCost(0.0, 1.0, 64), RankCost(0.0, 1.0, 16)]
    assert balance(costs, inner_steps=10) == [Share(4, 256), Share(16, 256)]


def test_fewest_steps_lower_the_batch_of_a_slow_rank() -> None:
    shares = balance(per_sample(1.0, 10.0), inner_steps=10, min_inner_steps=4)
    assert shares == [Share(16, 1024), Share(4, 102)]


def test_most_steps_end_the_round_early_for_a_fast_rank() -> None:
    shares = balance(per_sample(1.0, 10.0), inner_steps=10, max_inner_steps=12)
    assert shares == [Share(12, 768), Share(8, 512)]


def test_bounds_on_samples() -> None:
    costs = per_sample(1.0, 1.0)
    assert balance(costs, inner_steps=8, max_samples=512) == [Share(4, 256)] * 2
    assert balance(costs, inner_steps=8, min_samples=1280) == [Share(10, 640)] * 2
    # The bound on steps wins.
    assert balance(costs, inner_steps=8, min_samples=1280, max_inner_steps=9) == [Share(9, 576)] * 2
    uneven = balance(per_sample(1.0, 3.0, 7.0), inner_steps=8, max_samples=500)
    assert 490 <= sum(s.samples for s in uneven) <= 500


@pytest.mark.parametrize(
    "bad",
    [
        {"inner_steps": 0},
        {"inner_steps": 4, "min_inner_steps": 5},
        {"inner_steps": 4, "max_inner_steps": 3},
        {"inner_steps": 4, "min_inner_steps": 4, "max_samples": 7},
    ],
)
def test_impossible_bounds_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"inner_steps|samples a round"):
        balance(per_sample(1.0, 1.0), **bad)


@pytest.mark.parametrize("inner_steps", [8, 32, 100])
@pytest.mark.parametrize("max_batch_size", [8, 64])
def test_predicted_spread_with_the_speeds_of_halos(inner_steps: int, max_batch_size: int) -> None:
    costs = [RankCost(0.2 / s, 0.8 / s / max_batch_size, max_batch_size) for s in HALOS_SPEEDS]
    shares = balance(costs, inner_steps=inner_steps)
    assert sum(s.steps for s in shares) <= 16 * inner_steps
    assert sum(s.steps for s in shares) >= 16 * (inner_steps - 1)
    assert all(s.batch_size <= max_batch_size for s in shares)
    # Half a sample more or less on the slowest rank, which has fewest.
    bound = 1 / min(s.samples for s in shares)
    assert spread(costs, shares) <= bound
    if inner_steps >= 32 and max_batch_size == 64:
        assert spread(costs, shares) < 0.01


def test_predicted_spread_of_random_ranks() -> None:
    rng = random.Random(0)
    for _ in range(200):
        ranks = rng.randint(2, 12)
        costs = [
            RankCost(rng.random(), rng.uniform(0.01, 0.1), rng.choice([16, 32, 48]))
            for _ in range(ranks)
        ]
        shares = balance(costs, inner_steps=rng.randint(8, 40))
        if min(s.steps for s in shares) >= 8:
            assert spread(costs, shares) < 0.01
        for cost, share in zip(costs, shares, strict=True):
            assert share.steps <= share.samples <= share.steps * cost.max_batch_size


def test_share_cuts_batches_evenly() -> None:
    share = Share(4, 10)
    assert [share.batch(i) for i in range(4)] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert share.batch_size == 3
    assert Share(0, 0).batch_size == 0


def test_rest_is_shared_exactly() -> None:
    assert balance_rest(per_sample(6.0, 3.0, 2.0), 12) == [Share(1, 2), Share(1, 4), Share(1, 6)]
    assert balance_rest(per_sample(1.0, 1.0, 1.0), 7) == [Share(1, 3), Share(1, 2), Share(1, 2)]
    assert balance_rest(per_sample(1.0, 1.0, 1.0), 2) == [Share(1, 1), Share(1, 1), Share(0, 0)]
    assert balance_rest(per_sample(1.0, 1.0), 0) == [Share(0, 0)] * 2
    assert balance_rest(per_sample(1.0, 100.0), 50) == [Share(1, 50), Share(0, 0)]
    assert balance_rest(per_sample(1.0, max_batch_size=4), 9) == [Share(3, 9)]


def test_rest_property() -> None:
    rng = random.Random(1)
    for _ in range(300):
        costs = [
            RankCost(rng.choice([0.0, rng.random()]), rng.uniform(0.01, 1.0), rng.randint(1, 40))
            for _ in range(rng.randint(1, 9))
        ]
        samples = rng.randint(0, 500)
        shares = balance_rest(costs, samples)
        assert sum(s.samples for s in shares) == samples
        for cost, share in zip(costs, shares, strict=True):
            assert share.batch_size <= cost.max_batch_size
            assert (share.steps == 0) == (share.samples == 0)


def observe(model: CostModel, batch_size: int, seconds: float, steps: int = 8) -> RankCost:
    for _ in range(steps):
        model.observe(batch_size, seconds)
    cost = model.fit()
    assert cost is not None
    return cost


def test_cost_model_before_and_after_the_first_step() -> None:
    model = CostModel(32)
    assert model.fit() is None
    assert observe(model, 32, 0.5).full_step_s == pytest.approx(0.5)
    cost = model.fit()  # no new steps
    assert cost is not None
    assert cost.full_step_s == pytest.approx(0.5)


def test_cost_model_ignores_outliers() -> None:
    model = CostModel(32)
    for i in range(9):
        model.observe(32, 30.0 if i in (0, 5) else 0.5)
    cost = model.fit()
    assert cost is not None
    assert cost.full_step_s == pytest.approx(0.5)


@pytest.mark.parametrize(("first_s", "found_s"), [(40.0, 0.5), (0.7, 0.6)])
def test_cost_model_leaves_a_slow_first_step_out(first_s: float, found_s: float) -> None:
    model = CostModel(32)
    model.observe(32, first_s)  # compiles, allocates; or is only a little late
    model.observe(32, 0.5)
    cost = model.fit()
    assert cost is not None
    assert cost.full_step_s == pytest.approx(found_s)


def test_cost_model_follows_a_flip_in_one_fit_and_smooths_jitter() -> None:
    model = CostModel(32)
    observe(model, 32, 0.5)
    assert observe(model, 32, 0.55).full_step_s == pytest.approx(0.525)
    assert observe(model, 32, 5.0).full_step_s == pytest.approx(5.0)
    assert observe(model, 32, 0.5).full_step_s == pytest.approx(0.5)


def test_cost_model_with_one_step_a_round_follows_after_two() -> None:
    model = CostModel(32)
    for _ in range(4):
        observe(model, 32, 0.5, steps=1)
    assert observe(model, 32, 5.0, steps=1).full_step_s == pytest.approx(0.5)
    assert observe(model, 32, 5.0, steps=1).full_step_s == pytest.approx(5.0)


def test_cost_model_tells_step_and_sample_time_apart() -> None:
    model = CostModel(64)
    observe(model, 64, 0.2 + 0.01 * 64)
    cost = observe(model, 32, 0.2 + 0.01 * 32)
    assert cost.step_s == pytest.approx(0.2)
    assert cost.sample_s == pytest.approx(0.01)
    # After a flip to a third of the speed, on the same batch, the shape is kept.
    cost = observe(model, 32, 3 * (0.2 + 0.01 * 32))
    assert cost.full_step_s == pytest.approx(3 * (0.2 + 0.01 * 64))
