"""What the demo shows while it runs: a live table on a terminal, plain lines elsewhere.

Knows rich and the figures it is handed; measures nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

# Okabe and Ito's colours, told apart by colour-blind eyes; the report uses the same.
COLOURS = {"compute": "#009e73", "straggler": "#e69f00", "wan": "#0072b2"}
_BAR_CELLS = 24
_SPARKS = "▁▂▃▄▅▆▇█"
_PLAIN_EVERY_S = 10.0


@dataclasses.dataclass
class ArmView:
    """The figures of one arm that people see while it runs."""

    title: str
    state: str = "waiting"
    elapsed_s: float = 0.0
    budget_s: float = 0.0
    round: int = 0
    train_loss: float | None = None
    losses: list[float] = dataclasses.field(default_factory=list)
    tokens_per_s: float = 0.0
    shares: tuple[float, float, float] | None = None  # compute, straggler wait, WAN wait

    def line(self) -> str:
        """One line of plain text."""
        loss = f"{self.losses[-1]:.3f}" if self.losses else "-"
        train = f"{self.train_loss:.3f}" if self.train_loss is not None else "-"
        parts = [
            f"{self.title}: {self.state}",
            f"{self.elapsed_s:.0f} s of at most {self.budget_s:.0f} s",
            f"round {self.round}",
            f"held-out loss {loss}",
            f"training loss {train}",
            f"{self.tokens_per_s:,.0f} tokens/s",
        ]
        if self.shares:
            compute, straggler, wan = (f"{100 * share:.0f} %" for share in self.shares)
            parts.append(f"compute {compute}, straggler wait {straggler}, WAN wait {wan}")
        return ", ".join(parts)


class Display:
    """Shows the arms until closed; use as a context manager."""

    def __init__(self, console: Console, arms: Sequence[ArmView], header: str) -> None:
        self._console = console
        self._arms = arms
        self._header = header
        self._live: Live | None = None
        self._printed_at = 0.0
        self._begin = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def update(self, running: ArmView, *, done: bool = False) -> None:
        """Show the present figures."""
        if self._live is not None:
            self._live.update(self._render())
        if done:
            self.say(running.line())
        elif self._live is None and time.monotonic() - self._printed_at >= _PLAIN_EVERY_S:
            self._printed_at = time.monotonic()
            self.say(running.line())

    def _render(self) -> Group:
        table = Table(expand=False, pad_edge=False)
        table.add_column("")
        table.add_column("held-out loss", no_wrap=True)
        for name in ("training", "round", "tokens/s", "time"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("where the time goes", no_wrap=True)
        for arm in self._arms:
            table.add_row(
                Text(arm.title, style="bold" if arm.state == "training" else ""),
                _sparkline(arm.losses),
                f"{arm.train_loss:.3f}" if arm.train_loss is not None else "",
                str(arm.round or ""),
                f"{arm.tokens_per_s:,.0f}" if arm.tokens_per_s else "",
                _clock(arm),
                _bar(arm.shares),
            )
        legend = Text("  ").join(
            Text("█ ", style=COLOURS[key]) + Text(name)
            for key, name in zip(COLOURS, ("compute", "straggler wait", "WAN wait"), strict=True)
        )
        elapsed = Text(f"{time.monotonic() - self._begin:.0f} s since the start", style="dim")
        return Group(Text(self._header), table, legend, elapsed)


def _clock(arm: ArmView) -> str:
    if arm.state in ("waiting", "starting"):
        return arm.state
    return f"{arm.elapsed_s:.0f} / {arm.budget_s:.0f} s" + (
        "" if arm.state == "training" else f", {arm.state}"
    )


def _sparkline(losses: Sequence[float]) -> str:
    if not losses:
        return ""
    shown = losses[-12:]
    low, high = min(losses), max(losses)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0
    return f"{losses[-1]:.3f} " + "".join(_SPARKS[round((v - low) * scale)] for v in shown)


def _bar(shares: tuple[float, float, float] | None) -> Text:
    text = Text()
    if shares is None:
        return text
    edges = [0]
    for index in range(3):
        edges.append(round(_BAR_CELLS * min(1.0, sum(shares[: index + 1]))))
    for colour, begin, end in zip(COLOURS.values(), edges, edges[1:], strict=False):
        text.append("█" * (end - begin), style=colour)
    compute, straggler, wan = (round(100 * share) for share in shares)
    return text.append(f" {compute} / {straggler} / {wan} %")


def result_table(run: dict[str, Any]) -> Table:
    """Return the table that ends a run."""
    from torch_geomesh.report import COLUMNS, table_rows

    table = Table(title=run["title"], pad_edge=False)
    for index, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in table_rows(run):
        table.add_row(*row)
    return table
