"""Topology files: the shipped one against the published numbers, every check, scale, round trip."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path as FilePath

import pytest

from torch_geomesh.topology import Link, Path, Topology, TopologyError, shipped

# Gbit/s and round-trip ms of each pair, as published.
AZURE = {
    ("eastus", "brazilsouth"): (0.537, 118),
    ("eastus", "francecentral"): (0.935, 80),
    ("eastus", "eastasia"): (0.202, 199),
    ("brazilsouth", "francecentral"): (0.386, 186),
    ("brazilsouth", "eastasia"): (0.117, 320),
    ("francecentral", "eastasia"): (0.127, 184),
}

GOOD = """
name = "two"
regions = ["oslo", "osaka"]
[[link]]
between = ["oslo", "osaka"]
gbit_per_s = 0.4
rtt_ms = 210
"""


def write(folder: FilePath, text: str) -> FilePath:
    file = folder / "some.toml"
    file.write_text(text)
    return file


def test_azure_4_carries_the_published_numbers() -> None:
    azure = Topology.load("azure-4")
    assert azure.name == "azure-4"
    assert azure.regions == ("eastus", "brazilsouth", "francecentral", "eastasia")
    assert len(azure.links) == 12
    for (a, b), (gbit_per_s, rtt_ms) in AZURE.items():
        for source, target in ((a, b), (b, a)):
            link = azure.link(source, target)
            assert link.bytes_per_s == pytest.approx(gbit_per_s * 125e6, rel=1e-9)
            assert link.delay_s == pytest.approx(rtt_ms / 2000, rel=1e-9)
        assert azure.rtt_s(a, b) == pytest.approx(rtt_ms / 1000, rel=1e-9)
    assert azure.link("eastus", "eastus") == Link.of(12.5e9, 50e-6)
    assert azure.scale == 1.0


def test_all_shipped_topologies_load() -> None:
    assert "azure-4" in shipped()
    for name in shipped():
        assert Topology.load(name).regions


def test_scaled_multiplies_rates_and_nothing_else() -> None:
    azure = Topology.load("azure-4")
    tenth = azure.scaled(0.1).scaled(0.5)
    assert tenth.scale == pytest.approx(0.05)
    for pair, link in azure.links.items():
        assert tenth.links[pair].bytes_per_s == pytest.approx(link.bytes_per_s * 0.05)
        assert tenth.links[pair].delay_s == link.delay_s
    assert tenth.inside.bytes_per_s == pytest.approx(azure.inside.bytes_per_s * 0.05)
    assert azure.scale == 1.0
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(TopologyError, match="positive number"):
            azure.scaled(bad)


@pytest.mark.parametrize("factor", [1e300, 1e-300])
def test_a_scale_beyond_all_networks_is_refused(factor: float) -> None:
    with pytest.raises(TopologyError, match=re.escape(f"scaled by {factor:g}, a path")):
        Topology.load("azure-4").scaled(factor)


def test_fingerprint_is_of_content() -> None:
    azure = Topology.load("azure-4")
    assert len(azure.fingerprint()) == 16
    assert azure.fingerprint() == Topology.load("azure-4").fingerprint()
    assert azure.fingerprint() == dataclasses.replace(azure, name="other").fingerprint()
    assert azure.fingerprint() != azure.scaled(0.999999).fingerprint()
    pair = ("eastasia", "eastus")
    slower = {**azure.links, pair: Link.of(azure.links[pair].bytes_per_s, 0.0995001)}
    assert azure.fingerprint() != dataclasses.replace(azure, links=slower).fingerprint()


def test_plan_gives_what_the_compiler_takes() -> None:
    azure = Topology.load("azure-4")
    plan = azure.plan(["eastasia", "eastus", "eastus"])
    assert plan["regions"] == list(azure.regions)
    assert plan["region_of"] == [3, 0, 0]
    assert len(plan["links"]) == 16
    assert plan["links"][0] == (12.5e9, 50e-6)
    assert plan["links"][3] == pytest.approx((0.202 * 125e6, 0.0995))
    assert plan["links"][1 * 4 + 3] == pytest.approx((0.117 * 125e6, 0.16))
    with pytest.raises(TopologyError, match="no region 'mars'; it has eastus"):
        azure.plan(["eastus", "mars"])


@pytest.mark.parametrize("factor", [1.0, 0.1, 1 / 37, 3e-4, 7.7])
def test_saved_file_reads_back_equal(tmp_path: FilePath, factor: float) -> None:
    for name in shipped():
        topology = Topology.load(name).scaled(factor)
        topology.save(tmp_path / "saved.toml")
        assert Topology.load(tmp_path / "saved.toml") == topology


def test_one_way_links_paths_and_all_their_keys(tmp_path: FilePath) -> None:
    text = """
        regions = ["a", "b"]
        [inside]
        gbit_per_s = 8
        rtt_ms = 1
        [[link]]
        from = "a"
        to = "b"
        gbit_per_s = 0.8
        rtt_ms = 20
        jitter_ms = 3
        loss = 0.01
        queue_ms = 40
        [[link]]
        from = "b"
        to = "a"
        rtt_ms = 30
        loss = 0.5
        [[link.path]]
        gbit_per_s = 0.08
        [[link.path]]
        gbit_per_s = 0.16
        rtt_ms = 60
        loss = 0
        """
    topology = Topology.load(write(tmp_path, text))
    assert topology.name == "some"
    assert topology.inside == Link.of(1e9, 0.0005)
    there = Path(1e8, 0.01, jitter_s=0.003, loss=0.01, queue_s=0.04)
    assert topology.link("a", "b") == Link((there,))
    assert there.queue_bytes == 4_000_000
    back = topology.link("b", "a")
    assert back.paths == (Path(1e7, 0.015, loss=0.5), Path(2e7, 0.03))
    assert back.bytes_per_s == 3e7
    assert back.delay_s == 0.015
    assert topology.rtt_s("a", "b") == pytest.approx(0.025)
    topology.save(tmp_path / "again.toml")
    assert Topology.load(tmp_path / "again.toml") == topology


def test_default_queue_is_a_round_trip_and_holds_super_packets() -> None:
    assert Path(1e7, 0.05).queue_bytes == 1_000_000
    assert Path(1e8, 0.001).queue_bytes == 5_000_000
    assert Path(1e5, 0.001).queue_bytes == 131_072


def test_a_single_region_needs_no_link(tmp_path: FilePath) -> None:
    topology = Topology.load(write(tmp_path, 'regions = ["home"]'))
    assert topology.links == {}
    assert topology.plan(["home", "home"])["links"] == [(12.5e9, 50e-6)]


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


BAD = {
    "not toml": ("regions = [", "is not TOML"),
    "no regions": ('name = "x"', "regions: must be a list of at least one name"),
    "empty regions": ("regions = []", "regions: must be a list"),
    "region is a number": ("regions = [1]", "1 is not a name"),
    "region with a space": ('regions = ["a b"]', "'a b' is not a name"),
    "region twice": (changed('"osaka"]\n[', '"osaka", "oslo"]\n['), "'oslo' is there twice"),
    "unknown key": (GOOD + "colour = 1", "link 1: unknown key 'colour'; known are between"),
    "unknown top key": ("speed = 1\n" + GOOD, "unknown key 'speed'; known are name, regions"),
    "unknown region": (
        changed('["oslo", "osaka"]\ngbit', '["oslo", "mars"]\ngbit'),
        "link 1: between: unknown region 'mars'; regions are oslo, osaka",
    ),
    "to itself": (
        changed('["oslo", "osaka"]\ngbit', '["oslo", "oslo"]\ngbit'),
        "'oslo' to itself is set under",
    ),
    "three ends": (
        changed('["oslo", "osaka"]\ngbit', '["oslo", "osaka", "oslo"]\ngbit'),
        "must be a list of two regions",
    ),
    "no ends": (changed('between = ["oslo", "osaka"]\n', ""), "between: is missing"),
    "both kinds of ends": (GOOD + 'to = "oslo"', "between: stands for both directions"),
    "missing rate": (changed("gbit_per_s = 0.4\n", ""), "link 1: gbit_per_s: is missing"),
    "missing delay": (changed("rtt_ms = 210\n", ""), "link 1: rtt_ms: is missing"),
    "rate of zero": (
        changed("0.4", "0"),
        "gbit_per_s: must be at least 1e-09 and at most 1e+06, not 0",
    ),
    "negative delay": (changed("210", "-1"), "rtt_ms: must be at least 0 and at most 60000"),
    "infinite rate": (changed("0.4", "inf"), "gbit_per_s: must be at least 1e-09"),
    "rate above all networks": (
        changed("0.4", "1e300"),
        "at least 1e-09 and at most 1e+06, not 1e+300",
    ),
    "rate of paths": (
        GOOD + "[[link.path]]\ngbit_per_s = 1e301",
        "link 1: path 1: gbit_per_s: must be at least 1e-09 and at most 1e+06",
    ),
    "rate below all networks": (changed("0.4", "1e-300"), "gbit_per_s: must be at least 1e-09"),
    "rate beyond floats": (changed("0.4", "9" * 400), "gbit_per_s: must be at least 1e-09"),
    "rate as text": (changed("0.4", '"fast"'), "gbit_per_s: must be a number, not 'fast'"),
    "rate as truth": (changed("0.4", "true"), "gbit_per_s: must be a number, not True"),
    "loss above one": (GOOD + "loss = 1.5", "loss: must be at least 0 and at most 1"),
    "no queue": (GOOD + "queue_ms = 0", "queue_ms: must be above 0"),
    "missing link": (changed('"osaka"]\n[', '"osaka", "lima"]\n['), "there is none from oslo to l"),
    "link twice": (GOOD + GOOD[GOOD.index("[[") :], "link 2: oslo to osaka was set before"),
    "link as table": ('regions = ["a"]\nlink = 3', "link: must be written as [[link]]"),
    "bad path": (GOOD + "[[link.path]]\nrtt_ms = -2", "link 1: path 1: rtt_ms: must be at least 0"),
    "bad inside": ("inside = 3\n" + GOOD, "inside: must be a table, not 3"),
    "name as number": (changed('"two"', "2"), "name: must be a text"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_say_where_and_what(tmp_path: FilePath, case: str) -> None:
    text, message = BAD[case]
    file = write(tmp_path, text)
    with pytest.raises(TopologyError) as error:
        Topology.load(file)
    assert str(error.value).startswith(f"{file}: ")
    assert message in str(error.value)


def test_missing_file_lists_what_is_shipped(tmp_path: FilePath) -> None:
    with pytest.raises(TopologyError, match=r"azure-5: no such file.*there are: .*azure-4"):
        Topology.load("azure-5")
    with pytest.raises(TopologyError, match="cannot be read: Is a directory"):
        Topology.load(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TopologyError, match="is not TOML"):
        Topology.load(tmp_path / "bytes.toml")


def test_needs_neither_torch_nor_the_extension() -> None:
    file = FilePath(sys.modules[Topology.__module__].__file__ or "")
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('topology', {str(file)!r})\n"
        "module = importlib.util.module_from_spec(spec); sys.modules['topology'] = module\n"
        "spec.loader.exec_module(module)\n"
        "assert module.Topology.load('azure-4').regions[0] == 'eastus'\n"
        "assert not {'torch', 'numpy', 'torch_geomesh'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
