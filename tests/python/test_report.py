"""Reports from recorded figures: the numbers, a page that needs no other file, a picture."""

import html.parser
import json
import struct
import subprocess
import sys

import pytest

from torch_geomesh import report


def _arm(title, *, reached, time_s, straggler, wan, wan_bytes, tokens, rounds=2):
    round_s = time_s / rounds
    timeline = [
        [n * round_s, n * round_s + 1, n * round_s + 1.25, (n + 1) * round_s] for n in range(rounds)
    ]
    return {
        "title": title,
        "reached": reached,
        "time_to_target_s": time_s,
        "final_loss": 2.0,
        "rounds": rounds,
        "tokens": tokens,
        "tokens_per_s": tokens / time_s,
        "straggler_wait_frac": straggler,
        "wan_wait_frac": wan,
        "wan_bytes": wan_bytes,
        "contribution_bytes": {"code": 100, "fp32": 3190},
        "settings": {"lr": 0.001, "inner_steps": 10},
        "curve": [[0.0, 5.5], [time_s / 2, 2.5], [time_s, 2.0]],
        "ranks": [
            {"region": region, "speed": speed, "timeline": timeline}
            for region, speed in (("east", 0.25), ("west", 0.5))
        ],
    }


@pytest.fixture
def run(tmp_path):
    content = {
        "title": "Three <ways>",
        "topology": "two-sites",
        "regions": ["east", "west"],
        "scale": 0.04,
        "emulated": True,
        "speeds": [0.25, 0.5],
        "target_loss": 2.05,
        "parameters": 1_100_000,
        "text": "some & text",
        "seed": 0,
        "notes": [],
        "bit_identical": True,
        "arms": {
            "ddp": _arm(
                "DDP", reached=False, time_s=140, straggler=0.2, wan=0.7, wan_bytes=None, tokens=7
            ),
            "diloco": _arm(
                "DiLoCo",
                reached=True,
                time_s=120,
                straggler=0.16,
                wan=0.66,
                wan_bytes=64000,
                tokens=1000,
            ),
            "geomesh": _arm(
                "GeoMesh",
                reached=True,
                time_s=40,
                straggler=0.01,
                wan=0.11,
                wan_bytes=2000,
                tokens=4000,
            ),
        },
    }
    (tmp_path / "run.json").write_text(json.dumps(content))
    return content


def test_table_has_the_figures(run):
    rows = {row[0]: row[1:] for row in report.table_rows(run)}
    assert rows["DDP"] == [
        "more than 140.0 s",
        "more than 3.50 x",
        "2.000",
        "0",
        "20.0 %",
        "70.0 %",
        "-",
    ]
    assert rows["DiLoCo"] == ["120.0 s", "3.00 x", "2.000", "8", "16.0 %", "66.0 %", "64.0"]
    assert rows["GeoMesh"] == ["40.0 s", "1.00 x", "2.000", "100", "1.0 %", "11.0 %", "0.5"]


def test_no_ratio_when_geomesh_did_not_reach_the_target(run):
    run["arms"]["geomesh"]["reached"] = False
    assert [row[2] for row in report.table_rows(run)] == ["-", "-", "-"]


def test_sentences_give_the_ratios(run):
    said = " ".join(report.sentences(run))
    assert "82.0 % of its time on synchronisation (16.0 % waiting for slower ranks, 66.0 %" in said
    assert "takes 100 bytes on the wire, 1/31.90 of its 3,190 bytes in fp32" in said
    assert "straggler wait 16.0 x lower" in said
    assert "WAN wait 6.0 x lower" in said
    assert "WAN bytes a round 32.0 x fewer" in said
    assert "all ranks held identical bits" in said
    run["bit_identical"] = False
    assert "did NOT hold" in " ".join(report.sentences(run))


class _Checker(html.parser.HTMLParser):
    void = frozenset(("meta", "circle", "rect", "line", "polyline"))

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [value for key, value in attrs if key in ("src", "href", "xlink:href")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in self.void:
            return
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def test_page_is_whole_and_needs_no_other_file(run, tmp_path):
    page, picture = report.write(tmp_path)
    text = page.read_text()
    checker = _Checker()
    checker.feed(text.replace("/>", ">"))
    assert checker.open == []
    assert checker.links == []
    assert "@import" not in text
    assert "http" not in text
    assert checker.seen.count("svg") == 2
    # Three parts in each of 3 arms x 2 ranks x 2 rounds, and the clip of the plot.
    assert checker.seen.count("rect") == 3 * 3 * 2 * 2 + 1
    assert "Three &lt;ways&gt;" in text
    assert "Three <ways>" not in text
    assert "prefers-color-scheme: dark" in text
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert width > 1000
    assert height > 600


def test_parts_of_the_time_line_are_to_scale(run):
    svg = report._svg_timeline(run)
    rects = [part for part in svg.split("<rect ")[1:] if "east, round 0" in part]
    widths = [float(part.split('width="')[1].split('"')[0]) for part in rects[-3:]]
    # GeoMesh's first round: 1 s compute, 0.25 s straggler wait, 18.75 s WAN wait.
    assert widths[1] / widths[0] == pytest.approx(0.25, abs=0.01)
    assert widths[2] / widths[0] == pytest.approx(18.75, rel=0.01)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no run.json in"),
        ("{", "cannot read"),
        ('{"arms": {}}', "has no arms"),
        ('{"arms": {"ddp": {}}}', "is damaged, or of another version: KeyError: 'parameters'"),
    ],
)
def test_unusable_folders_are_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    done = subprocess.run(
        [sys.executable, "-m", "torch_geomesh.cli", "report", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr
