"""What ``geomesh doctor`` checks on one machine: versions, limits, kernel settings, device, ports.

Each function looks at one thing and returns checks: ok, warning or failed, what was seen, and the
line that mends it. Knows how to look, through a `Machine` that tests replace; what other ranks have
is `torch_geomesh.doctor`'s.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import socket
import ssl
import subprocess
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_geomesh.topology import Topology, TopologyError

__all__ = ["FAILED", "OK", "WARNING", "Check", "Machine", "local_checks"]

OK, WARNING, FAILED = "ok", "warning", "failed"

_MOST_LANES = 16  # to a peer on another host, where they help
_OTHER_FILES = 256  # of Python, PyTorch and a data loader
_NEEDED_TRIPS = 4  # docs/running.md: buffers of four times bandwidth x delay
# Each host has one of the same address; the engine never takes them by itself.
_HOST_PRIVATE = ("docker", "virbr", "br-", "podman", "cni", "lxcbr", "lxdbr")
_TORCH_LEAST, _TORCH_BELOW = (2, 11), (2, 16)


@dataclass(frozen=True)
class Check:
    """One line of the answer.

    Parameters
    ----------
    name : str
        What was looked at.
    state : str
        ``"ok"``, ``"warning"`` or ``"failed"``.
    what : str
        What was seen.
    fix : str
        The line that mends it; "" where nothing has to be mended.
    """

    name: str
    state: str
    what: str
    fix: str = ""


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _run(words: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@dataclass(frozen=True)
class Machine:
    """How the checks see the machine.

    Parameters
    ----------
    environment : mapping
        Of this process.
    read : callable
        A file's text without space around it; None: it cannot be read.
    run : callable
        A command's output; None: it is not there, or failed.
    limit : callable
        (soft, hard) of a resource of `resource`; ``resource.RLIM_INFINITY``: none.
    """

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    read: Callable[[str], str | None] = _read
    run: Callable[[Sequence[str]], str | None] = _run
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit

    def number(self, name: str, default: int) -> int:
        """Return a variable as a whole number, `default` where it is none."""
        text = self.environment.get(name, "")
        return int(text) if text.isdigit() else default

    @property
    def world(self) -> int:
        """Ranks of the job; 1 outside one."""
        return self.number("WORLD_SIZE", 1)

    @property
    def local_world(self) -> int:
        """Ranks of the job on this machine."""
        return self.number("LOCAL_WORLD_SIZE", 1)

    @property
    def single_host(self) -> bool | None:
        """Whether all ranks share this machine; None: not known."""
        if "WORLD_SIZE" not in self.environment or "LOCAL_WORLD_SIZE" not in self.environment:
            return None
        return self.world == self.local_world


def local_checks(machine: Machine) -> list[Check]:
    """Return all checks of this machine."""
    checks = [check_python(), check_torch(), check_module()]
    module_works = checks[-1].state != FAILED
    if module_works:
        checks.append(check_ucx(machine))
    checks.append(check_openssl())
    if module_works:
        checks += check_variables(machine)
    checks += [check_topology(machine), check_locked_memory(machine), check_open_files(machine)]
    checks += check_buffers(machine)
    checks += [check_congestion(machine), check_time(machine)]
    if module_works:
        checks += check_device(machine)
    return checks


# ---- versions ----


def check_python() -> Check:
    """Return the version of Python; the package cannot be imported by one too old."""
    return Check("python", OK, platform.python_version())


def check_torch() -> Check:
    """Check PyTorch's version."""
    import torch

    version = _numbers(torch.__version__)[:2]
    if _TORCH_LEAST <= version < _TORCH_BELOW:
        return Check("torch", OK, torch.__version__)
    return Check(
        "torch",
        FAILED,
        f"{torch.__version__}: torch_geomesh works with 2.11 to 2.15",
        "pip install 'torch>=2.11,<2.16' && pip install --no-build-isolation -e .",
    )


