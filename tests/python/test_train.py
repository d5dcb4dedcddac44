"""GeoMesh in one process: rounds, refusals, state."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from fake_geomesh import fake_geomesh
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, TensorDataset

from torch_geomesh.baselines import DiLoCo
from torch_geomesh.rounds import OuterLoop, RoundEvent
from torch_geomesh.sampler import GeoMeshSampler
from torch_geomesh.seeds import derive_seed
from torch_geomesh.train import GeoMesh, row_elements


@pytest.fixture(autouse=True)
def _without_the_compiled_part() -> Iterator[None]:
    with fake_geomesh():
        yield


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def make_data(samples: int = 120) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 5, generator=generator)
    return TensorDataset(x, torch.tanh(x @ torch.randn(5, 3, generator=generator)))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    x, y = make_data(8 * steps).tensors
    return list(zip(x.split(8), y.split(8), strict=True))


@pytest.mark.parametrize("kind", [GeoMesh, DiLoCo])
def test_rounds_alone_are_inner_steps_and_a_nesterov_step(kind: type[OuterLoop]) -> None:
    model, steps = make_model(), batches(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with kind(model, optimizer, inner_steps=3, outer_lr=0.7, outer_momentum=0.9) as mesh:  # type: ignore[call-arg]
        for x, y in steps:
            train_step(model, optimizer, x, y)
    assert mesh.round == 2
    assert mesh.inner_step == 2

    # The same in a few lines.
    reference = make_model()
    adam = torch.optim.AdamW(reference.parameters(), lr=0.01)
    lr, mu = torch.tensor(0.7), torch.tensor(0.9)
    anchor = [p.detach().clone() for p in reference.parameters()]
    momentum = [torch.zeros_like(a) for a in anchor]
    for i, (x, y) in enumerate(steps):
        train_step(reference, adam, x, y)
        if i % 3 == 2:
            for p, a, m in zip(reference.parameters(), anchor, momentum, strict=True):
                g = a - p.detach()
                m.copy_(mu * m + g)
                a.sub_(lr * (g + mu * m))
                p.data.copy_(a)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_alone_the_loss_falls_epoch_after_epoch() -> None:
    model, data = make_model(), make_data()
    sampler = GeoMeshSampler(data, max_batch_size=8, inner_steps=4)
    loader = DataLoader(data, batch_sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, seen = [], []
    with GeoMesh(model, optimizer, sampler=sampler, on_round=seen.append) as mesh:
        for _ in range(6):
            epoch = [train_step(model, optimizer, x, y) for x, y in loader]
            losses.append(float(sum(epoch)) / len(epoch))
            assert mesh.inner_step == 0  # an epoch ends with a round
    assert losses[-1] < 0.5 * losses[0]
    assert sampler.epoch == 6
    assert mesh.total_tokens == 6 * 120
    assert [e.round for e in seen] == list(range(mesh.round)) == [e.round for e in mesh.events]
    assert sum(e.samples for e in seen) == 6 * 120
    assert [e.epoch for e in seen] == sorted(e.epoch or 0 for e in seen)


def test_events_say_where_the_time_went() -> None:
    model, data = make_model(), make_data(64)
    sampler = GeoMeshSampler(data, max_batch_size=8, inner_steps=24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    events: list[RoundEvent] = []
    with GeoMesh(model, optimizer, sampler=sampler, on_round=events.append) as mesh:
        for x, y in DataLoader(data, batch_sampler=sampler):
            mesh.count_tokens(10 * len(x))
            mesh.record_loss(torch.tensor(2.0))
            mesh.record_loss(4.0)
            train_step(model, optimizer, x, y)
    first = events[0]
    assert (first.rank, first.inner_steps, first.batch_size, first.samples) == (0, 2, 8, 16)
    assert (first.tokens, first.total_tokens) == (160, 160)
    assert first.loss == 3.0
    assert first.begin < first.ready <= first.end
    assert 0 < first.compute_s <= first.ready - first.begin
    assert first.compute_s + first.data_wait_s == pytest.approx(
        first.ready - first.begin, abs=0.002
    )
    assert first.fp32_bytes == 4 * sum(p.numel() for p in model.parameters())
    assert first.straggler_wait_s == 0.0
    assert first.waited_for is None
    assert first.wan_wait_s == pytest.approx(first.end - first.ready)
    assert events[-1].straggler_wait_s is None


def test_evaluation_and_pauses_do_not_count_as_compute() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (x, y), *_ = batches(1)
    with GeoMesh(model, optimizer, inner_steps=2) as mesh:
        train_step(model, optimizer, x, y)
        model.eval()
        model(x)
        model.train()
        time.sleep(0.2)
        train_step(model, optimizer, x, y)
    assert mesh.events[0].compute_s < 0.1
    assert mesh.events[0].data_wait_s > 0.2


def test_what_lies_before_a_restart_of_the_clock_does_not_count() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (x, y), *_ = batches(1)
    with GeoMesh(model, optimizer, inner_steps=2) as mesh:
        entered = time.monotonic()
        time.sleep(0.2)
        mesh.restart_clock()  # at the round's start: the round begins here
        train_step(model, optimizer, x, y)
        time.sleep(0.2)
        mesh.restart_clock()  # in its middle
        train_step(model, optimizer, x, y)
    event = mesh.events[0]
    assert event.data_wait_s + event.compute_s < 0.1
    assert event.begin - entered > 0.2
    assert event.ready - event.begin > 0.2


@pytest.mark.parametrize("inside", [True, False])
def test_compiled_models_train_without_a_graph_break(inside: bool) -> None:
    def trained(compiled: bool) -> tuple[list[Tensor], GeoMesh]:
        model = make_model()
        run: nn.Module = model
        if compiled and inside:
            model.compile(backend="eager", fullgraph=True)
        elif compiled:
            run = torch.compile(model, backend="eager", fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with GeoMesh(model, optimizer, inner_steps=2) as mesh:
            for x, y in batches(4):
                train_step(run, optimizer, x, y)
        return [p.detach() for p in model.parameters()], mesh

    plain, _ = trained(compiled=False)
    ours, mesh = trained(compiled=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert mesh.round == 2
    assert mesh.events[1].compute_s > 0


def test_hooks_are_gone_after_the_block_also_after_an_error() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (x, y), *_ = batches(1)
    mesh = GeoMesh(model, optimizer, inner_steps=2)
    with pytest.raises(KeyError), mesh:
        raise KeyError
    train_step(model, optimizer, x, y)
    assert mesh.inner_step == 0
    assert not model._forward_pre_hooks
    with mesh, pytest.raises(RuntimeError, match="already running"):
        mesh.__enter__()


def test_a_sampler_serves_one_mesh_at_a_time() -> None:
    model, sampler = make_model(), GeoMeshSampler(10, max_batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        GeoMesh(model, optimizer, sampler=sampler),
        pytest.raises(RuntimeError, match="another GeoMesh"),
        GeoMesh(model, optimizer, sampler=sampler),
    ):
        pass


def test_frozen_parameters_are_untouched_and_tied_ones_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 4)
            self.frozen = nn.Linear(4, 4)
            self.frozen.requires_grad_(False)
            self.head = nn.Linear(4, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.frozen(self.embedding(tokens)))

    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    frozen = copy.deepcopy(model.frozen.state_dict())
    mesh = GeoMesh(model, optimizer, inner_steps=1)
    assert mesh._mean.numel() == 44
    with mesh:
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.arange(5)), torch.arange(5)).backward()
            optimizer.step()
    assert model.head.weight is model.embedding.weight
    assert all(torch.equal(v, frozen[k]) for k, v in model.frozen.state_dict().items())


@pytest.mark.parametrize("how", ["unfrozen", "unfrozen between", "added"])
def test_what_is_trained_but_not_averaged_is_refused(how: str) -> None:
    model = make_model()
    named = list(model.named_parameters())
    name, first = named[0]
    first.requires_grad_(how == "added")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = GeoMesh(model, optimizer, inner_steps=1)
    (x, y), *_ = batches(1)
    with mesh:
        train_step(model, optimizer, x, y)
        if how == "added":
            name = "of shape (3,)"
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        first.requires_grad_(True)
        if how != "unfrozen between":
            with pytest.raises(RuntimeError, match=re.escape(name)):
                train_step(model, optimizer, x, y)
    with pytest.raises(RuntimeError, match="is not averaged"):
        mesh.__enter__()
    assert mesh.round == 1


def test_a_loss_of_several_elements_is_refused_at_once() -> None:
    model = make_model()
    mesh = GeoMesh(model, torch.optim.SGD(model.parameters(), lr=0.1), inner_steps=1)
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        mesh.record_loss(torch.ones(3))
    with pytest.raises(ValueError, match="abc"):
        mesh.record_loss("abc")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "kind"), [(-1, ValueError), (2**70, ValueError), (2.5, TypeError), (None, TypeError)]
)
def test_a_wrong_token_count_is_refused_at_once(tokens: object, kind: type[Exception]) -> None:
    model = make_model()
    mesh = GeoMesh(model, torch.optim.SGD(model.parameters(), lr=0.1), inner_steps=1)
    with pytest.raises(kind, match="tokens"):
        mesh.count_tokens(tokens)  # type: ignore[arg-type]
    mesh.count_tokens(torch.tensor(7))  # type: ignore[arg-type]
    assert mesh.state_dict()["tokens"] == 7


@pytest.mark.parametrize("damage", ["left out", "shape", "NaN"])
@pytest.mark.parametrize("part", ["anchor", "momentum"])
def test_a_damaged_state_changes_nothing(part: str, damage: str) -> None:
    model = make_model()
    mesh = GeoMesh(model, torch.optim.SGD(model.parameters(), lr=0.1), inner_steps=1)
    state = copy.deepcopy(mesh.state_dict())
    name = list(state[part])[-1]
    for tensors in (state["anchor"], state["momentum"]):
        for tensor in tensors.values():
            tensor.fill_(1000)
    if damage == "left out":
        del state[part][name]
    elif damage == "shape":
        state[part][name] = torch.ones(1)
    else:
        state[part][name].view(-1)[-1] = float("nan")
    before = copy.deepcopy(mesh.state_dict())
    with pytest.raises(ValueError, match=re.escape(name)):
        mesh.load_state_dict(state)
    after = mesh.state_dict()
    for kind in ("anchor", "momentum"):
        for key, tensor in before[kind].items():
            assert torch.equal(after[kind][key], tensor)


@pytest.mark.parametrize("key", ["world_size", "round", "anchor", "counts_tokens"])
def test_a_state_that_lacks_something_is_refused(key: str) -> None:
    model = make_model()
    mesh = GeoMesh(model, torch.optim.SGD(model.parameters(), lr=0.1), inner_steps=2)
    state = mesh.state_dict()
    del state[key]
    with pytest.raises(ValueError, match=rf"GeoMesh: the state has no \['{key}'\]"):
        mesh.load_state_dict(state)
    with pytest.raises(TypeError, match="GeoMesh: expected a state_dict, got list"):
        mesh.load_state_dict([])  # type: ignore[arg-type]


def test_low_precision_parameters_keep_an_fp32_anchor() -> None:
    model = make_model().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with GeoMesh(model, optimizer, inner_steps=1, outer_lr=0.3, outer_momentum=0.0) as mesh:
        for x, y in batches(3):
            train_step(model, optimizer, x.bfloat16(), y.bfloat16())
    anchors = mesh.state_dict()["anchor"]
    assert all(a.dtype == torch.float32 for a in anchors.values())
    assert any(not torch.equal(a, a.bfloat16().float()) for a in anchors.values())
    for name, p in model.named_parameters():
        assert torch.equal(p, anchors[name].bfloat16())


def test_channels_last_parameters_work() -> None:
    def run(memory_format: torch.memory_format) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=memory_format)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with GeoMesh(model, optimizer, inner_steps=1):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 3, 5, 5)).square().sum().backward()
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    for a, b in zip(run(torch.contiguous_format), run(torch.channels_last), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_is_named_and_changes_nothing(bad: float) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (x, y), *_ = batches(1)
    mesh = GeoMesh(model, optimizer, inner_steps=1)
    with mesh:
        train_step(model, optimizer, x, y)
        before = copy.deepcopy(mesh.state_dict())
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        model[2].bias.grad[1] = bad
        with pytest.raises(RuntimeError, match=r"'2\.bias'"):
            optimizer.step()
        after = mesh.state_dict()
        for what in ("anchor", "momentum"):
            assert all(torch.equal(v, after[what][k]) for k, v in before[what].items())
        assert mesh.round == 1
        with pytest.raises(RuntimeError, match="round 1 failed"):
            optimizer.step()
    with pytest.raises(RuntimeError, match="round 1 failed"), mesh:
        pass


def test_a_skipped_step_counts() -> None:
    model, data = make_model(), make_data(24)
    sampler = GeoMeshSampler(data, max_batch_size=8, inner_steps=3, min_inner_steps=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GeoMesh(model, optimizer, sampler=sampler) as mesh:
        for i, (x, y) in enumerate(DataLoader(data, batch_sampler=sampler)):
            if i == 1:
                mesh.skip_step()
            else:
                train_step(model, optimizer, x, y)
    assert (mesh.round, mesh.inner_step, sampler.epoch) == (1, 0, 1)


def test_a_step_outside_the_block_is_refused() -> None:
    # The models of the ranks are made equal at entry: a round before would go on from unequal ones.
    model = make_model()
    mesh = GeoMesh(model, torch.optim.SGD(model.parameters(), lr=0.1), inner_steps=1)
    with pytest.raises(RuntimeError, match=r"skip_step\(\) counts inside the with block only"):
        mesh.skip_step()
    assert mesh.round == 0


def test_a_step_left_out_is_noticed_at_the_next_epoch() -> None:
    model, data = make_model(), make_data(24)
    sampler = GeoMeshSampler(data, max_batch_size=8, inner_steps=3, min_inner_steps=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GeoMesh(model, optimizer, sampler=sampler) as mesh:
        for i, (x, y) in enumerate(DataLoader(data, batch_sampler=sampler)):
            if i:
                train_step(model, optimizer, x, y)
        # The epoch isn't over: its last batch is drawn again.
        assert (mesh.round, mesh.inner_step, sampler.epoch) == (0, 2, 0)
        rest = list(DataLoader(data, batch_sampler=sampler))
        assert len(rest) == 1


# State.


def resume_after(stop: int, total: int) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters of a run of ``total`` steps, whole and with a restart after ``stop``."""

    def parts() -> tuple[nn.Module, torch.optim.Optimizer, GeoMeshSampler, GeoMesh]:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        sampler = GeoMeshSampler(120, max_batch_size=4, inner_steps=4, seed=3)
        return model, optimizer, sampler, GeoMesh(model, optimizer, sampler=sampler)

    def run(
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sampler: GeoMeshSampler,
        mesh: GeoMesh,
        steps: int,
    ) -> None:
        data = make_data()
        with mesh:
            while steps:
                for x, y in DataLoader(data, batch_sampler=sampler):
                    train_step(model, optimizer, x, y)
                    steps -= 1
                    if not steps:
                        break

    whole = parts()
    run(*whole, steps=total)
    first = parts()
    run(*first, steps=stop)
    saved = copy.deepcopy([part.state_dict() for part in first])
    second = parts()
    for part, state in zip(second, saved, strict=True):
        part.load_state_dict(state)
    assert second[3].inner_step == first[3].inner_step
    run(*second, steps=total - stop)
    assert second[3].round == whole[3].round
    return (
        [p.detach() for p in whole[0].parameters()],
        [p.detach() for p in second[0].parameters()],
    )


