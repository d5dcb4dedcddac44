"""Operations beyond the common ones: sparse, scaled, unusual dtypes, overlaps, hooks, timeouts."""

from __future__ import annotations

import os
import re
import threading
from datetime import timedelta
from functools import reduce
from operator import xor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from versions import TORCH_MINOR, needs_torch

import torch_geomesh as gm

c10d = dist.distributed_c10d


def sparse(rank: int, dense: int) -> torch.Tensor:
    """Some entries that others have too, some twice, some of no other rank; rank 1 has none."""
    count = 0 if rank == 1 else 3 + rank
    indices = torch.tensor(
        [[(rank * 5 + 3 * i) % 11 for i in range(count)], [i % 3 for i in range(count)]]
    )
    values = torch.arange(count * max(dense, 1), dtype=torch.float32) + rank
    values = values.reshape(count, dense) if dense else values
    return torch.sparse_coo_tensor(indices.long(), values, (11, 3, dense) if dense else (11, 3))


def sums_of_sparse_tensors(dense: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    tensor = sparse(rank, dense)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    want = sum(sparse(r, dense).to_dense() for r in range(world))
    assert torch.equal(tensor.to_dense(), want)
    assert torch.equal(work.result()[0].to_dense(), want)
    with pytest.raises(RuntimeError, match="sparse tensors take SUM only"):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dense", [0, 4])
def test_sparse_tensors(world, dense):
    run_ranks(world, sums_of_sparse_tensors, dense)


def sparse_embedding_gradients() -> None:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    rank, world = dist.get_rank(), dist.get_world_size()
    rows = [torch.tensor([[0, 2, 5]]), torch.tensor([[2, 7, 7]]), torch.tensor([[9, 0, 1]])]

    def make() -> nn.EmbeddingBag:
        torch.manual_seed(0)
        return nn.EmbeddingBag(10, 4, mode="sum", sparse=True)

    model = DistributedDataParallel(make())
    (model(rows[rank]) ** 2).sum().backward()
    got = model.module.weight.grad.to_dense()
    alone = make()
    for row in rows[:world]:
        ((alone(row) ** 2).sum() / world).backward()
    torch.testing.assert_close(got, alone.weight.grad.to_dense())


def test_ddp_with_sparse_gradients():
    run_ranks(3, sparse_embedding_gradients)


def scaled_sums() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for factor in (0.5, torch.tensor([3.0])):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
            op = torch._C._distributed_c10d._make_nccl_premul_sum(factor)
            give = torch.arange(9).to(dtype) + rank
            want = sum((torch.arange(9).to(dtype) + r) * float(factor) for r in range(world))
            tensor = give.clone()
            dist.all_reduce(tensor, op=op)
            assert torch.equal(tensor, want.to(dtype)), dtype
            tensor = give.clone()
            dist.reduce(tensor, 1, op=op)
            assert torch.equal(tensor, want.to(dtype) if rank == 1 else give)
            part = torch.empty(9, dtype=dtype)
            dist.reduce_scatter_tensor(part, give.repeat(world), op=op)
            assert torch.equal(part, want.to(dtype))
    # A view that is not contiguous, in place.
    wide = torch.full((4, 2), float(rank + 1))
    dist.all_reduce(wide[:, 0], op=torch._C._distributed_c10d._make_nccl_premul_sum(2.0))
    assert torch.equal(wide[:, 0], torch.full((4,), 2.0 * sum(range(1, world + 1))))
    assert torch.equal(wide[:, 1], torch.full((4,), float(rank + 1)))
    with pytest.raises(RuntimeError, match="PREMUL_SUM takes floating-point"):
        dist.all_reduce(
            torch.ones(2, dtype=torch.int32),
            op=torch._C._distributed_c10d._make_nccl_premul_sum(2.0),
        )


def test_premul_sum():
    run_ranks(3, scaled_sums)


def wide_and_narrow_dtypes() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = range(world)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        give = [(torch.arange(33) % 5 + r).float().to(dtype) for r in ranks]
        for op, wide in (
            (dist.ReduceOp.SUM, sum(g.float() for g in give)),
            (dist.ReduceOp.AVG, sum(g.float() for g in give) / world),
            (dist.ReduceOp.MAX, torch.stack([g.float() for g in give]).amax(0)),
        ):
            tensor = give[rank].clone()
            dist.all_reduce(tensor, op=op)
            assert torch.equal(tensor.float(), wide.to(dtype).float()), (dtype, op)
    for dtype, top in ((torch.uint16, 2**16), (torch.uint32, 2**32), (torch.uint64, 2**64)):
        exact = [[top - 1 - r, 5 + r, 3] for r in ranks]
        give = [torch.tensor(row, dtype=dtype) for row in exact]
        columns = list(zip(*exact, strict=True))
        for op, want in (
            (dist.ReduceOp.SUM, [sum(c) % top for c in columns]),
            (dist.ReduceOp.MAX, [max(c) for c in columns]),
            (dist.ReduceOp.MIN, [min(c) for c in columns]),
            (dist.ReduceOp.BXOR, [reduce(xor, c) for c in columns]),
        ):
            tensor = give[rank].clone()
            dist.all_reduce(tensor, op=op)
            assert tensor.tolist() == want, (dtype, op)
    # Where nothing is computed, any dtype goes.
    for dtype in (torch.bits8, torch.complex32, torch.float8_e5m2fnuz):
        own = torch.full((3,), rank + 1, dtype=torch.uint8).view(torch.uint8)
        tensor = own.repeat(torch.empty(0, dtype=dtype).element_size()).view(dtype)
        parts = [torch.empty_like(tensor) for _ in ranks]
        dist.all_gather(parts, tensor)
        for r, part in enumerate(parts):
            assert (part.view(torch.uint8) == r + 1).all(), dtype


def test_unusual_dtypes():
    run_ranks(3, wide_and_narrow_dtypes)


def gathers_into_one_tensor() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for size in (0, 1, 1001):
        own = torch.arange(size) + 1000 * rank
        out = torch.empty(world * size, dtype=torch.int64) if rank == 1 else None
        dist.gather_single(own, out, group_dst=1)
        if rank == 1:
            assert torch.equal(
                out, torch.cat([torch.arange(size) + 1000 * r for r in range(world)])
            )
    out = torch.zeros(2, world).t()
    dist.gather_single(torch.tensor([rank, -rank]).float(), out, group_dst=1)
    if rank == 1:
        assert out.tolist() == [[r, -r] for r in range(world)]


@needs_torch(14, "gather_single")
def test_gather_single():
    run_ranks(3, gathers_into_one_tensor)


def overlaps() -> None:
    """Refused on all ranks alike, before a byte leaves: the group goes on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.zeros(4 * world)
    with pytest.raises(RuntimeError, match="the input lies where another rank's result goes"):
        dist.all_gather_into_tensor(x, x[2:6])
    with pytest.raises(RuntimeError, match="outputs 0 and 1 share memory"):
        dist.all_gather([x[:4], *([x[2:6]] * (world - 1))], torch.ones(4))
    with pytest.raises(RuntimeError, match="the input lies where another rank's result goes"):
        dist.all_to_all_single(x, x)
    with pytest.raises(RuntimeError, match="the input lies where another rank's result goes"):
        dist.reduce_scatter_tensor(x[2:6], x)
    # Also this rank's own part of a list, where it is not the very input.
    others = [torch.empty(4) for _ in range(world)]
    with pytest.raises(RuntimeError, match="the input lies where another rank's result goes"):
        dist.all_gather([*others[:rank], x[2:6], *others[rank + 1 :]], x[:4])
    with pytest.raises(RuntimeError, match="the input lies where another rank's result goes"):
        dist.reduce_scatter(x[2:6], [*others[:rank], x[:4], *others[rank + 1 :]])
    dist.all_gather([*others[:rank], x[:4], *others[rank + 1 :]], x[:4])
    # Elements that share memory can't take results; the root refuses too, though it only sends.
    for shared in (torch.zeros(1).expand(4), torch.zeros(8).unfold(0, 4, 2)):
        with pytest.raises(RuntimeError, match="several of whose elements share memory"):
            dist.broadcast(shared, src=0)
        with pytest.raises(RuntimeError, match="several of whose elements share memory"):
            dist.reduce(shared, dst=1)
    woven = torch.zeros(6).as_strided((2, 2), (3, 2))  # at 0, 2, 3 and 5
    dist.all_reduce(woven.fill_(rank))
    assert torch.equal(woven, torch.full((2, 2), sum(range(world)) * 1.0))
    # Its own part is where the input belongs, and columns share no element.
    x[4 * rank : 4 * rank + 4] = rank
    dist.all_gather_into_tensor(x, x[4 * rank : 4 * rank + 4])
    assert torch.equal(x, torch.arange(world).repeat_interleave(4).float())
    columns = torch.zeros(5, world)
    dist.all_gather(list(columns.unbind(1)), torch.full((5,), float(rank)))
    assert torch.equal(columns, torch.arange(world).float().expand(5, world))
    y = torch.arange(4 * world).float()
    dist.reduce_scatter_tensor(y[4 * rank : 4 * rank + 4], y)
    assert torch.equal(y[4 * rank : 4 * rank + 4], world * (4 * rank + torch.arange(4.0)))


def test_overlapping_tensors():
    run_ranks(3, overlaps)


def different_roots(way: str) -> str:
    rank = dist.get_rank()
    with pytest.raises(RuntimeError) as error:
        if way == "broadcast":
            dist.broadcast(torch.ones(3), src=rank)
        else:
            dist.reduce(torch.ones(3), dst=1 - rank)
        for _ in range(1000):
            dist.barrier()
    return str(error.value)


def test_different_roots_are_noticed():
    for text in run_ranks(2, different_roots, "broadcast"):
        assert "broadcast(Float[3], root 0)" in text
        assert "broadcast(Float[3], root 1)" in text
    for text in run_ranks(2, different_roots, "reduce"):
        assert "sequence" in text


def hooks() -> None:
    backend = gm.backend.backend_of()
    called: list[str] = []
    done = threading.Event()
    backend.register_abort_hook(1, lambda: (called.append("one"), done.set()))
    backend.register_abort_hook(2, lambda: called.append("two"))
    backend.unregister_abort_hook(2)
    with pytest.raises(RuntimeError, match="abort hook 1 is registered already"):
        backend.register_abort_hook(1, lambda: None)
    assert TORCH_MINOR < 15 or backend.supports_abort_hooks
    with pytest.raises(RuntimeError, match="not done within its timeout"):
        if dist.get_rank() == 0:
            dist.barrier()
        else:
            c10d._get_default_group()._get_backend(torch.device("cpu"))
            dist.recv(torch.empty(1), src=0)
    assert done.wait(10)
    assert set(called) == {"one"}


@needs_torch(14, "hooks")
def test_abort_hooks():
    run_ranks(2, hooks, init={"timeout": timedelta(seconds=2)})


def completions() -> list[tuple[str, int]]:
    """The hook is told of each operation; that it raises disturbs nobody."""
    seen: list[tuple[str, int]] = []

    def hook(info) -> None:
        seen.append((str(info.op_type), info.seq))
        raise ValueError("from the hook")

    pg = c10d._get_default_group()
    pg._register_on_completion_hook(hook)
    tensor = torch.ones(3)
    for _ in range(3):
        dist.all_reduce(tensor)
    pg._wait_for_pending_works()
    assert (tensor == 8).all()
    return seen


def test_on_completion_hooks():
    for seen in run_ranks(2, completions):
        assert [number for _, number in seen] == [1, 2, 3]
        assert len({operation for operation, _ in seen}) == 1


def ephemeral_timeouts(first: bool) -> str:
    """The extensions hold until the first work after them is done."""
    store = c10d._get_default_store()
    if dist.get_rank() == 1:
        if not first:
            dist.barrier()
        store.wait(["over"], timedelta(seconds=30))
        return ""
    pg = c10d._get_default_group()
    pg._add_ephemeral_timeout(timedelta(seconds=0.5))
    pg._add_ephemeral_timeout(timedelta(seconds=0.6))
    if not first:
        dist.barrier()
    with pytest.raises(RuntimeError) as error:
        dist.recv(torch.empty(1), src=1)
    store.set("over", "")
    return str(error.value)


@needs_torch(14, "ephemeral timeouts of plugins")
@pytest.mark.parametrize(("first", "seconds"), [(True, "2.1 s"), (False, "1.0 s")])
def test_ephemeral_timeouts(first, seconds):
    text = run_ranks(2, ephemeral_timeouts, first, init={"timeout": timedelta(seconds=1)})[0]
    assert f"not done within its timeout of {seconds}" in text


def estimates() -> list[float]:
    tensor = torch.full((1_000_000,), float(dist.get_rank()))
    times = []
    for size in (1000, 1_000_000):
        with c10d._time_estimator() as estimate:
            dist.all_reduce(tensor[:size])
        times.append(estimate.estimated_time)
    with c10d._time_estimator() as twice:
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)
    times.append(twice.estimated_time)
    with c10d._time_estimator() as sending:
        dist.send(tensor, (dist.get_rank() + 1) % dist.get_world_size())
    times.append(sending.estimated_time)
    assert (tensor == dist.get_rank()).all()  # nothing was run
    dist.barrier()
    return times


@needs_torch(15, "time estimates of plugins")
def test_time_estimates():
    per_rank = [{"GEOMESH_REGION": "east"}, {"GEOMESH_REGION": "west"}, {"GEOMESH_REGION": "east"}]
    times = run_ranks(3, estimates, per_rank_environment=per_rank)
    assert times[0][:3] == times[1][:3] == times[2][:3]
    small, large, twice, sending = times[0]
    assert 0 < small < large
    assert twice == pytest.approx(2 * large)
    assert 0 < sending < large


def coalesces() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((5 + i,), float(rank)) for i in range(3)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors:
            dist.broadcast(tensor, src=2)
        gathered = torch.empty(world)
        dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]))
    manager.wait()
    assert all((tensor == 2).all() for tensor in tensors)
    assert gathered.tolist() == [float(r) for r in range(world)]
    backend = gm.backend.backend_of()
    with pytest.raises(RuntimeError, match=re.escape("endCoalescing() without")):
        backend._end_coalescing()


def test_coalescing():
    run_ranks(3, coalesces)


def names_in_later_calls(tell) -> str:
    rank = dist.get_rank()
    dist.barrier()
    if rank == 0:
        gm.backend.backend_of().abort()
        tell("aborted")
    with pytest.raises(RuntimeError, match="aborted the group"):
        dist.barrier()
    with pytest.raises(RuntimeError) as error:
        dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX)
    return str(error.value)


def test_a_call_after_the_failure_says_what_it_is():
    for text in run_ranks(2, names_in_later_calls):
        assert "all_reduce(Float[4], MAX)" in text
        assert "aborted the group" in text


def barrier_behind_operations() -> None:
    world = dist.get_world_size()
    for _ in range(10):
        tensors = [torch.full((100, 100), float(i)) for i in range(16)]
        for tensor in tensors:
            dist.all_reduce(tensor, async_op=True)  # nobody keeps the work
        dist.barrier()
        assert all((tensor == i * world).all() for i, tensor in enumerate(tensors))


def test_what_was_issued_before_a_barrier_is_done_after_it() -> None:
    run_ranks(4, barrier_behind_operations)


def receive_across_a_barrier() -> None:
    """A receive that nobody has served yet does not hold a barrier up."""
    tensor = torch.zeros(3)
    if dist.get_rank() == 0:
        work = dist.irecv(tensor, 1)
    dist.barrier()
    if dist.get_rank() == 1:
        dist.send(torch.ones(3), 0)
    else:
        work.wait()
        assert torch.equal(tensor, torch.ones(3))


def test_a_barrier_does_not_wait_for_messages() -> None:
    run_ranks(2, receive_across_a_barrier)


def backend_dropped_while_busy(folder: str) -> str:
    """Python lets go of the last reference while tensors of an operation need its lock."""
    options = c10d._DistributedBackendOptions()
    options.store = dist.FileStore(f"{folder}/store", 2)
    options.group_rank, options.group_size = int(os.environ["RANK"]), 2
    options.group_id, options.global_ranks_in_group = "alone", [0, 1]
    options.timeout = timedelta(seconds=20)
    backend = dist.Backend._plugins["GEOMESH"].creator_fn(options, gm.Options(linger="1s"))
    backend.allreduce([torch.ones(3)]).wait()
    if options.group_rank == 0:
        backend.allreduce([torch.ones(3)])  # rank 1 does not come to it
    del backend
    return "ended"


def test_a_backend_may_be_dropped_while_it_is_busy(tmp_path: Path) -> None:
    ended = run_ranks(2, backend_dropped_while_busy, str(tmp_path), initialize=False, timeout=30)
    assert ended == ["ended"] * 2
