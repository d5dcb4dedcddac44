"""Reports: one self-contained HTML file and one PNG from a run's folder.

Reads ``run.json``, which the demo writes: settings, and for each arm its loss over time, its
figures, and each rank's rounds. Knows how to draw; measures nothing, and needs neither torch nor
the extension.
"""

from __future__ import annotations

import html
import itertools
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RUN_FILE = "run.json"
HTML_FILE = "report.html"
PNG_FILE = "report.png"

COLUMNS = (
    "",
    "time to target",
    "against GeoMesh",
    "held-out loss",
    "tokens/s",
    "straggler wait",
    "WAN wait",
    "WAN bytes a token",
)

# Okabe and Ito's colours, which colour-blind eyes tell apart; curves also differ in dashes.
_ARM_COLOURS = {"ddp": "#cc79a7", "diloco": "#d55e00", "geomesh": "#0072b2"}
_ARM_DASHES = {"ddp": "2 4", "diloco": "8 4", "geomesh": ""}
_ARM_MARKERS = {"ddp": "s", "diloco": "^", "geomesh": "o"}
_PARTS = ("compute", "straggler wait", "WAN wait")
_PART_COLOURS = ("#009e73", "#e69f00", "#56b4e9")

_WIDTH = 960
_LEFT, _RIGHT = 150, 20


class ReportError(ValueError):
    """A folder that no report can be made from; the message says why."""


def load(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a run's figures."""
    path = Path(folder) / RUN_FILE
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ReportError(
            f"no {RUN_FILE} in {folder}: give the folder of a run that has ended, "
            "such as the demo's demo-out"
        ) from None
    except (OSError, ValueError) as error:
        raise ReportError(f"cannot read {path}: {error}") from error
    if not isinstance(run, dict) or not isinstance(run.get("arms"), dict) or not run["arms"]:
        raise ReportError(f"{path} has no arms: it was not written by a run of the demo")
    return run


def write(folder: str | os.PathLike[str]) -> list[Path]:
    """Write the HTML file and the PNG into a run's folder; return their paths."""
    run = load(folder)
    page, picture = Path(folder) / HTML_FILE, Path(folder) / PNG_FILE
    try:
        text = render_html(run)
        draw_png(run, picture)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ReportError(
            f"{Path(folder) / RUN_FILE} is damaged, or of another version: "
            f"{type(error).__name__}: {error}"
        ) from error
    page.write_text(text, encoding="utf-8")
    return [page, picture]


# Words and figures.


def table_rows(run: dict[str, Any]) -> list[list[str]]:
    """Return the table under `COLUMNS`, one row an arm, as text."""
    geomesh = run["arms"].get("geomesh")
    rows = []
    for arm in run["arms"].values():
        more = "" if arm["reached"] else "more than "
        ratio = "-"
        if geomesh and geomesh["reached"]:
            ratio = f"{more}{arm['time_to_target_s'] / geomesh['time_to_target_s']:.2f} x"
        per_token = "-"
        if arm["wan_bytes"] is not None and arm["tokens"]:
            per_token = f"{arm['wan_bytes'] / arm['tokens']:,.1f}"
        rows.append(
            [
                arm["title"],
                f"{more}{arm['time_to_target_s']:.1f} s",
                ratio,
                f"{arm['final_loss']:.3f}",
                f"{arm['tokens_per_s']:,.0f}",
                _percent(arm["straggler_wait_frac"]),
                _percent(arm["wan_wait_frac"]),
                per_token,
            ]
        )
    return rows


def sentences(run: dict[str, Any]) -> list[str]:
    """Say in words what was measured."""
    arms = run["arms"]
    said = []
    if diloco := arms.get("diloco"):
        straggler, wan = diloco["straggler_wait_frac"], diloco["wan_wait_frac"]
        said.append(
            f"DiLoCo spent {_percent(straggler + wan)} of its time on synchronisation "
            f"({_percent(straggler)} waiting for slower ranks, {_percent(wan)} for bytes over the "
            f"WAN), at {diloco['settings']['inner_steps']} inner steps a round. Bandwidths are "
            f"scaled by {run['scale']:.4g} so that it is about the published 65.8 %."
        )
    geomesh = arms.get("geomesh")
    if geomesh and diloco:
        said.append(
            f"GeoMesh against DiLoCo: straggler wait "
            f"{_times(diloco['straggler_wait_frac'], geomesh['straggler_wait_frac'])} lower, WAN "
            f"wait {_times(diloco['wan_wait_frac'], geomesh['wan_wait_frac'])} lower"
            + _bytes_a_round(diloco, geomesh)
            + "."
        )
    if geomesh and (one := geomesh.get("contribution_bytes")):
        said.append(
            f"A GeoMesh contribution takes {one['code']:,} bytes on the wire, 1/"
            f"{one['fp32'] / one['code']:.2f} of its {one['fp32']:,} bytes in fp32."
        )
    if geomesh:
        same = "held" if run["bit_identical"] else "did NOT hold"
        said.append(
            f"After each of its {geomesh['rounds']} rounds all ranks {same} identical bits."
        )
    return said


def _bytes_a_round(diloco: dict[str, Any], geomesh: dict[str, Any]) -> str:
    if not all(a["wan_bytes"] and a["rounds"] for a in (diloco, geomesh)):
        return ""
    ratio = _times(diloco["wan_bytes"] / diloco["rounds"], geomesh["wan_bytes"] / geomesh["rounds"])
    return f", WAN bytes a round {ratio} fewer"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _times(large: float, small: float) -> str:
    return f"{large / small:.1f} x" if small > 0 else "beyond measure"


# HTML.

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --dim: #5b6776; --paper: #ffffff;
  --card: #f5f7fa; --line: #d5dce4; --ddp: #b5568a; --diloco: #d55e00; --geomesh: #0072b2;
  --part0: #009e73; --part1: #e69f00; --part2: #56b4e9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebf1; --dim: #9aa7b6; --paper: #12171d;
  --card: #1a2129; --line: #36414d; --ddp: #e39cc3; --diloco: #ff8a3d; --geomesh: #56b4e9;
  --part0: #1fbf91; --part1: #f0b432; --part2: #4a9fd8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1040px; padding: 2rem 1.2rem 3rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .4rem 0; } .dim { color: var(--dim); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1rem; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .45rem .7rem; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { color: var(--dim); font-weight: 600; font-size: .85rem; white-space: normal;
  vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; } tr:last-child td { border-bottom: 0; }
tr.geomesh td { font-weight: 650; }
svg { display: block; width: 100%; height: auto; min-width: 640px; }
svg text { fill: var(--dim); font: 12px system-ui, sans-serif; } svg text.name { fill: var(--ink);
  font-weight: 600; font-size: 13px; }
.grid { stroke: var(--line); stroke-width: 1; } .target { stroke: var(--ink);
  stroke-dasharray: 3 3; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; margin: 0 0 .6rem; }
.legend i { display: inline-block; width: .9em; height: .9em; border-radius: 2px;
  margin-right: .45em; vertical-align: -.08em; }
pre { white-space: pre-wrap; font-size: .82rem; margin: 0; }
summary { cursor: pointer; color: var(--dim); margin-top: 2rem; }
"""


def render_html(run: dict[str, Any]) -> str:
    """Return the report as one HTML page that needs no other file."""
    text = html.escape
    facts = [
        f"{run['parameters'] / 1e6:.2f} M parameters; text: {text(run['text'])}; "
        f"seed {run['seed']}.",
        (
            f"{text(run['topology'])}, bandwidths times {run['scale']:.4g}, delays unchanged."
            if run["emulated"]
            else "Without an emulated WAN: all ranks on one machine's own network."
        ),
        "Relative GPU speeds: "
        + ", ".join(
            f"{text(region)} {speed:g}"
            for region, speed in zip(run["regions"], run["speeds"], strict=True)
        )
        + ".",
        *(text(note) for note in run["notes"]),
    ]
    legend = "".join(
        f'<span><i style="background:var(--part{i})"></i>{part}</span>'
        for i, part in enumerate(_PARTS)
    )
    settings = json.dumps({name: arm["settings"] for name, arm in run["arms"].items()}, indent=2)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text(run["title"])}</title><style>{_STYLE}</style></head><body>
<h1>{text(run["title"])}</h1>
{"".join(f'<p class="dim">{fact}</p>' for fact in facts)}
<h2>Result</h2><div class="card">{_html_table(run)}</div>
{"".join(f"<p>{text(sentence)}</p>" for sentence in sentences(run))}
<h2>Held-out loss against time</h2><div class="card">{_svg_curves(run)}</div>
<h2>Where each rank's time went</h2><div class="card"><div class="legend">{legend}</div>
{_svg_timeline(run)}</div>
<details><summary>Settings of each arm</summary><div class="card"><pre>{text(settings)}</pre></div>
</details>
</body></html>
"""


def _html_table(run: dict[str, Any]) -> str:
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    body = "".join(
        f'<tr class="{html.escape(name)}">'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        + "</tr>"
        for name, row in zip(run["arms"], table_rows(run), strict=True)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class _Scale:
    """Maps values to pixels."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self.low, self.high = low, high if high > low else low + 1
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        part = (value - self.low) / (self.high - self.low)
        return round(self._begin + part * (self._end - self._begin), 2)

    def ticks(self, about: int) -> list[float]:
        """Return round values within the scale."""
        raw = (self.high - self.low) / about
        power = 10 ** math.floor(math.log10(raw))
        step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _longest(run: dict[str, Any]) -> float:
    ends = [arm["time_to_target_s"] for arm in run["arms"].values()]
    ends += [t for arm in run["arms"].values() for t, _ in arm["curve"]]
    return max(ends, default=1.0) * 1.02


def _loss_range(run: dict[str, Any]) -> tuple[float, float]:
    """Return the losses worth showing: the initial one would flatten all the rest."""
    losses = [loss for arm in run["arms"].values() for t, loss in arm["curve"] if t > 0]
    low = min([run["target_loss"], *losses])
    high = min(max(losses, default=low + 1), low + 1.6)
    return low - 0.06 * (high - low), high + 0.04 * (high - low)


def _svg_curves(run: dict[str, Any]) -> str:
    height, bottom = 360, 40
    x = _Scale(0, _longest(run), 56, _WIDTH - _RIGHT)
    y = _Scale(*_loss_range(run), height - bottom, 14)
    parts = [
        f'<clipPath id="plot"><rect x="56" y="10" width="{_WIDTH - _RIGHT - 52}" '
        f'height="{height - bottom - 6}"/></clipPath>'
    ]
    for value in y.ticks(6):
        parts.append(
            f'<line class="grid" x1="56" x2="{_WIDTH - _RIGHT}" y1="{y(value)}" y2="{y(value)}"/>'
            f'<text x="48" y="{y(value) + 4}" text-anchor="end">{value:.2g}</text>'
        )
    parts += _time_axis(x, height - bottom, height - bottom + 18)
    target = run["target_loss"]
    parts.append(
        f'<line class="target" x1="56" x2="{_WIDTH - _RIGHT}" y1="{y(target)}" y2="{y(target)}"/>'
        f'<text x="62" y="{y(target) - 6}">'
        f"target {target:.3f}</text>"
    )
    for name, arm in run["arms"].items():
        points = [(x(t), y(loss)) for t, loss in arm["curve"]]
        line = " ".join(f"{px},{py}" for px, py in points)
        colour = f"var(--{name})"
        parts.append(
            f'<g clip-path="url(#plot)"><polyline points="{line}" fill="none" stroke="{colour}" '
            f'stroke-width="2.5" stroke-dasharray="{_ARM_DASHES.get(name, "")}"/>'
        )
        for (px, py), (t, loss) in zip(points, arm["curve"], strict=True):
            parts.append(
                f'<circle cx="{px}" cy="{py}" r="3.5" fill="{colour}">'
                f"<title>{html.escape(arm['title'])}: {loss:.3f} after {t:.1f} s</title></circle>"
            )
        parts.append("</g>")
    for row, (name, arm) in enumerate(run["arms"].items()):
        top = 26 + 20 * row
        parts.append(
            f'<line x1="{_WIDTH - 230}" x2="{_WIDTH - 196}" y1="{top}" y2="{top}" '
            f'stroke="var(--{name})" stroke-width="2.5" '
            f'stroke-dasharray="{_ARM_DASHES.get(name, "")}"/>'
            f'<text class="name" x="{_WIDTH - 188}" y="{top + 4}">{html.escape(arm["title"])}'
            "</text>"
        )
    return _svg(height, "Held-out loss against time", parts)


def _svg_timeline(run: dict[str, Any]) -> str:
    row, gap = 18, 34
    x = _Scale(0, _longest(run), _LEFT, _WIDTH - _RIGHT)
    parts: list[str] = []
    top = 4
    for arm in run["arms"].values():
        more = "" if arm["reached"] else "more than "
        parts.append(
            f'<text class="name" x="0" y="{top + 13}">{html.escape(arm["title"])}: {more}'
            f"{arm['time_to_target_s']:.1f} s</text>"
        )
        top += 22
        for rank in arm["ranks"]:
            label = f"{rank['region']} ({rank['speed']:g})"
            parts.append(f'<text x="0" y="{top + 13}">{html.escape(label)}</text>')
            for number, times in enumerate(rank["timeline"]):
                for part, (begin, end) in enumerate(itertools.pairwise(times)):
                    width = round(x(end) - x(begin), 2)
                    if width <= 0:
                        continue
                    parts.append(
                        f'<rect x="{x(begin)}" y="{top}" width="{width}" height="{row - 3}" '
                        f'fill="var(--part{part})"><title>{html.escape(rank["region"])}, round '
                        f"{number}: {_PARTS[part]} {end - begin:.2f} s</title></rect>"
                    )
            top += row
        top += gap - row
    axis = top - 6
    return _svg(axis + 26, "Timeline of each rank", _time_axis(x, axis, axis + 18) + parts)


def _time_axis(x: _Scale, line: float, text: float) -> list[str]:
    return [
        f'<line class="grid" x1="{x(value)}" x2="{x(value)}" y1="0" y2="{line}"/>'
        f'<text x="{x(value)}" y="{text}" text-anchor="middle">{value:g} s</text>'
        for value in x.ticks(8)
    ]


def _svg(height: float, label: str, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">'
        + "".join(parts)
        + "</svg>"
    )


# PNG.


def draw_png(run: dict[str, Any], path: Path) -> None:
    """Draw curves, timelines and table into one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arms = run["arms"]
    lanes = sum(len(arm["ranks"]) for arm in arms.values()) + len(arms)
    style: Any = {  # matplotlib wants a literal type for each key
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#b6c0cb",
        "axes.labelcolor": "#5b6776",
        "xtick.color": "#5b6776",
        "ytick.color": "#5b6776",
        "text.color": "#1d2733",
    }
    with pyplot.rc_context(style):
        figure = pyplot.figure(figsize=(11, 5.6 + 0.24 * lanes), layout="constrained")
        top, middle, bottom = figure.subplots(
            3, 1, height_ratios=[3.2, 0.24 * lanes + 0.3, 0.34 * (len(arms) + 1)]
        )
        figure.suptitle(run["title"], fontsize=15, fontweight="bold", x=0.01, ha="left")
        _plot_curves(run, top)
        _plot_timeline(run, middle)
        _plot_table(run, bottom)
        figure.savefig(path, dpi=110, facecolor="white")
        pyplot.close(figure)


def _plot_curves(run: dict[str, Any], axes: Any) -> None:
    for name, arm in run["arms"].items():
        times, losses = zip(*arm["curve"], strict=True)
        axes.plot(
            times,
            losses,
            label=arm["title"],
            color=_ARM_COLOURS.get(name),
            linestyle={"ddp": ":", "diloco": "--"}.get(name, "-"),
            marker=_ARM_MARKERS.get(name, "o"),
            markersize=4,
            linewidth=2,
        )
    axes.axhline(run["target_loss"], color="#1d2733", linewidth=1, linestyle=(0, (2, 2)))
    axes.annotate(
        f"target {run['target_loss']:.3f}",
        (0, run["target_loss"]),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        xytext=(5, 4),
        ha="left",
        color="#5b6776",
    )
    axes.set_xlim(0, _longest(run))
    axes.set_ylim(*_loss_range(run))
    axes.set_ylabel("held-out loss (nats a byte)")
    axes.grid(color="#e4e9ee")
    axes.legend(frameon=False, loc="upper right")


def _plot_timeline(run: dict[str, Any], axes: Any) -> None:
    from matplotlib.patches import Patch

    y, ticks, labels = 0.0, [], []
    for arm in run["arms"].values():
        more = "" if arm["reached"] else "more than "
        title = f"{arm['title']}: {more}{arm['time_to_target_s']:.1f} s"
        axes.text(0, y + 0.2, title, fontweight="bold", va="bottom")
        for rank in arm["ranks"]:
            y -= 1
            ticks.append(y + 0.5)
            labels.append(f"{rank['region']} ({rank['speed']:g})")
            for part, colour in enumerate(_PART_COLOURS):
                spans = [(t[part], t[part + 1] - t[part]) for t in rank["timeline"]]
                axes.broken_barh(spans, (y + 0.08, 0.84), facecolors=colour, linewidth=0)
        y -= 1.3
    axes.set_yticks(ticks, labels)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, _longest(run))
    axes.set_ylim(y + 1.2, 1.2)
    axes.set_xlabel("seconds from the start of the arm")
    axes.spines["left"].set_visible(False)
    axes.legend(
        handles=[
            Patch(color=colour, label=part)
            for colour, part in zip(_PART_COLOURS, _PARTS, strict=True)
        ],
        frameon=False,
        ncols=3,
        loc="upper right",
        bbox_to_anchor=(1, 1.08),
    )


def _plot_table(run: dict[str, Any], axes: Any) -> None:
    axes.axis("off")
    rows: Sequence[Sequence[str]] = table_rows(run)
    table = axes.table(
        cellText=rows,
        colLabels=[name.replace(" ", "\n", 1) for name in COLUMNS],
        cellLoc="right",
        loc="center",
        edges="horizontal",
        colWidths=[0.16, 0.15, 0.14, 0.1, 0.1, 0.11, 0.1, 0.13],
    )
    table.auto_set_font_size(False)
    table.set_fontsize(9.5)
    table.scale(1, 1.35)
    for (row, column), cell in table.get_celld().items():
        cell.set_edgecolor("#d5dce4")
        if row == 0:
            cell.set_height(cell.get_height() * 1.45)
            cell.set_text_props(color="#5b6776")
        if column == 0:
            cell.set_text_props(ha="left")
        if row and list(run["arms"])[row - 1] == "geomesh":
            cell.set_text_props(fontweight="bold")