@pytest.mark.parametrize("stop", [3, 5, 9, 31])
def test_a_restart_changes_no_bit(stop: int) -> None:
    whole, resumed = resume_after(stop, 60)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_states_that_do_not_fit_are_refused() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = GeoMesh(model, optimizer, inner_steps=2)
    state = copy.deepcopy(mesh.state_dict())
    other = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    stranger = GeoMesh(other, torch.optim.SGD(other.parameters(), lr=0.1), inner_steps=2)
    with pytest.raises(ValueError, match=r"'0\.weight' has shape \(8, 5\)"):
        stranger.load_state_dict(state)
    with pytest.raises(ValueError, match="version"):
        mesh.load_state_dict({})
    with pytest.raises(ValueError, match="has not"):
        mesh.load_state_dict({**state, "anchor": {**state["anchor"], "more": torch.zeros(1)}})
    with pytest.raises(ValueError, match=r"rank 1 in the middle"):
        mesh.load_state_dict({**state, "rank": 1, "inner_step": 1})

    sampler = GeoMeshSampler(100, max_batch_size=4)
    mesh = GeoMesh(model, optimizer, sampler=sampler)
    mesh.load_state_dict({**state, "inner_step": 1})
    with pytest.raises(ValueError, match="1 inner steps of its round, the sampler 0"), mesh:
        pass


