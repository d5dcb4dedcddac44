"""docs/errors.md as data: its entries, how a text is compared with one, and how it is written.

Knows nothing of ranks.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
REGIONS = [
    {"GEOMESH_REGION": region} for region in ("eastus", "brazilsouth", "francecentral", "eastasia")
]
Texts = dict[str, list[str | None]]  # None: a text that only chance brings about, and not now

# What differs from run to run, and from machine to machine: (pattern, what stands for it).
_VARYING = [
    (r"\bhost [\w.-]+", "host HOST"),
    (r"\brank \d on host HOST \(\w+\) reported:", "RANK reported:"),  # who was first
    (r" \(at \d\d:\d\d:\d\d\.\d{3} UTC\)", ""),
    (r"nobody listens at \S+", "nobody listens at ADDRESS"),
    (r"interfaces present: .*", "interfaces present: THESE"),
    (r"lane \d+ to .*?: (connection lost|cannot connect)", r"lane N to PEER: \1"),
    (r"cannot connect: UCX: [^;]*", "cannot connect: UCX: REASON"),
    (r"\d+\.\d+\.\d+\.\d+ \(\w+\)", "ADDRESS"),
    (r"\b\d+(\.\d+)? ?m?s\b", "TIME"),
    # Chance decides which rank hears first.
    (r", (lost|not connected yet[^;]*|silent for TIME)(?=$|;)", ", STATE"),
    (r"\b\d+ of (\d+)( bytes sent| received)", r"SOME of \1\2"),
    (r"\b[0-9a-f]{8}([0-9a-f]{8})?\b", "HEX"),
    (r"(process|range|message) \d+", r"\1 N"),
    (r"/\S+/(?=\w+\.(toml|py))", ""),
    (r"/\S+\.events", "EVENTS"),
]


def comparable(text: str) -> str:
    """Return the text on one line, without what differs from run to run."""
    text = " ".join(text.split())
    for pattern, instead in _VARYING:
        text = re.sub(pattern, instead, text)
    return text


_ENTRY = re.compile(r"^### ([^\n]*)\n(.*?)(?=^##|\Z)", re.M | re.S)
_BLOCK = re.compile(r"^```\n(.*?)^```$", re.M | re.S)


def entries() -> dict[str, list[str]]:
    """Return the page's texts by heading."""
    return {heading: _BLOCK.findall(rest) for heading, rest in _ENTRY.findall(PAGE.read_text())}


def as_written(text: str) -> str:
    """Return a text as the page has it: hosts are named by region, lines are short."""

    def host(match: re.Match[str]) -> str:
        return f"{match[1]}vm-{REGIONS[int(match[2])]['GEOMESH_REGION']}"

    text = " ".join(text.split())
    text = re.sub(r"(\brank (\d)(?: on | \()host )[\w.-]+", host, text)
    text = re.sub(r"(interfaces present: ).*", r"\1lo (127.0.0.1), eth0 (10.0.0.4)", text)
    text = re.sub(r"/\S+/(?=\w+\.(toml|py))", "/job/", text)
    text = re.sub(r"/\S+(/geomesh-\d+\.events)", r"/tmp\1", text)
    lines = textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def write(texts: Texts) -> None:
    """Put these texts into their blocks of the page."""

    def entry(match: re.Match[str]) -> str:
        found = iter(texts.get(match[1], []))

        def block(old: re.Match[str]) -> str:
            text = next(found, None)
            return old[0] if text is None else f"```\n{as_written(text)}```"

        return f"### {match[1]}\n{_BLOCK.sub(block, match[2])}"

    PAGE.write_text(_ENTRY.sub(entry, PAGE.read_text()))
