"""A backend's methods called directly, under all their names; handles; rare dtypes and views."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, start_ranks

from torch_geomesh.backend import backend_of

c10d = dist.distributed_c10d

ReduceOp = dist.ReduceOp
SIZES = [1, 1001, 40_003]  # the last one more than the engine's thread reduces itself


def needs_method(name: str) -> pytest.MarkDecorator:
    """Skip a test where PyTorch has no such method yet."""
    bound = hasattr(torch._C._distributed_c10d.Backend, name)
    return pytest.mark.skipif(not bound, reason=f"this PyTorch has no Backend.{name}")


def give(rank: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, exact in every dtype; any rank can make any other's."""
    generator = torch.Generator().manual_seed(10_000 * rank + size)
    return torch.randint(-3, 4, (size,), generator=generator).to(dtype)


def everybody(size: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [give(rank, size, dtype) for rank in range(dist.get_world_size())]


def total(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).sum(0)


def with_op(options: Any, op: Any) -> Any:
    options.reduceOp = op
    return options


def with_root(options: Any, root: int) -> Any:
    options.rootRank = root
    return options


# ---- names ----


def functions_of_one_tensor() -> list[str]:
    """PyTorch 2.15's names, each waited for by itself and by its work."""
    rank, world = dist.get_rank(), dist.get_world_size()
    called = []
    for size in SIZES:
        each, wide = everybody(size), everybody(world * size)
        parts = [tensor.view(world, size)[rank] for tensor in wide]
        # Of what rank r gives: r + j of the rows for rank j, and so r + j from it.
        rows = [give(r, sum(r + j for j in range(world))) for r in range(world)]
        splits = [[r + j for j in range(world)] for r in range(world)]
        swapped = torch.cat([rows[r].split(splits[r])[rank] for r in range(world)])
        root = size % world
        calls: dict[str, tuple[torch.Tensor, Callable[..., Any]]] = {
            "all_gather_single": (
                torch.cat(each),
                lambda f, out, each=each, **more: f(out, each[rank], **more),
            ),
            "reduce_scatter_single": (
                torch.stack(parts).amax(0),
                lambda f, out, wide=wide, **more: f(out, wide[rank], ReduceOp.MAX, **more),
            ),
            "all_to_all_single": (
                swapped,
                lambda f, out, rows=rows, splits=splits, **more: f(
                    out, rows[rank], splits[rank], splits[rank], **more
                ),
            ),
            **{
                name: (
                    torch.cat(each) if rank == root else torch.empty(0),
                    lambda f, out, each=each, root=root, **more: f(
                        each[rank], out if rank == root else None, root, **more
                    ),
                )
                for name in ("gather_single", "gather_into_tensor")
            },
        }
        for name, (want, call) in calls.items():
            if (function := getattr(dist, name, None)) is None:
                continue
            for async_op in (False, True):
                out = torch.full_like(want, -9)
                work = call(function, out, async_op=async_op)
                assert (work is None) is not async_op, name
                if async_op:
                    assert work.wait() is True, name
                    assert work.is_completed(), name
                    assert work.is_success(), name
                assert torch.equal(out, want), (name, size, async_op)
            called.append(name)
    return called


def test_functions_of_one_tensor_wait_or_return_a_work() -> None:
    first, *others = run_ranks(3, functions_of_one_tensor)
    assert others == [first] * 2
    new = ("all_gather_single", "reduce_scatter_single", "gather_single", "gather_into_tensor")
    names = ["all_to_all_single", *(name for name in new if hasattr(dist, name))]
    assert sorted(first) == sorted(names * len(SIZES))


def methods(size: int) -> dict[str, tuple[list[torch.Tensor], Callable[[Any], Any]]]:
    """Return the backend's methods: what this rank gets, and a call that returns it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    backend = backend_of()
    each, wide = everybody(size), everybody(world * size)
    parts = [tensor.view(world, size)[rank] for tensor in wide]
    lists = [list(tensor.view(world, size)) for tensor in wide]
    mine, whole = each[rank], wide[rank]
    root = size % world
    at_root = rank == root

    def new(parts: int = 1) -> torch.Tensor:
        return torch.full((parts * size,), -9.0)

    def done(work: Any, *results: torch.Tensor) -> list[torch.Tensor]:
        assert work.wait() is True
        return list(results)

    def into_one(method: Any, *more: Any) -> list[torch.Tensor]:
        out = new(world)
        return done(method(out, mine, *more), out)

    def at_the_root(method: Any) -> list[torch.Tensor]:
        out = new(world) if at_root else torch.empty(0)
        return done(method(out, mine, with_root(c10d.GatherOptions(), root)), out)

    def from_one(method: Any, *more: Any) -> list[torch.Tensor]:
        out = new()
        return done(method(out, whole, *more), out)

    def swapped(method: Any, *more: Any) -> list[torch.Tensor]:
        out = new(world)
        return done(method(out, whole, [size] * world, [size] * world, *more), out)

    def two(method: Any, outs: int, *given: torch.Tensor) -> list[torch.Tensor]:
        out = [new(outs), new(outs)]
        return done(method(out, list(given)), *out)

    def in_place(method: Any, *more: Any) -> list[torch.Tensor]:
        out = mine.clone()
        return done(method(out, *more), out)

    def listed(method: Any, *more: Any) -> list[torch.Tensor]:
        out = [new() for _ in range(world)]
        return done(method(out, *more), *out)

    def rooted_gather(method: Any) -> list[torch.Tensor]:
        out = [new() for _ in range(world)] if at_root else []
        return done(method(out, mine, root), *out)

    def rooted_scatter(method: Any) -> list[torch.Tensor]:
        out = new()
        return done(method(out, lists[rank] if at_root else [], root), out)

    def scattered(method: Any) -> list[torch.Tensor]:
        out = new()
        return done(method(out, lists[rank], ReduceOp.MIN), out)

    def messages(method: Any) -> list[torch.Tensor]:
        out = new()
        work = backend.recv_anysource([out], 5)
        method([mine], (rank + 1) % world, 5).wait()
        done(work)
        assert work._source_rank() == (rank - 1) % world
        return [out]

    largest = with_op(c10d.ReduceScatterOptions(), ReduceOp.MAX)
    return {
        "all_gather_single": ([torch.cat(each)], into_one),
        "_allgather_base": ([torch.cat(each)], into_one),
        "gather_single": ([torch.cat(each) if at_root else torch.empty(0)], at_the_root),
        "gather_into_tensor": ([torch.cat(each) if at_root else torch.empty(0)], at_the_root),
        "reduce_scatter_single": (
            [torch.stack(parts).amax(0)],
            lambda method: from_one(method, largest),
        ),
        "_reduce_scatter_base": ([total(parts)], from_one),
        "all_to_all_single": ([torch.cat(parts)], swapped),
        "alltoall_base": (
            [torch.cat(parts)],
            lambda method: swapped(method, timedelta(seconds=20)),
        ),
        "alltoall": (parts, lambda method: listed(method, lists[rank])),
        "all_gather_single_coalesced": (
            [torch.cat(each)] * 2,
            lambda method: two(method, world, mine, mine),
        ),
        "reduce_scatter_single_coalesced": (
            [total(parts)] * 2,
            lambda method: two(method, 1, whole, whole),
        ),
        # The forms with plain arguments instead of options.
        "allgather": (each, lambda method: listed(method, mine)),
        "allreduce": (
            [torch.stack(each).amin(0)],
            lambda method: in_place(method, ReduceOp.MIN),
        ),
        "broadcast": ([each[root]], lambda method: in_place(method, root)),
        "reduce": (
            [total(each) if at_root else mine],
            lambda method: in_place(method, root, ReduceOp.SUM),
        ),
        "gather": (each if at_root else [], rooted_gather),
        "scatter": ([lists[root][rank]], rooted_scatter),
        "reduce_scatter": ([torch.stack(parts).amin(0)], scattered),
        "send": ([each[(rank - 1) % world]], messages),
    }


def all_methods() -> list[str]:
    backend = backend_of()
    called = []
    for size in SIZES:
        for name, (want, call) in methods(size).items():
            if (method := getattr(backend, name, None)) is None:
                continue
            got = call(method)
            assert len(got) == len(want), name
            assert all(map(torch.equal, got, want)), (name, size)
            called.append(name)
    backend.barrier().wait()
    return called


def test_every_method_under_every_name() -> None:
    first, *others = run_ranks(3, all_methods)
    assert others == [first] * 2
    # Those of 2.11; newer PyTorch has more.
    old = {"_allgather_base", "_reduce_scatter_base", "alltoall_base", "alltoall", "send"}
    plain = {"allgather", "allreduce", "broadcast", "reduce", "gather", "scatter", "reduce_scatter"}
    assert old | plain <= set(first)
    assert len(first) == len(SIZES) * len(set(first))


# ---- sizes that differ by rank ----


def uneven() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for sizes in ([1, 4, 2], [3, 0, 20_001], [40_003, 7, 8]):
        for dtype in (torch.float32, torch.bfloat16, torch.int16):
            where = (sizes, dtype)
            inputs = [
                [give(r, 10 * j + n, dtype)[:n] for j, n in enumerate(sizes)] for r in range(3)
            ]
            for op, reference in {
                ReduceOp.SUM: lambda parts: parts.sum(0, dtype=parts.dtype),
                ReduceOp.MAX: lambda parts: parts.amax(0),
            }.items():
                out = torch.empty(sizes[rank], dtype=dtype)
                dist.reduce_scatter(out, inputs[rank], op)
                parts = torch.stack([given[rank] for given in inputs])
                assert not sizes[rank] or torch.equal(out, reference(parts)), where
            for root in range(world):
                outputs = [torch.empty(n, dtype=dtype) for n in sizes] if rank == root else None
                dist.gather(inputs[rank][rank], outputs, root)
                for r, output in enumerate(outputs or []):
                    assert torch.equal(output, inputs[r][r]), where
                out = torch.empty(sizes[rank], dtype=dtype)
                dist.scatter(out, inputs[rank] if rank == root else None, root)
                assert torch.equal(out, inputs[root][rank]), where
    # Another size than that of this rank's own part is refused at once, and the group goes on.
    parts = [torch.ones(2) for _ in range(world)]
    with pytest.raises(RuntimeError, match=rf"input {rank} has 2 elements, .* has 3"):
        dist.reduce_scatter(torch.empty(3), parts)
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"output 1 has 2 elements, .* has 3"):
            dist.gather(torch.ones(3), parts, 1)
        with pytest.raises(RuntimeError, match=r"input 1 has 2 elements, .* has 3"):
            dist.scatter(torch.ones(3), parts, 1)
    dist.barrier()


def test_sizes_that_differ_by_rank() -> None:
    run_ranks(3, uneven)


def another_ranks_size(way: str) -> str:
    """Rank 2 has another size in mind than the root: the message shows it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.ones(5 if rank == 2 else 3)
    threes = [torch.ones(3) for _ in range(world)] if rank == 0 else None
    with pytest.raises(RuntimeError) as error:
        if way == "gather":
            dist.gather(mine, threes, 0)
        else:
            dist.scatter(mine, threes, 0)
        for _ in range(100):
            dist.barrier()
    return str(error.value)


@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_another_size_than_the_roots_is_told(way: str) -> None:
    texts = run_ranks(3, another_ranks_size, way, init={"timeout": timedelta(seconds=10)})
    for text in texts:
        assert "12" in text, text
        assert "20" in text, text
        assert "bytes" in text, text


# ---- what went wrong ----


def errors(tell: Callable[[object], None]) -> dict[str, str]:
    rank = dist.get_rank()
    store = c10d._get_default_store()
    world = backend_of()
    said = {}
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    dist.all_reduce(torch.ones(3))
    if rank < 2:
        dist.all_reduce(torch.ones(3), group=group)
        pair = backend_of(group)
        said["healthy"] = pair.get_error().name
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True) if rank == 0 else None
        if work is not None:
            assert not work.is_completed()
            assert work.exception() is None
            with pytest.raises(RuntimeError, match=r"within its timeout of 1\.0 s") as first:
                work.wait()
            assert work.is_completed()
            assert not work.is_success()
            assert "within its timeout of 1.0 s" in str(work.exception())
            with pytest.raises(RuntimeError) as again:
                work.wait()
            assert str(again.value) == str(first.value)
            store.set("timed out", "")
        store.wait(["timed out"], timedelta(seconds=20))
        if rank == 1:
            with pytest.raises(RuntimeError, match="rank 0"):
                dist.all_reduce(torch.ones(3), group=group)
        said["timed out"] = pair.get_error().name
    said["another group"] = world.get_error().name
    dist.barrier()
    tell("ready")
    if rank == 2:
        signal.pause()
    with pytest.raises(RuntimeError, match="rank 2"):
        while True:
            dist.all_reduce(torch.ones(3))
    said["lost"] = world.get_error().name
    return said


