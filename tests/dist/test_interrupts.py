"""What happens around the backend: signals, stores that vanish, other libraries."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import _context, run_ranks, start_ranks
from versions import TORCH_MINOR


def interrupted(tell) -> None:
    """Rank 0 blocks in several calls, each ended by a signal that the test sends."""
    import torch_geomesh as gm

    rank = int(os.environ["RANK"])
    tcp = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    hour = timedelta(hours=1)

    def block(name: str, call) -> None:
        beat = [0]
        stop = threading.Event()

        def count() -> None:  # runs only while the blocked call has let go of Python's lock
            while not stop.wait(0.01):
                beat[0] += 1
                if beat[0] == 20:
                    tell(name)

        thread = threading.Thread(target=count)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            call()
        stop.set()
        thread.join()

    options = gm.Options(linger="1h")
    dist.init_process_group(
        "geomesh", store=tcp, rank=rank, world_size=2, timeout=hour, pg_options=options
    )
    group = dist.new_group()
    dist.barrier()
    if rank == 0:
        works = [dist.all_reduce(torch.ones(3), async_op=True)]
        block("wait", works[0].wait)
        block("barrier", lambda: dist.barrier(group=group))
        block("recv", lambda: dist.recv(torch.ones(3), 1, group=group))
        block("destroy", lambda: dist.destroy_process_group(group))
        # As init_process_group waits for the others.
        block("meet", lambda: dist.new_group([0, 1], timeout=hour))
        tell("end")
        works[0].wait()  # until SIGTERM
    tcp.wait(["terminated"], hour)
    with pytest.raises(RuntimeError, match=r"rank 0 on host"):
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(3))


def test_ctrl_c_and_sigterm_end_what_blocks() -> None:
    world = start_ranks(2, interrupted, initialize=False)
    for name in ("wait", "barrier", "recv", "destroy", "meet"):
        assert world.receive(0) == name
        world.signal(0, signal.SIGINT)
        sent = time.monotonic()
    assert world.receive(0) == "end"
    assert time.monotonic() - sent < 2  # the last one: the next one's message showed the others
    world.signal(0, signal.SIGTERM)
    world.processes[0].join(5)
    assert world.processes[0].exitcode == -signal.SIGTERM
    world.store.set("terminated", "yes")  # type: ignore[attr-defined]
    outcomes = world.join(expect_dead=(0,))
    assert not outcomes[1].error, outcomes[1].error


def host_store(pipe) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def store_goes_away(kind: str, place: str, tell) -> float:
    rank = int(os.environ["RANK"])
    if kind == "file":
        store: dist.Store = dist.FileStore(place, 2)
    else:
        store = dist.TCPStore("127.0.0.1", int(place), None, False)
    dist.init_process_group("geomesh", store=store, rank=rank, world_size=2)
    tensor = torch.tensor([1.0])
    dist.all_reduce(tensor)
    tell("ready")
    control = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    control.wait(["gone"])
    big = torch.full((300_000,), float(rank))
    dist.all_reduce(big)
    assert big.eq(1).all()
    if rank == 0:
        dist.isend(torch.arange(3_000_000.0), 1)
    start = time.monotonic()
    if rank == 1:
        into = torch.empty(3_000_000)
        dist.recv(into, 0)
        assert torch.equal(into, torch.arange(3_000_000.0))
    dist.destroy_process_group()
    return time.monotonic() - start


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_a_store_that_is_gone_does_not_hold_up_the_end(kind: str, tmp_path: Path) -> None:
    place, host = str(tmp_path / "store"), None
    if kind == "tcp":
        ours, theirs = _context.Pipe()
        host = _context.Process(target=host_store, args=(theirs,), daemon=True)
        host.start()
        assert ours.poll(60)
        place = str(ours.recv())
    world = start_ranks(2, store_goes_away, kind, place, initialize=False)
    for rank in range(2):
        world.receive(rank)
    if host is None:
        os.remove(place)
    else:
        host.kill()
        host.join()
    world.store.set("gone", "yes")  # type: ignore[attr-defined]
    for outcome in world.join():
        assert not outcome.error, outcome.error
        assert outcome.value < 5, outcome.value


# Runs with stray UCX variables and faulthandler: dlopen works afterwards, nothing is printed before
# the crash, and the crash is Python's to report.
GUEST = """
import ctypes, ctypes.util, os, sys, torch, torch.distributed as dist
dist.init_process_group("geomesh", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
import numpy, sqlite3
for name in ("m", "dl", "z"):
    path = ctypes.util.find_library(name)
    path and ctypes.CDLL(path)
assert numpy.ones(1000_000).sum() == 1e6
print("fine", flush=True)
sys.stderr.write("crash now\\n")
ctypes.string_at(0)
"""


def test_a_good_guest_in_the_process() -> None:
    environment = {**os.environ, "UCX_PREFIX": "/x", "UCX_TLS_STRAY": "1"}
    command = [sys.executable, "-X", "faulthandler", "-c", GUEST]
    run = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment)
    assert run.stdout == "fine\n", run.stderr
    assert run.returncode == -signal.SIGSEGV
    assert re.match(r"crash now\nFatal Python error: Segmentation fault\n", run.stderr), run.stderr
    assert "string_at" in run.stderr
    assert "ucs_" not in run.stderr  # no trace of UCX's own


def test_the_version_of_ucx_is_logged() -> None:
    environment = {**os.environ, "GEOMESH_LOG_LEVEL": "info"}
    code = GUEST.split("import numpy")[0]
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment)
    assert run.returncode == 0, run.stderr
    assert re.search(r"UCX 1\.\d+\.\d+ listens on", run.stderr), run.stderr


def group_limits() -> list[float]:
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    groups = [(dist.new_group(timeout=timedelta(seconds=1)), 1.0)]
    if TORCH_MINOR >= 14:  # PyTorch changes no plugin's limit before
        changed = dist.new_group(timeout=timedelta(minutes=5))
        dist.distributed_c10d._set_pg_timeout(timedelta(milliseconds=1500), changed)
        groups.append((changed, 1.5))
    took = []
    for group, seconds in groups:
        start = time.monotonic()
        if rank == 0:
            with pytest.raises(RuntimeError, match="rank 1"):
                dist.all_reduce(torch.ones(3), group=group)
        took.append((time.monotonic() - start) / seconds)
        store.set(f"done{seconds}", "yes") if rank == 0 else store.wait([f"done{seconds}"])
    return took


def test_a_groups_own_and_changed_limits_are_kept() -> None:
    for ratio in run_ranks(2, group_limits)[0]:
        assert 0.98 < ratio < 1.2


def test_python_may_end_while_works_end() -> None:
    script = str(Path(__file__).parent / "scripts" / "ends_at_once.py")
    for _ in range(4):
        runs = [
            subprocess.Popen([sys.executable, script], stderr=subprocess.PIPE, text=True)
            for _ in range(3)  # at the same time: who ends first is chance
        ]
        for run in runs:
            _, errors = run.communicate(timeout=90)
            assert run.returncode == 0, errors
            assert errors == ""
