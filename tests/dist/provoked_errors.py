"""Provokes each text of docs/errors.md, on ranks in the regions of azure-4.

A function marked with `provokes` returns the texts of one or more of the page's entries by the
entry's heading, in the order of its blocks.
"""

from __future__ import annotations

import importlib.machinery
import os
import re
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from errors_page import REGIONS, Texts
from ranks import World, run_ranks, start_ranks
from versions import TORCH_MINOR

import torch_geomesh as gm
from torch_geomesh.backend import backend_of

SECOND = timedelta(seconds=1)

provokers: list[tuple[Callable[[], Texts], tuple[str, ...]]] = []


def provokes(*headings: str) -> Callable[[Callable[[], Texts]], Callable[[], Texts]]:
    def register(function: Callable[[], Texts]) -> Callable[[], Texts]:
        provokers.append((function, headings))
        return function

    return register


# ---- on a rank ----


def error_of(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Call the function, which must raise; return the error's text without a C++ stack."""
    try:
        function(*args, **options)
    except Exception as error:
        return str(error).split("\nException raised from")[0]
    raise AssertionError(f"{function} raised nothing")


def meet(name: str, *ranks: int) -> None:
    """Wait until these ranks have come here too, without any collective."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name}/{dist.get_rank()}", "here")
    store.wait([f"{name}/{rank}" for rank in ranks or range(dist.get_world_size())])


def first_hand(texts: list[str | None]) -> str:
    """Return the text of a rank that has met the error itself."""
    return next(text for text in texts if text and "reported:" not in text)


def passed_on(texts: list[str | None]) -> str | None:
    """Return the text of a rank that was told by another; none where all met it themselves."""
    return next((text for text in texts if text and "reported:" in text), None)


def of(values: list[dict[str, str]], name: str) -> list[str | None]:
    return [value.get(name) for value in values]


class Logged:
    """What this process writes to stderr in the block, C++ too."""

    def __enter__(self) -> Logged:
        self.file = tempfile.TemporaryFile(mode="w+")
        self.saved = os.dup(2)
        os.dup2(self.file.fileno(), 2)
        return self

    def __exit__(self, *error: object) -> None:
        os.dup2(self.saved, 2)
        os.close(self.saved)
        self.file.seek(0)
        self.text = self.file.read()
        self.file.close()

    def line(self, component: str, about: str) -> str:
        """Return the message of the first line of this component that has ``about``."""
        match = re.search(rf"geomesh [EWI] .*?\b{component}: (.*{about}.*)", self.text)
        assert match, self.text
        return match[1]


# ---- operations ----


def stalls() -> dict[str, str]:
    rank = dist.get_rank()
    texts = {}

    group = dist.new_group(timeout=2 * SECOND)
    dist.all_reduce(torch.ones(4), group=group)
    if rank != 3:
        texts["away"] = error_of(dist.all_reduce, torch.ones(250_000), group=group)
        texts["later"] = error_of(dist.broadcast, torch.ones(4), 0, group=group)
    meet("away")
    if rank == 3:
        texts["late"] = error_of(dist.all_reduce, torch.ones(250_000), group=group)

    group = dist.new_group(timeout=2 * SECOND)
    if rank != 3:
        works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for _ in range(2)]
        texts["first"], texts["second"] = (error_of(work.wait) for work in works)
    meet("queued")

    group = dist.new_group()
    if rank != 3:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        meet("waiting", 0, 1, 2)
        limit = timedelta(milliseconds=300 if rank == 0 else 30_000)
        texts["wait"] = error_of(work.wait, limit)
    meet("wait")

    for name, function, args in (
        ("recv", dist.recv, (torch.ones(4), 1)),
        ("any", dist.recv, (torch.ones(4), None)),
        ("send", dist.send, (torch.ones(20_000_000), 1)),
    ):
        group = dist.new_group(timeout=SECOND / 3)
        if rank == 0:
            texts[name] = error_of(function, *args, group=group)
        meet(name)

    group = dist.new_group([0, 3])
    if rank == 3:
        dist.destroy_process_group(group)
    meet("left")
    if rank == 0:
        texts["left"] = error_of(dist.all_reduce, torch.ones(4), group=group)
    meet("end")
    return texts


@provokes(
    "A rank did not call the operation in time",
    "`wait()` had a limit of its own",
    "A send or receive found no counterpart",
    "A rank has destroyed the group",
    "An earlier operation of the group failed",
    "The group has failed before",
)
def stalled() -> Texts:
    values = run_ranks(4, stalls, per_rank_environment=REGIONS)
    return {
        "A rank did not call the operation in time": [first_hand(of(values, "away"))],
        "`wait()` had a limit of its own": [values[0]["wait"]],
        "A send or receive found no counterpart": [values[0][n] for n in ("recv", "any", "send")],
        "A rank has destroyed the group": [values[0]["left"]],
        "An earlier operation of the group failed": [first_hand(of(values, "second"))],
        "The group has failed before": [first_hand(of(values, "later")), values[3]["late"]],
    }


def loses_rank_3(how: str, tell: Callable[[object], None]) -> dict[str, str]:
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(4))
    if rank == 3:
        meet("begun", 0, 1, 2)
        time.sleep(0.3)  # the others have all that they can have without this rank
        tell("ready")
        if how == "abort":
            backend_of().abort()
            return {"own": error_of(dist.all_reduce, torch.ones(1000))}
        if how != "exit":
            signal.pause()
        return {}
    with Logged() as log:
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        meet("begun", 0, 1, 2, 3)
        texts = {"error": error_of(work.wait)}
    if how == "stop":
        texts["log"] = log.line("transport", "has been silent")
    return texts


def lose_rank_3(how: str, number: signal.Signals | None = None) -> list[dict[str, str]]:
    limits = {"GEOMESH_SUSPECT_AFTER": "1s", "GEOMESH_DEAD_AFTER": "2s"}
    world = start_ranks(4, loses_rank_3, how, per_rank_environment=REGIONS, environment=limits)
    world.receive(3)
    if number is not None:
        world.signal(3, number)
    outcomes = world.join(expect_dead=() if number is None else (3,))
    for outcome in outcomes[:3]:
        assert not outcome.error, outcome.error
    return [outcome.value or {} for outcome in outcomes]


@provokes("A rank died, or its machine did")
def killed() -> Texts:
    values = of(lose_rank_3("kill", signal.SIGKILL), "error")
    return {"A rank died, or its machine did": [first_hand(values), passed_on(values)]}


@provokes("A rank is stopped, or cut off from the network")
def stopped() -> Texts:
    values = lose_rank_3("stop", signal.SIGSTOP)
    return {
        "A rank is stopped, or cut off from the network": [
            next(iter(of(values, "log"))),
            first_hand(of(values, "error")),
        ]
    }


@provokes("A rank ended before the others")
def ended_early() -> Texts:
    return {"A rank ended before the others": [first_hand(of(lose_rank_3("exit"), "error"))]}


@provokes("A rank aborted the group")
def aborted() -> Texts:
    values = lose_rank_3("abort")
    return {"A rank aborted the group": [values[3]["own"], values[0]["error"]]}


def destroys_with_work_pending() -> dict[str, str]:
    texts = {}
    group = dist.new_group()
    meet("made")
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        backend = backend_of(group)
        with Logged() as log:
            dist.destroy_process_group(group)
        texts["log"] = log.line("group", "unfinished")
        texts["work"] = error_of(work.wait)
        texts["later"] = error_of(backend.allreduce, [torch.ones(4)])
    meet("destroyed")
    return texts


@provokes("A group was destroyed with work pending")
def destroyed() -> Texts:
    (texts, *_) = run_ranks(
        4,
        destroys_with_work_pending,
        per_rank_environment=REGIONS,
        environment={"GEOMESH_LINGER": "200ms"},
    )
    return {"A group was destroyed with work pending": list(texts.values())}


def is_clear(text: str | None) -> bool:
    """Tell whether a text is first-hand and all ranks had answered."""
    return text is not None and "reported:" not in text and "no answer" not in text


def in_spite_of_rank_0(call: Callable[[Any], Any], *where: int) -> str | None:
    """Let rank 0 call after all others, until one rank of ``where`` has a clear text; return it.

    Whose text comes first is chance, and the others then end with that one.
    """
    name = call.__name__
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    for turn in range(20):
        here = f"{name}{turn}"
        group = dist.new_group(timeout=timedelta(seconds=20))
        if rank == 0:
            meet(f"{here}/begun", 1, 2, 3)
            time.sleep(0.05)
            work = call(group)
        else:
            work = call(group)
            meet(f"{here}/begun", 1, 2, 3)
        text = error_of(work.wait)
        store.set(f"{here}/clear/{rank}", str(rank in where and is_clear(text)))
        meet(f"{here}/end")
        clear = [store.get(f"{here}/clear/{r}") == b"True" for r in range(4)]
        if any(clear):
            return text if clear[rank] else None
    raise AssertionError(text)


def different_roots(group: Any) -> Any:
    root = 0 if dist.get_rank() == 0 else 1
    dist.broadcast(torch.ones(3), group=group, group_src=root, async_op=True)
    return _Later(group)


class _Later:
    """The next operation: what is wrong with a broadcast, a rank may see when it has ended."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def wait(self) -> None:
        time.sleep(0.1)
        dist.barrier(group=self._group)


def differences() -> dict[str, str | None]:
    rank = dist.get_rank()
    odd = rank == 0
    more = {"async_op": True}

    def operations(group: Any) -> Any:
        if odd:
            return dist.all_gather_into_tensor(torch.ones(32), torch.ones(8), group=group, **more)
        return dist.all_reduce(torch.ones(8), group=group, **more)

    def shapes(group: Any) -> Any:
        return dist.all_reduce(torch.ones(9 if odd else 8), group=group, **more)

    def dtypes(group: Any) -> Any:
        tensor = torch.ones(8, dtype=torch.bfloat16 if odd else torch.float32)
        return dist.all_reduce(tensor, group=group, **more)

    def reductions(group: Any) -> Any:
        op = dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM
        return dist.all_reduce(torch.ones(8), op, group=group, **more)

    def parts(group: Any) -> Any:
        tensor = torch.ones(8 if odd else 4)
        return dist.all_to_all_single(torch.empty_like(tensor), tensor, group=group, **more)

    texts = {
        call.__name__: in_spite_of_rank_0(call, 1, 2, 3)
        for call in (operations, shapes, dtypes, reductions, different_roots)
    }
    texts["parts"] = in_spite_of_rank_0(parts, 0)
    for name, given, taken in (
        ("large", torch.ones(10), torch.ones(5)),
        ("small", torch.ones(5), torch.ones(10)),
        ("other dtype", torch.ones(5), torch.ones(10, dtype=torch.bfloat16)),
    ):
        group = dist.new_group()
        if rank == 0:
            with suppress(RuntimeError):  # it is told, too, if it was refused in time
                dist.send(given, 1, group=group)
        if rank == 1:
            texts[name] = error_of(dist.recv, taken, 0, group=group)
        meet(name)
    return texts


@provokes(
    "The ranks called different operations",
    "The ranks gave different shapes, dtypes or reductions",
    "The ranks named different roots",
    "A message does not fit its receive",
    "The ranks gave parts of different sizes",
)
def differ() -> Texts:
    values = run_ranks(4, differences, per_rank_environment=REGIONS)
    clear = {name: next(filter(is_clear, of(values, name))) for name in values[1]}
    return {
        "The ranks called different operations": [clear["operations"]],
        "The ranks gave different shapes, dtypes or reductions": [
            clear[name] for name in ("shapes", "dtypes", "reductions")
        ],
        "The ranks named different roots": [clear["different_roots"]],
        "A message does not fit its receive": [
            clear[name] for name in ("large", "small", "other dtype")
        ],
        "The ranks gave parts of different sizes": [clear["parts"]],
    }


# ---- calls that are refused ----


def refusals() -> dict[str, list[str]]:
    rank = dist.get_rank()
    ones, op = torch.ones, dist.ReduceOp
    memory = torch.zeros(16)
    group = dist.distributed_c10d._get_default_group()
    no_time = dist.AllreduceOptions()
    no_time.timeout = timedelta(0)
    into = dist.all_gather_into_tensor
    texts = {
        "The reduction is not defined for the dtype": [
            error_of(dist.all_reduce, ones(3, dtype=torch.int64), op.AVG),
            error_of(dist.all_reduce, ones(3), op.BAND),
            error_of(dist.all_reduce, torch.zeros(3, dtype=torch.uint8).view(torch.bits8)),
            error_of(dist.all_reduce, ones(3).to_sparse(), op.MAX),
        ],
        "Input and output do not go together": [
            error_of(into, ones(16, dtype=torch.float64), ones(4)),
            error_of(into, ones(15), ones(4)),
            error_of(dist.all_gather, [ones(3)] * 3, ones(3)),
            error_of(dist.all_to_all_single, ones(4), ones(4), [2, 1, 0, 0], [1, 1, 1, 1]),
        ],
        "The tensors overlap": [
            error_of(into, memory, memory[2:6]),
            error_of(dist.all_gather, [memory[:4]] * 4, ones(4)),
            error_of(dist.all_reduce, ones(1).expand(4)),
        ],
        "The tensor is not dense, or on another device": [
            error_of(backend_of().broadcast, ones(3).to_sparse(), 0),
            error_of(backend_of().allreduce, [ones(3, device="meta")]),
        ],
        "A rank, a tag or a timeout is out of range": [
            error_of(dist.broadcast, ones(3), 9),
            error_of(dist.send, ones(3), (rank + 1) % 4, tag=-1),
            error_of(group.allreduce, [ones(3)], no_time),
        ],
    }
    dist.all_reduce(memory)  # nothing had left: the group goes on
    return texts


@provokes(
    "The reduction is not defined for the dtype",
    "Input and output do not go together",
    "The tensors overlap",
    "The tensor is not dense, or on another device",
    "A rank, a tag or a timeout is out of range",
)
def refused() -> Texts:
    return run_ranks(4, refusals, per_rank_environment=REGIONS)[0]


def use_in_a_fork() -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, error_of(dist.all_reduce, torch.ones(3)).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


@provokes("The group is used in a fork")
def forked() -> Texts:
    texts = run_ranks(4, use_in_a_fork, per_rank_environment=REGIONS)
    return {"The group is used in a fork": [texts[0]]}


def barriers() -> list[str]:
    rank = dist.get_rank()
    texts = []
    if rank == 0:
        for every in (False, True):
            texts.append(error_of(dist.monitored_barrier, timeout=SECOND / 4, wait_all_ranks=every))
    meet("failed")
    if rank == 1:
        texts.append(error_of(dist.monitored_barrier))
    meet("late")
    return texts


@provokes("The monitored barrier failed")
def barrier_failed() -> Texts:
    if TORCH_MINOR < 14:
        pytest.skip("needs PyTorch 2.14: monitored_barrier is Gloo's alone before")
    values = run_ranks(4, barriers, per_rank_environment=REGIONS)
    return {"The monitored barrier failed": values[0] + values[1]}


def window_errors() -> dict[str, list[str]]:
    rank = dist.get_rank()
    new = dist.distributed_c10d._new_window
    window = new(torch.zeros(4))
    short = torch._C._distributed_c10d.WaitSignalOptions()
    short.timeout = timedelta(milliseconds=200)
    texts = {
        "A window refuses the call": [
            error_of(window.put, torch.ones(5), 0, 0, False),
            error_of(window.put, torch.ones(1, dtype=torch.int32), 0, 0, False),
            error_of(new, torch.zeros(4, 4)[:, 0]),
            error_of(window.tensor_register, torch.zeros(3)),
            error_of(window.map_remote_tensor, (rank + 1) % 4),
            error_of(new, torch.zeros(3, dtype=torch.int32 if rank else torch.float32)),
        ],
        "A window got no signal": [error_of(window.wait_signal, (rank + 1) % 4, False, short)],
    }
    meet("refused")
    if rank == 1:
        del window
    meet("deleted")
    if rank == 0:
        texts["A window was gone when a put came"] = [
            error_of(window.put, torch.ones(2), 1, 0, False)
        ]
    meet("end")
    return texts


@provokes(
    "A window refuses the call",
    "A window got no signal",
    "A window was gone when a put came",
)
def window_failed() -> Texts:
    if TORCH_MINOR < 14:
        pytest.skip("needs PyTorch 2.14: windows")
    return run_ranks(4, window_errors, per_rank_environment=REGIONS)[0]


# ---- start-up ----


def join(timeout: timedelta = SECOND, store: dist.Store | None = None, options: Any = None) -> None:
    store = store or dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False
    )
    dist.init_process_group(
        "geomesh",
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
        pg_options=options,
    )


