"""Every collective against a reference computed from all ranks' inputs on one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from torch_geomesh.backend import backend_of

SUM = dist.ReduceOp.SUM
SIZES = [0, 1, 7, 8, 9, 63, 64, 65, 1000, 4097, 100_003]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
]


def make(rank: int, size: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """A tensor that any rank can make for any other: small whole numbers, exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (size,), generator=generator).bool()
    low = 1 if dtype == torch.uint8 else -3
    return torch.randint(low, 4, (size,), generator=generator).to(dtype)


def reference_reduce(tensors: list[torch.Tensor], op: dist.ReduceOp) -> torch.Tensor:
    """Reduce in float64 or int64, then cast."""
    dtype = tensors[0].dtype
    wide = torch.stack(tensors).to(torch.float64 if dtype.is_floating_point else torch.int64)
    if op == dist.ReduceOp.SUM:
        result = wide.sum(0)
    elif op == dist.ReduceOp.AVG:
        result = wide.sum(0) / len(tensors)
    elif op == dist.ReduceOp.PRODUCT:
        result = wide.prod(0)
    elif op == dist.ReduceOp.MIN:
        result = wide.amin(0)
    elif op == dist.ReduceOp.MAX:
        result = wide.amax(0)
    else:
        result = wide[0].clone()
        for row in wide[1:]:
            if op == dist.ReduceOp.BAND:
                result &= row
            elif op == dist.ReduceOp.BOR:
                result |= row
            else:
                result ^= row
    if dtype == torch.bool:
        return result != 0
    return result.to(dtype)


def supported(op: dist.ReduceOp, dtype: torch.dtype) -> bool:
    """Bitwise operations take no floats, means no integers."""
    if op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        return not dtype.is_floating_point
    if op == dist.ReduceOp.AVG:
        return dtype.is_floating_point
    return True


def all_reduce_matrix() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    ops = [
        dist.ReduceOp.SUM,
        dist.ReduceOp.AVG,
        dist.ReduceOp.PRODUCT,
        dist.ReduceOp.MIN,
        dist.ReduceOp.MAX,
        dist.ReduceOp.BAND,
        dist.ReduceOp.BOR,
        dist.ReduceOp.BXOR,
    ]
    for dtype in DTYPES:
        for op in ops:
            if not supported(op, dtype):
                with pytest.raises(RuntimeError, match=str(dtype).split(".")[1]):
                    dist.all_reduce(make(rank, 4, dtype), op=op)
                continue
            for size in (1, 65, 4097):
                inputs = [make(r, size, dtype, salt=size) for r in range(world)]
                tensor = inputs[rank].clone()
                dist.all_reduce(tensor, op=op)
                expected = reference_reduce(inputs, op)
                if op == dist.ReduceOp.AVG:
                    torch.testing.assert_close(tensor, expected)
                else:
                    assert torch.equal(tensor, expected), (dtype, op, size)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_reduce_every_dtype_and_op(world: int) -> None:
    run_ranks(world, all_reduce_matrix)


def every_collective() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for size in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            each = [make(r, size, dtype, salt=size + 1) for r in range(world)]

            tensor = each[rank].clone()
            dist.all_reduce(tensor)
            assert torch.equal(tensor, reference_reduce(each, dist.ReduceOp.SUM)), (
                "all_reduce",
                size,
                dtype,
            )

            for root in range(world):
                tensor = each[rank].clone()
                dist.broadcast(tensor, src=root)
                assert torch.equal(tensor, each[root]), ("broadcast", size, dtype, root)

                tensor = each[rank].clone()
                dist.reduce(tensor, dst=root)
                expected = reference_reduce(each, dist.ReduceOp.SUM) if rank == root else each[rank]
                assert torch.equal(tensor, expected), ("reduce", size, dtype, root)

                outputs = (
                    [torch.empty_like(each[0]) for _ in range(world)] if rank == root else None
                )
                dist.gather(each[rank], outputs, dst=root)
                if outputs is not None:
                    assert all(torch.equal(a, b) for a, b in zip(outputs, each, strict=True))

                output = torch.empty_like(each[0])
                dist.scatter(output, [t + 1 for t in each] if rank == root else None, src=root)
                assert torch.equal(output, each[rank] + 1), ("scatter", size, dtype, root)

            outputs = [torch.empty_like(each[0]) for _ in range(world)]
            dist.all_gather(outputs, each[rank])
            assert all(torch.equal(a, b) for a, b in zip(outputs, each, strict=True)), (
                "all_gather",
                size,
            )

            output = torch.empty(world * size, dtype=dtype)
            dist.all_gather_into_tensor(output, each[rank])
            assert torch.equal(output, torch.cat(each)), ("all_gather_into_tensor", size)

            rows = [make(r, world * size, dtype, salt=size + 2) for r in range(world)]
            output = torch.empty(size, dtype=dtype)
            dist.reduce_scatter_tensor(output, rows[rank])
            summed = reference_reduce(rows, dist.ReduceOp.SUM).view(world, size)
            assert torch.equal(output, summed[rank]), ("reduce_scatter_tensor", size)

            output = torch.empty(size, dtype=dtype)
            dist.reduce_scatter(output, [part.clone() for part in rows[rank].view(world, size)])
            assert torch.equal(output, summed[rank]), ("reduce_scatter", size)

            output = torch.empty(world * size, dtype=dtype)
            dist.all_to_all_single(output, rows[rank])
            expected = torch.cat([row.view(world, size)[rank] for row in rows])
            assert torch.equal(output, expected), ("all_to_all_single", size)
    dist.barrier()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_collective(world: int) -> None:
    run_ranks(world, every_collective)