@needs_method("get_error")
def test_get_error_tells_what_kind_of_error_the_group_had() -> None:
    world = start_ranks(3, errors)
    for rank in range(3):
        world.receive(rank)
    world.signal(2, signal.SIGKILL)
    outcomes = world.join(expect_dead=(2,))
    for outcome in outcomes[:2]:
        assert not outcome.error, outcome.error
        assert outcome.value["healthy"] == "SUCCESS"
        assert outcome.value["another group"] == "SUCCESS"
        assert outcome.value["lost"] == "COMM_ERROR"
    assert outcomes[0].value["timed out"] == "TIMEOUT"
    assert outcomes[1].value["timed out"] != "SUCCESS"  # it was told by rank 0


# ---- handles ----


def handles() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    begin = time.monotonic()
    works = {
        "ALLREDUCE": dist.all_reduce(torch.ones(3), async_op=True),
        "BROADCAST": dist.broadcast(torch.ones(3), 1, async_op=True),
        "_ALLGATHER_BASE": dist.all_gather_into_tensor(
            torch.empty(3 * world), torch.ones(3), async_op=True
        ),
        "REDUCE": dist.reduce(torch.ones(100_003), 1, async_op=True),
    }
    for number, (name, work) in enumerate(works.items(), start=1):
        work.wait()
        assert 0 < work._get_duration() <= 1000 * (time.monotonic() - begin), name
        assert work._get_sequence_number() == number, name
        assert work.exception() is None, name
        if hasattr(work, "timeout"):
            assert work.timeout == timedelta(seconds=30), name
        if hasattr(torch._C._distributed_c10d, "OpType"):
            assert work._get_op_type() == int(getattr(torch._C._distributed_c10d.OpType, name))

    # Several operations under one handle: it is done when all are.
    before = backend_of()._get_sequence_number_for_group()
    outputs = [torch.empty(3 * world), torch.empty(2 * world)]
    work = group.allgather_into_tensor_coalesced(outputs, [torch.ones(3), torch.ones(2)])
    work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert all(map(torch.equal, work.result(), outputs))
    assert all(map(torch.equal, work.get_future().wait(), outputs))
    assert before < work._get_sequence_number() <= before + 2
    assert 0 < work._get_duration() <= 1000 * (time.monotonic() - begin)

    # One that nobody has answered yet.
    into = torch.zeros(2)
    if rank == 0:
        work = dist.irecv(into)
        assert not work.is_completed()
        assert not work.is_success()
        assert work.exception() is None
        with pytest.raises(RuntimeError, match="isn't done"):
            work._get_duration()
    dist.barrier()
    if rank == 2:
        dist.send(torch.ones(2), 0)
    if rank == 0:
        work.wait()
        assert work._source_rank() == 2
        assert work._get_duration() > 0
        assert into.tolist() == [1, 1]
    dist.barrier()


