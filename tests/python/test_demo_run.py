"""The demo as a whole, on a small model and fast emulated GPUs; and its end by Ctrl-C."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from torch_geomesh.demo.model import GPTConfig
from torch_geomesh.demo.run import run
from torch_geomesh.demo.settings import ARMS, Settings
from torch_geomesh.demo.speeds import StepCost


def _small(folder: Path) -> Settings:
    settings = Settings(
        out=folder,
        bandwidth_scale=0.5,
        cost=StepCost(0.004, 0.002),
        model=GPTConfig(context=32, width=32, layers=1, heads=2),
        target_of_bigram=1.6,
        held_out_samples=64,
    )
    arms = {
        # Rounds of a second: each arm's shortest time allows several.
        name: dataclasses.replace(arm, batch_size=8, lr=4e-3, inner_steps=min(arm.inner_steps, 20))
        for name, arm in settings.arms.items()
    }
    return dataclasses.replace(settings, arms=arms)


@pytest.mark.timeout(600)
def test_three_arms_train_to_the_target_and_are_reported(tmp_path):
    log = (tmp_path / "log").open("w+")
    outcome = run(_small(tmp_path), tmp_path / "figures.json", Console(file=log, width=200))
    assert json.loads((tmp_path / "figures.json").read_text()) == outcome
    assert list(outcome["arms"]) == list(ARMS)
    for arm in outcome["arms"].values():
        assert arm["reached"] == (arm["final_loss"] <= outcome["target_loss"])
        assert 0 < arm["time_to_target_s"] <= arm["budget_s"]
        assert arm["rounds"] >= 1
        assert arm["tokens"] == 32 * sum(sum(rank["samples"]) for rank in arm["ranks"])
        parts = [arm[f"{part}_frac"] for part in ("compute", "straggler_wait", "wan_wait")]
        assert all(0 <= part <= 1 for part in parts)
        assert sum(parts) == pytest.approx(1)
        for rank in arm["ranks"]:
            for begin, ready, turn, end in rank["timeline"]:
                assert begin <= ready <= turn <= end
    geomesh = outcome["arms"]["geomesh"]
    assert geomesh["reached"]
    assert outcome["bit_identical"]
    # Faster ranks do more once the ranks' speeds are known.
    samples = [sum(rank["samples"]) for rank in geomesh["ranks"]]
    assert samples[0] < samples[1] < samples[2]
    if outcome["emulated"]:
        assert all(arm["wan_bytes"] > 0 for arm in outcome["arms"].values())
    assert (tmp_path / "report.png").stat().st_size > 10_000
    log.seek(0)
    assert "time to target" in log.read()


def _mentioning(word: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if word.encode() in line and state != "Z" and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


@pytest.mark.timeout(300)
def test_interruption_leaves_nothing_behind(tmp_path):
    out = tmp_path / "interrupted-demo"
    demo = subprocess.Popen(
        [sys.executable, "-m", "torch_geomesh.cli", "demo", "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        started = out / "run" / "geomesh" / "start"
        deadline = time.monotonic() + 200
        while not started.exists() and time.monotonic() < deadline and demo.poll() is None:
            time.sleep(0.1)
        assert started.exists(), demo.communicate()[0] if demo.poll() is not None else "too slow"
        assert len(_mentioning(str(out))) >= 1 + 1 + 8  # demo, evaluation, 4 torchruns and ranks
        wans = set(_children(demo.pid, "geomesh-wan"))
        demo.send_signal(signal.SIGINT)
        output, _ = demo.communicate(timeout=30)
    finally:
        demo.kill()
    assert demo.returncode == 130, output
    assert "Traceback" not in output
    assert _mentioning(str(out)) == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in wans)


def _children(pid: int, name: str) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in children if name in Path(f"/proc/{c}/cmdline").read_text()]