def check_module() -> Check:
    """Check that the compiled module loads and was built for this PyTorch."""
    import torch

    from torch_geomesh import backend

    try:
        with warnings.catch_warnings():  # unknown variables have a check of their own
            warnings.simplefilter("ignore")
            built_for = backend.extension().built_for_torch()
    except ImportError as error:
        return Check("compiled module", FAILED, str(error), "pip install --no-build-isolation -e .")
    if _numbers(built_for) != _numbers(torch.__version__):
        return Check(
            "compiled module",
            FAILED,
            f"built for torch {built_for}, but this is torch {torch.__version__}",
            "pip install --no-build-isolation -e .",
        )
    return Check("compiled module", OK, f"built for torch {built_for}")


def ucx_version() -> str:
    """Return the version of the UCX that the compiled module has loaded."""
    library = ctypes.CDLL("libucp.so.0")
    library.ucp_get_version_string.restype = ctypes.c_char_p
    return library.ucp_get_version_string().decode()


def check_ucx(machine: Machine) -> Check:
    """Check the UCX that the compiled module has loaded, and variables that it would read."""
    version = ucx_version()
    bad = [
        name
        for name, wanted in (("UCX_MEM_EVENTS", "n"), ("UCX_DEBUG_SIGNO", "0"))
        if machine.environment.get(name, wanted) != wanted
    ]
    if bad:
        return Check(
            "UCX",
            WARNING,
            f"{version}, but {' and '.join(bad)} let it take hold of libc's memory functions or of "
            "signals",
            f"unset {' '.join(bad)}",
        )
    return Check("UCX", OK, version)