def test_handles_know_their_operation() -> None:
    run_ranks(3, handles)


def properties() -> None:
    backend = backend_of()
    assert backend.name() == "geomesh"
    assert backend._get_backend_name() == "geomesh"
    assert (backend.rank(), backend.size()) == (dist.get_rank(), dist.get_world_size())
    assert backend.options._timeout == timedelta(seconds=7)
    assert backend.bound_device_id is None
    assert backend.supports_splitting
    assert backend.supports_shrinking
    backend._set_sequence_number_for_group()
    assert backend._get_sequence_number_for_group() == 0
    backend._enable_collectives_timing()
    if hasattr(backend, "set_timeout"):
        backend.set_timeout(timedelta(seconds=9))
        assert backend.options._timeout == timedelta(seconds=9)
        work = dist.barrier(async_op=True)
        work.wait()
        assert work.timeout == timedelta(seconds=9)
        with pytest.raises(RuntimeError, match="must be positive"):
            backend.set_timeout(timedelta(0))


def test_properties() -> None:
    run_ranks(2, properties, init={"timeout": timedelta(seconds=7)})


def allocated() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    backend = backend_of()
    assert backend.supports_tensor_alloc(torch.device("cpu")) is True
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor = backend.allocate_tensor(1001, dtype=dtype, device=torch.device("cpu"))
        assert tensor.dtype == dtype
        assert tensor.shape == (1001,)
        tensor.fill_(rank + 1)
        dist.all_reduce(tensor)
        assert tensor.eq(sum(range(1, world + 1))).all()
    empty = backend.allocate_tensor(0, dtype=torch.float32, device=torch.device("cpu"))
    assert empty.numel() == 0


