"""Views that are not dense: exact through each rank's own strides, or refused before a byte leaves.

Every rank has another layout for every tensor. What surrounds a view is compared too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from torch_geomesh.backend import backend_of

Take = Callable[[torch.Tensor], torch.Tensor]
Layout = Callable[[list[int]], tuple[list[int], Take]]

# Of a shape: that of the memory around it, and which part of the memory has this shape.
WRITABLE: dict[str, Layout] = {
    "dense": lambda s: (s, lambda m: m),
    "transposed": lambda s: (s[::-1], lambda m: m.permute(3, 2, 1, 0)),
    "columns": lambda s: ([*s[:3], 2 * s[3]], lambda m: m[..., 1::2]),
    "rows": lambda s: ([3 * s[0], *s[1:]], lambda m: m[2::3]),
    "channels last": lambda s: ([s[0], s[2], s[3], s[1]], lambda m: m.permute(0, 3, 1, 2)),
    "tail": lambda s: ([s[0] + 3, *s[1:]], lambda m: m.narrow(0, -s[0], s[0])),
    "inner tail": lambda s: ([*s[:3], s[3] + 3], lambda m: m.narrow(3, -s[3], s[3])),
}
READABLE: dict[str, Layout] = {
    **WRITABLE,
    "expanded": lambda s: ([s[0], 1, *s[2:]], lambda m: m.expand(s)),
    "unfolded": lambda s: ([*s[:2], s[2] + s[3] - 1], lambda m: m.unfold(2, s[3], 1)),
}
SMALL = [2, 3, 2, 5]
LARGE = [2, 7, 37, 41]  # more bytes than the engine's thread reduces itself


class Held:
    """A tensor of this rank, a view of memory that has other values around it."""

    def __init__(self, memory: torch.Tensor, take: Take) -> None:
        self.memory, self.take = memory, take
        self.view = take(memory)
        self.wanted = memory.clone()

    def becomes(self, values: torch.Tensor) -> None:
        """Say what the view will hold; without this, all stays as it is."""
        self.take(self.wanted).copy_(values)


class Call:
    """The tensors of one call: what every rank gives, and where the results go."""

    def __init__(self, number: int, shape: list[int], dtype: torch.dtype) -> None:
        self.number, self.shape, self.dtype = number, shape, dtype
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.root = number % self.world
        self.held: list[Held] = []

    def all_shapes(self) -> list[int]:
        """Return the shape of one tensor for each rank, one after the other."""
        return [self.world * self.shape[0], *self.shape[1:]]

    def _make(self, rank: int, slot: int, shape: list[int], layouts: dict[str, Layout]) -> Held:
        names = list(layouts)
        inputs, outputs = divmod(self.number, len(WRITABLE))
        turn = inputs if layouts is READABLE else outputs + rank
        around, take = layouts[names[(turn + rank + slot) % len(names)]](list(shape))
        generator = torch.Generator().manual_seed(1000 * self.number + 100 * rank + slot)
        memory = torch.randint(-3, 4, around, generator=generator).to(self.dtype)
        return Held(memory, take)

    def given(self, slot: int = 0, shape: list[int] | None = None) -> torch.Tensor:
        """Return a tensor that this rank gives."""
        self.held.append(self._make(self.rank, slot, shape or self.shape, READABLE))
        return self.held[-1].view

    def everybodys(self, slot: int = 0, shape: list[int] | None = None) -> list[torch.Tensor]:
        """Return the values that each rank gives."""
        shape = shape or self.shape
        return [self._make(r, slot, shape, READABLE).view.clone() for r in range(self.world)]

    def into(self, values: torch.Tensor, slot: int = 10) -> torch.Tensor:
        """Return a tensor for a result, which must become these values."""
        held = self._make(self.rank, slot, list(values.shape), WRITABLE)
        held.becomes(values)
        self.held.append(held)
        return held.view

    def in_place(self, result: Callable[[list[torch.Tensor]], torch.Tensor]) -> torch.Tensor:
        """Return a tensor that is given and becomes ``result`` of what all ranks give."""
        give = [self._make(r, 20, self.shape, WRITABLE) for r in range(self.world)]
        values = [held.view.clone() for held in give]
        mine = give[self.rank]
        mine.becomes(result(values))
        self.held.append(mine)
        return mine.view

    def check(self) -> None:
        for place, held in enumerate(self.held):
            where = (self.number, place, held.view.shape, held.view.stride())
            assert torch.equal(held.memory, held.wanted), where


def total(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).sum(0, dtype=tensors[0].dtype)


# ---- each operation, on tensors in any layout ----


def all_reduce(call: Call) -> None:
    dist.all_reduce(call.in_place(total))


def all_reduce_coalesced(call: Call) -> None:
    # Two tensors of one call need not be alike in their strides either.
    other = call.into(total(call.everybodys(1)))
    other.copy_(call.everybodys(1)[call.rank])
    dist.group.WORLD.allreduce_coalesced([call.in_place(total), other]).wait()


def reduce(call: Call) -> None:
    mine = call.rank == call.root
    dist.reduce(call.in_place(lambda v: total(v) if mine else v[call.rank]), call.root)


def broadcast(call: Call) -> None:
    dist.broadcast(call.in_place(lambda values: values[call.root]), call.root)


def all_gather(call: Call) -> None:
    outputs = [call.into(v, 10 + r) for r, v in enumerate(call.everybodys())]
    dist.all_gather(outputs, call.given())


def all_gather_into_tensor(call: Call) -> None:
    dist.all_gather_into_tensor(call.into(torch.cat(call.everybodys())), call.given())


def all_gather_into_tensor_coalesced(call: Call) -> None:
    outputs = [call.into(torch.cat(call.everybodys(i)), 10 + i) for i in range(2)]
    inputs = [call.given(i) for i in range(2)]
    dist.group.WORLD.allgather_into_tensor_coalesced(outputs, inputs).wait()


def all_gather_coalesced(call: Call) -> None:
    outputs = [
        [call.into(call.everybodys(i)[r], 10 + r + i) for i in range(2)] for r in range(call.world)
    ]
    dist.group.WORLD.allgather_coalesced(outputs, [call.given(i) for i in range(2)]).wait()


def gather(call: Call) -> None:
    outputs = None
    if call.rank == call.root:
        outputs = [call.into(v, 10 + r) for r, v in enumerate(call.everybodys())]
    dist.gather(call.given(), outputs, call.root)


def gather_single(call: Call) -> None:
    if not hasattr(dist, "gather_single"):  # before PyTorch 2.14
        return
    output = call.into(torch.cat(call.everybodys())) if call.rank == call.root else None
    dist.gather_single(call.given(), output, call.root)


def scatter(call: Call) -> None:
    inputs = [call.given(i) for i in range(call.world)] if call.rank == call.root else None
    dist.scatter(call.into(call.everybodys(call.rank)[call.root]), inputs, call.root)


def reduce_scatter(call: Call) -> None:
    inputs = [call.given(i) for i in range(call.world)]
    dist.reduce_scatter(call.into(total(call.everybodys(call.rank))), inputs)


def reduce_scatter_tensor(call: Call) -> None:
    whole = call.all_shapes()
    mine = total(call.everybodys(0, whole)).chunk(call.world)[call.rank]
    dist.reduce_scatter_tensor(call.into(mine), call.given(0, whole))


def reduce_scatter_tensor_coalesced(call: Call) -> None:
    whole = call.all_shapes()
    outputs = [
        call.into(total(call.everybodys(i, whole)).chunk(call.world)[call.rank], 10 + i)
        for i in range(2)
    ]
    inputs = [call.given(i, whole) for i in range(2)]
    dist.group.WORLD.reduce_scatter_tensor_coalesced(outputs, inputs).wait()


def all_to_all(call: Call) -> None:
    outputs = [call.into(call.everybodys(call.rank)[r], 10 + r) for r in range(call.world)]
    dist.all_to_all(outputs, [call.given(i) for i in range(call.world)])


def all_to_all_single(call: Call) -> None:
    whole = call.all_shapes()
    rows = torch.cat([v.chunk(call.world)[call.rank] for v in call.everybodys(0, whole)])
    dist.all_to_all_single(call.into(rows), call.given(0, whole))


def all_to_all_single_in_uneven_parts(call: Call) -> None:
    whole = call.all_shapes()
    # 0, 2 and 4 rows, in another order on each rank: as many from all as to all.
    splits = [[(r + i) % 3 * 2 for i in range(3)] for r in range(3)]
    parts = [v.split(s) for v, s in zip(call.everybodys(0, whole), splits, strict=True)]
    output = call.into(torch.cat([part[call.rank] for part in parts]))
    from_each = [split[call.rank] for split in splits]
    dist.all_to_all_single(output, call.given(0, whole), from_each, splits[call.rank])


def send_and_receive(call: Call) -> None:
    right, left = (call.rank + 1) % call.world, (call.rank - 1) % call.world
    works = [dist.irecv(call.into(call.everybodys()[left]), left), dist.isend(call.given(), right)]
    for work in works:
        work.wait()


def receive_from_any_rank(call: Call) -> None:
    source = (call.root + 1) % call.world
    if call.rank == source:
        dist.send(call.given(), call.root)
    elif call.rank == call.root:
        assert dist.recv(call.into(call.everybodys()[source])) == source


OPERATIONS = [
    all_reduce,
    all_reduce_coalesced,
    reduce,
    broadcast,
    all_gather,
    all_gather_into_tensor,
    all_gather_into_tensor_coalesced,
    all_gather_coalesced,
    gather,
    gather_single,
    scatter,
    reduce_scatter,
    reduce_scatter_tensor,
    reduce_scatter_tensor_coalesced,
    all_to_all,
    all_to_all_single,
    all_to_all_single_in_uneven_parts,
    send_and_receive,
    receive_from_any_rank,
]
PAIRS = len(READABLE) * len(WRITABLE)  # of an input's layout and an output's


def in_every_layout(operation: Callable[[Call], None], shape: list[int], step: int) -> int:
    dtypes = itertools.cycle([torch.float32, torch.bfloat16, torch.int8])
    for number, dtype in zip(range(0, PAIRS, step), dtypes, strict=False):
        call = Call(number, shape, dtype)
        operation(call)
        call.check()
    return backend_of()._get_sequence_number_for_group()


def every_operation(shape: list[int], step: int) -> list[int]:
    return [in_every_layout(operation, shape, step) for operation in OPERATIONS]


# The steps have no factor in common with the number of layouts: all of them come up.
@pytest.mark.parametrize(("shape", "step"), [(SMALL, 4), (LARGE, 13)])
def test_results_come_through_every_layout_and_touch_nothing_else(
    shape: list[int], step: int
) -> None:
    first, *others = run_ranks(3, every_operation, shape, step)
    assert first[-1] > 0
    assert all(sequence == first for sequence in others)


# ---- what must be refused ----


def refusal(call: Callable[[], object]) -> str:
    """Return what the call itself raises, not its work; "" where it is accepted."""
    try:
        work = call()
    except RuntimeError as error:
        return str(error)
    if work is not None:
        work.wait()
    return ""


def overlapping(which: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory and a view of it, (6, 4), some of whose elements share memory."""
    memory = torch.arange(40.0)
    return memory, {
        "expanded": lambda: memory[:6].view(6, 1).expand(6, 4),
        "unfolded": lambda: memory[:14].unfold(0, 4, 2),
        "strides that meet": lambda: memory.as_strided((6, 4), (3, 3)),
        "strides that meet far away": lambda: memory.as_strided((6, 4), (2, 5), 1),
        "one row again": lambda: memory.as_strided((6, 4), (0, 1), 7),
    }[which]()