def check_openssl() -> Check:
    """Check that there is TLS 1.3."""
    if ssl.HAS_TLSv1_3:
        return Check("OpenSSL", OK, ssl.OPENSSL_VERSION)
    return Check(
        "OpenSSL",
        WARNING,
        f"{ssl.OPENSSL_VERSION} has no TLS 1.3: connections cannot be encrypted",
        "apt-get install openssl libssl3",
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Return (2, 15, 0) of "2.15.0+cpu"."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])


# ---- settings ----


def check_variables(machine: Machine) -> list[Check]:
    """Check GEOMESH_ variables: known names, and values that they take."""
    from torch_geomesh import backend

    names = sorted(name for name in machine.environment if name.startswith("GEOMESH_"))
    sentences = backend.extension().unknown_variables(names)
    checks = []
    for sentence in sentences:
        found = re.search(r"variable (\S+) .*did you mean (\S+)\?", sentence)
        fix = f"export {found[2]}=... and unset {found[1]}" if found else ""
        checks.append(Check("variables", FAILED, sentence, fix))
    try:
        with _environment_of(machine):
            backend.Options()
    except ValueError as error:
        name = str(error).partition("=")[0]
        checks.append(Check("variables", FAILED, str(error), f"export {name}=..."))
    return checks or [Check("variables", OK, ", ".join(names) or "none is set")]


@contextlib.contextmanager
def _environment_of(machine: Machine) -> Any:
    before = {name: value for name, value in os.environ.items() if name.startswith("GEOMESH_")}
    wanted = {n: v for n, v in machine.environment.items() if n.startswith("GEOMESH_")}
    for name in before.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _topology(machine: Machine) -> Topology | None:
    """Return the topology; None: none is set, or `check_topology` tells what is wrong."""
    source = machine.environment.get("GEOMESH_TOPOLOGY", "")
    if not source:
        return None
    try:
        return Topology.load(source)
    except TopologyError:
        return None


def check_topology(machine: Machine) -> Check:
    """Check that the topology can be read and has this machine's region."""
    source = machine.environment.get("GEOMESH_TOPOLOGY", "")
    region = machine.environment.get("GEOMESH_REGION", "")
    if not source:
        return Check("topology", OK, "none is set: links count as 1 Gbit/s and 100 ms")
    try:
        topology = Topology.load(source)
        if region:
            topology.index(region)
    except TopologyError as error:
        return Check(
            "topology", FAILED, str(error), "export GEOMESH_TOPOLOGY=... GEOMESH_REGION=..."
        )
    if not region:
        return Check(
            "topology",
            FAILED,
            f"{topology.name} has {', '.join(topology.regions)}, but GEOMESH_REGION is not set",
            f"export GEOMESH_REGION={topology.regions[0]}  # or another of them",
        )
    return Check("topology", OK, f"{topology.name}, region {region}")


# ---- limits and the kernel ----


def check_locked_memory(machine: Machine) -> Check:
    """Check memlock, which RDMA devices need and TCP does not."""
    soft, _ = machine.limit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    rdma = machine.run(["ls", "/sys/class/infiniband"])
    if soft == resource.RLIM_INFINITY or not rdma:
        more = "" if soft == resource.RLIM_INFINITY else ", enough for TCP"
        return Check("locked memory", OK, shown + more)
    return Check(
        "locked memory",
        WARNING,
        f"{shown}: an RDMA device ({rdma.split()[0]}) needs it unlimited",
        "ulimit -l unlimited",
    )


def check_open_files(machine: Machine) -> Check:
    """Check the limit of open files against the connections of the job."""
    lanes = machine.number("GEOMESH_LANES", 0) or _MOST_LANES
    needed = _OTHER_FILES + lanes * (machine.world - 1)
    soft, hard = machine.limit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        shown = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
        return Check("open files", OK, f"{shown}, {needed} needed")
    what = f"{soft}, but {machine.world} ranks with up to {lanes} lanes to each other need {needed}"
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return Check("open files", FAILED, what, f"ulimit -n {needed}")
    return Check(
        "open files",
        FAILED,
        f"{what} (the hard limit is {hard})",
        f"echo '* - nofile {needed}' >> /etc/security/limits.conf  # and log in again",
    )


def check_buffers(machine: Machine) -> list[Check]:
    """Check how large the kernel lets a socket's buffers grow against bandwidth x delay."""
    sizes: dict[str, int] = {}
    for name in ("ipv4/tcp_rmem", "ipv4/tcp_wmem", "core/rmem_max", "core/wmem_max"):
        text = machine.read(f"/proc/sys/net/{name}")
        if text and text.split()[-1].isdigit():
            sizes[name] = int(text.split()[-1])
    topology = _topology(machine)
    shown = ", ".join(f"{name.split('/')[1]} {_bytes(size)}" for name, size in sizes.items())
    if topology is None:
        what = shown or "not known: /proc/sys/net has none"
        return [Check("socket buffers", OK, f"{what}; compared when GEOMESH_TOPOLOGY is set")]
    own = machine.environment.get("GEOMESH_REGION", "")
    ways = [
        (topology.link(a, b).bytes_per_s * topology.rtt_s(a, b), a, b)
        for a in topology.regions
        for b in topology.regions
        if a != b and own in ("", a, b)
    ]
    if not ways:
        return [Check("socket buffers", OK, f"{shown}; the topology has one region")]
    product, a, b = max(ways)
    needed = int(_NEEDED_TRIPS * product)
    checks = []
    for name, size in sizes.items():
        # The kernel grows buffers up to tcp_rmem and tcp_wmem; the others bound programs that set
        # their own.
        bounds = name.startswith("ipv4")
        wanted = needed if bounds else int(product)
        if size >= wanted:
            continue
        key = f"net.{name.replace('/', '.')}"
        fix = f"sysctl -w {key}='4096 131072 {wanted}'" if bounds else f"sysctl -w {key}={wanted}"
        checks.append(
            Check(
                "socket buffers",
                FAILED if bounds and size < product else WARNING,
                f"{key} ends at {_bytes(size)}: {a} to {b} has {_bytes(int(product))} under way, "
                f"and needs {_bytes(wanted)}",
                fix,
            )
        )
    return checks or [Check("socket buffers", OK, f"{shown}; {_bytes(needed)} needed")]


def _bytes(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB" if size >= 1 << 20 else f"{size / (1 << 10):.0f} KiB"


def check_congestion(machine: Machine) -> Check:
    """Check congestion control: bbr fills long links, the others hardly."""
    base = "/proc/sys/net/ipv4/tcp"
    used = machine.read(f"{base}_congestion_control")
    if used in ("bbr", "bbr2", "bbr3"):
        return Check("congestion control", OK, used)
    if used is None:
        return Check("congestion control", OK, "not known: /proc/sys/net has none")
    if machine.single_host:
        return Check("congestion control", OK, f"{used}; all ranks are on this machine")
    available = (machine.read(f"{base}_available_congestion_control") or "").split()
    load = "" if "bbr" in available else "modprobe tcp_bbr && "
    return Check(
        "congestion control",
        WARNING,
        f"{used}: on long links with losses bbr carries much more",
        f"{load}sysctl -w net.ipv4.tcp_congestion_control=bbr",
    )


def check_time(machine: Machine) -> Check:
    """Check that the clock is kept right, for the times in logs of several machines."""
    state = machine.run(["timedatectl", "show", "--property=NTPSynchronized", "--value"])
    if state == "no":
        return Check(
            "clock",
            WARNING,
            "not synchronised: logs will be hard to compare",
            "timedatectl set-ntp true",
        )
    return Check("clock", OK, "synchronised" if state == "yes" else "timedatectl does not say")


# ---- device and ports ----


def check_device(machine: Machine) -> list[Check]:
    """Check the device that the engine takes, whether strangers reach it, and the ports."""
    from torch_geomesh import backend

    module = backend.extension()
    environment = machine.environment
    asked = environment.get("GEOMESH_INTERFACE")
    master = environment.get("MASTER_ADDR", "")

    def choose(interface: str | None) -> dict[str, Any]:
        return module.choose_device(interface, master, machine.single_host)

    try:
        device = choose(asked)
    except (ValueError, RuntimeError) as error:
        return [Check("device", FAILED, str(error), _other_device(choose, asked))]
    name, address = device["interface"], device["address"]
    shown = f"{name} ({address})"
    if machine.single_host is False and (device["loopback"] or name.startswith(_HOST_PRIVATE)):
        return [
            Check(
                "device",
                FAILED,
                f"{shown} is this machine's own, other machines cannot reach it",
                _other_device(choose, asked),
            )
        ]
    by = "GEOMESH_INTERFACE" if asked else f"the route to {master}" if master else "default"
    checks = [Check("device", OK, f"{shown}, by {by}")]
    known = {row["variable"] for row in module.option_table()}
    has_key = "GEOMESH_PSK_FILE" in known and bool(environment.get("GEOMESH_PSK_FILE"))
    if device["public"] and not has_key:
        key = ", or set a key: export GEOMESH_PSK_FILE=..." if "GEOMESH_PSK_FILE" in known else ""
        checks.append(
            Check(
                "privacy",
                FAILED,
                f"{address} is a public address, and UCX checks nobody: whoever reaches its port "
                "can write into this process",
                "use a VPN such as WireGuard: export GEOMESH_INTERFACE=wg0, or a private device "
                f"behind a firewall{key}",
            )
        )
    elif not device["loopback"]:
        kept = "with a key" if has_key else "private address"
        checks.append(Check("privacy", OK, f"{address}, {kept}"))
    return [*checks, check_ports(machine, address)]


def _other_device(choose: Callable[[str | None], dict[str, Any]], asked: str | None) -> str:
    """Return the line that lets the engine take a device that others reach."""
    if asked is not None:
        with contextlib.suppress(ValueError, RuntimeError):
            return f"unset GEOMESH_INTERFACE  # then it is {choose(None)['interface']}"
    return "export GEOMESH_INTERFACE=...  # the device by which the other machines reach this one"


def check_ports(machine: Machine, address: str) -> Check:
    """Check that GEOMESH_PORTS has a free port for each rank of this machine."""
    text = machine.environment.get("GEOMESH_PORTS", "")
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not found:  # not set, or refused by `check_variables`
        return Check("ports", OK, "any: open all ports between the machines, or set GEOMESH_PORTS")
    first, last = int(found[1]), int(found[2] or found[1])
    needed = machine.local_world
    free = 0
    for port in range(first, last + 1):
        free += _is_free(address, port)
        if free >= needed:
            return Check("ports", OK, f"{text}: enough are free for {needed} ranks here")
    return Check(
        "ports",
        FAILED,
        f"{text}: {free} free on {address}, but {needed} ranks here need one each",
        f"export GEOMESH_PORTS={first}-{min(first + 100, 65535)}",
    )


def _is_free(address: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address, port))
            trial.listen(1)
        except OSError:
            return False
    return True
