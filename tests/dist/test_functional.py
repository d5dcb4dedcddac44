"""Functional collectives, eager, differentiated and compiled; torch.distributed.nn's functions.

Differentiated ones are compared with all ranks' arithmetic written as one graph in one process.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dnn
from ranks import run_ranks
from small_model import batch, make_model, reference, train, weights
from torch import nn

import torch_geomesh as gm

Tensors = list[torch.Tensor]


def inputs(world: int, *shape: int) -> Tensors:
    """Return what each rank gives."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(world)]


def check(
    ours: Callable[[torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]],
    alone: Callable[[Tensors], list[torch.Tensor | tuple[torch.Tensor, ...]]],
    give: Tensors,
) -> None:
    """Compare result and gradient with those of all ranks' arithmetic in one process.

    ``alone`` takes what all ranks give and returns what each gets. The loss is the sum over all
    ranks of a weighted sum of what they get.
    """
    rank = dist.get_rank()

    def loss_of(got: torch.Tensor | tuple[torch.Tensor, ...], at: int) -> torch.Tensor:
        parts = [got] if isinstance(got, torch.Tensor) else list(got)
        flat = torch.cat([part.reshape(-1) for part in parts])
        return (flat**2 * torch.linspace(at + 1, at + 2, flat.numel(), dtype=flat.dtype)).sum()

    mine = give[rank].clone().requires_grad_()
    got = ours(mine)
    loss_of(got, rank).backward()

    leaves = [tensor.clone().requires_grad_() for tensor in give]
    want = alone(leaves)
    loss = sum(loss_of(each, at) for at, each in enumerate(want))
    gradient = torch.autograd.grad(loss, leaves[rank], materialize_grads=True)[0]
    torch.testing.assert_close(got, want[rank])
    torch.testing.assert_close(mine.grad, gradient)


SPLITS = [[1, 0, 4], [2, 2, 1], [0, 3, 2]]  # rows that rank r sends to each


def exchange(give: Tensors) -> Tensors:
    parts = [tensor.split(split) for tensor, split in zip(give, SPLITS, strict=True)]
    return [torch.cat([from_[to] for from_ in parts]) for to in range(3)]


def differentiated() -> None:
    warnings.simplefilter("ignore", FutureWarning)  # most of torch.distributed.nn is deprecated
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    give = inputs(world, 6, 3)
    received = [split[rank] for split in SPLITS]

    def total(tensors: Tensors) -> torch.Tensor:
        return torch.stack(tensors).sum(0)

    def everywhere(tensor: torch.Tensor) -> Tensors:
        return [tensor] * world

    # torch.distributed.nn
    check(dnn.all_reduce, lambda g: everywhere(total(g)), give)
    check(dnn.all_gather, lambda g: [tuple(g)] * world, give)
    check(
        lambda x: dnn.reduce_scatter(torch.empty(2, 3, dtype=x.dtype), list(x.chunk(3))),
        lambda g: list(total(g).chunk(3)),
        give,
    )
    check(
        lambda x: dnn.all_to_all([torch.empty_like(t) for t in x.chunk(3)], list(x.chunk(3))),
        lambda g: [tuple(t.chunk(3)[to] for t in g) for to in range(world)],
        give,
    )
    check(
        lambda x: dnn.all_to_all_single(
            torch.empty(sum(received), 3, dtype=x.dtype), x, received, SPLITS[rank]
        ),
        exchange,
        inputs(world, 5, 3),
    )
    check(lambda x: dnn.broadcast(x, src=1), lambda g: everywhere(g[1]), give)
    check(
        lambda x: tuple(dnn.gather(x, dst=2)),
        lambda g: [tuple(g) if r == 2 else tuple(torch.zeros_like(t) for t in g) for r in range(3)],
        give,
    )
    check(lambda x: dnn.scatter(list(x.chunk(3)), src=1), lambda g: list(g[1].chunk(3)), give)
    check(
        lambda x: dnn.reduce(x, dst=1),
        lambda g: [total(g) if r == 1 else give[r] for r in range(world)],
        give,
    )

    # The functional collectives that have gradients.
    check(
        lambda x: funcol.wait_tensor(funcol.all_gather_tensor_autograd(x, 0, group)),
        lambda g: everywhere(torch.cat(g)),
        give,
    )
    for dim in (0, 1):
        check(
            lambda x, dim=dim: funcol.wait_tensor(
                funcol.reduce_scatter_tensor_autograd(x, "sum", dim, group)
            ),
            lambda g, dim=dim: list(total(g).chunk(3, dim)),
            give,
        )
    check(
        lambda x: funcol.wait_tensor(
            funcol.all_to_all_single_autograd(x, received, SPLITS[rank], group)
        ),
        exchange,
        inputs(world, 5, 3),
    )


