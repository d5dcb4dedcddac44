"""The whole demo: emulated regions, three arms in turn, what people see, and the figures.

Everything it starts ends with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from torch_geomesh import report
from torch_geomesh.demo import data
from torch_geomesh.demo.arm import ArmRun
from torch_geomesh.demo.display import ArmView, Display, result_table
from torch_geomesh.demo.jobs import DemoError, Evaluator, Regions
from torch_geomesh.demo.model import build, loss_of
from torch_geomesh.demo.settings import ARMS, TITLES, Settings
from torch_geomesh.demo.speeds import StepCost, measure
from torch_geomesh.topology import Topology

# The published result: 70.2 % less time. Arms get enough time to show it, and a little more.
_LONGEST_SHARE = 0.298
_BUDGET_OF_GEOMESH = 1.03 / _LONGEST_SHARE
_WHOLE_DEMO_S = 340.0
_START_S = 20.0  # of an arm, about
_GEOMESH_BUDGET_S = 75.0
_MAX_LOAD = 0.75  # of this machine's cores, for training
_MAX_LATE_SHARE = 0.02  # of an arm's time, behind the pace of an emulated GPU


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
        settings.file.write_text(settings.to_json())
        evaluator = Evaluator(settings.file)
        stack.callback(evaluator.close)
        topology = Topology.load(settings.topology).scaled(settings.bandwidth_scale)
        if len(topology.regions) != settings.ranks:
            raise DemoError(
                f"{settings.ranks} speeds for {len(topology.regions)} regions of {topology.name}"
            )
        regions = Regions(topology)
        stack.enter_context(_ended_undisturbed(regions))
        if regions.unavailable:
            notes.append(
                f"Without emulated regions, all ranks on one fast network: {regions.unavailable}"
            )
        target = settings.target_of_bigram * data.bigram_loss(text)
        outcome = _outcome(settings, topology, target, text, regions, notes)
        _announce(console, outcome)

        evaluator.ask(None)
        initial = evaluator.answer(timeout_s=180.0)
        if initial is None:
            raise DemoError("the evaluation of the initial parameters took more than 180 s")
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
        notes += _late_notes(outcome["arms"])
        if health := regions.health():
            outcome["emulator_lateness_p99_ms"] = 1e3 * health.lateness_p99_s
            if not health.sound:
                notes.append(
                    "The emulator lacked processor time (packets "
                    f"{1e3 * health.lateness_p99_s:.1f} ms late, {health.device_drops} dropped): "
                    "run the demo again when this machine has less else to do."
                )
    outcome["seconds"] = round(time.monotonic() - begin, 1)
    _publish(settings, outcome, json_file, console)
    return outcome


def _late_notes(arms: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"{arm['title']}: a rank was {arm['late_s']:.1f} s behind the pace of its emulated GPU, so "
        "that waits show this machine's other work as well: run the demo again when it has less."
        for arm in arms.values()
        if arm["late_s"] > _MAX_LATE_SHARE * arm["time_to_target_s"]
    ]


@contextlib.contextmanager
def _ended_undisturbed(regions: Regions) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.callback(_end_undisturbed, regions)
        regions.start()
        yield


def _end_undisturbed(regions: Regions) -> None:
    with _undisturbed():
        regions.close()


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
        f"{_wan(outcome)}\n"
        f"Target: a held-out loss of {outcome['target_loss']:.3f} nats a byte.",
        highlight=False,
        soft_wrap=True,
    )
    for note in outcome["notes"]:
        say(f"[yellow]{note}[/yellow]", highlight=False, soft_wrap=True)


def _wan(outcome: dict[str, Any]) -> str:
    if not outcome["emulated"]:
        return "WAN: none."
    return (
        f"WAN: {outcome['topology']} with all bandwidths times {outcome['scale']:.4g} "
        f"(1/{1 / outcome['scale']:.3g}), delays as they are."
    )


def _publish(
    settings: Settings, outcome: dict[str, Any], json_file: Path | None, console: Console
) -> None:
    text = json.dumps(outcome, indent=1)
    (settings.out / "run.json").write_text(text)
    if json_file is not None:
        json_file.write_text(text)
    written = report.write(settings.out)
    console.print(result_table(outcome))
    for note in outcome["notes"]:
        console.print(f"[yellow]{note}[/yellow]", highlight=False, soft_wrap=True)
    for line in report.sentences(outcome):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(
        "Report: " + ", ".join(str(path) for path in written), highlight=False, soft_wrap=True
    )