@needs_method("allocate_tensor")
def test_memory_of_the_backend_is_memory() -> None:
    run_ranks(2, allocated)


# ---- dtypes in which nobody computes ----


def complex_numbers(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    real, imaginary = give(rank, size), give(rank + 7, size)
    return torch.complex(real, imaginary).to(dtype)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare in a dtype that torch.equal knows."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    return a.dtype == b.dtype and torch.equal(a.to(wide), b.to(wide))


def sums_of_complex_numbers() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    backend = backend_of()
    for dtype in (torch.complex64, torch.complex128, torch.complex32):
        for size in SIZES:
            each = [complex_numbers(r, size, dtype) for r in range(world)]
            exact = sum(tensor.to(torch.complex128) for tensor in each)
            want = exact.to(dtype)
            where = (dtype, size)

            tensor = each[rank].clone()
            dist.all_reduce(tensor)  # as pairs of reals
            assert equal(tensor, want), where
            tensor = each[rank].clone()
            backend.allreduce([tensor]).wait()  # as it is
            assert equal(tensor, want), where
            tensor = each[rank].clone()
            dist.reduce(tensor, 1)
            assert equal(tensor, want if rank == 1 else each[rank]), where
            tensors = [each[rank].clone(), each[rank].clone()]
            backend.allreduce_coalesced(tensors).wait()
            assert all(equal(tensor, want) for tensor in tensors), where
            tensor = torch.empty_like(want)
            dist.reduce_scatter_tensor(tensor, each[rank].repeat(world))
            assert equal(tensor, want), where
            dist.reduce_scatter(tensor.zero_(), [each[rank].clone() for _ in range(world)])
            assert equal(tensor, want), where

            tensor = each[rank].clone()
            dist.all_reduce(tensor, ReduceOp.AVG)
            tolerance = 2e-3 if dtype == torch.complex32 else 1e-6
            torch.testing.assert_close(
                tensor.to(torch.complex128), exact / world, rtol=tolerance, atol=tolerance
            )
        for name in ("PRODUCT", "MIN", "BAND"):
            options = with_op(c10d.AllreduceOptions(), getattr(ReduceOp, name))
            with pytest.raises(RuntimeError, match=rf"Complex\w*\[2\], {name}\).*complex tensors"):
                backend.allreduce([torch.ones(2, dtype=dtype)], options)
    dist.barrier()


def test_complex_numbers() -> None:
    run_ranks(3, sums_of_complex_numbers)


FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda t: t.sum(0),
    "AVG": lambda t: t.sum(0) / len(t),
    "PRODUCT": lambda t: t.prod(0),
    "MIN": lambda t: t.amin(0),
    "MAX": lambda t: t.amax(0),
}