def try_to_join() -> str:
    return error_of(join, timedelta(seconds=20))


def start(world: int, *per_rank: dict[str, str], **environment: str) -> list[str]:
    """Return the error of each rank that tries to join with these variables."""
    own = [{**REGIONS[rank], **(per_rank[rank] if per_rank else {})} for rank in range(world)]
    return run_ranks(
        world, try_to_join, initialize=False, environment=environment, per_rank_environment=own
    )


def three_join() -> str:
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    if rank == 3:
        return ""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, None, False)
    store.set(f"here/{rank}", "")
    store.wait([f"here/{other}" for other in range(3)])
    return error_of(join, SECOND, store)


@provokes("A rank is missing at the start")
def missing() -> Texts:
    texts = run_ranks(4, three_join, initialize=False, per_rank_environment=REGIONS)
    return {"A rank is missing at the start": [texts[0]]}


def unequal_groups() -> str:
    members = [0, 1, 2] if dist.get_rank() < 2 else [0, 2, 3]
    return error_of(dist.new_group, members, timeout=SECOND, use_local_synchronization=True)


@provokes("The ranks create different groups")
def created_unequally() -> Texts:
    texts = run_ranks(4, unequal_groups, per_rank_environment=REGIONS)
    return {"The ranks create different groups": [texts[0]]}


