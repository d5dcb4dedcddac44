"""wire/tls between network namespaces: one open port is enough, and NAT on both sides is allowed.

A router joins two namespaces. To each it is a one-to-one NAT; its firewall lets new connections
through to one port only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PORT = 23000
PRIVATE = {"a": "10.198.1.2", "b": "10.198.2.2"}
PUBLIC = {"a": "198.51.100.1", "b": "203.0.113.2"}

RULES = f"""
table ip geomesh {{
  counter urgent {{ }}
  counter bulk {{ }}
  chain marked {{
    type filter hook forward priority 10;
    ip dscp 46 counter name urgent
    ip dscp 10 counter name bulk
  }}
  chain before {{
    type nat hook prerouting priority dstnat;
    ip daddr {PUBLIC["a"]} dnat to {PRIVATE["a"]}
    ip daddr {PUBLIC["b"]} tcp dport 4443 dnat to {PRIVATE["b"]}:{PORT}
    ip daddr {PUBLIC["b"]} dnat to {PRIVATE["b"]}
  }}
  chain after {{
    type nat hook postrouting priority srcnat;
    ip saddr {PRIVATE["a"]} snat to {PUBLIC["a"]}
    ip saddr {PRIVATE["b"]} snat to {PUBLIC["b"]}
  }}
  chain through {{
    type filter hook forward priority filter; policy drop;
    ct state established,related accept
    ct status dnat tcp dport {PORT} accept
  }}
}}
"""

RANK = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
import torch_geomesh
rank = int(sys.argv[2])
dist.init_process_group("geomesh", init_method="file://" + sys.argv[1], rank=rank, world_size=2,
                        timeout=timedelta(seconds=30))
tensor = torch.arange(300_000, dtype=torch.float32) * (rank + 1)
dist.all_reduce(tensor)
assert torch.equal(tensor, torch.arange(300_000, dtype=torch.float32) * 3)
dist.destroy_process_group()
print("reduced")
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass
class Sites:
    """Two namespaces behind a router, by name."""

    names: dict[str, str]

    def counted(self, name: str) -> int:
        """Return how many bytes the router's counter of that name has seen."""
        command = ["ip", "netns", "exec", self.names["r"], "nft", "-j", "list", "counter", "ip"]
        listed = subprocess.run([*command, "geomesh", name], capture_output=True, check=True)
        (counter,) = (c["counter"] for c in json.loads(listed.stdout)["nftables"] if "counter" in c)
        return int(counter["bytes"])

    def run(self, site: str, command: list[str], **options: object) -> subprocess.Popen[str]:
        """Start a command at a site."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[site], *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,  # type: ignore[call-overload]
        )


@contextmanager
def sites_behind_nat() -> Iterator[Sites]:
    names = {site: f"gm-tls-{os.getpid()}-{site}" for site in ("a", "b", "r")}
    try:
        for name in names.values():
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for number, site in enumerate(("a", "b"), start=1):
            inner, router = names[site], names["r"]
            ip(
                "-n",
                inner,
                "link",
                "add",
                "wan",
                "type",
                "veth",
                "peer",
                "name",
                site,
                "netns",
                router,
            )
            ip("-n", inner, "addr", "add", f"{PRIVATE[site]}/24", "dev", "wan")
            ip("-n", router, "addr", "add", f"10.198.{number}.1/24", "dev", site)
            ip("-n", inner, "link", "set", "wan", "up")
            ip("-n", router, "link", "set", "dev", site, "up")
            ip("-n", inner, "route", "add", "default", "via", f"10.198.{number}.1")
        in_router = ["ip", "netns", "exec", names["r"]]
        subprocess.run([*in_router, "sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)
        subprocess.run([*in_router, "nft", "-f", "-"], input=RULES, text=True, check=True)
        yield Sites(names)
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.fixture(scope="module")
def sites() -> Iterator[Sites]:
    if os.geteuid() != 0 or not shutil.which("nft") or not shutil.which("ip"):
        pytest.skip("needs root, iproute2 and nftables")
    try:
        with sites_behind_nat() as made:
            yield made
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no namespaces with NAT here: {error.stderr or error}")


def run_ranks(
    sites: Sites, folder: Path, advertised: dict[str, str], **variables: str
) -> list[tuple[int, str]]:
    """Return each rank's exit status and output."""
    key = folder / "key"
    key.write_text("5c" * 31 + "00\n")
    key.chmod(0o600)
    ranks = []
    for rank, site in enumerate(("a", "b")):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "GEOMESH_PSK_FILE": str(key),
            "GEOMESH_INTERFACE": "wan",
            "GEOMESH_PORTS": str(PORT),
            "GEOMESH_DEAD_AFTER": "15s",  # a handshake has 10 s, and then says why
            "MASTER_ADDR": "",
            **variables,
        }
        if site in advertised:
            environment["GEOMESH_ADVERTISE"] = advertised[site]
        command = [sys.executable, "-c", RANK, str(folder / "store"), str(rank)]
        ranks.append(sites.run(site, command, env=environment))
    results = []
    for rank in ranks:
        output, _ = rank.communicate(timeout=120)
        results.append((rank.returncode, output))
    return results


def test_one_port_through_nat_on_both_sides(sites: Sites, tmp_path: Path) -> None:
    for status, output in run_ranks(
        sites, tmp_path, {"a": PUBLIC["a"], "b": f"{PUBLIC['b']}:4443"}
    ):
        assert status == 0, output
        assert "reduced" in output


def test_without_advertising_it_says_what_it_cannot_reach(sites: Sites, tmp_path: Path) -> None:
    outputs = run_ranks(sites, tmp_path, {})
    assert all(status != 0 for status, _ in outputs), outputs
    together = "".join(output for _, output in outputs)
    assert any(f"{address}:{PORT}" in together for address in PRIVATE.values()), together


def test_packets_are_marked_by_what_they_carry(sites: Sites, tmp_path: Path) -> None:
    advertised = {"a": PUBLIC["a"], "b": f"{PUBLIC['b']}:4443"}
    before = {name: sites.counted(name) for name in ("urgent", "bulk")}
    marks = {"GEOMESH_DSCP": "46,10", "GEOMESH_LANES": "2"}
    for status, output in run_ranks(sites, tmp_path, advertised, **marks):
        assert status == 0, output
    urgent, bulk = (sites.counted(name) - before[name] for name in ("urgent", "bulk"))
    # An all-reduce of 1.2 MB between two sends 1.2 MB a side; all else is short.
    assert 2_400_000 <= bulk < 2_700_000
    assert 100 < urgent < 100_000
