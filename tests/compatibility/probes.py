"""Small programs that try one operation each on a few ranks of a backend, to see what it does.

They measure the column of Gloo in docs/compatibility.md. Each probe has ranks of its own (forks),
so that one that fails or hangs spoils no other:

    python tests/compatibility/probes.py gloo [NAME ...]
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

Probe = Callable[[int, int], None]
PROBES: dict[str, Probe] = {}
WORLD = 3
ReduceOp = dist.ReduceOp


def probe(function: Probe) -> Probe:
    """Register a probe under its function's name."""
    PROBES[function.__name__] = function
    return function


def each(size: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return what each rank gives."""
    return [(torch.arange(size) % 5 + r + 1).to(dtype) for r in range(WORLD)]


def default_group() -> Any:
    return dist.distributed_c10d._get_default_group()


def says(work: Callable[[], Any], *words: str) -> None:
    """Require an error whose text has all of the words (patterns)."""
    text = ""
    try:
        work()
    except RuntimeError as error:
        text = str(error)
    assert text, "no error"
    for word in words:
        assert re.search(word, text), text


# ---- collectives ----


@probe
def broadcast(rank: int, world: int) -> None:
    tensor = each(1001)[rank].clone()
    dist.broadcast(tensor, src=1)
    assert torch.equal(tensor, each(1001)[1])


@probe
def all_reduce(rank: int, world: int) -> None:
    tensor = each(1001)[rank].clone()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, sum(each(1001)))


@probe
def reduce(rank: int, world: int) -> None:
    tensor = each(1001)[rank].clone()
    dist.reduce(tensor, dst=1)
    assert rank != 1 or torch.equal(tensor, sum(each(1001)))


@probe
def reduce_leaves_the_others_alone(rank: int, world: int) -> None:
    tensor = each(1001)[rank].clone()
    dist.reduce(tensor, dst=1)
    assert torch.equal(tensor, sum(each(1001)) if rank == 1 else each(1001)[rank])


@probe
def all_gather(rank: int, world: int) -> None:
    outputs = [torch.empty(7) for _ in range(world)]
    dist.all_gather(outputs, each(7)[rank])
    assert torch.equal(torch.stack(outputs), torch.stack(each(7)))


@probe
def all_gather_uneven(rank: int, world: int) -> None:
    outputs = [torch.empty(3 * r + 1) for r in range(world)]
    dist.all_gather(outputs, torch.full((3 * rank + 1,), float(rank)))
    assert all((output == r).all() for r, output in enumerate(outputs))


@probe
def all_gather_into_tensor(rank: int, world: int) -> None:
    output = torch.empty(7 * world)
    dist.all_gather_into_tensor(output, each(7)[rank])
    assert torch.equal(output, torch.cat(each(7)))


@probe
def gather(rank: int, world: int) -> None:
    outputs = [torch.empty(7) for _ in range(world)] if rank == 1 else None
    dist.gather(each(7)[rank], outputs, dst=1)
    assert outputs is None or torch.equal(torch.stack(outputs), torch.stack(each(7)))


@probe
def gather_single(rank: int, world: int) -> None:
    output = torch.empty(7 * world) if rank == 1 else None
    dist.gather_single(each(7)[rank], output, group_dst=1)
    assert output is None or torch.equal(output, torch.cat(each(7)))


@probe
def scatter(rank: int, world: int) -> None:
    output = torch.empty(7)
    dist.scatter(output, each(7) if rank == 1 else None, src=1)
    assert torch.equal(output, each(7)[rank])


@probe
def reduce_scatter(rank: int, world: int) -> None:
    output = torch.empty(7)
    dist.reduce_scatter(output, [part + rank for part in each(7)])
    assert torch.equal(output, sum(each(7)[rank] + r for r in range(world)))


@probe
def reduce_scatter_tensor(rank: int, world: int) -> None:
    output = torch.empty(7)
    dist.reduce_scatter_tensor(output, torch.cat([part + rank for part in each(7)]))
    assert torch.equal(output, sum(each(7)[rank] + r for r in range(world)))


@probe
def all_to_all_single(rank: int, world: int) -> None:
    output = torch.empty(world)
    dist.all_to_all_single(output, torch.arange(float(world)) + 10 * rank)
    assert output.tolist() == [10.0 * r + rank for r in range(world)]


@probe
def all_to_all_single_uneven(rank: int, world: int) -> None:
    send = torch.cat([torch.full((rank + j, 2), 10.0 * rank + j) for j in range(world)])
    output = torch.empty(sum(j + rank for j in range(world)), 2)
    counts = [rank + j for j in range(world)]
    dist.all_to_all_single(output, send, counts, counts)
    want = torch.cat([torch.full((j + rank, 2), 10.0 * j + rank) for j in range(world)])
    assert torch.equal(output, want)


@probe
def all_to_all(rank: int, world: int) -> None:
    outputs = [torch.empty(j + 2 * rank) for j in range(world)]
    dist.all_to_all(outputs, [torch.full((rank + 2 * j,), 10.0 * rank + j) for j in range(world)])
    assert all((output == 10 * j + rank).all() for j, output in enumerate(outputs))


@probe
def barrier(rank: int, world: int) -> None:
    store = default_group().get_group_store()
    store.add("entered", 1)
    dist.barrier()
    assert store.add("entered", 0) == world


@probe
def all_reduce_coalesced(rank: int, world: int) -> None:
    tensors = [each(size)[rank].clone() for size in (1, 65, 1000)]
    default_group().allreduce_coalesced(tensors).wait()
    assert all(torch.equal(tensor, sum(each(len(tensor)))) for tensor in tensors)


@probe
def all_gather_coalesced(rank: int, world: int) -> None:
    outputs = [torch.empty(world * size) for size in (1, 65)]
    inputs = [each(size)[rank] for size in (1, 65)]
    default_group().allgather_into_tensor_coalesced(outputs, inputs).wait()
    assert all(torch.equal(o, torch.cat(each(len(o) // world))) for o in outputs)


@probe
def reduce_scatter_coalesced(rank: int, world: int) -> None:
    outputs = [torch.empty(size) for size in (1, 65)]
    inputs = [torch.cat(each(size)) for size in (1, 65)]
    default_group().reduce_scatter_tensor_coalesced(outputs, inputs).wait()
    assert all(torch.equal(o, world * each(len(o))[rank]) for o in outputs)


@probe
def coalescing_of_several_kinds(rank: int, world: int) -> None:
    tensor, gathered = torch.full((5,), float(rank)), torch.empty(world)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.broadcast(tensor, src=2)
        dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]))
    manager.wait()
    assert (tensor == 2).all()
    assert gathered.tolist() == [float(r) for r in range(world)]


@probe
def sparse_all_reduce(rank: int, world: int) -> None:
    def make(r: int) -> torch.Tensor:
        return torch.sparse_coo_tensor([[r, 4]], [1.0, r + 1.0], (6,))

    tensor = make(rank)
    dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense(), sum(make(r).to_dense() for r in range(world)))


# ---- point to point ----


@probe
def send_recv(rank: int, world: int) -> None:
    into = torch.empty(1001)
    works = [
        dist.isend(each(1001)[rank], (rank + 1) % world),
        dist.irecv(into, (rank - 1) % world),
    ]
    for work in works:
        work.wait()
    assert torch.equal(into, each(1001)[(rank - 1) % world])


@probe
def tags(rank: int, world: int) -> None:
    if rank == 0:
        works = [dist.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in (1, 2)]
        for work in works:
            work.wait()
    elif rank == 1:
        for tag in (2, 1):
            into = torch.empty(1)
            dist.recv(into, 0, tag=tag)
            assert into.item() == tag


@probe
def any_source(rank: int, world: int) -> None:
    if rank != 0:
        return dist.send(torch.tensor([float(rank)]), 0)
    taken = set()
    for _ in range(world - 1):
        into = torch.empty(1)
        source = dist.recv(into)
        assert source == into.item()
        taken.add(source)
    assert taken == {1, 2}
    return None


@probe
def batch(rank: int, world: int) -> None:
    into = torch.empty(7)
    operations = [
        dist.P2POp(dist.isend, each(7)[rank], (rank + 1) % world),
        dist.P2POp(dist.irecv, into, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(into, each(7)[(rank - 1) % world])


@probe
def wrong_dtype_is_refused(rank: int, world: int) -> None:
    if rank == 0:
        says(lambda: (dist.send(torch.ones(4), 1), dist.barrier()))
    elif rank == 1:
        says(lambda: (dist.recv(torch.ones(4, dtype=torch.int32), 0), dist.barrier()))
    else:
        says(dist.barrier)


# ---- groups ----


@probe
def subgroups(rank: int, world: int) -> None:
    group = dist.new_group([0, 2])
    alone = dist.new_group([rank], use_local_synchronization=True)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=alone)
    if rank != 1:
        dist.all_reduce(tensor, group=group)
    assert tensor.item() == (1 if rank == 1 else 2)


@probe
def split(rank: int, world: int) -> None:
    group = dist.split_group(split_ranks=[[0, 2], [1]])
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == (1 if rank == 1 else 2)


@probe
def shrink(rank: int, world: int) -> None:
    if rank != 1:
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=dist.shrink_group([1]))
        assert tensor.item() == 2


@probe
def shrink_after_a_death(rank: int, world: int) -> None:
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    says(lambda: dist.all_reduce(torch.ones(1)))
    tensor = torch.ones(1)
    group = dist.shrink_group([1], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == 2


@probe
def merge(rank: int, world: int) -> None:
    mine = dist.new_group([0, 1] if rank < 2 else [2], use_local_synchronization=True)
    store = dist.FileStore(os.environ["PROBE_FOLDER"] + "/merge", world)
    merged = mine.merge_remote_group(store, world, timedelta(seconds=10), "all")
    tensor = torch.ones(1)
    merged.allreduce([tensor]).wait()
    assert tensor.item() == world


@probe
def reconfigure(rank: int, world: int) -> None:
    backend = default_group()._get_backend(torch.device("cpu"))
    assert backend.supports_reconfigure


@probe
def windows(rank: int, world: int) -> None:
    memory = torch.zeros(world)
    window = dist.distributed_c10d._new_window(memory)
    for peer in range(world):
        window.put(torch.tensor([rank + 1.0]), peer, rank, False)
        window.signal(peer, False)
    for peer in range(world):
        window.wait_signal(peer, False)
    assert memory.tolist() == [1.0, 2.0, 3.0]
    dist.barrier()


# ---- dtypes and reductions ----


def _sums(*dtypes: torch.dtype) -> Probe:
    def run(rank: int, world: int) -> None:
        for dtype in dtypes:
            tensor = each(33, dtype)[rank].clone()
            dist.all_reduce(tensor)
            want = sum(
                t.to(torch.complex64 if dtype.is_complex else torch.float64)
                for t in each(33, dtype)
            )
            if dtype == torch.bool:
                want = want != 0
            assert torch.equal(tensor, want.to(dtype)), dtype

    return run


PROBES["sum_floats"] = _sums(torch.float32, torch.float64)
PROBES["sum_float16"] = _sums(torch.float16)
PROBES["sum_bfloat16"] = _sums(torch.bfloat16)
PROBES["sum_float8"] = _sums(torch.float8_e4m3fn, torch.float8_e5m2)
PROBES["sum_integers"] = _sums(torch.int8, torch.uint8, torch.int32, torch.int64)
PROBES["sum_int16"] = _sums(torch.int16)
PROBES["sum_bool"] = _sums(torch.bool)
PROBES["sum_unsigned"] = _sums(torch.uint16, torch.uint32, torch.uint64)
PROBES["sum_complex"] = _sums(torch.complex64)


@probe
def gather_of_any_dtype(rank: int, world: int) -> None:
    for dtype in (torch.bits8, torch.complex32, torch.float8_e5m2fnuz, torch.uint16):
        size = torch.empty(0, dtype=dtype).element_size()
        tensor = torch.full((3 * size,), rank + 1, dtype=torch.uint8).view(dtype)
        parts = [torch.empty_like(tensor) for _ in range(world)]
        dist.all_gather(parts, tensor)
        assert all((part.view(torch.uint8) == r + 1).all() for r, part in enumerate(parts)), dtype


def _reduces(op: Any, reference: Callable[[torch.Tensor], torch.Tensor], dtype: Any) -> Probe:
    def run(rank: int, world: int) -> None:
        tensor = each(33, dtype)[rank].clone()
        dist.all_reduce(tensor, op=op)
        assert torch.equal(tensor, reference(torch.stack(each(33, dtype))).to(dtype))

    return run


def _fold(function: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(rows: torch.Tensor) -> torch.Tensor:
        total = rows[0]
        for row in rows[1:]:
            total = function(total, row)
        return total

    return run


PROBES["op_product"] = _reduces(ReduceOp.PRODUCT, lambda t: t.prod(0), torch.float32)
PROBES["op_min"] = _reduces(ReduceOp.MIN, lambda t: t.amin(0), torch.float32)
PROBES["op_max"] = _reduces(ReduceOp.MAX, lambda t: t.amax(0), torch.float32)
PROBES["op_avg"] = _reduces(ReduceOp.AVG, lambda t: t.mean(0), torch.float32)
PROBES["op_band"] = _reduces(ReduceOp.BAND, _fold(torch.bitwise_and), torch.int32)
PROBES["op_bor"] = _reduces(ReduceOp.BOR, _fold(torch.bitwise_or), torch.int32)
PROBES["op_bxor"] = _reduces(ReduceOp.BXOR, _fold(torch.bitwise_xor), torch.int32)


@probe
def op_premul_sum(rank: int, world: int) -> None:
    tensor = each(9)[rank].clone()
    dist.all_reduce(tensor, op=torch._C._distributed_c10d._make_nccl_premul_sum(0.5))
    assert torch.equal(tensor, sum(each(9)) / 2)


@probe
def halves_rounded_once(rank: int, world: int) -> None:
    given = torch.randn(world, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensor = given[rank].clone()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, given.float().sum(0).bfloat16())


@probe
def lists_of_tensors(rank: int, world: int) -> None:
    tensors = [each(9)[rank].clone() for _ in range(2)]
    default_group()._get_backend(torch.device("cpu")).allreduce(tensors).wait()
    for tensor in tensors:
        assert torch.equal(tensor, 2 * sum(each(9)))


# ---- layouts ----


@probe
def not_contiguous(rank: int, world: int) -> None:
    memory = torch.arange(24.0).view(4, 6) + rank
    dist.all_reduce(memory[:, 1])
    dist.all_reduce(memory.t()[2:4])
    total = sum(torch.arange(24.0).view(4, 6) + r for r in range(world))
    assert torch.equal(memory[:, 1:4], total[:, 1:4])


@probe
def zero_size(rank: int, world: int) -> None:
    empty = torch.empty(0)
    dist.all_reduce(empty)
    dist.broadcast(empty, src=0)
    dist.all_gather([torch.empty(0) for _ in range(world)], empty)
    dist.reduce_scatter_tensor(empty, torch.empty(0))
    dist.all_to_all_single(torch.empty(0), empty)
    dist.barrier()


@probe
def overlaps_are_refused(rank: int, world: int) -> None:
    memory = torch.zeros(4 * world)
    says(lambda: dist.all_gather_into_tensor(memory, memory[2:6]))


# ---- handles ----


@probe
def futures(rank: int, world: int) -> None:
    tensor = each(9)[rank].clone()
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert torch.equal(doubled.wait(), 2 * sum(each(9)))


@probe
def limit_of_one_call(rank: int, world: int) -> None:
    if rank == 1:
        return time.sleep(9)
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=0.5)
    start = time.monotonic()
    says(lambda: default_group().allreduce([torch.ones(4)], options).wait())
    assert time.monotonic() - start < 7, f"{time.monotonic() - start:.1f} s"
    return None


@probe
def limit_of_one_wait(rank: int, world: int) -> None:
    if rank == 1:
        return time.sleep(9)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    start = time.monotonic()
    says(lambda: work.wait(timedelta(seconds=0.5)))
    assert time.monotonic() - start < 7, f"{time.monotonic() - start:.1f} s"
    return None


@probe
def on_completion_hook(rank: int, world: int) -> None:
    seen: list[int] = []
    default_group()._register_on_completion_hook(lambda info: seen.append(info.seq))
    dist.all_reduce(torch.ones(3))
    default_group()._wait_for_pending_works()
    assert len(seen) == 1


@probe
def abort_hooks(rank: int, world: int) -> None:
    assert default_group()._get_backend(torch.device("cpu")).supports_abort_hooks


@probe
def time_estimates(rank: int, world: int) -> None:
    with dist.distributed_c10d._time_estimator() as estimate:
        dist.all_reduce(torch.ones(1000))
    assert estimate.estimated_time > 0


@probe
def debug_detail(rank: int, world: int) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group(list(range(world)))
    says(lambda: dist.all_reduce(torch.ones(3 + rank), group=group), "mismatch")


# ---- failures ----


@probe
def monitored_barrier(rank: int, world: int) -> None:
    dist.monitored_barrier(timeout=timedelta(seconds=5))
    if rank == 0:
        says(lambda: dist.monitored_barrier(timeout=timedelta(seconds=1)), r"[Rr]ank 1")
    elif rank == 2:
        says(lambda: dist.monitored_barrier(timeout=timedelta(seconds=2)))


@probe
def monitored_barrier_leaves_the_group(rank: int, world: int) -> None:
    if rank == 0:
        says(lambda: dist.monitored_barrier(timeout=timedelta(seconds=1)), r"[Rr]ank 1")
    elif rank == 2:
        says(lambda: dist.monitored_barrier(timeout=timedelta(seconds=2)))
    else:
        time.sleep(2.5)
    all_reduce(rank, world)


def _after_loss(rank: int, number: signal.Signals) -> str:
    """Return the error that the others get, within 12 s of the loss."""
    dist.all_reduce(torch.ones(10))
    if rank == 1:
        os.kill(os.getpid(), number)
        time.sleep(600)
    start = time.monotonic()
    try:
        for _ in range(1000):
            dist.all_reduce(torch.ones(100_000))
    except RuntimeError as error:
        assert time.monotonic() - start < 12, "late"
        return str(error)
    raise AssertionError("no error")


@probe
def killed_rank_is_an_error(rank: int, world: int) -> None:
    _after_loss(rank, signal.SIGKILL)


@probe
def killed_rank_is_named(rank: int, world: int) -> None:
    assert re.search(r"rank 1\b", _after_loss(rank, signal.SIGKILL))


@probe
def stopped_rank_is_an_error(rank: int, world: int) -> None:
    _after_loss(rank, signal.SIGSTOP)


@probe
def deadline_is_kept(rank: int, world: int) -> None:
    if rank == 1:
        return time.sleep(3)
    default_group()._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=1))
    return says(lambda: dist.all_reduce(torch.ones(10)))


@probe
def deadline_names_who_is_missing(rank: int, world: int) -> None:
    if rank == 1:
        return time.sleep(3)
    default_group()._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=1))
    return says(lambda: dist.all_reduce(torch.ones(10)), r"rank 1\b", "all_?reduce")


@probe
def different_calls_are_told(rank: int, world: int) -> None:
    dtype = torch.float64 if rank == 1 else torch.float32
    says(lambda: (dist.all_reduce(torch.ones(4, dtype=dtype)), dist.barrier()), "(Float|Double)")


@probe
def different_roots_are_told(rank: int, world: int) -> None:
    def calls() -> None:
        dist.broadcast(torch.ones(3), src=1 if rank == 1 else 0)
        dist.barrier()

    says(calls, "root")


# ---- what is built on a backend ----


@probe
def objects(rank: int, world: int) -> None:
    got: list[Any] = [None] * world
    dist.all_gather_object(got, {"rank": rank})
    assert got == [{"rank": r} for r in range(world)]


@probe
def ddp(rank: int, world: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    model(torch.full((1, 4), rank + 1.0)).sum().backward()
    assert torch.allclose(model.module.weight.grad, torch.full((1, 4), 2.0))


@probe
def ddp_with_sparse_gradients(rank: int, world: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.EmbeddingBag(10, 4, mode="sum", sparse=True)
    )
    model(torch.tensor([[rank, 5]])).sum().backward()
    grad = model.module.weight.grad.to_dense()
    assert torch.allclose(grad[5], torch.ones(4))


@probe
def dtensor(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(70.0).view(10, 7)
    mesh = init_device_mesh("cpu", (world,))
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(rows.redistribute(mesh, [Shard(1)]).full_tensor(), whole)


@probe
def fsdp2(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(6, 3, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    model(torch.full((1, 6), rank + 1.0)).sum().backward()
    assert torch.allclose(model.weight.grad.full_tensor(), torch.full((3, 6), 2.0))


# ---- running them ----


def _rank(pipe: Any, backend: str, name: str, rank: int, folder: str) -> None:
    os.environ["PROBE_FOLDER"] = folder
    error = ""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            backend,
            store=dist.FileStore(f"{folder}/store", WORLD),
            rank=rank,
            world_size=WORLD,
            timeout=timedelta(seconds=20),
        )
        PROBES[name](rank, WORLD)
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
    pipe.send(error)
    pipe.recv()  # no rank leaves before the last has its result
    os._exit(0)


def run(backend: str, name: str, limit: float = 40) -> str:
    """Try one probe; return an empty text, or why it did not work.

    Ranks that kill or stop themselves are not waited for once the others are done.
    """
    context = torch.multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks, pipes = [], []
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(theirs, backend, name, rank, folder))
            process.start()
            theirs.close()
            ranks.append(process)
            pipes.append(ours)
        loses_one = "_rank_" in name or "death" in name
        waited = [pipes[0], pipes[2]] if loses_one else list(pipes)
        deadline = time.monotonic() + limit
        problem = ""
        while waited and not problem and time.monotonic() < deadline:
            for pipe in wait(waited, timeout=max(0.0, deadline - time.monotonic())):
                waited.remove(pipe)  # type: ignore[arg-type]
                try:
                    problem = problem or pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    problem = problem or "a rank died"
        if waited and not problem:
            problem = f"did not end within {limit:.0f} s"
        for process in ranks:
            process.kill()
            process.join()
    return problem


def main() -> int:
    """Try the named probes, or all."""
    backend, *names = sys.argv[1:]
    if backend == "geomesh":
        os.environ.update(GEOMESH_DEAD_AFTER="4s", GEOMESH_SUSPECT_AFTER="2s")
    failed = 0
    for name in names or PROBES:
        problem = run(backend, name)
        failed += bool(problem)
        print(f"{name:36} {problem.splitlines()[0][:120] if problem else 'yes'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