def refused_writes(which: str) -> int:
    """Try all calls on the ranks that would write; the others, which can't know, don't call."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group, backend = dist.group.WORLD, backend_of()
    memory, bad = overlapping(which)
    before = memory.clone()
    fine, third, triple = torch.ones(6, 4), torch.ones(2, 4), torch.ones(18, 4)
    everywhere, at_the_root = range(world), [1]
    lists = [torch.zeros(6, 4) for _ in range(world)]
    worse = [[*lists[:i], bad, *lists[i + 1 :]] for i in range(world)]
    later = {"async_op": True}
    calls: list[tuple[str, range | list[int], Callable[[], object]]] = [
        ("all_reduce", everywhere, lambda: dist.all_reduce(bad, **later)),
        (
            "all_reduce, coalesced",
            everywhere,
            lambda: group.allreduce_coalesced([fine, bad]),
        ),
        ("all_reduce of two", everywhere, lambda: backend.allreduce([fine, bad])),
        # Also where they only read it: all ranks say the same.
        ("reduce", everywhere, lambda: dist.reduce(bad, 1, **later)),
        ("broadcast", everywhere, lambda: dist.broadcast(bad, 1, **later)),
        ("all_gather_into_tensor", everywhere, lambda: _gather_into(bad, third, **later)),
        (
            "all_gather_into_tensor, coalesced",
            everywhere,
            lambda: group.allgather_into_tensor_coalesced([fine, bad], [third, third]),
        ),
        ("scatter", everywhere, lambda: _scatter(bad, lists)),
        ("reduce_scatter", everywhere, lambda: dist.reduce_scatter(bad, lists, **later)),
        (
            "reduce_scatter_tensor",
            everywhere,
            lambda: dist.reduce_scatter_tensor(bad, triple, **later),
        ),
        (
            "reduce_scatter_tensor, coalesced",
            everywhere,
            lambda: group.reduce_scatter_tensor_coalesced([fine, bad], [triple, triple]),
        ),
        ("all_to_all_single", everywhere, lambda: dist.all_to_all_single(bad, fine, **later)),
        ("irecv", everywhere, lambda: dist.irecv(bad, (rank + 1) % world)),
        ("irecv from any", everywhere, lambda: dist.irecv(bad)),
        ("premul", everywhere, lambda: dist.all_reduce(bad, op=_premul(), **later)),
    ]
    for i, outputs in enumerate(worse):
        calls += [
            (f"all_gather {i}", everywhere, lambda o=outputs: dist.all_gather(o, fine, **later)),
            (f"gather {i}", at_the_root, lambda o=outputs: dist.gather(fine, o, 1, **later)),
            (f"all_to_all {i}", everywhere, lambda o=outputs: dist.all_to_all(o, lists, **later)),
            (
                f"all_gather, coalesced {i}",
                everywhere,
                lambda o=outputs: group.allgather_coalesced([[t] for t in o], [fine]),
            ),
        ]
    if hasattr(dist, "gather_single"):  # PyTorch 2.14
        calls.append(
            ("gather_single", at_the_root, lambda: dist.gather_single(third, bad, 1, **later))
        )

    sequence = backend._get_sequence_number_for_group()
    accepted = []
    for name, where, call in calls:
        if rank in where:
            text = refusal(call)
            if "share memory" not in text:
                accepted.append((name, text))
    assert accepted == [], which
    assert backend._get_sequence_number_for_group() == sequence
    assert torch.equal(memory, before)
    tensor = torch.full((5,), float(rank))
    dist.all_reduce(tensor)
    assert tensor.eq(sum(range(world))).all()
    return backend._get_sequence_number_for_group()


def _gather_into(output: torch.Tensor, part: torch.Tensor, **more: bool) -> object:
    return dist.all_gather_into_tensor(output, part, **more)


def _scatter(output: torch.Tensor, parts: list[torch.Tensor]) -> object:
    return dist.scatter(output, parts if dist.get_rank() == 1 else None, 1, async_op=True)


def _premul() -> object:
    return torch._C._distributed_c10d._make_nccl_premul_sum(2.0)


def all_refused_writes() -> list[int]:
    return [
        refused_writes("expanded"),
        refused_writes("one row again"),
        refused_writes("unfolded"),
        refused_writes("strides that meet"),
        refused_writes("strides that meet far away"),
    ]


def test_results_whose_own_elements_share_memory_are_refused_everywhere() -> None:
    first, *others = run_ranks(3, all_refused_writes)
    assert first == [1, 2, 3, 4, 5]
    assert others == [first] * 2


def interleaved() -> None:
    """Elements that lie between each other, but no two in one place: exact, or refused."""
    rank, world = dist.get_rank(), dist.get_world_size()
    memory = torch.zeros(40)
    view = memory.as_strided((3, 4), (5, 7))  # 5 i is 7 j for no i below 3
    assert len({5 * i + 7 * j for i in range(3) for j in range(4)}) == 12
    view.fill_(1)
    memory_before = memory.clone()
    text = refusal(lambda: dist.all_reduce(view))
    assert not text or "share memory" in text
    assert torch.equal(memory, memory_before if text else memory_before * world)
    # Nothing shares memory with nothing, nor an element with itself.
    one = memory[:4].fill_(float(rank))
    for tensor in (
        one.as_strided((0, 4), (0, 0)),
        one.as_strided((1, 4), (0, 1)),
        one.as_strided((4, 1, 1), (1, 0, 0)),
    ):
        want = torch.full_like(tensor, float(sum(range(world))))
        tensor.fill_(float(rank))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, want)
    dist.barrier()


def test_strides_that_only_look_as_if_they_met() -> None:
    run_ranks(3, interleaved)


def own_parts() -> list[str]:
    """Return which calls were accepted whose result for this rank itself partly is its input."""
    rank, world = dist.get_rank(), dist.get_world_size()
    accepted = []

    def others(own: torch.Tensor) -> list[torch.Tensor]:
        """Return a list with ``own`` at this rank's place, and other memory elsewhere."""
        tensors = [torch.full((4,), float(rank)) for _ in range(world)]
        tensors[rank] = own
        return tensors

    def check(name: str, call: Callable[[], object]) -> None:
        text = refusal(call)
        if "the input lies where" not in text:
            accepted.append(f"{name}: {text}")

    more = {"async_op": True}
    for shift in (1, 3):
        x = torch.arange(12.0)
        source, target = x[4:8], x[4 + shift : 8 + shift]
        check("all_gather", lambda s=source, t=target: dist.all_gather(others(t), s, **more))
        check(
            "reduce_scatter", lambda s=source, t=target: dist.reduce_scatter(t, others(s), **more)
        )
        check(
            "all_to_all", lambda s=source, t=target: dist.all_to_all(others(t), others(s), **more)
        )
        near = x[4 * rank + (-shift if rank == world - 1 else shift) :][:4]
        check("all_gather_into_tensor", lambda x=x, n=near: _gather_into(x, n, **more))
        check(
            "reduce_scatter_tensor",
            lambda x=x, n=near: dist.reduce_scatter_tensor(n, x, **more),
        )
        # Only the root has both: the others take no part, so the group goes on.
        if rank == 1:
            check("gather", lambda s=source, t=target: dist.gather(s, others(t), 1, **more))
            check("scatter", lambda s=source, t=target: dist.scatter(t, others(s), 1, **more))
        assert torch.equal(x, torch.arange(12.0)), accepted

    # Where it is exactly the input, it is where the input belongs.
    each = [torch.arange(4.0) + r for r in range(world)]
    outputs = others(torch.arange(4.0) + rank)
    dist.all_gather(outputs, outputs[rank])
    assert all(map(torch.equal, outputs, each))
    inputs = others(torch.arange(4.0) + rank)
    dist.reduce_scatter(inputs[rank], inputs)
    assert torch.equal(inputs[rank], torch.arange(4.0) + sum(range(world)))
    outputs = others(torch.arange(4.0) + rank)
    dist.gather(outputs[rank], outputs if rank == 1 else None, 1)
    assert rank != 1 or all(map(torch.equal, outputs, each))
    inputs = others(torch.arange(4.0))
    dist.scatter(inputs[rank], inputs if rank == 1 else None, 1)
    assert torch.equal(inputs[rank], torch.arange(4.0) if rank == 1 else torch.full((4,), 1.0))
    return accepted


def test_an_own_result_that_partly_is_the_input_is_refused() -> None:
    assert run_ranks(3, own_parts) == [[]] * 3