def test_a_state_of_another_world_starts_the_round_again_from_the_anchor() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = GeoMesh(model, optimizer, inner_steps=4)
    with mesh:
        for x, y in batches(6):
            train_step(model, optimizer, x, y)
    state = {**copy.deepcopy(mesh.state_dict()), "world_size": 3, "rank": 2}
    other = make_model(seed=9)
    resumed = GeoMesh(other, torch.optim.SGD(other.parameters(), lr=0.1), inner_steps=4)
    resumed.load_state_dict(state)
    assert (resumed.round, resumed.inner_step) == (1, 0)
    for name, p in other.named_parameters():
        assert torch.equal(p, state["anchor"][name])


def test_a_lost_residual_is_reported() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = GeoMesh(model, optimizer, inner_steps=2, residual_decay=0.5)
    assert mesh.state_dict()["residual"].keys() == dict(model.named_parameters()).keys()
    without = GeoMesh(model, optimizer, inner_steps=2).state_dict()
    with pytest.warns(UserWarning, match="no residual of its own"):
        mesh.load_state_dict(without)


# Refusals.


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_what_cannot_work_is_refused_with_the_reason() -> None:
    model = make_model()
    for arguments, reason in [
        ({}, "either a sampler or inner_steps"),
        ({"inner_steps": 2, "sampler": GeoMeshSampler(9, max_batch_size=1)}, "either a sampler"),
        ({"inner_steps": 0}, "inner_steps >= 1"),
        ({"inner_steps": 2, "outer_lr": 0.0}, "outer_lr"),
        ({"inner_steps": 2, "outer_momentum": 1.0}, "outer_momentum"),
        ({"inner_steps": 2, "form": "ring"}, "form"),
        ({"inner_steps": 2, "residual_decay": 2.0}, "residual_decay"),
    ]:
        with pytest.raises(ValueError, match=reason):
            GeoMesh(model, sgd(model), **arguments)  # type: ignore[arg-type]

    for arguments, reason in [
        ({"inner_steps": 2.5}, "GeoMesh: expected a whole number for inner_steps, got 2.5"),
        ({"inner_steps": 2, "seed": "x"}, "GeoMesh: expected a whole number for seed, got 'x'"),
        ({"inner_steps": 2, "outer_lr": "x"}, "GeoMesh: expected a number for outer_lr, got 'x'"),
        ({"inner_steps": 2, "outer_momentum": None}, "expected a number for outer_momentum"),
        ({"inner_steps": 2, "residual_decay": "x"}, "expected a number for residual_decay"),
        ({"inner_steps": 2, "timeout": 5}, r"expected a timedelta for timeout, got 5"),
        ({"inner_steps": 2, "on_round": 3}, "expected a function for on_round, got 3"),
        ({"sampler": [[0]]}, "expected a GeoMeshSampler, got list"),
    ]:
        with pytest.raises(TypeError, match=reason):
            GeoMesh(model, sgd(model), **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a timeout above 0"):
        GeoMesh(model, sgd(model), inner_steps=2, timeout=timedelta(0))
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got int"):
        GeoMesh(3, sgd(model), inner_steps=2)  # type: ignore[arg-type]

    frozen = make_model().requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires"):
        GeoMesh(frozen, sgd(make_model()), inner_steps=2)
    with pytest.raises(ValueError, match=r"'0\.weight' is torch\.float64"):
        GeoMesh(double := make_model().double(), sgd(double), inner_steps=2)
    with pytest.raises(ValueError, match="no data"):
        GeoMesh(meta := make_model().to("meta"), sgd(meta), inner_steps=2)
    with pytest.raises(ValueError, match="lazy"):
        GeoMesh(lazy := nn.LazyLinear(3), torch.optim.SGD(lazy.parameters(), lr=1), inner_steps=2)
    with pytest.raises(ValueError, match="several devices"):
        split = make_model()
        split[2].to("meta")
        GeoMesh(split, sgd(split), inner_steps=2)
    with pytest.raises(ValueError, match="not the model's"):
        GeoMesh(model, sgd(make_model()), inner_steps=2)
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        GeoMesh(model, nn.Identity(), inner_steps=2)  # type: ignore[arg-type]

    shared = nn.Module()
    memory = torch.zeros(10)
    shared.a, shared.b = nn.Parameter(memory[:6]), nn.Parameter(memory[4:])
    with pytest.raises(ValueError, match="share memory"):
        GeoMesh(shared, sgd(shared), inner_steps=2)
    sparse = nn.Module()
    sparse.a = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="sparse"):
        GeoMesh(sparse, sgd(sparse), inner_steps=2)