class _OthersRecords(dist.Store):
    """A store in which the other ranks' records are already, made of this rank's."""

    def __init__(self, record_of: Callable[[bytes, int], bytes]) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._record_of = record_of

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        if key.endswith("/rank0"):
            for rank in (1, 2, 3):
                self._values[f"{key[:-1]}{rank}"] = self._record_of(data, rank)

    def get(self, key: str) -> bytes:
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = b"%d" % total
        return total

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def has_extended_api(self) -> bool:
        return False


class _NoStore(dist.Store):
    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("Connection was likely closed. Did the remote server shutdown or crash?")


def join_with_records(kind: str) -> str:
    number, version = 8, 2  # bytes before the record's magic, and its version's
    if kind == "store":
        return error_of(join, SECOND, _NoStore())
    at = number + 4
    records = {
        "version": lambda record, _: record[:at] + b"\x03\x00" + record[at + version :],
        "same rank": lambda record, _: record,
        "other": lambda record, rank: b"what another program has put there",
    }
    return error_of(join, SECOND, _OthersRecords(records[kind]))


@provokes(
    "The ranks have different versions",
    "Two jobs, or two processes of one rank, use the same store",
    "The rendezvous store fails",
)
def met_strangers() -> Texts:
    def text(kind: str) -> str:
        four = {"WORLD_SIZE": "4"}
        return run_ranks(1, join_with_records, kind, initialize=False, environment=four)[0]

    return {
        "The ranks have different versions": [text("version")],
        "Two jobs, or two processes of one rank, use the same store": [
            text("same rank"),
            text("other"),
        ],
        "The rendezvous store fails": [text("store")],
    }


