"""Emulated WAN: regions as network namespaces on this machine, joined by ``geomesh-wan``.

`Emulation` makes the regions and links of a topology, runs commands inside them, changes links
while they run, and reads the counters.

Knows processes and the control socket; how packets travel is the program's (csrc/emulator). It is
found in ``torch_geomesh/bin``; developers point to another build by ``GEOMESH_WAN_BINARY``.
Nothing outlives the emulation: ``geomesh-wan`` watches this process, and when it ends, however it
ends, kills what runs inside the regions; namespaces and devices go with the last process.

Settings that a region's network does not take from the kernel's defaults: ``tcp_rmem`` and
``tcp_wmem`` end at 5 times the largest bandwidth x delay of the topology (at least 32 MiB, at most
512 MiB), which congestion control by bbr needs to leave its start-up on long links.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from types import TracebackType
from typing import IO, Any

from torch_geomesh.topology import Link, Topology

__all__ = ["Counters", "Emulation", "EmulationError", "EmulationUnavailable", "Health"]

DEVICE = "wan0"
MASTER_PORT = 29500

_START_TIMEOUT_S = 30.0
_REPLY_TIMEOUT_S = 30.0
_MIN_TCP_BUFFER = 32 << 20
_MAX_TCP_BUFFER = 512 << 20
_FOLDER_PREFIX = "geomesh-wan-"
# A delivery later than this, at the 99th percentile, is visible in what is measured.
_SOUND_LATENESS_S = 1e-3


class EmulationError(RuntimeError):
    """The emulation failed while it was used."""


class EmulationUnavailable(EmulationError):  # noqa: N818, the name users see
    """Regions cannot be emulated on this machine or by this user; the message says what to do."""


@dataclass(frozen=True)
class Counters:
    """What went from one region to another: IP packets as on a wire, and their bytes.

    ``bytes`` and ``packets`` went onto the link; ``lost`` of them were lost there by chance;
    ``queue_dropped`` did not fit the queue and ``cut_dropped`` met a cut link. ``paths`` has the
    same for each path, if there are several.
    """

    bytes: int
    packets: int
    lost_bytes: int
    lost_packets: int
    queue_dropped_bytes: int
    queue_dropped_packets: int
    cut_dropped_bytes: int = 0
    cut_dropped_packets: int = 0
    paths: tuple[Counters, ...] = ()


@dataclass(frozen=True)
class Health:
    """How well the emulator itself did since the start or the last reset.

    ``lateness``: how much later than due packets were delivered. ``device_drops``: packets lost
    because it did not read in time. ``realtime``: it runs before ordinary processes.
    """

    deliveries: int
    lateness_p50_s: float
    lateness_p99_s: float
    lateness_max_s: float
    device_drops: int
    undelivered: int
    unroutable: int
    cpu_s: float
    realtime: bool

    @property
    def sound(self) -> bool:
        """Whether what was measured shows the links and not the emulator's lack of processor."""
        return self.lateness_p99_s <= _SOUND_LATENESS_S and self.device_drops == 0


