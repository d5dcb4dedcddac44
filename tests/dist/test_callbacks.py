"""What a callback of a work's future may do: start other operations, and wait for them."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from versions import needs_torch

from torch_geomesh.backend import backend_of

Callback = Callable[[torch.futures.Future], None]


def started_with(callback: Callback) -> None:
    """Start an operation that ends with the callback, on a thread of the backend's.

    Of two ranks, 1 has the callback; 0 joins the operation when that is in place, for the callback
    of a work that is done already runs where it is added.
    """
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        work = dist.all_reduce(torch.ones(5), async_op=True)
        work.get_future().add_done_callback(callback)
        store.set("added", "")
    else:
        store.wait(["added"])
        dist.all_reduce(torch.ones(5))


def chained() -> None:
    """A callback starts the next operation; nobody waits in it."""
    seen: list[torch.Tensor] = []
    done = threading.Event()

    def last(future: torch.futures.Future) -> None:
        seen.append(future.value()[0])
        done.set()

    def following(future: torch.futures.Future) -> None:
        work = dist.all_reduce(future.value()[0], async_op=True)
        work.get_future().add_done_callback(last)

    started_with(following)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.full((5,), 10.0))
    else:
        assert done.wait(20)
        assert torch.equal(seen[0], torch.full((5,), 12.0))


def test_a_callback_starts_an_operation() -> None:
    run_ranks(2, chained)


BACKENDS = ["geomesh", "gloo"]


def nested(wait: str) -> None:
    """A callback waits for an operation of its own, as PyTorch's PowerSGD does."""
    signal.alarm(5)  # where the callback hangs, so does the group's end
    seen: list[torch.Tensor] = []
    done = threading.Event()

    def inside(future: torch.futures.Future) -> None:
        tensor = future.value()[0]
        work = dist.all_reduce(tensor, async_op=True)
        if wait == "future":
            work.get_future().wait()
        else:
            work.wait()
        seen.append(tensor)
        done.set()

    started_with(inside)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.full((5,), 10.0))
    else:
        assert done.wait(4), "the callback did not come back"
        assert torch.equal(seen[0], torch.full((5,), 12.0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wait", ["work", "future"])
def test_a_callback_waits_for_an_operation(backend: str, wait: str) -> None:
    run_ranks(2, nested, wait, init={"backend": backend, "timeout": timedelta(seconds=2)})


def slow() -> None:
    """A callback takes its time: operations that have nothing to do with it are done meanwhile."""
    released = threading.Event()
    in_time: list[bool] = []
    done = threading.Event()

    def busy(_: torch.futures.Future) -> None:
        in_time.append(released.wait(3))
        done.set()

    started_with(busy)
    dist.all_reduce(torch.ones(5))
    released.set()
    if dist.get_rank() == 1:
        assert done.wait(10)
        assert in_time == [True], "the second operation ended after the callback only"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_callback_that_takes_its_time(backend: str) -> None:
    run_ranks(2, slow, init={"backend": backend})


def waited_for() -> None:
    for _ in range(500):
        works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
        for work in works:
            future = work.get_future()
            work.wait()
            assert future.done()
            assert future.value()[0].tolist() == [2.0] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_future_is_done_when_its_work_was_waited_for(backend: str) -> None:
    run_ranks(2, waited_for, init={"backend": backend})


def ended_by(what: str) -> None:
    """The group ends in a callback of one of its own operations, or in its abort hook."""
    everything = what in ("all groups", "abort hook of all")
    group = None if everything else dist.new_group()
    ended, later = threading.Event(), threading.Event()

    def end(*_: object) -> None:
        dist.destroy_process_group(group)
        ended.set()

    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.wait(["added"])
        if not what.startswith("abort hook"):
            dist.all_reduce(torch.ones(5), group=group)
            dist.all_reduce(torch.ones(5), group=group)
        store.wait(["ended"])
        end()
    elif what.startswith("abort hook"):
        backend = backend_of(group)
        backend.register_abort_hook(1, end)
        dist.all_reduce(torch.ones(5), group=group, async_op=True)
        store.set("added", "")
        backend.abort()
    else:
        works = [dist.all_reduce(torch.ones(5), group=group, async_op=True) for _ in range(2)]
        works[0].get_future().add_done_callback(end)
        works[1].get_future().add_done_callback(lambda _: later.set())
        del works
        store.set("added", "")
        assert later.wait(10)
    assert ended.wait(10)
    store.set("ended", "")
    if not everything:
        dist.barrier()  # the others go on


@pytest.mark.parametrize(
    "what",
    [
        "one group",
        "all groups",
        pytest.param("abort hook", marks=needs_torch(14, "abort hooks")),
        pytest.param("abort hook of all", marks=needs_torch(14, "abort hooks")),
    ],
)
def test_a_callback_ends_its_own_group(what: str) -> None:
    run_ranks(2, ended_by, what)


def hung(what: str) -> None:
    """Somebody else's code never comes back; the group ends all the same."""
    group = dist.new_group()
    inside, release, back = threading.Event(), threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        inside.set()
        release.wait(120)
        back.set()

    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.wait(["added"])
        if what != "abort hook":
            dist.all_reduce(torch.ones(5), group=group)
        store.wait(["ended"])
        return
    backend = backend_of(group)
    if what == "abort hook":
        backend.register_abort_hook(1, hang)
    if what == "completion hook":
        group._register_on_completion_hook(hang)
    work = dist.all_reduce(torch.ones(5), group=group, async_op=True)
    if what == "callback":
        work.get_future().add_done_callback(hang)
    store.set("added", "")
    if what == "abort hook":
        with pytest.raises(dist.DistBackendError, match="within the 100 ms given"):
            work.wait(timedelta(milliseconds=100))
    assert inside.wait(20)
    del backend, work
    started = time.monotonic()
    dist.destroy_process_group()  # with all its groups, and the engine
    assert time.monotonic() - started < 100  # 10 s for the code that hangs
    assert not back.is_set()
    store.set("ended", "")
    dist.init_process_group(
        "geomesh", rank=0, world_size=1, store=dist.HashStore()
    )  # and a new one begins
    dist.all_reduce(torch.ones(5))
    release.set()
    assert back.wait(20)


@pytest.mark.parametrize(
    "what",
    [
        "callback",
        "completion hook",
        pytest.param("abort hook", marks=needs_torch(14, "abort hooks")),
    ],
)
def test_code_that_hangs_does_not_keep_a_group_from_ending(what: str) -> None:
    run_ranks(2, hung, what)


def results() -> dict[str, int]:
    """c10d's WorkResult, in a future that never has an error: SUCCESS, TIMEOUT, COMM_ERROR."""
    group, quick = dist.new_group(), dist.new_group(timeout=timedelta(seconds=0.2))
    work = dist.all_reduce(torch.ones(5), group=group, async_op=True)
    found = {"done": work.get_future_result().wait()}  # asked before the work may be done
    found["done before"] = work.get_future_result().wait()
    together = group.allgather_into_tensor_coalesced(
        [torch.empty(10), torch.empty(20)], [torch.ones(5), torch.ones(10)]
    )
    found["together"] = together.get_future_result().wait()

    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.wait(["asked"])
        return found
    short = dist.all_reduce(torch.ones(5), group=quick, async_op=True)
    found["late"] = short.get_future_result().wait()
    aborted = dist.all_reduce(torch.ones(5), group=group, async_op=True)
    backend_of(group).abort()
    found["aborted"] = aborted.get_future_result().wait()
    store.set("asked", "")
    return found


def test_what_became_of_a_work() -> None:
    done = {"done": 0, "done before": 0, "together": 0}
    first, second = run_ranks(2, results)
    assert first == done
    assert second == {**done, "late": 1, "aborted": 2}


def raced() -> None:
    """Ask for a work's futures just as it ends, in all the ways; each has its value."""
    tensor, short = torch.ones(4), random.Random(dist.get_rank())
    for _ in range(3000):
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True)
        for _ in range(short.randrange(300)):
            pass
        assert work.get_future_result().wait() == 0
        seen: list[float] = []
        work.get_future().then(lambda _, work=work, seen=seen: seen.append(work._get_duration()))
        work.wait()
        assert work.get_future().wait()[0].tolist() == [1.0] * 4
        assert len(seen) == 1


def test_a_future_asked_for_as_the_work_ends_has_its_value() -> None:
    run_ranks(2, raced)


def looks_in() -> str:
    """A thread waits again and again for what is done; the engine's deadlines come all the same."""
    tensor = torch.ones(4)
    done = dist.all_reduce(tensor, async_op=True)
    done.wait()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["seen"])
        return ""
    over = threading.Event()

    def look_in() -> None:
        while not over.is_set():
            done.wait()

    thread = threading.Thread(target=look_in)
    thread.start()
    late = dist.all_reduce(tensor, async_op=True)
    raised = late.get_future().then(lambda future: None)  # completed by the deadline alone
    with pytest.raises(RuntimeError) as error:
        raised.wait()
        late.wait()
    over.set()
    thread.join()
    store.set("seen", "")
    return str(error.value)


def test_waiting_for_what_is_done_keeps_no_deadline_from_coming() -> None:
    text = run_ranks(2, looks_in, init={"timeout": timedelta(seconds=2)})[0]
    assert "not done within its timeout of 2." in text
