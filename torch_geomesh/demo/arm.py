"""One arm of the demo while it runs: from torchrun to its figures.

Reads the ranks' records, has saved parameters evaluated aside, and ends the arm at the target or
at its budget.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any

from torch_geomesh.demo import records
from torch_geomesh.demo.display import ArmView, Display
from torch_geomesh.demo.jobs import DemoError, Evaluator, Regions
from torch_geomesh.demo.records import RecordTail, Round
from torch_geomesh.demo.settings import TITLES, Settings
from torch_geomesh.demo.train import gate_path, snapshot_path
from torch_geomesh.topology import Topology

_LONGEST_START_S = 120.0
_TURN_S = 0.1


class ArmRun:
    """One arm, from torchrun to its figures."""

    def __init__(
        self,
        settings: Settings,
        arm: str,
        view: ArmView,
        target: float,
        initial_loss: float,
    ) -> None:
        self.settings = settings
        self.arm = arm
        self.view = view
        self.target = target
        self.folder = settings.out / "run" / arm
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.rounds: list[list[Round]] = [[] for _ in range(settings.ranks)]
        self.curve: list[tuple[float, float]] = [(0.0, initial_loss)]
        self.reached_at: float | None = None
        self._tails = [
            RecordTail(self.folder / f"rank{rank}.jsonl") for rank in range(settings.ranks)
        ]
        self._ready = 0
        self._start = 0.0
        self._tokens = 0
        self._bytes_at: dict[int, int | None] = {}
        self._evaluating: tuple[int, float] | None = None
        self._evaluated = -1
        self._recent: list[float] = []
        view.losses.append(initial_loss)

    def run(
        self, regions: Regions, evaluator: Evaluator, display: Display, budget_s: float
    ) -> None:
        """Train to the target or for `budget_s`."""
        self.view.state, self.view.budget_s = "starting", budget_s
        module = ["-m", "torch_geomesh.demo.train", str(self.settings.file), self.arm]
        regions.torchrun(module, self.folder)
        try:
            self._open_gate(regions, display)
            self._train(regions, evaluator, display, budget_s)
        finally:
            regions.end()
        self._drain(evaluator)
        reached = self.reached_at is not None
        self.view.state = "reached the target" if reached else "stopped at its budget"
        self.view.elapsed_s = self.reached_at if self.reached_at is not None else budget_s
        display.update(self.view, done=True)

    def _open_gate(self, regions: Regions, display: Display) -> None:
        deadline = time.monotonic() + _LONGEST_START_S
        while self._ready < self.settings.ranks:
            self._read(regions)
            self._check(regions)
            if time.monotonic() > deadline:
                raise DemoError(
                    f"{self.view.title}: {self._ready} of {self.settings.ranks} ranks were ready "
                    f"after {_LONGEST_START_S:.0f} s; their output is in {self.folder}"
                )
            display.update(self.view)
            time.sleep(_TURN_S)
        regions.reset_bytes()
        self._start = time.monotonic() + 0.2
        gate = gate_path(self.folder)
        gate.with_suffix(".part").write_text(repr(self._start))
        gate.with_suffix(".part").rename(gate)

    def _train(
        self, regions: Regions, evaluator: Evaluator, display: Display, budget_s: float
    ) -> None:
        self.view.state = "training"
        end = self._start + budget_s
        while not self._all_reached() and time.monotonic() < end:
            self._read(regions)
            if self.reached_at is None:
                self._evaluate(evaluator)
            self._check(regions)
            self._look()
            display.update(self.view)
            time.sleep(_TURN_S)
        if not self._all_reached():
            self._read(regions)

    def _all_reached(self) -> bool:
        """Whether every rank has ended the round that reached the target."""
        return self.reached_at is not None and all(
            len(own) > self._evaluated for own in self.rounds
        )

    def _drain(self, evaluator: Evaluator) -> None:
        """Evaluate what was saved before the end and not yet evaluated."""
        while self.reached_at is None:
            if evaluator.busy:
                self._take(evaluator.answer(timeout_s=30.0))
            else:
                self._evaluate(evaluator)
                if not evaluator.busy:
                    return
        while evaluator.busy:
            evaluator.answer(timeout_s=30.0)

    def _read(self, regions: Regions) -> None:
        for rank, tail in enumerate(self._tails):
            for line in tail.new():
                kind = line.pop("kind")
                if kind == "ready":
                    self._ready += 1
                elif kind == "step":
                    self._tokens += line["tokens"]
                    self._recent.append(line["loss"])
                elif kind == "round":
                    for key in ("begin", "ready", "end"):
                        line[key] -= self._start
                    self.rounds[rank].append(Round(**line))
                    # The last rank to end a round ends it.
                    if all(len(own) > line["number"] for own in self.rounds):
                        self._bytes_at[line["number"]] = regions.wan_bytes()

    def _evaluate(self, evaluator: Evaluator) -> None:
        if evaluator.busy:
            self._take(evaluator.answer())
            return
        # The newest: where rounds are quicker than evaluations, some are left out.
        in_time = [round_ for round_ in self.rounds[0] if round_.end <= self.view.budget_s]
        if in_time and (newest := in_time[-1]).number > self._evaluated:
            self._evaluating = (newest.number, newest.end)
            evaluator.ask(snapshot_path(self.folder, newest.number))

    def _take(self, loss: float | None) -> None:
        if loss is None or self._evaluating is None:
            return
        number, at = self._evaluating
        for old in range(self._evaluated + 1, number + 1):
            snapshot_path(self.folder, old).unlink(missing_ok=True)
        self._evaluated, self._evaluating = number, None
        self.curve.append((at, loss))
        self.view.losses.append(loss)
        if loss <= self.target:
            self.reached_at = at

    def _look(self) -> None:
        """Bring what people see up to date."""
        view = self.view
        view.elapsed_s = max(0.0, time.monotonic() - self._start)
        view.round = len(self.rounds[0])
        del self._recent[: -8 * self.settings.ranks]
        view.train_loss = sum(self._recent) / len(self._recent) if self._recent else None
        view.tokens_per_s = self._tokens / max(view.elapsed_s, 1e-3)
        view.shares = _shares(records.complete_rounds(self.rounds, float("inf")))

    def _check(self, regions: Regions) -> None:
        if regions.ended():
            raise DemoError(
                f"{self.view.title}: a rank has failed.\n{_last_words(self.folder)}\n"
                f"The ranks' whole output is in {self.folder}"
            )

    def figures(self) -> dict[str, Any]:
        """Return what the arm gives to the report and to ``--json``."""
        until = self.reached_at if self.reached_at is not None else self.view.budget_s
        # All ranks end a round at about, not exactly, the same time. The round that reached the
        # target counts on all of them, whatever it took the last one.
        last = [own[self._evaluated].end for own in self.rounds if self._all_reached()]
        rounds = records.complete_rounds(self.rounds, max([until + 0.5, *last]))
        waits = records.divide(rounds)
        end = max((own[-1].end for own in rounds if own), default=0.0)
        tokens = sum(round_.tokens for own in rounds for round_ in own)
        compute, straggler, wan = _shares(rounds) or (0.0, 0.0, 0.0)
        regions = Topology.load(self.settings.topology).regions
        count = len(rounds[0])
        return {
            "title": TITLES[self.arm],
            "reached": self.reached_at is not None,
            "time_to_target_s": round(until, 3),
            "budget_s": round(self.view.budget_s, 3),
            "final_loss": self.curve[-1][1],
            "rounds": count,
            "tokens": tokens,
            "tokens_per_s": tokens / end if end else 0.0,
            "compute_frac": compute,
            "straggler_wait_frac": straggler,
            "wan_wait_frac": wan,
            "late_s": max((own[-1].late_s for own in rounds if own), default=0.0),
            "wan_bytes": self._bytes_at.get(count - 1),
            "contribution_bytes": (
                _contribution(rounds) if self.settings.arms[self.arm].form == "exchange" else None
            ),
            "bit_identical": records.identical(rounds),
            "settings": dataclasses.asdict(self.settings.arms[self.arm]),
            "curve": [[round(t, 3), loss] for t, loss in self.curve],
            "ranks": [
                {
                    "region": regions[rank],
                    "speed": self.settings.speeds[rank],
                    # begin of compute, of straggler wait, of WAN wait; end
                    "timeline": [
                        [
                            round(r.begin, 3),
                            round(r.ready, 3),
                            round(r.ready + w.straggler_wait_s, 3),
                            round(r.end, 3),
                        ]
                        for r, w in zip(own, waits[rank], strict=True)
                    ],
                    "steps": [r.steps for r in own],
                    "samples": [r.samples for r in own],
                }
                for rank, own in enumerate(rounds)
            ],
        }


def _contribution(rounds: list[list[Round]]) -> dict[str, int] | None:
    """Return a contribution's bytes on the wire and in fp32, from the last round.

    For forms in which each contribution goes to every other rank once, whoever passes it on.
    """
    last = [own[-1] for own in rounds if own]
    copies = len(last) * (len(last) - 1)
    if not copies or any(r.bytes_sent is None or r.fp32_bytes is None for r in last):
        return None
    sent = sum(r.bytes_sent or 0 for r in last)
    return {"code": round(sent / copies), "fp32": last[0].fp32_bytes or 0}


def _shares(rounds: list[list[Round]]) -> tuple[float, float, float] | None:
    """Divide all ranks' time from the start to the last complete round's end."""
    if not rounds or not rounds[0]:
        return None
    whole = len(rounds) * max(own[-1].end for own in rounds)
    sums = [records.total(waits) for waits in records.divide(rounds)]
    straggler = sum(w.straggler_wait_s for w in sums) / whole
    wan = sum(w.wan_wait_s for w in sums) / whole
    return 1 - straggler - wan, straggler, wan


def _last_words(folder: Path) -> str:
    """Return the most telling lines of the ranks' logs."""
    for log in sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime):
        lines = log.read_text(errors="replace").splitlines()
        errors = [
            line.strip()
            for line in lines
            if ("Error" in line and "ChildFailedError" not in line) or "traceback : Signal" in line
        ]
        if errors:
            return f"{log.stem}: " + "\n".join(errors[:3])
    return "No rank has written an error."
