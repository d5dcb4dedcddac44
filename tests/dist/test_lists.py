"""Lists of several tensors a rank, which Gloo takes and PyTorch's functions never pass."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

c10d = dist.distributed_c10d

ELEMENTS = 1031  # leaves a remainder in every division


def backend() -> Any:
    return c10d._get_default_group()._get_backend(torch.device("cpu"))


def given(rank: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Ones and twos, of which sums and products are exact in every dtype."""
    generator = torch.Generator().manual_seed(100 * rank + count)
    return [torch.randint(1, 3, (ELEMENTS,), generator=generator).to(dtype) for _ in range(count)]


OPS: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": operator.add,
    "PRODUCT": operator.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}


def reduced(count: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        everybodys = [tensor for r in range(world) for tensor in given(r, count, dtype)]
        for name, function in OPS.items():
            if name.startswith("B") and dtype.is_floating_point:
                continue
            options = c10d.AllreduceOptions()
            options.reduceOp = getattr(dist.ReduceOp, name)
            tensors = given(rank, count, dtype)
            # Every second element: not dense.
            tensors[-1] = torch.stack([tensors[-1], tensors[-1]], 1)[:, 0]
            work = backend().allreduce(tensors, options)
            work.wait()
            want = functools.reduce(function, everybodys)
            assert len(work.result()) == count
            for tensor in tensors:
                assert torch.equal(tensor, want), (name, dtype)


def summed_sparse() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()

    def sparse(r: int, i: int) -> torch.Tensor:
        entries = torch.tensor([[r, i, 6]])
        return torch.sparse_coo_tensor(entries, torch.tensor([1.0 + r, 10.0 * i, 0.5]), (9,))

    tensors = [sparse(rank, i) for i in range(3)]
    backend().allreduce(tensors).wait()
    want = sum(sparse(r, i).to_dense() for r in range(world) for i in range(3))
    for tensor in tensors:
        assert torch.equal(tensor.to_dense(), want)


def broadcast() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for root in range(world):
        for number in range(3):
            options = c10d.BroadcastOptions()
            options.rootRank, options.rootTensor = root, number
            tensors = given(rank, 3, torch.float32)
            tensors[1] = tensors[1].expand(2, ELEMENTS).t().contiguous()[:, 0]  # strided
            backend().broadcast(tensors, options).wait()
            for tensor in tensors:
                assert torch.equal(tensor, given(root, 3, torch.float32)[number])


def gathered() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for count in (1, 2, 3):
        outputs = [
            [torch.zeros(ELEMENTS, dtype=torch.float16) for _ in range(count * world)]
            for _ in range(count)
        ]
        work = backend().allgather(outputs, given(rank, count, torch.float16))
        work.wait()
        want = [tensor for r in range(world) for tensor in given(r, count, torch.float16)]
        assert len(work.result()) == count * count * world
        value = work.get_future().wait()
        for listed in outputs + (value if count > 1 else [value]):
            assert all(map(torch.equal, listed, want))


def refused() -> None:
    a, b, c = torch.zeros(2), torch.zeros(2, dtype=torch.int32), torch.zeros(3)
    sparse = torch.zeros(2).to_sparse()
    group = backend()

    def check(pattern: str, call: Callable[[], Any]) -> None:
        with pytest.raises(RuntimeError, match=pattern):
            call()

    check("all_reduce: requires non-empty tensor list", lambda: group.allreduce([]))
    check("all_reduce: invalid tensor type: Int", lambda: group.allreduce([a, b]))
    check(r"all_reduce: invalid tensor size: \[3\]", lambda: group.allreduce([a, c]))
    check("all_reduce: invalid tensor layout: Sparse", lambda: group.allreduce([a, sparse]))
    check("share memory", lambda: group.allreduce([a, a]))
    average = c10d.AllreduceOptions()
    average.reduceOp = dist.ReduceOp.AVG
    check("AVG.*one tensor a rank", lambda: group.allreduce([a, a.clone()], average))
    for number, count in ((-1, 1), (1, 1), (0, 0)):
        options = c10d.BroadcastOptions()
        options.rootTensor = number
        check(
            f"broadcast: invalid root tensor: {number} of a list of {count}",
            lambda options=options, count=count: group.broadcast([a] * count, options),
        )
    rooted = c10d.ReduceOptions()
    rooted.rootTensor = 1
    check("reduce: invalid root tensor: 1", lambda: group.reduce([a], rooted))
    check("reduce: requires a single-element tensor list", lambda: group.reduce([a, a.clone()]))
    world = dist.get_world_size()
    check("non-empty input tensor list", lambda: group.allgather([], []))
    check("have the same length", lambda: group.allgather([[a] * world], [a, a.clone()]))
    check(
        f"invalid output tensor list of 1: takes 2 for each of {world} ranks",
        lambda: group.allgather([[c], [c]], [a, a.clone()]),
    )
    fine = [torch.zeros(2) for _ in range(2 * world)]
    bad = [torch.zeros(2) for _ in range(2 * world - 1)] + [c]
    for outputs in ([fine, bad], [bad, fine]):
        check("invalid (tensor size|size of)", lambda o=outputs: group.allgather(o, [a, a.clone()]))
    # Nothing has left: the group goes on.
    tensors = [torch.ones(1), torch.ones(1)]
    group.allreduce(tensors).wait()
    assert tensors[1].item() == 2 * world


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_reduction_counts_every_tensor_of_every_rank(world: int, count: int) -> None:
    run_ranks(world, reduced, count)


@pytest.mark.parametrize("function", [summed_sparse, broadcast, gathered, refused])
def test_lists(function: Callable[[], None]) -> None:
    run_ranks(3, function)
