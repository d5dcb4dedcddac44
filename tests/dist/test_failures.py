"""Lost, stopped and silent peers, deadlines, aborts: always an error, never a hang."""

from __future__ import annotations

import gc
import os
import re
import secrets
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, start_ranks

REGIONS = [{"GEOMESH_REGION": name} for name in ("eastus", "brazilsouth", "eastasia")]


def reduce_until_error(tell) -> str:
    dist.all_reduce(torch.ones(10))
    tell("ready")
    with pytest.raises(RuntimeError) as caught:
        while True:
            dist.all_reduce(torch.ones(300_000))
    first = str(caught.value)
    with pytest.raises(RuntimeError) as again:
        dist.broadcast(torch.ones(4), src=0)
    assert "rank 2" in str(again.value)
    return first


def test_killed_rank_is_named_with_its_region_by_all_others() -> None:
    world = start_ranks(3, reduce_until_error, per_rank_environment=REGIONS)
    for rank in range(3):
        world.receive(rank)
    world.signal(2, signal.SIGKILL)
    killed = time.monotonic()
    outcomes = world.join(expect_dead=(2,))
    assert time.monotonic() - killed < 10
    for outcome in outcomes[:2]:
        assert not outcome.error, outcome.error
        assert re.search(r"all_reduce\(", outcome.value)
        assert re.search(r"rank 2\b.*eastasia", outcome.value, re.S), outcome.value


def end_as_soon_as_met() -> str:
    """Rank 2 ends before anybody can be sure to have connected with it."""
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(10))
    return str(caught.value)


@pytest.mark.parametrize("wire", ["ucx", "tls"])
def test_a_rank_that_dies_before_it_is_connected_is_not_waited_for(
    wire: str, tmp_path: Path
) -> None:
    environment = {"GEOMESH_WIRE": wire}
    if wire == "tls":
        key = tmp_path / "key"
        key.write_text(secrets.token_hex(32))
        key.chmod(0o600)
        environment["GEOMESH_PSK_FILE"] = str(key)
    for _ in range(3):
        outcomes = start_ranks(3, end_as_soon_as_met, environment=environment).join(
            expect_dead=(2,)
        )
        for outcome in outcomes[:2]:
            assert not outcome.error, outcome.error
            assert re.search("lost rank 2 on host", outcome.value), outcome.value
            assert "no connection with" not in outcome.value


def wait_in_collective(tell) -> str:
    dist.all_reduce(torch.ones(10))
    tell("ready")
    if dist.get_rank() == 2:
        time.sleep(600)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(1000))
    return str(caught.value)


def test_stopped_rank_is_given_up_after_the_liveness_limit() -> None:
    limits = {"GEOMESH_DEAD_AFTER": "2s", "GEOMESH_SUSPECT_AFTER": "1s"}
    world = start_ranks(3, wait_in_collective, environment=limits)
    for rank in range(3):
        world.receive(rank)
    world.signal(2, signal.SIGSTOP)
    outcomes = world.join(expect_dead=(2,))
    for outcome in outcomes[:2]:
        assert not outcome.error, outcome.error
        assert "rank 2" in outcome.value
        assert 1.5 < outcome.seconds < 12


def one_rank_stays_away() -> str:
    if dist.get_rank() == 1:
        time.sleep(2.5)
        return ""
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(1000))
    return str(caught.value)


def test_deadline_names_operation_number_and_missing_rank() -> None:
    values = run_ranks(2, one_rank_stays_away, init={"timeout": timedelta(seconds=1)})
    assert re.search(r"all_reduce\(", values[0])
    assert "rank 1" in values[0]
    assert re.search(r"operation 1\b|#1\b|sequence 1\b", values[0]), values[0]


def own_limits() -> tuple[float, float]:
    if dist.get_rank() == 1:
        time.sleep(4)
        return 0.0, 0.0
    group = dist.distributed_c10d._get_default_group()
    options = dist.AllreduceOptions()
    options.timeout = timedelta(milliseconds=500)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1"):
        group.allreduce([torch.ones(4)], options).wait()
    return time.monotonic() - start, 0.0