def test_gradients() -> None:
    run_ranks(3, differentiated)


def functional() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    give = inputs(world, 6, 3)
    mine = give[rank]
    total = torch.stack(give).sum(0)
    close = torch.testing.assert_close

    close(funcol.all_reduce(mine, "sum", group).wait(), total)
    close(funcol.all_reduce(mine, "avg", group).wait(), total / world)
    close(funcol.all_reduce(mine, "max", group).wait(), torch.stack(give).amax(0), rtol=0, atol=0)
    assert torch.equal(mine, inputs(world, 6, 3)[rank])  # functional: left as it was
    for dim in (0, 1):
        got = funcol.all_gather_tensor(mine, dim, group)
        assert torch.equal(got + 0, torch.cat(give, dim))  # used without a wait
        close(funcol.reduce_scatter_tensor(mine, "sum", dim, group) + 0, total.chunk(3, dim)[rank])
    rows = inputs(world, 5, 3)
    got = funcol.all_to_all_single(
        rows[rank], [split[rank] for split in SPLITS], SPLITS[rank], group
    )
    assert torch.equal(got + 0, exchange(rows)[rank])
    assert torch.equal(funcol.broadcast(mine, 2, group) + 0, give[2])
    flat = funcol.permute_tensor(mine.flatten(), [1, 2, 0], group)
    assert torch.equal(flat + 0, give[(rank - 1) % 3].flatten())
    several = funcol.all_reduce_coalesced([mine, mine[:1]], "sum", group)
    close([tensor + 0 for tensor in several], [total, total[:1]])
    several = funcol.all_gather_into_tensor_coalesced([mine, mine[:1]], group)
    assert torch.equal(several[0] + 0, torch.cat(give))
    assert torch.equal(several[1] + 0, torch.cat([tensor[:1] for tensor in give]))
    several = funcol.reduce_scatter_tensor_coalesced([mine, 2 * mine], "sum", [0, 0], group)
    close([t + 0 for t in several], [total.chunk(3)[rank], 2 * total.chunk(3)[rank]])