def eight_bits() -> None:
    """Computed in float32 and rounded once, at the end: not in eight bits at each step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in FLOAT8:
        for size in SIZES:
            # Sums and products need more digits than eight bits have.
            each = [(give(r, size) * 1.75 + 0.125).to(dtype) for r in range(world)]
            wide = torch.stack([tensor.float() for tensor in each])
            for name, reference in REDUCTIONS.items():
                op = getattr(ReduceOp, name)
                want = reference(wide).to(dtype)
                tensor = each[rank].clone()
                dist.all_reduce(tensor, op)
                assert equal(tensor, want), (dtype, size, name)
                tensor = each[rank].clone()
                dist.reduce(tensor, 2, op)
                assert equal(tensor, want if rank == 2 else each[rank]), (dtype, size, name)
                tensor = torch.empty_like(want)
                dist.reduce_scatter_tensor(tensor, torch.cat([each[rank]] * world), op)
                assert equal(tensor, want), (dtype, size, name)
        with pytest.raises(RuntimeError, match=r"Float8_\w+\[2\], BXOR"):
            dist.all_reduce(torch.ones(2).to(dtype), ReduceOp.BXOR)
    dist.barrier()


def test_eight_bit_floats() -> None:
    run_ranks(3, eight_bits)


# ---- views that only say that they are conjugated or negated ----


class Lazy:
    """A view whose values are not what lies in memory, with its memory."""

    def __init__(self, kind: str, values: torch.Tensor) -> None:
        if kind == "conjugated":
            self.memory = values.conj().resolve_conj().clone()
            self.view = self.memory.conj()
            assert self.view.is_conj()
        else:  # the imaginary part of what is conjugated, which is strided too
            self.memory = torch.complex(torch.full_like(values, 5.0), -values)
            self.view = self.memory.conj().imag
            assert self.view.is_neg()
        assert torch.equal(self.view, values)

    def holds(self, values: torch.Tensor) -> bool:
        """Tell whether it has these values, and so its memory their opposites."""
        if self.memory.is_complex() and self.view.is_complex():
            return torch.equal(self.memory, values.conj().resolve_conj())
        return torch.equal(self.memory.imag, -values) and self.memory.real.eq(5).all().item()


def lazy_views(kind: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    backend = backend_of()  # the functions of torch.distributed take no conjugated tensor
    for size in (3, 1001):

        def values(r: int, size: int = size) -> torch.Tensor:
            if kind == "conjugated":
                return complex_numbers(r, size, torch.complex64)
            return give(r, size)

        def new(like: torch.Tensor) -> Lazy:
            return Lazy(kind, torch.zeros_like(like))

        each = [values(r) for r in range(world)]
        zeros, sums, joined = torch.zeros_like(each[0]), total(each), torch.cat(each)

        mine = Lazy(kind, each[rank])
        backend.allreduce([mine.view]).wait()
        assert mine.holds(sums)
        pair = [Lazy(kind, each[rank]), Lazy(kind, zeros)]
        backend.allreduce_coalesced([one.view for one in pair]).wait()
        assert pair[0].holds(sums)
        assert pair[1].holds(zeros)
        for root in range(world):
            mine = Lazy(kind, each[rank])
            backend.reduce([mine.view], with_root(c10d.ReduceOptions(), root)).wait()
            assert mine.holds(sums if rank == root else each[rank])
            mine = Lazy(kind, each[rank])
            backend.broadcast([mine.view], with_root(c10d.BroadcastOptions(), root)).wait()
            assert mine.holds(each[root])

            outputs = [new(zeros) for _ in each] if rank == root else []
            given = Lazy(kind, each[rank])
            backend.gather([o.view for o in outputs], given.view, root).wait()
            assert all(o.holds(e) for o, e in zip(outputs, each, strict=False))
            assert given.holds(each[rank])
            output = new(zeros)
            inputs = [Lazy(kind, one).view for one in each] if rank == root else []
            backend.scatter(output.view, inputs, root).wait()
            assert output.holds(each[rank])

        given, outputs = Lazy(kind, each[rank]), [new(zeros) for _ in each]
        backend.allgather([o.view for o in outputs], given.view).wait()
        assert all(o.holds(e) for o, e in zip(outputs, each, strict=True))
        output = new(joined)
        backend._allgather_base(output.view, given.view).wait()
        assert output.holds(joined)
        lists = [[new(zeros)] for _ in each]
        backend.allgather_coalesced([[o.view for o in one] for one in lists], [given.view]).wait()
        assert all(one[0].holds(e) for one, e in zip(lists, each, strict=True))
        assert given.holds(each[rank])

        wide = Lazy(kind, torch.cat([each[rank] * (r + 1) for r in range(world)]))
        output = new(zeros)
        backend._reduce_scatter_base(output.view, wide.view).wait()
        assert output.holds(sums * (rank + 1))
        output = new(zeros)
        backend.reduce_scatter(output.view, list(wide.view.chunk(world))).wait()
        assert output.holds(sums * (rank + 1))
        output = new(joined)
        backend.alltoall_base(output.view, wide.view, [], []).wait()
        assert output.holds(torch.cat([one * (rank + 1) for one in each]))
        outputs = [new(zeros) for _ in each]
        backend.alltoall([o.view for o in outputs], list(wide.view.chunk(world))).wait()
        assert all(o.holds(e * (rank + 1)) for o, e in zip(outputs, each, strict=True))

        output = new(zeros)
        work = backend.recv([output.view], (rank - 1) % world, 0)
        backend.send([given.view], (rank + 1) % world, 0).wait()
        work.wait()
        assert output.holds(each[(rank - 1) % world])


@pytest.mark.parametrize("kind", ["conjugated", "negated"])
def test_views_that_are_conjugated_or_negated_when_read(kind: str) -> None:
    run_ranks(3, lazy_views, kind)