def uneven() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [3 * r + 1 for r in range(world)]
    outputs = [torch.empty(size) for size in sizes]
    dist.all_gather(outputs, torch.full((sizes[rank],), float(rank)))
    assert all(
        torch.equal(o, torch.full((s,), float(r)))
        for r, (o, s) in enumerate(zip(outputs, sizes, strict=True))
    )

    # Rank i sends i + j rows of two to rank j.
    send = torch.cat([torch.full((rank + j, 2), 10.0 * rank + j) for j in range(world)])
    receive = torch.empty(sum(j + rank for j in range(world)), 2)
    dist.all_to_all_single(
        receive, send, [j + rank for j in range(world)], [rank + j for j in range(world)]
    )
    assert torch.equal(
        receive, torch.cat([torch.full((j + rank, 2), 10.0 * j + rank) for j in range(world)])
    )

    outputs = [torch.empty(j + 2 * rank) for j in range(world)]
    dist.all_to_all(outputs, [torch.full((rank + 2 * j,), 10.0 * rank + j) for j in range(world)])
    assert all(
        torch.equal(o, torch.full((j + 2 * rank,), 10.0 * j + rank)) for j, o in enumerate(outputs)
    )


@pytest.mark.parametrize("world", [1, 3])
def test_uneven_sizes(world: int) -> None:
    run_ranks(world, uneven)


def odd_layouts() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    base = torch.arange(24.0).view(4, 6) + rank
    total = sum(torch.arange(24.0).view(4, 6) + r for r in range(world))
    views = {
        "column": lambda t: t[:, 1],
        "transpose": lambda t: t.t(),
        "offset": lambda t: t.flatten()[3:],
        "step": lambda t: t[::2, ::3],
        "per rank": lambda t: t.t() if rank % 2 else t.t().contiguous(),
    }
    for name, view in views.items():
        memory = base.clone()
        tensor = view(memory)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, view(total)), name
    image = torch.arange(48.0).view(1, 3, 4, 4).to(memory_format=torch.channels_last) + rank
    dist.broadcast(image, src=world - 1)
    assert torch.equal(image, torch.arange(48.0).view(1, 3, 4, 4) + world - 1)
    assert image.is_contiguous(memory_format=torch.channels_last)
    gathered = [torch.empty(6, 4).t() for _ in range(world)]
    dist.all_gather(gathered, base)
    assert all(torch.equal(g, torch.arange(24.0).view(4, 6) + r) for r, g in enumerate(gathered))
    with pytest.raises(RuntimeError, match=r"share memory.*contiguous"):
        dist.all_reduce(torch.ones(1).expand(4))
    after = torch.ones(3)
    dist.all_reduce(after)
    assert after.tolist() == [world] * 3


def test_layouts_come_back_through_the_callers_view() -> None:
    run_ranks(3, odd_layouts)


def averages() -> None:
    world = dist.get_world_size()
    half = torch.full((100,), 30000.0, dtype=torch.float16)
    dist.all_reduce(half, op=dist.ReduceOp.AVG)
    assert torch.equal(half, torch.full((100,), 30000.0, dtype=torch.float16))
    brain = torch.full((100,), 3e38, dtype=torch.bfloat16)
    dist.all_reduce(brain, op=dist.ReduceOp.AVG)
    assert torch.equal(brain, torch.full((100,), 3e38, dtype=torch.bfloat16))
    assert world == 4


def test_average_does_not_overflow() -> None:
    run_ranks(4, averages)