@provokes("The interface is not there", "No port is free")
def listened() -> Texts:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = start(1, GEOMESH_PORTS=f"{port}-{port}")
    return {
        "The interface is not there": start(1, GEOMESH_INTERFACE="eth99")
        + start(1, GEOMESH_INTERFACE="^lo,docker"),
        "No port is free": ports,
    }


_HALF_A_TOPOLOGY = """
regions = ["eastus", "brazilsouth"]
[[link]]
from = "eastus"
to = "brazilsouth"
gbit_per_s = 0.5
rtt_ms = 118
"""


@provokes(
    "The topology file can't be used",
    "A rank's region is not in the topology",
    "The ranks have different topologies",
)
def described() -> Texts:
    with tempfile.TemporaryDirectory() as folder:

        def file(text: str) -> str:
            path = Path(folder) / "wan.toml"
            path.write_text(text)
            return start(1, GEOMESH_TOPOLOGY=str(path))[0]

        files = [
            start(1, GEOMESH_TOPOLOGY="wan.toml")[0],
            file("regions ="),
            file(_HALF_A_TOPOLOGY),
            file(_HALF_A_TOPOLOGY.replace("0.5", "1e300")),
        ]
    mars, nowhere = {"GEOMESH_REGION": "mars"}, {"GEOMESH_REGION": ""}
    topology = {"GEOMESH_TOPOLOGY": "azure-4"}
    return {
        "The topology file can't be used": files,
        "A rank's region is not in the topology": [
            start(4, {}, {}, {}, mars, **topology)[0],
            start(4, {}, {}, {}, nowhere, **topology)[0],
        ],
        "The ranks have different topologies": start(4, topology, topology, topology, {})[:1],
    }


