"""The DDP sign hook: against DDP's own averaging, and whatever DDP does to its buckets."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import reference_codec as reference
import torch
import torch.distributed as dist
from fake_geomesh import encode, fake_geomesh
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_geomesh.hooks import SignHookState, sign_hook
from torch_geomesh.seeds import derive_seed
from torch_geomesh.train import row_elements

KINDS = ["fake", "geomesh"]


def run(world: int, kind: str, function: Any, *args: Any) -> list[Any]:
    backend = "gloo" if kind == "fake" else kind
    return run_ranks(world, _inside, kind, function, args, init={"backend": backend})


def _inside(kind: str, function: Any, args: tuple[Any, ...]) -> Any:
    with fake_geomesh() if kind == "fake" else contextlib.nullcontext() as fake:
        return function(fake, *args)


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(12, 16)
        self.first = nn.Linear(16, 24)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.second = nn.Linear(24, 12, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(self.embedding(tokens))))


def gradients(module: nn.Module) -> dict[str, np.ndarray]:
    return {
        name: p.grad.numpy().copy() for name, p in module.named_parameters() if p.grad is not None
    }


def backward(model: nn.Module, step: int, samples: int = 8, offset: int = 0) -> None:
    # Tokens 8 and up are never used.
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(0, 8, (64,), generator=generator)[offset : offset + samples]
    nn.functional.cross_entropy(model(tokens), (tokens + 1) % 12).backward()


# One bucket, one step, bit for bit.


def one_bucket(fake: Any) -> dict[str, np.ndarray]:
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    model.register_comm_hook(SignHookState(seed=3), sign_hook)
    backward(model, step=0)
    return gradients(model.module)


def local_gradients(fake: Any) -> dict[str, np.ndarray]:
    net = Net()
    backward(net, step=0)
    return gradients(net)


def test_one_bucket_bit_for_bit() -> None:
    averaged = run(2, "fake", one_bucket)
    local = run(2, "fake", local_gradients)
    # The first step's only bucket holds all gradients, in the model's order.
    names = [n for n, p in Net().named_parameters() if p.requires_grad]
    shapes = {n: p.shape for n, p in Net().named_parameters()}
    seed = derive_seed(3, 0, 0)
    codes = []
    for rank in range(2):
        parts = [local[rank].get(n, np.zeros(shapes[n], np.float32)) for n in names]
        vector = reference.Vector(parts, [row_elements(shapes[n]) for n in names])
        codes.append(encode(vector, seed, rank, weight=1))
    mean = torch.from_numpy(reference.decode_mean(codes, vector, rotation_seed=seed))
    for result in averaged:
        for name, part in zip(names, mean.split([shapes[n].numel() for n in names]), strict=True):
            if name in result:
                assert result[name].tobytes() == part.numpy().tobytes(), name
        assert not result["embedding.weight"][8:].any()  # rows of unused tokens stay zero
        assert result["embedding.weight"][:8].any()


# Any buckets, several steps, accumulation: against DDP's own mean.


def many_steps(
    fake: Any,
    bucket_mb: float,
    view: bool,
    static: bool,
    unused: bool,
    accumulate: int,
    decay: float | None,
) -> dict[str, Any]:
    nets = [Net(), Net()]
    if not unused:
        for net in nets:
            net.unused.requires_grad_(False)
    ours, exact = (
        DistributedDataParallel(
            net,
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=view,
            static_graph=static,
            find_unused_parameters=unused and not static,
        )
        for net in nets
    )
    state = SignHookState(residual_decay=decay)
    ours.register_comm_hook(state, sign_hook)
    found, errors = [], []
    names: list[list[str]] = []
    for step in range(4):
        for model in (ours, exact):
            model.zero_grad()
            for micro in range(accumulate):
                last = micro == accumulate - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    backward(model, step, samples=8, offset=8 * micro)
        found.append(gradients(ours.module))
        if fake:  # what went in each of the step's calls
            names.append([call["names"] for call in fake.calls])
            fake.calls.clear()
        error, size = 0.0, 0.0
        for name, gradient in gradients(exact.module).items():
            error += float(np.square(found[-1][name] - gradient).sum())
            size += float(np.square(gradient).sum())
        errors.append(error / size)
    return {
        "gradients": found,
        "relative_error": errors,
        "steps": state.step,
        "names": names,
        "kept": len(state._residuals),
        "bytes": state.bytes_sent,
    }


CASES = [
    # bucket_mb, view, static, unused, accumulate, decay
    (25, False, False, True, 1, None),
    (0.001, True, False, True, 1, None),
    (0.001, False, True, False, 1, None),
    (25, True, True, True, 1, 0.5),
    (0.001, True, False, False, 4, None),
    (0.001, True, False, False, 1, 0.5),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_stay_near_ddps_own_whatever_the_buckets(
    kind: str, case: tuple[float, bool, bool, bool, int, float | None]
) -> None:
    results = run(2, kind, many_steps, *case)
    for step in range(4):
        for name, gradient in results[0]["gradients"][step].items():
            assert gradient.tobytes() == results[1]["gradients"][step][name].tobytes(), name
    for result in results:
        # One bit an element of a mean of two: the error's square is (pi / 2 - 1) / 2 of the
        # gradient's where ranks' gradients are alike, more where they cancel out.
        assert 0 < max(result["relative_error"]) < 3
        assert result["steps"] == 4
        assert result["bytes"] > 0
        if case[5] is not None:
            trainable = 6 if case[3] else 4
            assert result["kept"] == trainable


def test_buckets_are_rebuilt_and_every_element_goes_once() -> None:
    case = (0.001, True, False, False, 1, None)
    for result in run(2, "fake", many_steps, *case):
        first, second, *later = result["names"]
        assert len(second) > 1
        assert first != second  # rebuilt: other buckets, or another order
        assert later == [second] * 2
        for step in (first, second):
            elements = list(itertools.chain.from_iterable(step))
            assert len(elements) == len(set(elements)) == 4
        assert set(itertools.chain.from_iterable(first)) == set(
            itertools.chain.from_iterable(second)
        )


def test_accumulation_exchanges_once_a_step() -> None:
    case = (25, False, False, False, 4, None)
    for result in run(2, "fake", many_steps, *case):
        assert [len(calls) for calls in result["names"]] == [1] * 4


# State.


def residual_run(fake: Any, restart: int | None) -> list[dict[str, np.ndarray]]:
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.001, find_unused_parameters=True)
    state = SignHookState(residual_decay=1.0)
    model.register_comm_hook(state, sign_hook)
    found = []
    for step in range(4):
        if step == restart:
            saved = pickle.dumps(state)
            model = DistributedDataParallel(Net(), bucket_cap_mb=0.001, find_unused_parameters=True)
            state = pickle.loads(saved)
            model.register_comm_hook(state, sign_hook)
        model.zero_grad()
        backward(model, step)
        found.append(gradients(model.module))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_state_survives_a_checkpoint(kind: str) -> None:
    whole, restarted = run(2, kind, residual_run, None), run(2, kind, residual_run, 2)
    # With unused parameters DDP keeps its buckets, so the codes are the same to the bit.
    for rank in range(2):
        for a, b in zip(whole[rank], restarted[rank], strict=True):
            assert a.keys() == b.keys()
            assert all(a[name].tobytes() == b[name].tobytes() for name in a)


def test_pickled_state_has_no_process_group_and_everything_else() -> None:
    state = SignHookState(seed=5, residual_decay=0.5)
    state.step, state._residuals[3] = 7, torch.arange(4.0)
    loaded = pickle.loads(pickle.dumps(state))
    assert loaded.process_group is None
    assert (loaded.seed, loaded.residual_decay, loaded.step) == (5, 0.5, 7)
    assert torch.equal(loaded._residuals[3], torch.arange(4.0))
    with pytest.raises(ValueError, match="version"):
        SignHookState.__new__(SignHookState).__setstate__({"version": 99})


def foreign_state(fake: Any) -> str:
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    state = SignHookState(residual_decay=0.5)
    state._residuals[0] = torch.zeros(7)
    model.register_comm_hook(state, sign_hook)
    try:
        backward(model, 0)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_state_of_another_model_is_refused() -> None:
    for text in run(2, "fake", foreign_state):
        assert "the residual in its state 7" in text


# What goes wrong.


def nan_gradient(fake: Any) -> str:
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    state = SignHookState(residual_decay=0.5)
    model.register_comm_hook(state, sign_hook)
    if dist.get_rank() == 1:
        model.module.second.weight.register_hook(lambda g: g * float("nan"))
    try:
        backward(model, 0)
    except RuntimeError as error:
        return str(error) if not state._residuals else "a residual was kept"
    return "no error"


@pytest.mark.parametrize("kind", KINDS)
def test_nan_raises_from_backward_on_every_rank(kind: str) -> None:
    results = run(2, kind, nan_gradient)
    assert "gradient 5 of shape (12, 24)" in results[1]
    assert all(text not in ("no error", "a residual was kept") for text in results)


def refusals(fake: Any) -> list[str]:
    found = []
    try:
        SignHookState()
    except TypeError as error:
        found.append(str(error))
    try:
        sign_hook(None, torch.zeros(3))  # type: ignore[arg-type]  # what FSDP passes
    except TypeError as error:
        found.append(str(error))
    return found


def no_state() -> str:
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    model.register_comm_hook(None, sign_hook)
    try:
        backward(model, 0)
    except TypeError as error:
        return str(error)
    return "no error"


def test_a_hook_without_its_state_is_told_how() -> None:
    for text in run_ranks(2, no_state):
        assert "register_comm_hook(gm.SignHookState(), gm.sign_hook), got NoneType" in text


def test_other_backends_and_wrappers_are_refused() -> None:
    for group, bucket in run_ranks(2, refusals, None, init={"backend": "gloo"}):
        assert "'gloo', not 'geomesh'" in group
        assert "takes its GradBucket, got Tensor" in bucket


def alone(fake: Any) -> bool:
    model, net = DistributedDataParallel(Net(), find_unused_parameters=True), Net()
    model.register_comm_hook(SignHookState(), sign_hook)
    backward(model, 0)
    backward(net, 0)
    ours, plain = gradients(model.module), gradients(net)
    return all(ours[name].tobytes() == plain[name].tobytes() for name in plain)


@pytest.mark.parametrize("kind", KINDS)
def test_alone_gradients_are_exact(kind: str) -> None:
    assert run(1, kind, alone) == [True]


def low_precision(fake: Any) -> dict[str, Any]:
    model = DistributedDataParallel(Net().to(torch.bfloat16), find_unused_parameters=True)
    model.register_comm_hook(SignHookState(), sign_hook)
    backward(model, 0)
    weight = model.module.second.weight
    assert weight.grad is not None
    return {"dtype": str(weight.grad.dtype), "sum": float(weight.grad.abs().sum())}


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_gradients(kind: str) -> None:
    results = run(2, kind, low_precision)
    assert results[0] == results[1]
    assert results[0]["dtype"] == "torch.bfloat16"
    assert results[0]["sum"] > 0


def test_bad_decay_is_refused() -> None:
    with pytest.raises(ValueError, match="residual_decay"):
        SignHookState(residual_decay=1.5)
    with pytest.raises(TypeError, match="expected a number for residual_decay, got 'half'"):
        SignHookState(residual_decay="half")  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", ["x", 1.5, None])
def test_a_seed_that_is_no_whole_number_is_refused_at_once(seed: object) -> None:
    with pytest.raises(TypeError, match="SignHookState: expected a whole number for seed, got"):
        SignHookState(seed=seed)  # type: ignore[arg-type]