def sums_of_halves() -> list[int]:
    """All that 16-bit floats lose is one rounding of float32's sum in rank order."""
    rank, world = dist.get_rank(), dist.get_world_size()
    digests = []
    for dtype in (torch.float16, torch.bfloat16):
        for size in (1, 7, 1000, 66_000, 1_000_003):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT):
                generator = torch.Generator().manual_seed(size)
                given = torch.randn(world, world, size, generator=generator).to(dtype)
                given[:, :, ::3] *= 2**-14  # means below float16's normal numbers
                exact = given[0].float()
                for one in given[1:]:
                    exact = exact * one.float() if op == dist.ReduceOp.PRODUCT else exact + one
                want = (exact / world if op == dist.ReduceOp.AVG else exact).to(dtype)
                tensor = given[rank, 0].clone()
                dist.all_reduce(tensor, op)
                assert torch.equal(tensor, want[0]), (dtype, size, op)
                digests.append(hash(tuple(tensor[:100].tolist())))
                tensor = given[rank, 0].clone()
                dist.reduce(tensor, 1, op)
                assert torch.equal(tensor, want[0] if rank == 1 else given[rank, 0])
                part = torch.empty(size, dtype=dtype)
                dist.reduce_scatter_tensor(part, given[rank].flatten(), op)
                assert torch.equal(part, want[rank]), (dtype, size, op)
    return digests


@pytest.mark.parametrize("world", [2, 3, 4])
def test_halves_are_summed_in_float32_and_rounded_once(world: int) -> None:
    first, *others = run_ranks(world, sums_of_halves)
    assert all(other == first for other in others)


def denormals() -> list[list[int]]:
    """Rank 0's program flushes denormals to zero; the sums are everybody's."""
    torch.set_flush_denormal(dist.get_rank() == 0)
    sums = []
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        for size in (4, 100_003):
            for _ in range(50):
                tensor = torch.ones(size, dtype=bits).view(dtype)
                dist.all_reduce(tensor)
                seen = tensor.view(bits)
                assert seen.eq(seen[0]).all()
                sums.append(int(seen[0]))
    return sums


def test_a_program_that_flushes_denormals_changes_no_sum() -> None:
    for sums in run_ranks(3, denormals):
        assert sums == [3] * 200


def futures_and_order() -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((1000,), float(rank + i)) for i in range(20)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    futures = [w.get_future() for w in works]
    for work in reversed(works):
        work.wait()
    for i, (tensor, future) in enumerate(zip(tensors, futures, strict=True)):
        expected = sum(r + i for r in range(world))
        assert tensor.eq(expected).all()
        assert future.wait()[0] is tensor or torch.equal(future.wait()[0], tensor)
    # The same tensor again and again, without waiting: issue order decides.
    tensor = torch.full((100_000,), 1.0)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(5)]
    for work in works:
        work.wait()
    assert tensor.eq(world**5).all()
    chained = (
        dist.all_reduce(torch.ones(4), async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    )
    return chained.wait().tolist()


def test_async_work_futures_and_issue_order() -> None:
    assert run_ranks(3, futures_and_order) == [[6.0] * 4] * 3


def point_to_point() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world, (rank - 1) % world
    for size in (0, 1, 65, 700_001):
        out = torch.full((size,), float(rank))
        into = torch.empty(size)
        works = [dist.isend(out, right), dist.irecv(into, left)]
        for work in works:
            work.wait()
        assert into.eq(float(left)).all()
    # Matched by tag, whatever the order of posting; first in, first out inside a tag.
    if rank == 0:
        works = [
            dist.isend(torch.full((500_000,), 1.0), 1, tag=1),
            dist.isend(torch.full((500_000,), 2.0), 1, tag=2),
        ]
        works += [dist.isend(torch.tensor([float(i)]), 1, tag=2**31 - 1) for i in range(100)]
        for work in works:
            work.wait()
        with pytest.raises(RuntimeError, match="never negative"):
            dist.send(torch.ones(1), 1, tag=-1)
    elif rank == 1:
        second, first = torch.empty(500_000), torch.empty(500_000)
        dist.recv(second, 0, tag=2)
        dist.recv(first, 0, tag=1)
        assert first.eq(1).all()
        assert second.eq(2).all()
        for i in range(100):
            value = torch.empty(1)
            dist.recv(value, 0, tag=2**31 - 1)
            assert value.item() == i
    dist.barrier()


def test_point_to_point() -> None:
    run_ranks(3, point_to_point)


def subgroups() -> None:
    rank = dist.get_rank()
    even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
    alone = dist.new_group([rank], use_local_synchronization=True)
    mine = even if rank % 2 == 0 else odd
    for _ in range(3):
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=mine)
        assert tensor.item() == (2 if rank % 2 == 0 else 4)
        everybody = torch.tensor([1.0])
        dist.all_reduce(everybody)
        assert everybody.item() == 4
    tensor = torch.tensor([7.0])
    dist.all_reduce(tensor, group=alone)
    assert tensor.item() == 7
    objects = [None] * 4
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(4)]
    box = [rank, "x" * rank]
    dist.broadcast_object_list(box, src=3)
    assert box == [3, "xxx"]


