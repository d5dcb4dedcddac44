"""``geomesh doctor``: each check provoked, with the exact lines; then whole jobs."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from job_processes import Ended, run_job

from torch_geomesh import backend, checks, doctor
from torch_geomesh.checks import FAILED, OK, WARNING, Check, Machine
from torch_geomesh.emulate import Emulation, EmulationUnavailable
from torch_geomesh.pairs import RankInfo
from torch_geomesh.topology import Link, Topology

COMMAND = [sys.executable, "-m", "torch_geomesh.cli", "doctor"]


def machine(
    files: dict[str, str] | None = None,
    commands: dict[str, str] | None = None,
    limit: tuple[int, int] = (1 << 20, 1 << 20),
    **environment: str,
) -> Machine:
    """A machine that has these files and commands (by their first word), and nothing else."""
    return Machine(
        environment=environment,
        read=(files or {}).get,
        run=lambda words: (commands or {}).get(words[0]),
        limit=lambda _: limit,
    )


# ---- versions ----


@pytest.mark.parametrize(
    ("version", "state"),
    [("2.10.1", FAILED), ("2.11.0+cpu", OK), ("2.15.3", OK), ("2.16.0.dev20270101", FAILED)],
)
def test_torch(monkeypatch: pytest.MonkeyPatch, version: str, state: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    check = checks.check_torch()
    assert check.state == state
    if state == FAILED:
        assert check.what == f"{version}: torch_geomesh works with 2.11 to 2.15"
        assert check.fix.startswith("pip install 'torch>=2.11,<2.16'")


def test_module_of_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    built_for = backend.extension().built_for_torch()
    monkeypatch.setattr(torch, "__version__", built_for + "+cpu")
    assert checks.check_module() == Check("compiled module", OK, f"built for torch {built_for}")
    monkeypatch.setattr(torch, "__version__", "2.14.1+cpu")
    assert checks.check_module() == Check(
        "compiled module",
        FAILED,
        f"built for torch {built_for}, but this is torch 2.14.1+cpu",
        "pip install --no-build-isolation -e .",
    )


def test_module_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ImportError("no such thing")

    monkeypatch.setattr(backend, "extension", missing)
    assert checks.check_module() == Check(
        "compiled module", FAILED, "no such thing", "pip install --no-build-isolation -e ."
    )


def test_ucx() -> None:
    backend.extension()
    good = checks.check_ucx(machine())
    assert good.state == OK
    assert good.what.startswith("1.")
    assert checks.check_ucx(machine(UCX_MEM_EVENTS="y")) == Check(
        "UCX",
        WARNING,
        f"{good.what}, but UCX_MEM_EVENTS let it take hold of libc's memory functions or of "
        "signals",
        "unset UCX_MEM_EVENTS",
    )


def test_openssl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_openssl().state == OK
    monkeypatch.setattr(checks.ssl, "HAS_TLSv1_3", False)
    check = checks.check_openssl()
    assert check.state == WARNING
    assert check.what.endswith("has no TLS 1.3: connections cannot be encrypted")


# ---- settings ----


def test_variables() -> None:
    assert checks.check_variables(machine(GEOMESH_LANES="4", PATH="/bin")) == [
        Check("variables", OK, "GEOMESH_LANES")
    ]
    assert checks.check_variables(machine()) == [Check("variables", OK, "none is set")]
    assert checks.check_variables(machine(GEOMESH_LANE="4")) == [
        Check(
            "variables",
            FAILED,
            "the variable GEOMESH_LANE is not one of torch_geomesh's and has no effect; did you "
            "mean GEOMESH_LANES?",
            "export GEOMESH_LANES=... and unset GEOMESH_LANE",
        )
    ]
    assert checks.check_variables(machine(GEOMESH_LANES="many")) == [
        Check(
            "variables",
            FAILED,
            "GEOMESH_LANES='many': takes a whole number from 0 to 64",
            "export GEOMESH_LANES=...",
        )
    ]
    assert "GEOMESH_LANES" not in os.environ


def test_topology(tmp_path: Path) -> None:
    fix = "export GEOMESH_TOPOLOGY=... GEOMESH_REGION=..."
    assert checks.check_topology(machine()).state == OK
    assert checks.check_topology(
        machine(GEOMESH_TOPOLOGY="azure-4", GEOMESH_REGION="eastus")
    ) == Check("topology", OK, "azure-4, region eastus")
    assert checks.check_topology(machine(GEOMESH_TOPOLOGY="azure-4")) == Check(
        "topology",
        FAILED,
        "azure-4 has eastus, brazilsouth, francecentral, eastasia, but GEOMESH_REGION is not set",
        "export GEOMESH_REGION=eastus  # or another of them",
    )
    assert checks.check_topology(
        machine(GEOMESH_TOPOLOGY="azure-4", GEOMESH_REGION="oslo")
    ) == Check(
        "topology",
        FAILED,
        "topology azure-4 has no region 'oslo'; it has eastus, brazilsouth, francecentral, "
        "eastasia",
        fix,
    )
    assert checks.check_topology(machine(GEOMESH_TOPOLOGY=f"{tmp_path}/none.toml")) == Check(
        "topology",
        FAILED,
        f"{tmp_path}/none.toml: no such file, and no topology of this name is shipped "
        "(there are: azure-4)",
        fix,
    )


# ---- limits and the kernel ----


def test_locked_memory() -> None:
    rdma = {"ls": "mlx5_0\nmlx5_1"}
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert checks.check_locked_memory(machine(limit=(65536, 65536))) == Check(
        "locked memory", OK, "64 KiB, enough for TCP"
    )
    assert checks.check_locked_memory(machine(commands=rdma, limit=unlimited)) == Check(
        "locked memory", OK, "unlimited"
    )
    assert checks.check_locked_memory(machine(commands=rdma, limit=(65536, 65536))) == Check(
        "locked memory",
        WARNING,
        "64 KiB: an RDMA device (mlx5_0) needs it unlimited",
        "ulimit -l unlimited",
    )


def test_open_files() -> None:
    def check(soft: int, hard: int, **environment: str) -> Check:
        return checks.check_open_files(machine(limit=(soft, hard), **environment))

    assert check(1840, 1840, WORLD_SIZE="100") == Check("open files", OK, "1840, 1840 needed")
    assert check(1839, 2000, WORLD_SIZE="100") == Check(
        "open files",
        FAILED,
        "1839, but 100 ranks with up to 16 lanes to each other need 1840",
        "ulimit -n 1840",
    )
    assert check(300, 400, WORLD_SIZE="100", GEOMESH_LANES="2") == Check(
        "open files",
        FAILED,
        "300, but 100 ranks with up to 2 lanes to each other need 454 (the hard limit is 400)",
        "echo '* - nofile 454' >> /etc/security/limits.conf  # and log in again",
    )


_BUFFERS = {
    "/proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t6291456",
    "/proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t134217728",
    "/proc/sys/net/core/rmem_max": "212992",
    "/proc/sys/net/core/wmem_max": "134217728",
}


def test_socket_buffers(tmp_path: Path) -> None:
    (check,) = checks.check_buffers(machine(_BUFFERS))
    assert check == Check(
        "socket buffers",
        OK,
        "tcp_rmem 6.0 MiB, tcp_wmem 128.0 MiB, rmem_max 208 KiB, wmem_max 128.0 MiB; compared when "
        "GEOMESH_TOPOLOGY is set",
    )
    # 1 Gbit/s and 200 ms: 25,000,000 bytes under way.
    long = Link.of(125e6, 0.1)
    Topology("wan", ("a", "b"), {("a", "b"): long, ("b", "a"): long}).save(tmp_path / "wan.toml")
    found = checks.check_buffers(
        machine(_BUFFERS, GEOMESH_TOPOLOGY=f"{tmp_path}/wan.toml", GEOMESH_REGION="b")
    )
    assert found == [
        Check(
            "socket buffers",
            FAILED,
            "net.ipv4.tcp_rmem ends at 6.0 MiB: b to a has 23.8 MiB under way, and needs 95.4 MiB",
            "sysctl -w net.ipv4.tcp_rmem='4096 131072 100000000'",
        ),
        Check(
            "socket buffers",
            WARNING,
            "net.core.rmem_max ends at 208 KiB: b to a has 23.8 MiB under way, and needs 23.8 MiB",
            "sysctl -w net.core.rmem_max=25000000",
        ),
    ]
    enough = {**_BUFFERS, "/proc/sys/net/ipv4/tcp_rmem": "4096 131072 50000000"}
    found = checks.check_buffers(machine(enough, GEOMESH_TOPOLOGY=f"{tmp_path}/wan.toml"))
    assert [check.state for check in found] == [WARNING, WARNING]  # it works, and not at its best


def test_congestion_control() -> None:
    used = "/proc/sys/net/ipv4/tcp_congestion_control"
    available = "/proc/sys/net/ipv4/tcp_available_congestion_control"
    assert checks.check_congestion(machine({used: "bbr"})) == Check("congestion control", OK, "bbr")
    what = "cubic: on long links with losses bbr carries much more"
    sysctl = "sysctl -w net.ipv4.tcp_congestion_control=bbr"
    assert checks.check_congestion(machine({used: "cubic", available: "reno cubic"})) == Check(
        "congestion control", WARNING, what, f"modprobe tcp_bbr && {sysctl}"
    )
    assert checks.check_congestion(machine({used: "cubic", available: "cubic bbr"})) == Check(
        "congestion control", WARNING, what, sysctl
    )
    alone = machine({used: "cubic"}, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    assert checks.check_congestion(alone) == Check(
        "congestion control", OK, "cubic; all ranks are on this machine"
    )


def test_time() -> None:
    assert checks.check_time(machine(commands={"timedatectl": "yes"})).what == "synchronised"
    assert checks.check_time(machine()) == Check("clock", OK, "timedatectl does not say")
    assert checks.check_time(machine(commands={"timedatectl": "no"})) == Check(
        "clock",
        WARNING,
        "not synchronised: logs will be hard to compare",
        "timedatectl set-ntp true",
    )


# ---- device and ports ----


def test_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = checks.check_ports(machine(GEOMESH_PORTS=str(port)), "127.0.0.1")
        assert found == Check(
            "ports",
            FAILED,
            f"{port}: 0 free on 127.0.0.1, but 1 ranks here need one each",
            f"export GEOMESH_PORTS={port}-{min(port + 100, 65535)}",
        )
    assert checks.check_ports(machine(GEOMESH_PORTS=str(port)), "127.0.0.1") == Check(
        "ports", OK, f"{port}: enough are free for 1 ranks here"
    )
    assert checks.check_ports(
        machine(GEOMESH_PORTS=str(port), LOCAL_WORLD_SIZE="2"), "127.0.0.1"
    ).what == (f"{port}: 1 free on 127.0.0.1, but 2 ranks here need one each")


def test_device_that_is_not_there() -> None:
    (check,) = checks.check_device(machine(GEOMESH_INTERFACE="eth99", MASTER_ADDR="127.0.0.1"))
    assert check.state == FAILED
    assert check.what.startswith("GEOMESH_INTERFACE: interface 'eth99' is not present;")
    assert check.fix == "unset GEOMESH_INTERFACE  # then it is lo"


def test_loopback_with_several_hosts() -> None:
    (check,) = checks.check_device(
        machine(GEOMESH_INTERFACE="lo", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")
    )
    assert check.state == FAILED
    assert check.what.startswith(
        "GEOMESH_INTERFACE: 'lo' is this host's loopback, which other hosts cannot reach;"
    )


def _in_a_network(tmp_path: Path, setup: str, **environment: str) -> list[dict[str, Any]]:
    """Run the command in a network namespace of its own; return its checks."""
    script = f"ip link set lo up && {setup} && exec {' '.join(COMMAND)} --json {tmp_path}/f.json"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if not (tmp_path / "f.json").exists():
        pytest.skip(f"no network of its own can be made: {done.stderr[-300:]}")
    assert done.returncode == 1, done.stdout + done.stderr
    return json.loads((tmp_path / "f.json").read_text())


needs_namespaces = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None,
    reason="needs root, ip and unshare",
)


@needs_namespaces
def test_public_address_without_a_key(tmp_path: Path) -> None:
    rows = _in_a_network(
        tmp_path,
        "ip link add wan0 type veth peer name other && ip link set other up && "
        "ip addr add 9.9.9.9/24 dev wan0 && ip link set wan0 up",
        GEOMESH_INTERFACE="wan0",
    )
    failed = [row for row in rows if row["state"] == FAILED]
    assert [row["name"] for row in failed] == ["privacy"]
    assert failed[0]["what"] == (
        "9.9.9.9 is a public address, and UCX checks nobody: whoever reaches its port can write "
        "into this process"
    )
    assert failed[0]["fix"].startswith(
        "use a VPN such as WireGuard: export GEOMESH_INTERFACE=wg0, or a private device behind a "
        "firewall"
    )


@needs_namespaces
def test_bridge_of_this_host_with_several_hosts(tmp_path: Path) -> None:
    rows = _in_a_network(
        tmp_path,
        "ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && "
        "ip link set docker0 up && ip link add wan0 type veth peer name other && "
        "ip link set other up && "
        "ip addr add 10.9.0.1/24 dev wan0 && ip link set wan0 up",
        GEOMESH_INTERFACE="docker0",
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="1",
    )
    failed = [row for row in rows if row["state"] == FAILED]
    assert [row["name"] for row in failed] == ["device"]
    assert failed[0]["what"] == (
        "docker0 (172.17.0.1) is this machine's own, other machines cannot reach it"
    )
    assert failed[0]["fix"] == "unset GEOMESH_INTERFACE  # then it is wan0"


# ---- ranks together ----


def test_ucx_of_another_version() -> None:
    fix = "pip install --force-reinstall libucx-cu13==...  # the same on all"
    for other, state in (("1.19.1", WARNING), ("2.0.0", FAILED)):
        assert doctor.compare({0: {"UCX": "1.22.0"}, 1: {"UCX": other}}) == [
            Check("equal settings", state, f"UCX differs: 1.22.0 on rank 0; {other} on rank 1", fix)
        ]


def test_unequal_settings() -> None:
    one = {"GEOMESH_LANES": "4", "torch": "2.15.0", "torch_geomesh": "0.1.0"}
    assert doctor.compare({0: one, 1: one}) == [Check("equal settings", OK, "the same on 2 ranks")]
    other = {"a key": "set", "torch": "2.14.0", "torch_geomesh": "0.2.0", "the topology": "abc"}
    assert doctor.compare({0: one, 1: other, 2: one}) == [
        Check(
            "equal settings",
            FAILED,
            "GEOMESH_LANES differs: 4 on ranks 0, 2; not set on rank 1",
            "export GEOMESH_LANES=4  # on all",
        ),
        Check(
            "equal settings",
            FAILED,
            "a key differs: not set on ranks 0, 2; set on rank 1",
            "export GEOMESH_PSK_FILE=...  # the same key on all",
        ),
        Check(
            "equal settings",
            FAILED,
            "the topology differs: not set on ranks 0, 2; abc on rank 1",
            "export GEOMESH_TOPOLOGY=...  # the same file on all",
        ),
        Check(
            "equal settings",
            WARNING,
            "torch differs: 2.15.0 on ranks 0, 2; 2.14.0 on rank 1",
            "pip install torch==2.15.0  # on all",
        ),
        Check(
            "equal settings",
            FAILED,
            "torch_geomesh differs: 0.1.0 on ranks 0, 2; 0.2.0 on rank 1",
            "pip install torch_geomesh==0.1.0  # on all",
        ),
    ]


def test_settings_that_may_differ_are_not_compared() -> None:
    own = {name: "x" for name in doctor._OWN}
    assert set(doctor.settings_of(machine(**own, GEOMESH_LANES="2"))) == {
        "GEOMESH_LANES",
        "UCX",
        "a key",
        "the topology",
        "torch",
        "torch_geomesh",
    }


def test_regions() -> None:
    infos = {0: RankInfo(0, "a", "oslo"), 1: RankInfo(1, "b", ""), 2: RankInfo(2, "c", "")}
    assert doctor.check_regions(infos) == Check(
        "regions",
        WARNING,
        "ranks 1, 2 without a region, the others have one: those count as one more region, far "
        "from the others",
        "export GEOMESH_REGION=...",
    )
    assert doctor.check_regions({0: infos[0]}) == Check("regions", OK, "oslo")


def test_pairs() -> None:
    infos = {0: RankInfo(0, "a", "oslo"), 1: RankInfo(1, "b", ""), 2: RankInfo(2, "c", "x")}
    assert doctor.check_pairs(infos, {}, []) == [
        Check("pairs", OK, "all 3 pairs of 3 ranks connect")
    ]
    infos[2] = RankInfo(2, "c", "x", "no port is free")
    found = doctor.check_pairs(infos, {0: {1: "refused"}, 1: {0: "silent"}}, [1])
    assert [(check.name, check.what) for check in found] == [
        ("engines", "rank 2 (host c, x) could not start: no port is free"),
        ("pairs", "rank 1 has not told what it found"),
        (
            "pairs",
            "rank 0 (host a, oslo) and rank 1 (host b) cannot connect: rank 0: refused; rank 1: "
            "silent",
        ),
    ]
    assert {check.state for check in found} == {FAILED}


def test_clocks() -> None:
    assert doctor.check_clocks({1: 0.002, 2: -0.0204}) == Check(
        "clocks", OK, "rank 2 is 0.020 s behind rank 0, and no rank more"
    )
    assert doctor.check_clocks({1: 0.002, 2: 3.5}) == Check(
        "clocks",
        WARNING,
        "rank 2 is 3.500 s ahead of rank 0: logs will be hard to compare",
        "timedatectl set-ntp true",
    )


def test_lines() -> None:
    same = Check("torch", OK, "2.15.0")
    merged = doctor._merged(
        {0: [same, Check("ports", OK, "any")], 1: [same, Check("ports", FAILED, "none", "open")]}, 2
    )
    assert doctor.render(merged) == (
        "ok       torch  2.15.0\n"
        "ok       ports  any [rank 0]\n"
        "failed   ports  none [rank 1]\n"
        "                -> open"
    )


# ---- the command ----


def _quiet_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("GEOMESH_")}


def test_command_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--json", str(tmp_path / "f.json")],
        env=_quiet_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    rows = json.loads((tmp_path / "f.json").read_text())
    failed = [row["name"] for row in rows if row["state"] == FAILED]
    # Where this machine has a public address, that is told.
    assert failed in ([], ["privacy"]), done.stdout
    assert done.returncode == len(failed)
    assert f"{len(rows)} checks: {len(failed)} failed, " in done.stdout
    assert "--no-python geomesh doctor" in done.stdout
    assert {row["name"] for row in rows} >= {"python", "torch", "UCX", "OpenSSL", "device", "ports"}


def test_command_with_few_files_and_a_typo() -> None:
    done = subprocess.run(
        ["sh", "-c", f"ulimit -n 300 && exec {' '.join(COMMAND)}"],
        env={**_quiet_environment(), "WORLD_SIZE": "100", "GEOMESH_LANE": "4"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert (
        "failed   open files          300, but 100 ranks with up to 16 lanes to each other need "
        "1840 (the hard limit is 300)"
    ) in lines
    assert (
        "failed   variables           the variable GEOMESH_LANE is not one of torch_geomesh's and "
        "has no effect; did you mean GEOMESH_LANES?"
    ) in lines
    assert (
        "                             -> export GEOMESH_LANES=... and unset GEOMESH_LANE" in lines
    )


def test_wrong_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor._refusal("") == "--json: an empty path"
    assert doctor._refusal("/proc/none/f") == "--json /proc/none/f: no file can be written there"


def _rows(ends: list[Ended], file: Path, status: int) -> list[dict[str, Any]]:
    assert [ended.status for ended in ends] == [status] * len(ends), ends
    assert all(ended.out == "" for ended in ends[1:])
    return json.loads(file.read_text())


def test_job_that_is_well(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    rows = _rows(run_job(3, [*COMMAND, "--json", str(file)]), file, 0)
    states = {row["name"]: row["state"] for row in rows}
    assert FAILED not in states.values()
    by_name = {row["name"]: row["what"] for row in rows}
    assert by_name["pairs"] == "all 3 pairs of 3 ranks connect"
    assert by_name["equal settings"] == "the same on 3 ranks"
    assert by_name["clocks"].endswith(" rank 0, and no rank more")


def test_job_with_unequal_settings_and_a_rank_without_its_device(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    env = [{"GEOMESH_LANES": "2"}, {"GEOMESH_LANES": "4"}, {"GEOMESH_INTERFACE": "eth99"}]
    rows = _rows(run_job(3, [*COMMAND, "--json", str(file)], env=env), file, 1)
    failed = [(row["name"], row["what"], row["ranks"]) for row in rows if row["state"] == FAILED]
    assert [name for name, _, _ in failed] == ["device", "equal settings", "engines"]
    assert failed[0][2] == [2]
    assert failed[1][1] == ("GEOMESH_LANES differs: 2 on rank 0; 4 on rank 1; not set on rank 2")
    assert failed[2][1].startswith(f"rank 2 (host {socket.gethostname()}) could not start: ")
    assert "interface 'eth99' is not present" in failed[2][1]


@pytest.mark.wan
def test_job_with_a_pair_that_cannot_connect(tmp_path: Path) -> None:
    link = Link.of(12.5e6, 0.01)
    names = ("oslo", "osaka", "quito")
    links = {(a, b): link for a in names for b in names if a != b}
    file = tmp_path / "f.json"
    try:
        with Emulation(Topology("three", names, links)) as wan:
            wan.cut("osaka", "quito")
            ends = run_job(
                3,
                [*COMMAND, "--json", str(file)],
                master=wan.address("oslo"),
                hosts=3,
                start=lambda rank, command, env, **options: wan.popen(
                    names[rank], command, env=env, **options
                ),
            )
    except EmulationUnavailable as reason:
        pytest.skip(str(reason))
    rows = _rows(ends, file, 1)
    failed = [row for row in rows if row["state"] == FAILED]
    assert [row["name"] for row in failed] == ["pairs"]
    assert failed[0]["what"].startswith(
        "rank 1 (host osaka, osaka) and rank 2 (host quito, quito) cannot connect: rank 1: "
    )
    assert failed[0]["fix"] == (
        "open the ports of GEOMESH_PORTS between these two machines, both ways"
    )