def steps(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Collectives with arithmetic between them, as a compiler sees them."""
    group = dist.group.WORLD
    y = torch.tanh(x @ weight)
    y = funcol.all_reduce(y, "sum", group) * 2
    gathered = funcol.all_gather_tensor(y + dist.get_rank(), 0, group)
    return funcol.reduce_scatter_tensor(gathered.cos(), "sum", 0, group) + y


def steps_alone(give: Tensors, weight: torch.Tensor) -> Tensors:
    y = 2 * sum(torch.tanh(x @ weight) for x in give)
    gathered = torch.cat([y + r for r in range(len(give))]).cos()
    return [part + y for part in (len(give) * gathered).chunk(len(give))]


def compiled(backend: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    give = inputs(world, 4, 3)
    weight = inputs(1, 3, 5)[0]
    run = torch.compile(steps, backend=backend, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(run(give[rank], weight), steps_alone(give, weight)[rank])

    # c10d's own calls inside a compiled function become functional ones.
    def in_place(x: torch.Tensor) -> torch.Tensor:
        x = x * 3
        dist.all_reduce(x)
        out = x.new_empty(x.shape[0] * world, *x.shape[1:])
        dist.all_gather_into_tensor(out, x + rank)
        return out

    total = 3 * sum(give)
    got = torch.compile(in_place, backend=backend, fullgraph=True)(give[rank])
    torch.testing.assert_close(got, torch.cat([total + r for r in range(world)]))


def quick_inductor() -> None:
    """Have Inductor compile as little as it can: here collectives matter, not vector code."""
    from torch._inductor import config

    config.cpp.vec_isa_ok = False  # or it tries out what the processor can, a program each
    config.cpp_cache_precompile_headers = False  # outside its cache folder
    config.compile_threads = 1  # no pool of processes


def tripled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two exchanges at once, then more of their results; one kernel serves all tensors alike."""
    group = dist.group.WORLD
    total = funcol.all_reduce(x * 3, "sum", group)
    gathered = funcol.all_gather_tensor(x * 3, 0, group)
    mine = funcol.reduce_scatter_tensor(gathered * 3, "sum", 0, group)
    return funcol.all_reduce(total * 3, "max", group) * 3, mine * 3


def with_inductor() -> None:
    from torch._inductor.utils import run_and_get_code

    warnings.simplefilter("ignore", FutureWarning)
    quick_inductor()
    rank, world = dist.get_rank(), dist.get_world_size()
    run = torch.compile(tripled, backend="inductor", fullgraph=True)
    for step in range(3):
        # Large enough that an exchange is still under way when the next kernel runs.
        give = [tensor * (step + 1) for tensor in inputs(world, 512, 33)]
        before = give[rank].clone()
        (largest, mine), code = run_and_get_code(run, give[rank])
        torch.testing.assert_close(largest, 27 * sum(give))
        torch.testing.assert_close(mine, 27 * world * give[rank])
        assert torch.equal(give[rank], before)
        if step == 0:
            # What this test is for: a buffer is reduced in place, and is another tensor's after
            # the wait.
            (text,) = code
            assert "_c10d_functional.all_reduce_.default(" in text, text
            assert "_c10d_functional.wait_tensor.default(" in text, text
            assert "# reuse" in text, text


class OwnForward(nn.Module):
    """The small model in a class of our own: torch's own classes are not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def compiled_training(optimize: str, backend: str) -> None:
    """DDP around a compiled model; the compiler cuts at buckets or traces the exchange as well."""
    from torch._dynamo.utils import counters

    warnings.simplefilter("ignore", FutureWarning)
    quick_inductor()
    torch._dynamo.config.optimize_ddp = optimize
    rank, world = dist.get_rank(), dist.get_world_size()
    models = {}
    for name in ("eager", "compiled"):
        models[name] = nn.parallel.DistributedDataParallel(OwnForward())
        if name == "compiled":
            models[name].module.compile(backend=backend)
        train(models[name], [batch(rank, step) for step in range(2)])
    assert counters["stats"]["unique_graphs"] == 1, counters
    torch.testing.assert_close(weights(models["compiled"]), weights(models["eager"]))
    torch.testing.assert_close(weights(models["compiled"]), reference(world, 2))


def compiled_with_the_sign_hook() -> None:
    rank = dist.get_rank()
    models, states = {}, {}
    for name in ("eager", "compiled"):
        models[name] = nn.parallel.DistributedDataParallel(OwnForward())
        states[name] = gm.SignHookState()
        models[name].register_comm_hook(states[name], gm.sign_hook)
        if name == "compiled":
            models[name].module.compile(backend="aot_eager")
        train(models[name], [batch(rank, 0)])
    for ours, eager in zip(weights(models["compiled"]), weights(models["eager"]), strict=True):
        assert torch.equal(ours, eager)
    # Then DDP puts gradients into buckets in the order in which they came, another one when
    # compiled: the code is another, of as many bytes.
    for name, model in models.items():
        train(model, [batch(rank, 1)])
        assert states[name].step == 2
    assert states["compiled"].bytes_sent == states["eager"].bytes_sent > 0
    for ours in weights(models["compiled"]):
        everyone = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, ours)
        assert all(torch.equal(each, ours) for each in everyone)


needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler"
)


def test_functional_collectives() -> None:
    run_ranks(3, functional)


def test_compiled() -> None:
    run_ranks(2, compiled, "aot_eager")


@needs_compiler
def test_inductor_reduces_in_place_and_reuses_buffers(tmp_path: Path) -> None:
    run_ranks(2, with_inductor, environment={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})


@needs_compiler
def test_a_training_step_compiled_by_inductor_equals_the_eager_one(tmp_path: Path) -> None:
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run_ranks(2, compiled_training, "ddp_optimizer", "inductor", environment=environment)


def test_a_training_step_with_compiled_reductions_equals_the_eager_one() -> None:
    run_ranks(2, compiled_training, "python_reducer", "aot_eager")


def test_the_sign_hook_codes_a_compiled_models_gradients_as_the_eager_ones() -> None:
    run_ranks(2, compiled_with_the_sign_hook)