def test_an_operations_own_limit_is_stronger_than_the_groups() -> None:
    seconds = run_ranks(2, own_limits)[0][0]
    assert 0.4 < seconds < 1.5


def wait_limit() -> float:
    if dist.get_rank() == 1:
        time.sleep(3)
        return 0.0
    work = dist.all_reduce(torch.ones(4), async_op=True)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="wait"):
        work.wait(timedelta(milliseconds=500))
    return time.monotonic() - start


def test_the_waits_own_limit_is_the_strongest() -> None:
    assert 0.4 < run_ranks(2, wait_limit)[0] < 1.5


def never_comes() -> str:
    with pytest.raises(RuntimeError) as caught:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False
        )
        dist.init_process_group(
            "geomesh", store=store, rank=0, world_size=3, timeout=timedelta(seconds=1)
        )
    return str(caught.value)


def test_missing_ranks_are_named_when_the_group_does_not_meet() -> None:
    value = run_ranks(1, never_comes, initialize=False)[0]
    assert re.search(r"missing: rank 1, 2 of 3", value), value


def different_calls() -> str:
    dist.all_reduce(torch.ones(4))
    with pytest.raises(RuntimeError) as caught:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(4))
        else:
            dist.all_reduce(torch.ones(4, dtype=torch.float64))
    return str(caught.value)


def test_ranks_that_call_different_things_are_told() -> None:
    for value in run_ranks(2, different_calls):
        assert "differ" in value or "another" in value or "mismatch" in value, value


def aborted() -> float:
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match=r"rank 0 .*aborted"):
            dist.all_reduce(torch.ones(4))
            dist.all_reduce(torch.ones(4))
        return 0.0
    dist.all_reduce(torch.ones(4))
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    time.sleep(0.5)
    start = time.monotonic()
    backend.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        dist.all_reduce(torch.ones(4))
    return time.monotonic() - start


def test_abort_returns_and_reaches_the_others() -> None:
    assert run_ranks(2, aborted)[0] < 2


def again_and_again() -> list[float]:
    sums = []
    rank = dist.get_rank()
    for turn in range(5):
        tensor = torch.tensor([float(turn + rank)])
        dist.all_reduce(tensor)
        sums.append(tensor.item())
        dist.destroy_process_group()
        if rank == 1:
            time.sleep(0.2)
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False
        )
        dist.init_process_group("geomesh", store=store, rank=rank, world_size=3)
    return sums


def test_destroy_and_join_again_on_the_same_store() -> None:
    assert run_ranks(3, again_and_again) == [[3.0, 6.0, 9.0, 12.0, 15.0]] * 3


def sends_and_leaves() -> bool:
    big = torch.arange(8_000_000, dtype=torch.float32)
    if dist.get_rank() == 0:
        dist.isend(big, 1)
        dist.destroy_process_group()
        return True
    time.sleep(1)
    into = torch.empty_like(big)
    dist.recv(into, 0)
    return torch.equal(into, big)


def test_a_send_is_delivered_though_its_rank_leaves_at_once() -> None:
    assert run_ranks(2, sends_and_leaves) == [True, True]


def forgets_tensors() -> bool:
    rank, world = dist.get_rank(), dist.get_world_size()
    futures = []
    for i in range(200):
        tensor = torch.full((5000,), float(rank + i))
        futures.append(dist.all_reduce(tensor.clone(), async_op=True).get_future())
        del tensor
        gc.collect(0)
        torch.full((5000,), -1.0)
    expected = [sum(r + i for r in range(world)) for i in range(200)]
    return all(f.wait()[0].eq(e).all() for f, e in zip(futures, expected, strict=True))


def test_tensors_live_until_their_work_is_done() -> None:
    assert run_ranks(2, forgets_tensors) == [True, True]


