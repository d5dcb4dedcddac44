"""The whole demo: emulated regions, three arms in turn, what people see, and the figures.

Starts torchrun in every region for each arm, reads the ranks' records while they train, has saved
parameters evaluated aside, and ends an arm at the target or at its budget.  Everything it starts
ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console

from torch_geomesh import report
from torch_geomesh.demo import data, records
from torch_geomesh.demo.display import ArmView, Display, result_table
from torch_geomesh.demo.model import build, loss_of
from torch_geomesh.demo.records import RecordTail, Round
from torch_geomesh.demo.settings import ARMS, TITLES, Settings
from torch_geomesh.demo.speeds import StepCost, measure
from torch_geomesh.demo.train import gate_path, snapshot_path
from torch_geomesh.emulate import Emulation, EmulationUnavailable
from torch_geomesh.topology import Topology

# The published result: 70.2 % less time. Arms get enough time to show it, and a little more.
_LONGEST_SHARE = 0.298
_BUDGET_OF_GEOMESH = 1.03 / _LONGEST_SHARE
_WHOLE_DEMO_S = 350.0
_START_S = 14.0  # of an arm, about
_LONGEST_START_S = 120.0
_GEOMESH_BUDGET_S = 75.0
_TURN_S = 0.1
_MAX_LOAD = 0.75  # of this machine's cores, for training
_PR_SET_PDEATHSIG = 1


class DemoError(RuntimeError):
    """The demo cannot go on; the message says why and what to do."""


class Evaluator:
    """The process that evaluates saved parameters."""

    def __init__(self, settings_file: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torch_geomesh.demo.evaluate", str(settings_file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.busy = False

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def ask(self, snapshot: Path | None) -> None:
        """Begin to evaluate a snapshot, or None: the initial parameters."""
        assert self._process.stdin is not None and not self.busy
        self.busy = True
        self._process.stdin.write(f"{snapshot or ''}\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = 0.0) -> float | None:
        """Return the loss asked for, or None if it is not there yet."""
        try:
            line = self._answers.get(timeout=timeout_s) if timeout_s else self._answers.get(False)
        except queue.Empty:
            return None
        if not line:
            raise DemoError("the process that evaluates has ended; its error is above")
        self.busy = False
        return float(line)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


class Regions:
    """Where ranks run: in emulated regions, or plainly on this machine."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.unavailable: str | None = None
        self._emulation: Emulation | None = None
        self._running: list[subprocess.Popen[bytes]] = []
        self._counted = 0

    def __enter__(self) -> Self:
        emulation = Emulation(self.topology)
        try:
            emulation.start()
        except EmulationUnavailable as error:
            self.unavailable = str(error)
        else:
            self._emulation = emulation
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.end()
        finally:
            if self._emulation is not None:
                self._emulation.close()

    def torchrun(self, script: list[str], folder: Path) -> None:
        """Start one torchrun a region, together one job; their output goes to `folder`."""
        port = 29500 if self._emulation else _free_port()
        command = [sys.executable, "-m", "torch.distributed.run", *script]
        for number, region in enumerate(self.topology.regions):
            environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            with (folder / f"{region}.log").open("wb") as log:
                options: dict[str, Any] = {
                    "stdin": subprocess.DEVNULL,
                    "stdout": log,
                    "stderr": subprocess.STDOUT,
                    "start_new_session": True,
                }
                if self._emulation:
                    started = self._emulation.popen(region, command, env=environment, **options)
                else:
                    environment |= {
                        "GEOMESH_REGION": region,
                        "PET_MASTER_ADDR": "127.0.0.1",
                        "PET_MASTER_PORT": str(port),
                        "PET_NNODES": str(len(self.topology.regions)),
                        "PET_NODE_RANK": str(number),
                        "PET_NPROC_PER_NODE": "1",
                        "GLOO_SOCKET_IFNAME": "lo",
                    }
                    started = subprocess.Popen(
                        command,
                        env={**os.environ, **environment},
                        preexec_fn=_die_with_parent,
                        **options,
                    )
            self._running.append(started)

    def ended(self) -> bool:
        """Whether one of the torchruns has ended by itself."""
        return any(process.poll() is not None for process in self._running)

    def end(self) -> None:
        """End all ranks, at once."""
        if self._emulation is not None and self._running and self._emulation.alive():
            self._emulation.kill_processes()
        for process in self._running:
            process.kill()  # its workers have asked to die with it
            process.wait()
        self._running = []

    def reset_bytes(self) -> None:
        """Count WAN bytes from here."""
        self._counted = self._emulation.wan_bytes() if self._emulation else 0

    def wan_bytes(self) -> int | None:
        """Return the bytes between regions since `reset_bytes`; None without emulation."""
        return self._emulation.wan_bytes() - self._counted if self._emulation else None

    def lateness_s(self) -> float | None:
        """Return by how much the emulator delivered late, 99th percentile."""
        return self._emulation.health().lateness_p99_s if self._emulation else None


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
        module = ["-m", "torch_geomesh.demo.train", str(_settings_file(self.settings)), self.arm]
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
        while self.reached_at is None and time.monotonic() < end:
            self._read(regions)
            self._evaluate(evaluator)
            self._check(regions)
            self._look()
            display.update(self.view)
            time.sleep(_TURN_S)
        if self.reached_at is None:
            self._read(regions)

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
                    if rank == 0:
                        self._bytes_at[line["number"]] = regions.wan_bytes()

    def _evaluate(self, evaluator: Evaluator) -> None:
        if evaluator.busy:
            self._take(evaluator.answer())
            return
        # The newest: where rounds are quicker than evaluations, some are left out.
        if self.rounds[0] and (newest := self.rounds[0][-1]).number > self._evaluated:
            self._evaluating = (newest.number, newest.end)
            evaluator.ask(snapshot_path(self.folder, newest.number))

    def _take(self, loss: float | None) -> None:
        if loss is None or self._evaluating is None:
            return
        number, at = self._evaluating
        for old in range(self._evaluated + 1, number + 1):
            snapshot_path(self.folder, old).unlink(missing_ok=True)
        self._evaluated, self._evaluating = number, None
        if at > self.view.budget_s:
            return
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
        # All ranks end a round at about, not exactly, the same time.
        rounds = records.complete_rounds(self.rounds, until + 0.5)
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
            "wan_bytes": self._bytes_at.get(count - 1),
            "contribution_bytes": _contribution(rounds),
            "bit_identical": records.identical(rounds),
            "settings": dataclasses.asdict(self.settings.arms[self.arm]),
            "curve": [[round(t, 3), loss] for t, loss in self.curve],
            "ranks": [
                {
                    "region": regions[rank],
                    "speed": self.settings.speeds[rank],
                    # begin, ready, last rank ready, end
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
    known = [r for own in rounds for r in own if r.bytes_sent is not None]
    if not known or known[-1].fp32_bytes is None:
        return None
    return {"sent_a_round": known[-1].bytes_sent or 0, "fp32": known[-1].fp32_bytes}


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
        errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
        if errors:
            return f"{log.stem}: " + "\n".join(errors[:3])
    return "No rank has written an error."


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _settings_file(settings: Settings) -> Path:
    return settings.out / "run" / "settings.json"


def fitted_to_machine(settings: Settings, text: data.Text) -> tuple[Settings, str | None]:
    """Slow the emulated GPUs and links down together if this machine is too slow for them."""
    torch.set_num_threads(1)
    windows = data.ByteWindows(text.train, settings.model.context)
    model = build(settings.model, settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(batch: int) -> None:
        loss_of(model, *windows.__getitems__(list(range(batch)))).backward()
        optimizer.step()
        optimizer.zero_grad()

    batch = settings.arms["geomesh"].batch_size
    real = measure(step, (max(1, batch // 4), batch), repeats=5)
    return _fit(settings, real, os.cpu_count() or 1)


def _fit(settings: Settings, real: StepCost, cores: int) -> tuple[Settings, str | None]:
    batch = settings.arms["geomesh"].batch_size
    load = sum(settings.speeds) * real.seconds(batch) / settings.cost.seconds(batch)
    # A rank has one thread: its own pace needs that as well.
    alone = max(settings.speeds) * real.seconds(batch) / settings.cost.seconds(batch)
    slower = max(load / (cores * _MAX_LOAD), alone / _MAX_LOAD)
    if slower <= 1:
        return settings, None
    fitted = dataclasses.replace(
        settings,
        cost=settings.cost.scaled(slower),
        bandwidth_scale=settings.bandwidth_scale / slower,
    )
    return fitted, (
        f"This machine needs {slower:.2f} times as long for a step as the demo's figures assume: "
        f"emulated GPUs and bandwidths are slowed down by that."
    )


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM clean up as Ctrl-C does, and let neither disturb the cleaning up."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    before = [(s, signal.signal(s, signal.SIG_IGN)) for s in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def run(settings: Settings, json_file: Path | None, console: Console) -> dict[str, Any]:
    """Run the demo; return and write its figures."""
    begin = time.monotonic()
    with _terminated_like_interrupted(), contextlib.ExitStack() as stack:
        text = data.load(settings.data, least_bytes=64 * settings.model.context)
        settings.out.joinpath("run").mkdir(parents=True, exist_ok=True)
        settings, note = fitted_to_machine(settings, text)
        notes = [note] if note else []
        _settings_file(settings).write_text(settings.to_json())
        evaluator = Evaluator(_settings_file(settings))
        stack.callback(evaluator.close)
        topology = Topology.load(settings.topology).scaled(settings.bandwidth_scale)
        if len(topology.regions) != settings.ranks:
            raise DemoError(
                f"{settings.ranks} speeds for {len(topology.regions)} regions of {topology.name}"
            )
        regions = Regions(topology)
        stack.push(_quietly(regions))
        regions.__enter__()
        if regions.unavailable:
            notes.append(
                f"Without emulated regions, all ranks are on one fast network: {regions.unavailable}"
            )
        target = settings.target_of_bigram * data.bigram_loss(text)
        outcome = _outcome(settings, topology, target, text, regions, notes)
        _announce(console, outcome)

        evaluator.ask(None)
        initial = evaluator.answer(timeout_s=60.0)
        if initial is None:
            raise DemoError("the evaluation of the initial parameters took more than 60 s")
        views = {arm: ArmView(TITLES[arm]) for arm in ARMS}
        header = f"target: held-out loss {target:.3f}"
        with Display(console, list(views.values()), header) as display:
            # GeoMesh first: the others' budgets are multiples of its time.
            order = ["geomesh", "diloco", "ddp"]
            for position, arm in enumerate(order):
                one = ArmRun(settings, arm, views[arm], target, initial)
                left = _WHOLE_DEMO_S - (time.monotonic() - begin)
                one.run(regions, evaluator, display, _budget(outcome, left, len(order) - position))
                outcome["arms"][arm] = one.figures()
        outcome["arms"] = {arm: outcome["arms"][arm] for arm in ARMS}
        outcome["bit_identical"] = outcome["arms"]["geomesh"]["bit_identical"]
        lateness = regions.lateness_s()
        outcome["emulator_lateness_p99_ms"] = None if lateness is None else 1e3 * lateness
    outcome["seconds"] = round(time.monotonic() - begin, 1)
    _publish(settings, outcome, json_file, console)
    return outcome


@contextlib.contextmanager
def _quietly(regions: Regions) -> Iterator[None]:
    try:
        yield
    finally:
        with _undisturbed():
            regions.__exit__(None, None, None)


def _budget(outcome: dict[str, Any], left_s: float, arms_left: int) -> float:
    """Return an arm's time: what the published result takes, or what is left of the demo's."""
    share = left_s / arms_left - _START_S
    if "geomesh" not in outcome["arms"]:
        return _GEOMESH_BUDGET_S
    return max(min(_BUDGET_OF_GEOMESH * outcome["arms"]["geomesh"]["time_to_target_s"], share), 5.0)


def _outcome(
    settings: Settings,
    topology: Topology,
    target: float,
    text: data.Text,
    regions: Regions,
    notes: list[str],
) -> dict[str, Any]:
    model = build(settings.model, settings.seed)
    return {
        "title": f"The same training three ways, over {topology.name}",
        "topology": topology.name,
        "regions": list(topology.regions),
        "scale": settings.bandwidth_scale,
        "emulated": regions.unavailable is None,
        "speeds": list(settings.speeds),
        "target_loss": target,
        "parameters": sum(p.numel() for p in model.parameters()),
        "text": text.source,
        "text_bytes": [len(text.train), len(text.held_out)],
        "seed": settings.seed,
        "notes": notes,
        "bit_identical": False,
        "arms": {},
    }


def _announce(console: Console, outcome: dict[str, Any]) -> None:
    say = console.print
    ranks = ", ".join(
        f"{region} {speed:g}"
        for region, speed in zip(outcome["regions"], outcome["speeds"], strict=True)
    )
    say(f"[bold]{outcome['title']}[/bold]", highlight=False)
    train, held_out = (size / 1e6 for size in outcome["text_bytes"])
    say(
        f"Model: {outcome['parameters'] / 1e6:.2f} M parameters, bytes in and out. Text: "
        f"{outcome['text']}; {train:.1f} MB to train on, {held_out:.1f} MB held out.\n"
        f"One rank a region, as fast as GPUs of relative speed: {ranks}.\n"
        f"WAN: {outcome['topology']} with all bandwidths times {outcome['scale']:.4g} "
        f"(1/{1 / outcome['scale']:.3g}), delays as they are.\n"
        f"Target: a held-out loss of {outcome['target_loss']:.3f} nats a byte.",
        highlight=False,
        soft_wrap=True,
    )
    for note in outcome["notes"]:
        say(f"[yellow]{note}[/yellow]", highlight=False, soft_wrap=True)


def _publish(
    settings: Settings, outcome: dict[str, Any], json_file: Path | None, console: Console
) -> None:
    text = json.dumps(outcome, indent=1)
    (settings.out / "run.json").write_text(text)
    if json_file is not None:
        json_file.write_text(text)
    written = report.write(settings.out)
    console.print(result_table(outcome))
    for line in report.sentences(outcome):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(
        "Report: " + ", ".join(str(path) for path in written), highlight=False, soft_wrap=True
    )
