"""Tensors without elements: every operation is one operation and sends nothing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import torch_geomesh as gm
from torch_geomesh.backend import backend_of

c10d = dist.distributed_c10d

SHAPES = [(0,), (1, 0, 2), (0, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64]
# (0, 3) as a view whose strides say nothing about its elements, since it has none.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda t: t,
    "transposed": lambda t: t.t() if t.dim() == 2 else t,
    "strides of zero": lambda t: t.as_strided(t.shape, [0] * t.dim()),
}


def sent() -> int:
    """Return the bytes that went to all peers so far: data, no control."""
    return sum(s["bytes_sent"] for s in gm.stats())


def sequence() -> int:
    return backend_of()._get_sequence_number_for_group()


Collective = Callable[[Callable[[], torch.Tensor]], Any]


def collectives() -> dict[str, Collective]:
    """Return calls that take what makes an empty tensor; each is one operation of the group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group, backend = dist.group.WORLD, backend_of()
    later = {"async_op": True}

    def each(new: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        return [new() for _ in range(world)]

    calls: dict[str, Collective] = {
        "all_gather": lambda new: dist.all_gather(each(new), new(), **later),
        "all_gather_into_tensor": lambda new: dist.all_gather_into_tensor(new(), new(), **later),
        "reduce_scatter": lambda new: dist.reduce_scatter(new(), each(new), **later),
        "reduce_scatter_tensor": lambda new: dist.reduce_scatter_tensor(new(), new(), **later),
        "all_to_all": lambda new: dist.all_to_all(each(new), each(new), **later),
        "all_to_all_single, split": lambda new: dist.all_to_all_single(
            torch.empty(0, 3), torch.empty(0, 3), [0] * world, [0] * world, **later
        ),
        "all_reduce, coalesced": lambda new: group.allreduce_coalesced([new(), new()]),
        "all_gather, coalesced": lambda new: group.allgather_coalesced(
            [[new(), new()] for _ in range(world)], [new(), new()]
        ),
        "all_reduce of a list": lambda new: backend.allreduce([new(), new()]),
        "all_gather of a list": lambda new: backend.allgather(
            [each(new) + each(new) for _ in range(2)], [new(), new()]
        ),
        "all_reduce of sparse": lambda new: dist.all_reduce(torch.zeros(4).to_sparse(), **later),
    }
    for op in ("SUM", "PRODUCT", "MIN", "MAX"):
        calls[f"all_reduce {op}"] = lambda new, op=op: dist.all_reduce(
            new(), getattr(dist.ReduceOp, op), **later
        )
    for root in range(world):
        calls[f"broadcast {root}"] = lambda new, root=root: dist.broadcast(new(), root, **later)
        calls[f"reduce {root}"] = lambda new, root=root: dist.reduce(new(), root, **later)
        calls[f"gather {root}"] = lambda new, root=root: dist.gather(
            new(), each(new) if rank == root else None, root, **later
        )
        calls[f"scatter {root}"] = lambda new, root=root: dist.scatter(
            new(), each(new) if rank == root else None, root, **later
        )
    if hasattr(dist, "gather_single"):  # PyTorch 2.14
        calls["gather_single"] = lambda new: dist.gather_single(new(), new(), 1, **later)
    return calls


def run_collectives() -> int:
    """Run all of them and look at what each leaves; return the sequence number."""
    dtypes = itertools.cycle(DTYPES)
    for (name, call), shape, (view, take) in itertools.product(
        collectives().items(), SHAPES, VIEWS.items()
    ):
        dtype = next(dtypes)
        made: list[torch.Tensor] = []

        def new(
            shape: tuple[int, ...] = shape,
            dtype: torch.dtype = dtype,
            take: Callable[[torch.Tensor], torch.Tensor] = take,
            made: list[torch.Tensor] = made,
        ) -> torch.Tensor:
            made.append(take(torch.empty(shape, dtype=dtype)))
            return made[-1]

        want = take(torch.empty(shape))
        before = sequence()
        work = call(new)
        work.wait()
        where = (name, shape, dtype, view)
        # A sparse tensor's entries are counted, told, and then summed up.
        assert sequence() > before if "sparse" in name else sequence() == before + 1, where
        assert work.is_success(), where
        for tensor in made:
            assert tensor.shape == want.shape, where
            assert tensor.stride() == want.stride(), where
            assert tensor.dtype == dtype, where
        if "sparse" not in name:
            assert work.bytes_sent == 0, where
            assert work.bytes_received == 0, where
    return sequence()


def no_bytes_are_sent() -> int:
    """Rank by rank: nobody waits for anybody, as there is nothing to wait for (as with Gloo)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = c10d._get_default_store()
    if rank > 0:
        store.wait([f"rank {rank - 1} is through"], timedelta(seconds=20))
    before = sent()
    count = 0
    for call, shape, dtype in itertools.product(collectives().items(), SHAPES, DTYPES):
        if "sparse" not in call[0]:  # how many entries each has, the others must be told
            call[1](lambda shape=shape, dtype=dtype: torch.empty(shape, dtype=dtype)).wait()
            count += 1
    assert sent() == before
    assert sequence() == count
    store.set(f"rank {rank} is through", "")
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor)
    assert tensor.eq(sum(range(world))).all()
    return sequence()


def alltoall_single_of_any_shape() -> None:
    """Split along the first dimension, which three ranks must divide where it is not empty."""
    output = torch.empty(3, 0, 2)
    dist.all_to_all_single(output, torch.empty(3, 0, 2))
    assert output.shape == (3, 0, 2)
    dist.all_to_all_single(output, torch.empty(3, 0, 2), [0, 1, 2], [2, 1, 0])
    with pytest.raises(RuntimeError, match="not a multiple of the 3 ranks"):
        dist.all_to_all_single(torch.empty(1, 0, 2), torch.empty(1, 0, 2))


def wrong_calls_are_errors_all_the_same() -> None:
    """Whether there is an element or not, what can't be computed is refused."""
    before = sequence()
    for shape in SHAPES:
        empty = torch.empty(shape)
        with pytest.raises(RuntimeError, match=r"BAND.*float32"):
            dist.all_reduce(empty, dist.ReduceOp.BAND)
        with pytest.raises(RuntimeError, match="differ in dtype"):
            dist.all_gather_into_tensor(empty, empty.double())
        with pytest.raises(RuntimeError, match="invalid root rank: 3"):
            dist.broadcast(empty, 3)
    assert sequence() == before


def all_at_once() -> list[int]:
    numbers = [run_collectives()]
    alltoall_single_of_any_shape()
    wrong_calls_are_errors_all_the_same()
    numbers.append(sequence())
    tensor = torch.full((3,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    assert tensor.eq(3).all()
    return numbers


def test_every_collective_keeps_the_shape_and_is_one_operation() -> None:
    first, *others = run_ranks(3, all_at_once)
    assert first[0] > 200
    assert others == [first] * 2


def test_no_bytes_are_sent_and_nobody_waits() -> None:
    first, *others = run_ranks(3, no_bytes_are_sent)
    assert others == [first] * 2


# ---- empty here, not there ----


def differ_in_emptiness() -> dict[str, str]:
    """One rank has five elements where the others have none, and the other way round."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = range(world)

    def gather(n: int, group: dist.ProcessGroup) -> None:
        outputs = [torch.empty(n) for _ in ranks] if rank == 0 else None
        dist.gather(torch.ones(n), outputs, 0, group=group)

    def scatter(n: int, group: dist.ProcessGroup) -> None:
        inputs = [torch.ones(n) for _ in ranks] if rank == 0 else None
        dist.scatter(torch.empty(n), inputs, 0, group=group)

    calls: dict[str, Callable[[int, dist.ProcessGroup], object]] = {
        "all_reduce": lambda n, group: dist.all_reduce(torch.ones(n), group=group),
        "broadcast": lambda n, group: dist.broadcast(torch.ones(n), 0, group=group),
        "reduce": lambda n, group: dist.reduce(torch.ones(n), 0, group=group),
        "all_gather": lambda n, group: dist.all_gather_into_tensor(
            torch.empty(n * world), torch.ones(n), group=group
        ),
        "reduce_scatter": lambda n, group: dist.reduce_scatter_tensor(
            torch.empty(n), torch.ones(n * world), group=group
        ),
        "gather": gather,
        "scatter": scatter,
        "all_to_all": lambda n, group: dist.all_to_all_single(
            torch.empty(n * world), torch.ones(n * world), group=group
        ),
    }
    texts = {}
    for (name, call), odd, empty in itertools.product(calls.items(), (0, 1), (True, False)):
        group = dist.new_group()
        elements = 5 if (rank == odd) != empty else 0
        with pytest.raises(RuntimeError) as error:
            call(elements, group)
            while True:  # a rank that was through already is told in one of the next operations
                dist.barrier(group)
        texts[f"{name} {odd} {empty}"] = str(error.value)
    return texts


def test_ranks_that_differ_in_emptiness_are_told() -> None:
    values = run_ranks(3, differ_in_emptiness)
    assert len(values[0]) == 8 * 4
    for texts in values:
        for name, text in texts.items():
            assert re.search(
                "different operation|different sizes|has room for|bytes where .* are due", text
            ), (name, text)


# ---- some parts empty, others not ----


def full(rank: int, other: int, size: int) -> torch.Tensor:
    return torch.full((size,), 10.0 * rank + other)


def some_parts_are_empty() -> int:
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = range(world)
    group = dist.group.WORLD
    for salt in range(4):
        # Elements that rank r gives to rank j: each combination of none and some comes up.
        sizes = [[(r * (j + salt) + salt) % 3 * 5 for j in ranks] for r in ranks]
        mine = [full(rank, j, sizes[rank][j]) for j in ranks]
        theirs = [full(r, rank, sizes[r][rank]) for r in ranks]

        outputs = [torch.empty_like(t) for t in theirs]
        dist.all_to_all(outputs, mine)
        assert all(map(torch.equal, outputs, theirs)), ("all_to_all", sizes)

        output = torch.empty(sum(map(len, theirs)))
        dist.all_to_all_single(
            output, torch.cat(mine), [len(t) for t in theirs], [len(t) for t in mine]
        )
        assert torch.equal(output, torch.cat(theirs)), ("all_to_all_single", sizes)

        gathered = [torch.empty(sizes[r][0]) for r in ranks]
        dist.all_gather(gathered, mine[0])
        want = [full(r, 0, sizes[r][0]) for r in ranks]
        assert all(map(torch.equal, gathered, want)), ("all_gather", sizes)

        for root in ranks:
            outputs = [torch.empty(sizes[r][root]) for r in ranks] if rank == root else None
            dist.gather(mine[root], outputs, root)
            assert outputs is None or all(map(torch.equal, outputs, theirs)), ("gather", sizes)
            output = torch.empty(sizes[root][rank])
            dist.scatter(output, mine if rank == root else None, root)
            assert torch.equal(output, full(root, rank, sizes[root][rank])), ("scatter", sizes)

        # The part of each rank is of one size on all of them.
        parts = [torch.full((sizes[0][j],), rank + 10.0 * j) for j in ranks]
        output = torch.empty(sizes[0][rank])
        dist.reduce_scatter(output, parts)
        assert output.eq(sum(ranks) + world * 10.0 * rank).all(), ("reduce_scatter", sizes)

    none, some = torch.empty(0, 2), torch.full((3,), float(rank))
    tensors = [none, some.clone(), none.clone(), some.clone()]
    group.allreduce_coalesced(tensors).wait()
    assert [t.shape for t in tensors] == [(0, 2), (3,), (0, 2), (3,)]
    assert all(t.eq(sum(ranks)).all() for t in tensors)

    outputs = [torch.empty(0), torch.empty(3 * world), torch.empty(0, 2)]
    group.allgather_into_tensor_coalesced(outputs, [torch.empty(0), some, none]).wait()
    assert torch.equal(outputs[1], torch.arange(float(world)).repeat_interleave(3))
    assert outputs[2].shape == (0, 2)

    outputs = [torch.empty(0, 2), torch.empty(1), torch.empty(0)]
    group.reduce_scatter_tensor_coalesced(outputs, [none, some, torch.empty(0)]).wait()
    assert outputs[1].tolist() == [sum(ranks)]

    lists = [[torch.empty(0, 2), torch.empty(3), torch.empty(0)] for _ in ranks]
    group.allgather_coalesced(lists, [none, some, torch.empty(0)]).wait()
    assert all(tensors[1].eq(r).all() for r, tensors in enumerate(lists))

    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in (none, tensors[1], none):
            dist.all_reduce(tensor)
    manager.wait()
    assert tensors[1].eq(sum(ranks) * world).all()
    return sequence()


def test_some_parts_are_empty() -> None:
    first, *others = run_ranks(3, some_parts_are_empty)
    assert others == [first] * 2


# ---- messages ----


def empty_messages() -> int:
    rank, world = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world, (rank - 1) % world
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        output = torch.empty(shape, dtype=dtype)
        work = dist.isend(torch.empty(shape, dtype=dtype), right)
        dist.recv(output, left)
        work.wait()
        assert output.shape == shape

    # A message without elements is a message: it has its place in the order.
    works = [dist.isend(torch.full((size,), 7.0), right) for size in (0, 2, 0, 0, 3)]
    for size in (0, 2, 0, 0, 3):
        output = torch.zeros(size)
        dist.recv(output, left)
        assert output.eq(7).all()
    for work in works:
        work.wait()

    batch = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.empty(0), right),
            dist.P2POp(dist.irecv, torch.empty(0), left),
        ]
    )
    for work in batch:
        work.wait()
    return sequence()


def test_empty_messages_come_in_their_turn() -> None:
    first, *others = run_ranks(3, empty_messages)
    assert others == [first] * 2


def empty_messages_from_any_rank() -> list[int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        for _ in range(2):
            dist.send(torch.empty(0, 3), 0)
        dist.barrier()
        if rank == 1:
            dist.send(torch.full((2,), 5.0), 0)
        return []
    sources = [dist.recv(torch.empty(0, 3)) for _ in range(2 * (world - 1))]
    dist.barrier()
    # None is left over, to be taken for a later one.
    value = torch.zeros(2)
    assert dist.recv(value) == 1
    assert value.eq(5).all()
    return sorted(sources)


def test_a_receive_from_any_rank_gets_empty_messages() -> None:
    limit = {"timeout": timedelta(seconds=5)}
    assert run_ranks(3, empty_messages_from_any_rank, init=limit)[0] == [1, 1, 2, 2]


def receives_before_it_is_sent() -> bool:
    if dist.get_rank() == 0:
        dist.barrier()
        dist.barrier()
        dist.send(torch.empty(0), 1)
        return False
    work = dist.irecv(torch.empty(0), 0)
    dist.barrier()  # there was time to end
    early = work.is_completed()
    dist.barrier()
    work.wait()
    return early


def test_a_receive_of_nothing_waits_until_it_is_sent() -> None:
    assert run_ranks(2, receives_before_it_is_sent)[1] is False


def another_size(sent: int, received: int) -> str:
    with pytest.raises(RuntimeError) as error:
        if dist.get_rank() == 0:
            dist.send(torch.ones(sent), 1)
        else:
            dist.recv(torch.ones(received), 0)
        dist.barrier()
    return str(error.value)


@pytest.mark.parametrize(("sent", "received"), [(0, 5), (5, 0)])
def test_an_empty_message_for_a_receive_that_is_not_is_an_error(sent: int, received: int) -> None:
    limit = {"timeout": timedelta(seconds=5)}
    receiver = run_ranks(2, another_size, sent, received, init=limit)[1]
    took, had = 4 * received, 4 * sent
    assert re.search(rf"of {had} bytes where {took} are|sent {had} bytes, .* {took}\b", receiver)
