"""GeoMesh and DiLoCo on several ranks: over the reference codec and over the real backend."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import reference_codec as reference
import torch
import torch.distributed as dist
from fake_geomesh import encode, fake_geomesh, outer_step_, pseudo_gradients
from ranks import run_ranks, start_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torch_geomesh.baselines import DiLoCo
from torch_geomesh.rounds import RoundEvent
from torch_geomesh.sampler import GeoMeshSampler
from torch_geomesh.seeds import derive_seed
from torch_geomesh.train import GeoMesh, row_elements

KINDS = ["fake", "geomesh"]


@pytest.fixture(autouse=True)
def _one_thread_as_the_ranks_have() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(world: int, kind: str, function: Any, *args: Any) -> list[Any]:
    backend = "gloo" if kind == "fake" else kind
    return run_ranks(world, _inside, kind, function, args, init={"backend": backend})


def _inside(kind: str, function: Any, args: tuple[Any, ...]) -> Any:
    with fake_geomesh() if kind == "fake" else contextlib.nullcontext():
        return function(*args)


def make_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(5, 20, bias=False), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 3)
    )


def make_data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 5, generator=generator)
    return TensorDataset(x, torch.tanh(x @ torch.randn(5, 3, generator=generator)))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


# A round, bit for bit.

STEPS = 4  # two rounds of two inner steps


def batch_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    x, y = make_data(3 * STEPS * 8).tensors
    begin = (rank * STEPS + step) * 8
    return x[begin : begin + 8], y[begin : begin + 8]


def two_rounds() -> tuple[list[bytes], list[RoundEvent], dict[str, Any]]:
    rank = dist.get_rank()
    model = make_model(seed=rank)  # ranks start unequal: entry makes them equal
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))
    with GeoMesh(model, optimizer, inner_steps=2, seed=7, outer_lr=0.5, form="exchange") as mesh:
        for step in range(STEPS):
            mesh.count_tokens(100 * rank)  # rank 0 counts none: it has no say
            train_step(model, optimizer, *batch_of(rank, step))
        return (
            [p.detach().numpy().tobytes() for p in model.parameters()],
            list(mesh.events),
            {"hash": mesh.round_hash(), "total": mesh.total_tokens},
        )


def two_rounds_in_a_few_lines() -> list[bytes]:
    models = [make_model(seed=0) for _ in range(3)]
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.1 * (rank + 1)) for rank, m in enumerate(models)
    ]
    parameters = [[p.detach() for p in m.parameters()] for m in models]
    anchor = [p.clone() for p in parameters[0]]
    momentum = torch.zeros(sum(a.numel() for a in anchor))
    rows = [row_elements(a.shape) for a in anchor]
    for round_ in range(2):
        seed, codes = derive_seed(7, round_), []
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for step in (2 * round_, 2 * round_ + 1):
                train_step(model, optimizer, *batch_of(rank, step))
            values = pseudo_gradients(parameters[rank], anchor)
            vector = reference.Vector([v.numpy() for v in values], rows)
            codes.append(encode(vector, seed, rank, weight=200 * rank))
        mean = torch.from_numpy(reference.decode_mean(codes, vector, rotation_seed=seed))
        outer_step_(anchor, parameters[0], momentum, mean, 0.5, 0.9)
        for other in parameters[1:]:
            for p, a in zip(other, anchor, strict=True):
                p.copy_(a)
    return [p.numpy().tobytes() for p in parameters[0]]


def test_two_rounds_bit_for_bit() -> None:
    results = run(3, "fake", two_rounds)
    expected = two_rounds_in_a_few_lines()
    for parameters, _, _ in results:
        assert parameters == expected


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_hold_the_same_bits_and_agree_on_tokens(kind: str) -> None:
    results = run(3, kind, two_rounds)
    assert results[0][0] == results[1][0] == results[2][0]
    assert len({result["hash"] for _, _, result in results}) == 1
    assert {result["total"] for _, _, result in results} == {2 * 600}
    for rank, (_, events, _) in enumerate(results):
        assert [e.tokens for e in events] == [200 * rank] * 2
        assert [e.total_tokens for e in events] == [600] * 2
        assert all(e.bytes_sent is not None for e in events)
        assert events[0].straggler_wait_s is not None
        assert events[0].wan_wait_s is not None
        assert events[0].straggler_wait_s + events[0].wan_wait_s == pytest.approx(
            events[0].end - events[0].ready
        )
    # Someone was last, and waited for nobody.
    last = [events[0].waited_for is None for _, events, _ in results]
    assert last.count(True) == 1
    assert {e[0].waited_for for _, e, _ in results} - {None} == {last.index(True)}


def test_real_rounds_are_near_the_exact_ones() -> None:
    """The real codec's parameters lie as near the fp32 result as the reference codec's."""
    models = [make_model(seed=0) for _ in range(3)]
    exact = [a.clone() for a in [p.detach() for p in models[0].parameters()]]
    start = [a.clone() for a in exact]
    mean = [torch.zeros_like(a) for a in exact]
    for rank, model in enumerate(models):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))
        for step in range(2):
            train_step(model, optimizer, *batch_of(rank, step))
        for m, a, p in zip(mean, start, model.parameters(), strict=True):
            m += (a - p.detach()) * (rank / 3)
    results = run(3, "geomesh", one_round)
    moved = torch.cat(
        [(a - torch.from_numpy(b)).reshape(-1) for a, b in zip(start, results[0], strict=True)]
    )
    wanted = torch.cat([(0.5 * 1.9 * m).reshape(-1) for m in mean])
    assert torch.nn.functional.cosine_similarity(moved, wanted, dim=0) > 0.7
    assert moved.norm() < 2 * wanted.norm()


def one_round() -> list[np.ndarray]:
    rank = dist.get_rank()
    model = make_model(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))
    with GeoMesh(model, optimizer, inner_steps=2, outer_lr=0.5) as mesh:
        for step in range(2):
            mesh.count_tokens(100 * rank)
            train_step(model, optimizer, *batch_of(rank, step))
    return [p.detach().numpy() for p in model.parameters()]


# Ranks of different speed, a real loader, a whole run.


def whole_run(samples: int, epochs: int, workers: int, step_s: list[float]) -> dict[str, Any]:
    rank = dist.get_rank()
    model, data = make_model(seed=rank), make_data(samples)
    indexed = TensorDataset(torch.arange(samples), *data.tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler = GeoMeshSampler(samples, max_batch_size=8 + 4 * rank, inner_steps=6)
    loader = DataLoader(indexed, batch_sampler=sampler, num_workers=workers)
    # A rank is a daemonic process here, which may otherwise not have loader workers.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    hashes: list[str] = []
    drawn: list[list[int]] = []
    losses: list[float] = []
    with GeoMesh(
        model,
        optimizer,
        sampler=sampler,
        outer_momentum=0.5,
        on_round=lambda event: hashes.append(mesh.round_hash()),
    ) as mesh:
        for _ in range(epochs):
            drawn.append([])
            for index, x, y in loader:
                drawn[-1].extend(index.tolist())
                optimizer.zero_grad()
                model.eval()  # BatchNorm does not take batches of one
                with torch.no_grad():
                    losses.append(float(nn.functional.mse_loss(model(x), y)))
                model.train(len(x) > 1)
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                time.sleep(step_s[rank] * len(x))
                optimizer.step()
    steps = [event.inner_steps for event in mesh.events]
    waits = [event.straggler_wait_s for event in mesh.events]
    compute = [event.compute_s for event in mesh.events]
    return {
        "hashes": hashes,
        "drawn": drawn,
        "steps": steps,
        "waits": waits,
        "compute": compute,
        "losses": losses,
        "epoch": sampler.epoch,
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_uneven_ranks_share_each_epoch_and_agree_every_round(kind: str, workers: int) -> None:
    results = run(3, kind, whole_run, 700, 2, workers, [0.001, 0.003, 0.001])
    assert all(result["hashes"] == results[0]["hashes"] for result in results)
    assert len(results[0]["hashes"]) > 5
    assert {result["epoch"] for result in results} == {2}
    for epoch in range(2):
        indices = [index for result in results for index in result["drawn"][epoch]]
        assert sorted(indices) == list(range(700))
    # The slow rank does less, and is waited for less and less.
    late = slice(len(results[0]["steps"]) // 2, -1)
    assert sum(results[1]["steps"][late]) < sum(results[0]["steps"][late])
    first = results[0]["losses"][:5], results[0]["losses"][-5:]
    assert sum(first[1]) < sum(first[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("samples", [0, 1, 2, 10])
def test_ranks_without_samples_take_part(kind: str, samples: int) -> None:
    results = run(3, kind, whole_run, samples, 2, 0, [0.0, 0.0, 0.0])
    assert all(result["hashes"] == results[0]["hashes"] for result in results)
    assert len(results[0]["hashes"]) == (0 if samples == 0 else 2)
    for epoch in range(2):
        indices = [index for result in results for index in result["drawn"][epoch]]
        assert sorted(indices) == list(range(samples))


# What goes wrong on one rank.


def nan_on_rank_1() -> dict[str, Any]:
    rank = dist.get_rank()
    model = make_model(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GeoMesh(model, optimizer, inner_steps=2, residual_decay=0.5) as mesh:
        for step in range(3):
            train_step(model, optimizer, *batch_of(rank, step))
        if rank == 1:
            model[3].bias.register_hook(lambda gradient: gradient * float("nan"))
        before = copy.deepcopy(mesh.state_dict())
        error = ""
        try:
            train_step(model, optimizer, *batch_of(rank, 3))
        except RuntimeError as raised:
            error = str(raised)
        after = mesh.state_dict()
    same = all(
        torch.equal(before[what][name], after[what][name])
        for what in ("anchor", "momentum", "residual")
        for name in before["anchor"]
    )
    residual = torch.cat([r.reshape(-1) for r in after["residual"].values()])
    return {"error": error, "same": same, "round": mesh.round, "residual": residual.numpy()}


@pytest.mark.parametrize("kind", KINDS)
def test_nan_on_one_rank_ends_the_round_on_all_and_changes_nothing(kind: str) -> None:
    results = run(3, kind, nan_on_rank_1)
    assert "3.bias" in results[1]["error"]
    for result in results:
        assert result["error"]
        assert result["same"]
        assert result["round"] == 1
        assert np.isfinite(result["residual"]).all()
        assert np.abs(result["residual"]).sum() > 0


def rank_1_dies(tell: Any) -> dict[str, Any]:
    rank = dist.get_rank()
    model = make_model(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GeoMesh(model, optimizer, inner_steps=2) as mesh:
        for step in range(2):
            train_step(model, optimizer, *batch_of(rank, step))
        before = copy.deepcopy(mesh.state_dict())
        train_step(model, optimizer, *batch_of(rank, 2))
        tell("ready")
        if rank == 1:
            time.sleep(60)
        begin, error = time.monotonic(), ""
        try:
            train_step(model, optimizer, *batch_of(rank, 3))
        except RuntimeError as raised:
            error = str(raised)
        seconds = time.monotonic() - begin
    after = mesh.state_dict()
    same = all(
        torch.equal(before[what][name], after[what][name])
        for what in ("anchor", "momentum")
        for name in before["anchor"]
    )
    return {"error": error, "same": same, "round": mesh.round, "seconds": seconds}


def test_a_killed_rank_is_named_and_the_round_does_not_commit() -> None:
    world = start_ranks(3, rank_1_dies)
    for rank in range(3):
        assert world.receive(rank) == "ready"
    world.signal(1, signal.SIGKILL)
    outcomes = world.join(expect_dead=(1,))
    for rank in (0, 2):
        result = outcomes[rank].value
        assert result is not None, outcomes[rank].error
        assert "rank 1" in result["error"]
        assert result["same"]
        assert result["round"] == 1
        assert result["seconds"] < 20


def different_settings() -> str:
    rank = dist.get_rank()
    model = make_model(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for arguments in ({"outer_lr": 0.5 + rank}, {"seed": rank}):
        try:
            GeoMesh(model, optimizer, inner_steps=2, **arguments).__enter__()  # type: ignore[arg-type]
        except ValueError as error:
            found.append(str(error))
    other = nn.Sequential(nn.Linear(5, 20 + rank), nn.Linear(20 + rank, 3))
    try:
        GeoMesh(other, torch.optim.SGD(other.parameters(), lr=0.1), inner_steps=2).__enter__()
    except ValueError as error:
        found.append(str(error))
    try:
        GeoMeshSampler(100 + rank, max_batch_size=4)
    except ValueError as error:
        found.append(str(error))
    return "\n".join(found)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_differ_are_told_in_what(kind: str) -> None:
    for text in run(2, kind, different_settings):
        settings, seed, structure, length = text.splitlines()
        assert "ranks 0 and [1] differ in: settings" in settings
        assert "settings" in seed
        assert "model structure" in structure
        assert "length 100 and 101" in length


def tokens_counted_here_only(fake: bool, how: str) -> tuple[str, int]:
    rank = dist.get_rank()
    model = make_model(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = GeoMeshSampler(60, max_batch_size=4, inner_steps=4) if how == "sampler" else None
    batches = DataLoader(make_data(60), batch_sampler=sampler) if sampler else [batch_of(0, 0)] * 12
    steps = None if sampler else 4
    with GeoMesh(model, optimizer, sampler=sampler, inner_steps=steps) as mesh:
        try:
            for x, y in batches:
                if rank == 1 or (how == "later" and mesh.round == 0):
                    mesh.count_tokens(x.numel())
                train_step(model, optimizer, x, y)
        except RuntimeError as error:
            return str(error), mesh.round
    return "", mesh.round


@pytest.mark.parametrize("how", ["steps", "sampler"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_counted_on_some_ranks_only_are_refused(kind: str, how: str) -> None:
    for text, rounds in run(3, kind, tokens_counted_here_only, kind == "fake", how):
        assert "ranks [1] call count_tokens(), ranks [0, 2] do not" in text
        assert rounds == 0  # nothing was committed


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_counts_no_more_is_no_error(kind: str) -> None:
    # One that has counted goes on to count: without a call it has no tokens.
    assert run(2, kind, tokens_counted_here_only, kind == "fake", "later") == [("", 3), ("", 3)]


def not_geomesh() -> str:
    model = make_model(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        GeoMesh(model, optimizer, inner_steps=2)
    except TypeError as error:
        return str(error)
    return ""


def test_another_backend_is_refused() -> None:
    for text in run_ranks(2, not_geomesh, init={"backend": "gloo"}):
        assert "'gloo', not 'geomesh'" in text


# Resuming.


def resumed_run(stop: int | None) -> list[bytes]:
    """Four steps a rank; with ``stop``, everything is saved, made anew and loaded there."""
    rank = dist.get_rank()

    def parts() -> list[Any]:
        model = make_model(seed=rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return [model, optimizer, GeoMesh(model, optimizer, inner_steps=3, residual_decay=1.0)]

    model, optimizer, mesh = kept = parts()
    for step in range(8):
        if step == stop:
            states = copy.deepcopy([part.state_dict() for part in kept])
            model, optimizer, mesh = kept = parts()
            for part, state in zip(kept, states, strict=True):
                part.load_state_dict(state)
        with mesh:  # leaving and entering changes nothing
            train_step(model, optimizer, *batch_of(rank, step % STEPS))
    return [p.detach().numpy().tobytes() for p in model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_changes_no_bit(kind: str) -> None:
    whole = run(2, kind, resumed_run, None)
    assert run(2, kind, resumed_run, 3) == whole  # at a round's end
    assert run(2, kind, resumed_run, 5) == whole  # in the middle of one


def states_of_different_rounds() -> str:
    rank = dist.get_rank()
    model = make_model(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = GeoMesh(model, optimizer, inner_steps=1)
    states = [copy.deepcopy(mesh.state_dict())]
    with mesh:
        train_step(model, optimizer, *batch_of(rank, 0))
    states.append(copy.deepcopy(mesh.state_dict()))
    states[0]["rank"] = states[1]["rank"] = rank
    mesh = GeoMesh(model, optimizer, inner_steps=1)
    mesh.load_state_dict(states[rank])
    try:
        mesh.__enter__()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_different_rounds_are_refused(kind: str) -> None:
    for text in run(2, kind, states_of_different_rounds):
        assert "ranks 0 and [1] differ in: round" in text


# The baseline.


def diloco() -> tuple[list[bytes], int]:
    rank = dist.get_rank()
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    model = make_model(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))
    with DiLoCo(model, optimizer, inner_steps=2, outer_lr=0.5, parallel_groups=groups) as mesh:
        for step in range(STEPS):
            train_step(model, optimizer, *batch_of(rank, step))
    return [p.detach().numpy().tobytes() for p in model.parameters()], mesh.round


@pytest.mark.parametrize("kind", KINDS)
def test_diloco_is_the_plain_mean_and_the_same_outer_step(kind: str) -> None:
    results = run(2, kind, diloco)
    models = [make_model(seed=0) for _ in range(2)]
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.1 * (rank + 1)) for rank, m in enumerate(models)
    ]
    parameters = [[p.detach() for p in m.parameters()] for m in models]
    anchor = [p.clone() for p in parameters[0]]
    momentum = torch.zeros(sum(a.numel() for a in anchor))
    for round_ in range(2):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for step in (2 * round_, 2 * round_ + 1):
                train_step(model, optimizer, *batch_of(rank, step))
        flat = [torch.cat([g.reshape(-1) for g in pseudo_gradients(p, anchor)]) for p in parameters]
        outer_step_(anchor, parameters[0], momentum, (flat[0] + flat[1]) / 2, 0.5, 0.9)
        for p, a in zip(parameters[1], anchor, strict=True):
            p.copy_(a)
    expected = [p.numpy().tobytes() for p in parameters[0]]
    assert results == [(expected, 2)] * 2