def test_wrappers_that_synchronise_every_step_are_refused(tmp_path: object) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = make_model()
        wrapped = nn.parallel.DistributedDataParallel(make_model())
        with pytest.raises(ValueError, match="DistributedDataParallel"):
            GeoMesh(wrapped, sgd(wrapped), inner_steps=2)
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match="ZeroRedundancyOptimizer"):
            GeoMesh(model, zero, inner_steps=2)
        from torch.distributed.fsdp import fully_shard

        sharded = make_model()
        fully_shard(sharded, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match="DTensor"):
            GeoMesh(sharded, sgd(sharded), inner_steps=2)
    finally:
        torch.distributed.destroy_process_group()


def test_rows_are_looked_at_where_they_are_long_enough() -> None:
    assert row_elements(torch.Size([100, 32])) == 32
    assert row_elements(torch.Size([8, 4, 3, 3])) == 36
    assert row_elements(torch.Size([100, 2])) == 0
    assert row_elements(torch.Size([100])) == 0
    assert row_elements(torch.Size([])) == 0
    assert row_elements(torch.Size([5, 0])) == 0


def test_seeds_differ_and_stay_the_same() -> None:
    seeds = {derive_seed(s, *c) for s in (0, 1) for c in [(0,), (1,), (0, 0), (0, 1), (1, 0)]}
    assert len(seeds) == 10
    assert derive_seed(0, 0) == derive_seed(0, 0) < 2**64
    assert derive_seed(-1, 5) == derive_seed(2**64 - 1, 5)