def join_and_warn(about: str) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        join(timedelta(seconds=20))
    return next((str(one.message) for one in caught if about in str(one.message)), "")


@provokes("Some ranks have a region, others have none", "A variable is not known")
def warned() -> Texts:
    some = [*REGIONS[:3], {}]
    unknown = {"GEOMESH_LANE": "2"}
    return {
        "Some ranks have a region, others have none": run_ranks(
            4, join_and_warn, "no region", initialize=False, per_rank_environment=some
        )[:1],
        "A variable is not known": run_ranks(
            1, join_and_warn, "GEOMESH_LANE ", initialize=False, environment=unknown
        ),
    }


def without_the_compiled_module() -> str:
    gm.__path__ = []  # as in a source folder where nothing was built
    sys.meta_path[:] = [importlib.machinery.PathFinder]  # not those of editable installs
    return error_of(join)


@provokes("The compiled module is not there")
def not_built() -> Texts:
    texts = run_ranks(1, without_the_compiled_module, initialize=False)
    return {"The compiled module is not there": [texts[0]]}


def wrong_options() -> list[str]:
    return [
        error_of(gm.Options, lane=2),
        error_of(join, options=dist.ProcessGroupGloo._Options()),
    ]


def other_options() -> str:
    return error_of(dist.new_group, pg_options=gm.Options(lanes=3))