def test_groups_do_not_disturb_each_other() -> None:
    run_ranks(4, subgroups)


def coalesced() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [0, 1, 65, 1000]
    tensors = [make(rank, size, torch.float32, salt=size) for size in sizes]
    tensors.append(make(rank, 12, torch.float32, salt=9).view(3, 4).t())  # comes back in its layout
    expected = [
        reference_reduce([make(r, size, torch.float32, salt=size) for r in range(world)], SUM)
        for size in sizes
    ]
    strided = reference_reduce([make(r, 12, torch.float32, salt=9) for r in range(world)], SUM)
    group = dist.distributed_c10d._get_default_group()
    group.allreduce_coalesced(tensors).wait()
    for tensor, want in zip(tensors, [*expected, strided.view(3, 4).t()], strict=True):
        assert torch.equal(tensor, want)

    inputs = [make(rank, size, torch.float32, salt=size) for size in sizes]
    outputs = [torch.empty(world * size) for size in sizes]
    group.allgather_into_tensor_coalesced(outputs, inputs).wait()
    for output, size in zip(outputs, sizes, strict=True):
        assert torch.equal(
            output, torch.cat([make(r, size, torch.float32, salt=size) for r in range(world)])
        )

    inputs = [make(rank, world * size, torch.float32, salt=size) for size in sizes]
    outputs = [torch.empty(size) for size in sizes]
    group.reduce_scatter_tensor_coalesced(outputs, inputs).wait()
    for output, size in zip(outputs, sizes, strict=True):
        every = [make(r, world * size, torch.float32, salt=size) for r in range(world)]
        assert torch.equal(output, reference_reduce(every, SUM).view(world, size)[rank])

    # All are checked before the first one leaves.
    if rank == 0:
        short, wrong = torch.empty(world * 5), torch.empty(world * 5 - 1)
        with pytest.raises(RuntimeError, match=r"ranks times 5"):
            group.allgather_into_tensor_coalesced([short, wrong], [torch.ones(5)] * 2)
        with pytest.raises(RuntimeError, match=r"ranks times 5"):
            group.reduce_scatter_tensor_coalesced([torch.ones(5)] * 2, [short, wrong])
    with pytest.raises(RuntimeError, match=r"share memory"):
        group.allreduce_coalesced([torch.ones(1).expand(4)])
    total = torch.full((5,), float(rank))
    dist.all_reduce(total)
    assert torch.equal(total, torch.full((5,), sum(range(world)), dtype=torch.float32))


@pytest.mark.parametrize("world", [1, 3])
def test_coalesced_forms(world: int) -> None:
    run_ranks(world, coalesced)


def gathered_together() -> None:
    """All dtypes and layouts in one call are one operation; sizes are the same on all ranks."""
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()

    def of(r: int) -> list[torch.Tensor]:
        return [
            torch.full((3,), r + 1, dtype=torch.int8),
            torch.arange(10.0).view(2, 5).t() + r,
            torch.tensor(r + 0.5, dtype=torch.bfloat16),
            torch.empty(0, 4),
            torch.full((2, 3), complex(r, -1)),
            torch.tensor([True, False, r % 2 == 0]),
        ]

    want = [of(r) for r in range(world)]
    outputs = [[torch.empty_like(tensor) for tensor in tensors] for tensors in want]
    # The group itself asks no plugin before PyTorch 2.15.
    backend = backend_of()
    before = backend._get_sequence_number_for_group()
    work = group.allgather_coalesced(outputs, of(rank))
    work.wait()
    assert backend._get_sequence_number_for_group() == before + 1
    for got, expected in zip(outputs, want, strict=True):
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == b.dtype
            assert a.stride() == b.stride()
            assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match=r"takes as many outputs of each rank as inputs \(6\)"):
        group.allgather_coalesced([tensors[:5] for tensors in outputs], of(rank))
    with pytest.raises(RuntimeError, match="invalid size of output tensor at index 0: "):
        short = [[tensors[0][:1], *tensors[1:]] for tensors in outputs]
        group.allgather_coalesced(short, of(rank))
    dist.barrier()


@pytest.mark.parametrize("world", [1, 3])
def test_tensors_gathered_together_are_one_operation(world: int) -> None:
    run_ranks(world, gathered_together)