def idle_cost() -> float:
    if dist.get_rank() == 1:
        time.sleep(5)
        dist.all_reduce(torch.ones(1))
        return 0.0
    work = dist.all_reduce(torch.ones(1), async_op=True)
    time.sleep(0.5)
    before = time.process_time()
    start = time.monotonic()
    work.wait()
    return (time.process_time() - before) / (time.monotonic() - start)


def test_a_waiting_rank_uses_no_cpu() -> None:
    assert run_ranks(2, idle_cost)[0] < 0.02


def not_a_number() -> str:
    from torch_geomesh.backend import backend_of

    rank = dist.get_rank()
    weights = [torch.ones(10), torch.ones(5000)]
    if rank == 1:
        weights[1][4321] = float("nan")
    out = torch.empty(5010)
    with pytest.raises(RuntimeError) as caught:  # also where it is known before the call
        backend_of().sign_all_reduce(
            weights, None, out, weight=1, rotation_seed=3, names=["head.bias", "head.weight"]
        ).wait()
    return str(caught.value)


def test_nan_is_named_on_every_rank_before_it_is_sent() -> None:
    for value in run_ranks(3, not_a_number):
        assert "head.weight" in value, value
        assert "4321" in value, value
    assert "rank 1" in run_ranks(3, not_a_number)[0]


def some_leave() -> list[str]:
    rank = dist.get_rank()
    ones = torch.ones(8)

    def keep_sending(group) -> None:
        while True:
            dist.send(ones, 2, group=group)

    calls = {
        "all_reduce": lambda group: dist.all_reduce(ones.clone(), group=group),
        "recv": lambda group: dist.recv(torch.empty(8), 2, group=group),
        "send": keep_sending,  # what goes before it is known that rank 2 has left is lost on it
        "barrier": lambda group: dist.barrier(group),
    }
    # A deadline that the test does not live to see.
    groups = {name: dist.new_group(timeout=timedelta(seconds=600)) for name in calls}
    last = dist.new_group(timeout=timedelta(seconds=600))
    if rank == 2:
        dist.send(ones * 5, 0, group=groups["recv"])
        for group in groups.values():
            dist.destroy_process_group(group)
    # Those that stay go on among themselves, and have what it sent before it left.
    into = torch.empty(8)
    if rank == 0:
        dist.recv(into, 2, group=groups["recv"])
        assert torch.equal(into, ones * 5)
        dist.send(ones * 7, 1, group=groups["recv"])
    if rank == 1:
        dist.recv(into, 0, group=groups["recv"])
        assert torch.equal(into, ones * 7)
    texts = []
    for name, call in calls.items():
        if rank != 2:
            with pytest.raises(RuntimeError) as caught:
                call(groups[name])
            texts.append(str(caught.value).split("\nException raised")[0])
    # Nobody is left to hear from.
    if rank == 0:
        with pytest.raises(RuntimeError) as caught:
            dist.recv(into, group=last)
        texts.append(str(caught.value).split("\nException raised")[0])
    else:
        dist.destroy_process_group(last)
    dist.barrier()
    return texts


def test_whoever_still_wants_something_of_a_rank_that_left_is_told() -> None:
    texts = run_ranks(3, some_leave, per_rank_environment=REGIONS)
    gone = r"rank 2 on host \S+ \(eastasia\) has left the group"
    for rank in (0, 1):
        for text in texts[rank][:4]:
            assert re.search(gone, text), text
    # Each of these has had an error of its own, on one of the two at least.
    for number, call in (
        (0, r"all_reduce\(Float\[8\], SUM\)"),
        (1, r"recv\(.*, from rank 2, .*\)"),
    ):
        own = rf"{call}, sequence \d+: {gone}"
        assert any(re.search(own, texts[rank][number]) for rank in (0, 1)), texts
    assert re.search(r"recv\(.*has left the group", texts[0][4])
