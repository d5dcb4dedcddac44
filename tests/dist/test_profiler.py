"""torch.profiler: each operation has a range with its name, its shapes and its duration."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.profiler import ProfilerActivity, profile

from torch_geomesh.backend import backend_of


def operations() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    root = rank == 0
    x = torch.ones(3, 2)
    dist.all_reduce(x)
    dist.all_reduce(torch.ones(5), async_op=True).wait()
    dist.broadcast(x, src=0)
    dist.reduce(x, dst=0)
    dist.all_gather([torch.empty(4) for _ in range(world)], torch.ones(4))
    dist.gather(torch.ones(6), [torch.empty(6) for _ in range(world)] if root else None)
    dist.scatter(torch.empty(7), [torch.ones(7) for _ in range(world)] if root else None)
    dist.reduce_scatter(torch.empty(9), [torch.ones(9) for _ in range(world)])
    dist.all_to_all_single(torch.empty(world, 8), torch.ones(world, 8))
    if root:
        dist.send(torch.ones(11), dst=1)
    else:
        dist.recv(torch.empty(12)[:11], src=0)
    dist.barrier()


def more_operations() -> None:
    """What Gloo has under the names of other operations, or in several pieces."""
    warnings.simplefilter("ignore", FutureWarning)  # some names are deprecated, and used
    rank, world = dist.get_rank(), dist.get_world_size()
    root = rank == 0
    group = dist.group.WORLD
    dist.all_gather_into_tensor(torch.empty(3 * world, 2), torch.ones(3, 2))
    dist.reduce_scatter_tensor(torch.empty(5), torch.ones(5 * world))
    pair = [torch.ones(3), torch.ones(7)]
    dist.all_reduce_coalesced(pair)
    dist.all_gather_coalesced([[torch.empty(3), torch.empty(7)] for _ in range(world)], pair)
    whole = [torch.empty(3 * world), torch.empty(7 * world)]
    group.allgather_into_tensor_coalesced(whole, pair).wait()
    group.reduce_scatter_tensor_coalesced(pair, whole).wait()
    with dist._coalescing_manager(async_ops=True) as several:
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(6))
    several.wait()
    with dist._coalescing_manager(async_ops=True) as several:
        for tensor, gathered in zip(pair, whole, strict=True):
            dist.all_gather_into_tensor(gathered, tensor)
    several.wait()
    # Rank r gives rank p 5 + 2r + p elements.
    dist.all_to_all(
        [torch.empty(5 + 2 * peer + rank) for peer in range(world)],
        [torch.ones(5 + 2 * rank + peer) for peer in range(world)],
    )
    if root:
        dist.send(torch.ones(11), dst=1)
    else:
        assert dist.recv(torch.empty(11)) == 0  # from any rank
    peer = 1 - rank
    exchange = [
        dist.P2POp(dist.isend, torch.ones(13 + rank), peer),
        dist.P2POp(dist.irecv, torch.empty(13 + peer), peer),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    out = torch.empty(109)
    given = [torch.ones(100), torch.ones(3, 3)]
    backend_of().sign_all_reduce(given, None, out, weight=1, rotation_seed=1).wait()


def ranges(
    backend: str, record_shapes: bool, operations: Callable[[], None] = operations
) -> list[tuple[str, list[list[int]], float]]:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=record_shapes) as profiler:
        operations()
    return [
        (event.name.removeprefix(f"{backend}:"), event.input_shapes, event.time_range.elapsed_us())
        for event in profiler.events()
        if event.name.startswith(f"{backend}:")
    ]


def test_names_and_shapes_are_gloos() -> None:
    gloo = run_ranks(2, ranges, "gloo", True, init={"backend": "gloo"})
    ours = run_ranks(2, ranges, "geomesh", True)
    for rank, (theirs, mine) in enumerate(zip(gloo, ours, strict=True)):
        assert [name for name, *_ in mine] == [
            "all_reduce",
            "all_reduce",
            "broadcast",
            "reduce",
            "all_gather",
            "gather",
            "scatter",
            "reduce_scatter",
            "all_to_all",
            "recv" if rank else "send",
            "barrier",
        ]
        # Gloo has all-reduces in a reduce-scatter's place, of the 9 elements that a rank gets.
        assert mine[7][1] == [[9], [9]]
        assert [event[:2] for event in mine if event[0] != "reduce_scatter"] == [
            event[:2] for event in theirs if event[1] != [[9]]
        ]
        assert all(elapsed > 0 for *_, elapsed in mine)


def test_single_tensor_coalesced_and_any_source_forms_have_names_and_shapes() -> None:
    for rank, events in enumerate(run_ranks(2, ranges, "geomesh", True, more_operations)):
        assert [event[:2] for event in events] == [
            ("_all_gather_base", [[3, 2]]),  # under NCCL's names
            ("_reduce_scatter_base", [[10]]),
            ("all_reduce_coalesced", [[3], [7]]),
            ("all_gather", [[3], [7]]),
            # Each of several single tensors is an operation of its own.
            ("_all_gather_base", [[3]]),
            ("_all_gather_base", [[7]]),
            ("_reduce_scatter_base", [[6]]),
            ("_reduce_scatter_base", [[14]]),
            ("all_reduce_coalesced", [[4], [6]]),
            ("_all_gather_base", [[3]]),
            ("_all_gather_base", [[7]]),
            ("all_to_all", [[5 + 2 * rank], [6 + 2 * rank]]),
            ("recvAnySource" if rank else "send", [[11]]),
            ("send", [[13 + rank]]),
            ("recv", [[14 - rank]]),
            ("sign_all_reduce", [[100], [3, 3]]),
        ]
        assert all(elapsed > 0 for *_, elapsed in events)


def test_no_shapes_unless_asked() -> None:
    for events in run_ranks(2, ranges, "geomesh", False):
        assert len(events) == 11
        assert not any(shapes for _, shapes, _ in events)


def overlapping() -> None:
    """A range ends when its operation is done, not when it was issued."""
    import time

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work = None
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(5), async_op=True)
            time.sleep(0.3)  # rank 1 comes this much later, and so does the end
            dist.distributed_c10d._get_default_store().set("go", "")
        else:
            dist.distributed_c10d._get_default_store().wait(["go"])
            work = dist.all_reduce(torch.ones(5), async_op=True)
        work.wait()
    (event,) = [event for event in profiler.events() if event.name == "geomesh:all_reduce"]
    if dist.get_rank() == 0:
        assert event.time_range.elapsed_us() > 250_000


def test_a_range_ends_with_its_operation() -> None:
    run_ranks(2, overlapping)