@provokes("A value can't be taken", "An option is not known, or comes too late")
def chosen() -> Texts:
    unknown = run_ranks(1, wrong_options, initialize=False)[0]
    late = run_ranks(4, other_options, per_rank_environment=REGIONS)[0]
    return {
        "A value can't be taken": [
            start(1, GEOMESH_LANES="many")[0],
            start(1, GEOMESH_DEAD_AFTER="soon")[0],
            start(1, GEOMESH_PORTS="99999")[0],
            start(1, GEOMESH_UNEXPECTED_BYTES="1")[0],
        ],
        "An option is not known, or comes too late": [*unknown, late],
    }


# ---- training ----


def broken_training() -> dict[str, list[str]]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    texts = {}

    def step(spoilt: bool = False) -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        if spoilt:
            model.weight.grad[1, 2] = float("nan")
        optimizer.step()

    different = gm.GeoMesh(model, optimizer, inner_steps=1, outer_lr=0.7 if rank else 0.5)
    texts["settings"] = error_of(different.__enter__)
    texts["samplers"] = error_of(gm.GeoMeshSampler, 100 + rank // 3, max_batch_size=4)
    sampler = gm.GeoMeshSampler(100, max_batch_size=4)
    with gm.GeoMesh(model, optimizer, sampler=sampler):
        texts["no batch"] = error_of(step)
    with gm.GeoMesh(model, optimizer, inner_steps=1) as mesh:
        if rank == 1:
            mesh.count_tokens(300)
        texts["tokens"] = error_of(step)
    with gm.GeoMesh(model, optimizer, inner_steps=1):
        step()
        if rank == 1:
            meet("nan", 0, 2, 3)
            time.sleep(0.3)
        else:
            meet("nan", 0, 2, 3)
        texts["nan"] = error_of(step, spoilt=rank == 1)
        texts["after"] = error_of(step)
    return texts


@provokes(
    "A pseudo-gradient has NaN or infinity",
    "A round has failed before",
    "Only some ranks count tokens",
    "The ranks train with different settings",
    "The sampler and the training loop do not agree",
)
def trained() -> Texts:
    values = run_ranks(4, broken_training, per_rank_environment=REGIONS)
    return {
        "A pseudo-gradient has NaN or infinity": [values[1]["nan"]],
        "A round has failed before": [values[1]["after"]],
        "Only some ranks count tokens": [values[0]["tokens"]],
        "The ranks train with different settings": [
            values[0]["settings"],
            values[0]["samplers"],
        ],
        "The sampler and the training loop do not agree": [values[0]["no batch"]],
    }


# ---- a rank that dies between its record and its first connection: half a minute ----


class _LastWords(dist.Store):
    """Calls ``after`` as soon as this rank's record is in the real store."""

    def __init__(self, store: dist.Store, after: Callable[[], object]) -> None:
        super().__init__()
        self._store = store
        self._after = after

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(key, bytes(value) if isinstance(value, bytes | bytearray) else value)
        if key.endswith("/rank3"):
            self._after()


def met_only(after: Callable[[], object]) -> str:
    """Join, and on rank 3 do ``after`` before anybody can have connected to it."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store: dist.Store = dist.TCPStore(address, port, None, False)
    if os.environ["RANK"] == "3":
        store = _LastWords(store, after)
    join(timedelta(seconds=60), store)
    return error_of(dist.all_reduce, torch.ones(1000))


def stopped_when_met() -> str:
    return met_only(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def dead_when_met() -> str:
    return met_only(lambda: os._exit(0))


def never_connected(world: World) -> Texts:
    outcomes = world.join(60, expect_dead=(3,))
    text = first_hand([outcome.value for outcome in outcomes])
    # Which of two ranks connects to the other is chance.
    listens = "it was to connect" in text
    return {NEVER_CONNECTED: [text if listens else None, None if listens else text]}


NEVER_CONNECTED = "A rank was never reached"


@provokes("A rank died before it was connected")
def died_before_it_was_connected() -> Texts:
    world = start_ranks(4, dead_when_met, initialize=False, per_rank_environment=REGIONS)
    text = first_hand([outcome.value for outcome in world.join(60, expect_dead=(3,))])
    # A connection may have been made in its last moments; then it is like any other loss.
    return {"A rank died before it was connected": [text if "nobody listens" in text else None]}