class Emulation:
    """Regions of a topology, made on entry and gone on exit.

    Parameters
    ----------
    topology : Topology
        Regions and links; links inside a region are not limited (ranks there share a host).
    ipv6 : bool
        Give each region an IPv6 address as well.
    binary : path, optional
        The ``geomesh-wan`` to use.
    seed : int
        Of random loss and jitter.

    Raises
    ------
    EmulationUnavailable
        On entry, where regions cannot be made.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        ipv6: bool = False,
        binary: str | os.PathLike[str] | None = None,
        seed: int = 1,
    ) -> None:
        self.topology = topology
        self.ipv6 = ipv6
        self.seed = seed
        self.warning = ""
        self._binary = binary
        self._folder: FilePath | None = None
        self._wan: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._replies: IO[bytes] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Emulation:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Make the regions; `with` does it."""
        if self._wan is not None:
            raise EmulationError("the emulation was started before")
        binary = find_binary(self._binary)
        sweep_stale()
        self._folder = _make_folder()
        try:
            (self._folder / "hosts").write_text(self._hosts(), encoding="utf-8")
            self.topology.save(self.topology_file)
            started = self._start_wan(binary)
            self.warning = started["warning"]
            _record_owner(self._folder, self._wan.pid if self._wan else 0)
            self._control = socket.socket(socket.AF_UNIX)
            self._control.settimeout(_REPLY_TIMEOUT_S)
            self._control.connect(os.fspath(self.control_path))
            self._replies = self._control.makefile("rb")
            for a, b in self._pairs():
                self.set_link(a, b, self.topology.link(a, b))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End everything inside the regions, and the regions; may be called twice."""
        wan = self._wan
        if wan is not None and wan.poll() is None:
            with contextlib.suppress(EmulationError):
                self._ask("quit")
            try:
                wan.wait(timeout=_REPLY_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                wan.kill()
        if wan is not None:
            wan.wait()
            if wan.stdout is not None:
                wan.stdout.close()
        if self._replies is not None:
            self._replies.close()
        if self._control is not None:
            self._control.close()
        self._control = self._replies = self._wan = None
        if self._folder is not None:
            # There only if geomesh-wan did not end by itself; then it left its processes too.
            if self._folder.exists():
                _kill_by_environment(self._folder)
                shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @property
    def folder(self) -> FilePath:
        """Folder of this run, removed at its end."""
        if self._folder is None:
            raise EmulationError("the emulation is not running")
        return self._folder

    @property
    def topology_file(self) -> FilePath:
        """The topology that is emulated, as a file."""
        return self.folder / "topology.toml"

    @property
    def control_path(self) -> FilePath:
        """The control socket; also in each command's environment, as GEOMESH_WAN_CONTROL."""
        return self.folder / "control"

    def address(self, region: str, family: int = 4) -> str:
        """Return a region's IPv4 or IPv6 address."""
        number = self.topology.index(region) + 1
        if family == 4:
            return f"10.71.{number}.1"
        if not self.ipv6:
            raise EmulationError("the emulation was made without IPv6")
        return f"fd71::{number:x}:1"

    def environment(
        self, region: str, *, ranks_per_region: int = 1, master_port: int = MASTER_PORT
    ) -> dict[str, str]:
        """Return what a region's commands have in their environment.

        With it a plain ``torchrun script.py`` in each region is one job: torchrun reads its
        options from PET_ variables.
        """
        master = self.address(self.topology.regions[0])
        return {
            "GEOMESH_REGION": region,
            "GEOMESH_TOPOLOGY": os.fspath(self.topology_file),
            "GEOMESH_WAN_CONTROL": os.fspath(self.control_path),
            "GLOO_SOCKET_IFNAME": DEVICE,
            "MASTER_ADDR": master,
            "MASTER_PORT": str(master_port),
            "PET_MASTER_ADDR": master,
            "PET_MASTER_PORT": str(master_port),
            "PET_NNODES": str(len(self.topology.regions)),
            "PET_NODE_RANK": str(self.topology.index(region)),
            "PET_NPROC_PER_NODE": str(ranks_per_region),
        }

    def command(self, region: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` inside `region`, as the same process."""
        self.topology.index(region)
        binary = os.fspath(find_binary(self._binary))
        return [binary, "enter", os.fspath(self.control_path), region, *command]

    def popen(
        self,
        region: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command inside a region.

        Parameters
        ----------
        region : str
            Where.
        command : sequence of str
            What, found on PATH.
        env : mapping, optional
            Added to this process's environment and to `environment`.
        **options
            As for `subprocess.Popen`.
        """
        full = {**os.environ, **self.environment(region), **(env or {})}
        return subprocess.Popen(self.command(region, command), env=full, **options)

    def run(
        self,
        region: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.CompletedProcess[Any]:
        """Run a command inside a region to its end; `options` as for `subprocess.run`."""
        full = {**os.environ, **self.environment(region), **(env or {})}
        return subprocess.run(self.command(region, command), env=full, **options)

    def set_link(self, source: str, target: str, link: Link) -> None:
        """Set the link from `source` to `target`; what is under way keeps its time."""
        words = ["link", source, target]
        for path in link.paths:
            words += [
                "path",
                f"bytes_per_s={path.bytes_per_s!r}",
                f"delay_s={path.delay_s!r}",
                f"jitter_s={path.jitter_s!r}",
                f"loss={path.loss!r}",
                f"queue_bytes={path.queue_bytes}",
            ]
        self._ask(" ".join(words))

    def cut(self, region: str, other: str | None = None, *, one_way: bool = False) -> None:
        """Let nothing pass between two regions, or between one and all others.

        What is under way is lost. Endpoints are not told: there is silence, as after a cable cut.
        """
        self._for_pairs("cut", region, other, one_way)

    def restore(self, region: str, other: str | None = None, *, one_way: bool = False) -> None:
        """Undo `cut`."""
        self._for_pairs("restore", region, other, one_way)

    def counters(self) -> dict[tuple[str, str], Counters]:
        """Return the counters of each ordered pair."""
        return {
            (pair.pop("from"), pair.pop("to")): _counters(pair)
            for pair in self._ask("counters")["pairs"]
        }

    def wan_bytes(self) -> int:
        """Return the bytes that went onto links between regions, all pairs together."""
        return sum(counters.bytes for counters in self.counters().values())

    def reset_counters(self) -> None:
        """Begin all counters, and `health`, from zero."""
        self._ask("reset")

    def health(self) -> Health:
        """Return how punctual the emulator was."""
        reply = self._ask("status")
        del reply["ok"]
        return Health(**reply)

    def kill_processes(self) -> None:
        """Kill everything inside the regions; the regions stay."""
        left = self._ask("kill")["left"]
        if left:
            raise EmulationError(f"{left} processes inside the regions cannot be killed")

    def alive(self) -> bool:
        """Whether packets are still carried."""
        return self._wan is not None and self._wan.poll() is None

    def _pairs(self) -> Iterator[tuple[str, str]]:
        regions = self.topology.regions
        return ((a, b) for a in regions for b in regions if a != b)

    def _for_pairs(self, command: str, region: str, other: str | None, one_way: bool) -> None:
        self.topology.index(region)
        if other is not None:
            self.topology.index(other)
        others = [other] if other else [name for name in self.topology.regions if name != region]
        for name in others:
            self._ask(f"{command} {region} {name}")
            if not one_way:
                self._ask(f"{command} {name} {region}")

    def _hosts(self) -> str:
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
        for region in self.topology.regions:
            # The mapped form is what a socket for both families looks up backwards.
            lines.append(f"{self.address(region)} {region}")
            lines.append(f"::ffff:{self.address(region)} {region}")
            if self.ipv6:
                lines.append(f"{self.address(region, 6)} {region}")
        return "\n".join(lines) + "\n"

    def _tcp_buffer_bytes(self) -> int:
        most = max(
            (
                self.topology.link(a, b).bytes_per_s * self.topology.rtt_s(a, b)
                for a, b in self._pairs()
            ),
            default=0.0,
        )
        return min(max(int(5 * most), _MIN_TCP_BUFFER), _MAX_TCP_BUFFER)

    def _start_wan(self, binary: FilePath) -> dict[str, Any]:
        command = [os.fspath(binary), "run", "--parent", str(os.getpid())]
        command += ["--folder", os.fspath(self.folder), "--seed", str(self.seed)]
        command += ["--tcp-buffer", str(self._tcp_buffer_bytes())]
        command += ["--ipv6"] if self.ipv6 else []
        for region in self.topology.regions:
            command += ["--region", region]
        # A session of its own: a Ctrl-C at the terminal is for the front end, which ends it.
        self._wan = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._wan.stdout is not None
        ready, _, _ = select.select([self._wan.stdout], [], [], _START_TIMEOUT_S)
        line = self._wan.stdout.readline() if ready else b""
        if not line:
            raise EmulationError(f"{binary} did not start (exit status {self._wan.poll()})")
        reply = json.loads(line)
        if not reply["ok"]:
            raise EmulationUnavailable(
                f"cannot emulate regions on this machine: {reply['error']}. "
                f"{_advice(reply['error'])}"
            )
        return dict(reply)

    def _ask(self, line: str) -> dict[str, Any]:
        with self._lock:
            if self._control is None or self._replies is None:
                raise EmulationError("the emulation is not running")
            try:
                self._control.sendall(line.encode() + b"\n")
                answer = self._replies.readline()
            except OSError as error:
                raise EmulationError(f"geomesh-wan does not answer: {error}") from error
        if not answer:
            raise EmulationError("geomesh-wan has ended; the regions are cut off from each other")
        reply = json.loads(answer)
        if not reply["ok"]:
            raise EmulationError(f"geomesh-wan refused '{line}': {reply['error']}")
        return dict(reply)


def find_binary(given: str | os.PathLike[str] | None = None) -> FilePath:
    """Return the ``geomesh-wan`` to use: the one given, the developer's, or the installed one."""
    chosen = given or os.environ.get("GEOMESH_WAN_BINARY")
    binary = FilePath(chosen) if chosen else FilePath(__file__).parent / "bin" / "geomesh-wan"
    if not os.access(binary, os.X_OK):
        raise EmulationUnavailable(
            f"the emulator's program is not at {binary}: install the package again "
            "(pip install -e . in a clone); it is built for Linux only"
        )
    return binary


def sweep_stale() -> None:
    """Remove what runs left whose front end and geomesh-wan were both killed."""
    for base in {tempfile.gettempdir(), "/tmp"}:
        for folder in FilePath(base).glob(f"{_FOLDER_PREFIX}*"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                if folder.stat().st_uid != os.getuid():
                    continue
                owner = json.loads((folder / "owner.json").read_text())
                if any(_start_time(pid) == start for pid, start in owner["processes"]):
                    continue
                _kill_by_environment(folder)
                shutil.rmtree(folder, ignore_errors=True)


def _make_folder() -> FilePath:
    base = tempfile.gettempdir()
    # A socket's path has at most 107 bytes.
    if len(base) > 60:
        base = "/tmp"
    return FilePath(tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-", dir=base))


def _record_owner(folder: FilePath, wan: int) -> None:
    processes = [[pid, _start_time(pid)] for pid in (os.getpid(), wan)]
    (folder / "owner.json").write_text(json.dumps({"processes": processes}))


def _start_time(pid: int) -> str | None:
    """Return what tells a process from a later one with the same id; None: there is none."""
    try:
        status = FilePath(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = status.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def _kill_by_environment(folder: FilePath) -> None:
    """Kill processes that were started inside the regions of the run with this folder."""
    mark = f"GEOMESH_WAN_CONTROL={folder / 'control'}".encode()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        found = False
        for entry in FilePath("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                pid = int(entry.name)
                environment = (entry / "environ").read_bytes().split(b"\0")
                if pid != os.getpid() and mark in environment:
                    found = True
                    os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.01)


def _counters(pair: dict[str, Any]) -> Counters:
    names = set(Counters.__dataclass_fields__) - {"paths"}
    paths = tuple(_counters(path) for path in pair.get("paths", ()))
    return Counters(
        **{name: pair[name] for name in names if name in pair},
        paths=paths if len(paths) > 1 else (),
    )


def _advice(error: str) -> str:
    if "/dev/net/tun" in error:
        if "No such file" in error or "No such device" in error:
            return (
                "Load the driver (modprobe tun); in a container give it the device "
                "(docker run --device /dev/net/tun)."
            )
        return "Run as root, or let this user open the device (chmod 0666 /dev/net/tun)."
    if "namespace" in error or "not permitted" in error:
        return (
            "Run as root (in a container with --cap-add SYS_ADMIN,NET_ADMIN), or allow user "
            "namespaces: sysctl user.max_user_namespaces must not be 0 and, on Ubuntu, "
            "kernel.apparmor_restrict_unprivileged_userns must be 0."
        )
    return "Run as root on a Linux machine."
