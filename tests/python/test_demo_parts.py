"""The demo's parts: text, model, pacing, division of time, budgets, settings."""

import dataclasses
import hashlib
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from torch_geomesh.demo import arm, data, model, records, run, speeds
from torch_geomesh.demo.display import ArmView
from torch_geomesh.demo.settings import Settings

# Text and samples.


def test_standard_library_is_text_in_a_fixed_order_without_tests():
    first, second = data.load(None, 1000), data.load(None, 1000)
    assert first == second
    assert len(first.train) > 5_000_000
    assert 0.02 < len(first.held_out) / len(first.train) < 0.3
    names = [
        p.relative_to(data.standard_library()) for p in data._python_files(data.standard_library())
    ]
    assert Path("dataclasses.py") in names
    assert not any("test" in name.parts or "site-packages" in name.parts for name in names)


def test_folder_is_split_by_file_name_alone(tmp_path):
    for n in range(200):
        (tmp_path / f"{n}.txt").write_text(f"text {n} " * 10)
    text = data.load(tmp_path, 50)
    for n in range(200):
        digest = hashlib.sha256(f"{n}.txt".encode()).digest()
        held_out = int.from_bytes(digest[:2], "big") < 65536 // 20
        assert (f"text {n} ".encode() in text.held_out) == held_out
        assert (f"text {n} ".encode() in text.train) == (not held_out)


def test_single_file_is_split_by_position(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(bytes(range(200)))
    text = data.load(file, 5)
    assert text.train == bytes(range(190))
    assert text.held_out == bytes(range(190, 200))


def test_unusable_text_is_named(tmp_path):
    with pytest.raises(data.DataError, match=r"no text at .*nowhere"):
        data.load(tmp_path / "nowhere", 1)
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(data.DataError, match=r"short\.txt has 3 bytes of training text"):
        data.load(tmp_path / "short.txt", 10)


def test_windows_show_each_byte_once_and_its_successor():
    windows = data.ByteWindows(bytes(range(100)), context=7)
    assert len(windows) == 14
    inputs, targets = windows.__getitems__(list(range(14)))
    assert inputs.flatten().tolist() == list(range(98))
    assert targets.flatten().tolist() == list(range(1, 99))
    one, next_one = windows[3]
    assert one.tolist() == list(range(21, 28))
    assert next_one.tolist() == list(range(22, 29))


def test_bigram_loss_of_known_text():
    # After "a" comes "b" or "c", half and half; after both comes "a".
    text = data.Text(b"abac" * 5000, b"abac" * 5000, "")
    assert data.bigram_loss(text) == pytest.approx(math.log(2) / 2, abs=0.01)


# Model.


def test_model_has_about_a_million_parameters_and_depends_on_the_seed_only():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = (model.build(model.GPTConfig(), seed=3) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert 0.9e6 < sum(p.numel() for p in first.parameters()) < 1.2e6
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    other = model.build(model.GPTConfig(), seed=4)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_model_does_not_look_ahead():
    gpt = model.build(model.GPTConfig(), seed=0).eval()
    tokens = torch.arange(32)[None]
    changed = tokens.clone()
    changed[0, 20] = 99
    a, b = gpt(tokens), gpt(changed)
    assert torch.allclose(a[0, :20], b[0, :20], atol=1e-6)
    assert not torch.allclose(a[0, 20], b[0, 20], atol=1e-3)


# Pacing.


class _Clock:
    def __init__(self):
        self.now, self.sleeps = 0.0, []

    def sleep(self, seconds):
        self.sleeps.append(round(seconds, 6))
        self.now += seconds


class _TwoBlocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def _paced(speed):
    clock, net = _Clock(), _TwoBlocks()
    pacer = speeds.Pacer(
        net, speeds.StepCost(1.0, 0.25), speed, now=lambda: clock.now, sleep=clock.sleep
    )
    return clock, net, pacer


def test_step_takes_the_emulated_time_spread_over_both_passes():
    clock, net, pacer = _paced(speed=0.5)
    out = net(torch.ones(4, 3, requires_grad=True))
    # 1 + 4 x 0.25 s at half speed: 4 s, a third of it forward; the head's part has no block.
    assert clock.now == pytest.approx(4 / 3 * 2 / 3)
    out.sum().backward()
    assert clock.now == pytest.approx(4.0)
    assert pacer.computed_at == pytest.approx(4.0)
    assert clock.sleeps == pytest.approx([4 / 9, 4 / 9, 4 / 3 + 4 / 9, 4 / 3], abs=1e-5)


def test_delay_is_caught_up_in_the_next_step_but_not_after_restart():
    clock, net, pacer = _paced(speed=1.0)
    x = torch.ones(4, 3, requires_grad=True)
    net(x).sum().backward()
    clock.now += 0.5  # the operating system did something else
    net(x).sum().backward()
    assert clock.now == pytest.approx(4.0)
    assert pacer.late_s == 0
    clock.now += 0.5  # waited for others
    pacer.restart()
    net(x).sum().backward()
    assert clock.now == pytest.approx(6.5)


def test_time_that_cannot_be_caught_up_is_counted():
    clock, net, pacer = _paced(speed=1.0)
    x = torch.ones(4, 3, requires_grad=True)
    net(x).sum().backward()
    clock.now += 5.0
    net(x).sum().backward()
    assert clock.now == pytest.approx(9.0)
    assert pacer.late_s == pytest.approx(5.0)


def test_steps_end_behind_their_time_is_counted_and_stays_counted():
    clock, net, pacer = _paced(speed=1.0)
    x = torch.ones(4, 3, requires_grad=True)
    out = net(x)
    clock.now = 2.75  # the step was to end at 2
    out.sum().backward()
    assert pacer.late_s == pytest.approx(0.75)
    pacer.restart()
    assert pacer.late_s == pytest.approx(0.75)
    net(x).sum().backward()
    assert clock.now == pytest.approx(4.75)
    assert pacer.late_s == pytest.approx(0.75)


def test_rank_behind_its_pace_is_said():
    arms = {
        "ddp": {"title": "DDP over Gloo", "late_s": 0.9, "time_to_target_s": 50.0},
        "geomesh": {"title": "GeoMesh", "late_s": 1.1, "time_to_target_s": 50.0},
    }
    (note,) = run._late_notes(arms)
    assert "GeoMesh: a rank was 1.1 s behind the pace of its emulated GPU" in note


def test_evaluation_is_not_paced_and_hooks_can_be_removed():
    clock, net, pacer = _paced(speed=1.0)
    net.eval()(torch.ones(4, 3))
    assert clock.sleeps == []
    pacer.remove()
    net.train()(torch.ones(4, 3))
    assert clock.sleeps == []


def test_cost_is_fitted_from_two_batch_sizes():
    clock = _Clock()
    fitted = speeds.measure(
        lambda b: clock.sleep(0.2 + 0.1 * b), (2, 8), repeats=3, now=lambda: clock.now
    )
    assert fitted.step_s == pytest.approx(0.2)
    assert fitted.sample_s == pytest.approx(0.1)


def test_slow_machine_slows_gpus_and_links_by_the_same_factor():
    settings = Settings(out=Path("."), cost=speeds.StepCost(0.0, 0.1), speeds=(0.5, 1.0))
    same, note = run._fit(settings, speeds.StepCost(0.0, 0.02), cores=2)
    assert same is settings
    assert note is None
    slower, note = run._fit(settings, speeds.StepCost(0.0, 0.2), cores=2)
    # 1.5 x 2 cores of work on 2 x 0.75 cores: twice as slow; one thread alone 2.67 times.
    assert slower.cost.sample_s == pytest.approx(0.1 * 2 / 0.75)
    assert slower.bandwidth_scale == pytest.approx(settings.bandwidth_scale * 0.75 / 2)
    assert "2.67 times" in note


# Records.


def _round(begin, ready, end, number=0, digest="a"):
    return records.Round(number, begin, ready, end, 1, 8, 512, 2.0, digest)


def test_stragglers_cost_what_the_slowest_computes_longer():
    slow, fast = [_round(0.0, 4.0, 5.0)], [_round(0.0, 1.0, 5.5)]
    (a,), (b,) = records.divide([slow, fast])
    assert (a.compute_s, a.straggler_wait_s, a.wan_wait_s) == (4.0, 0.0, 1.0)
    assert (b.compute_s, b.straggler_wait_s, b.wan_wait_s) == (1.0, 3.0, 1.5)


def test_rank_that_begins_late_is_no_straggler():
    late, early = [_round(2.0, 5.0, 6.0)], [_round(0.0, 2.5, 6.5)]
    (a,), (b,) = records.divide([late, early])
    assert (a.straggler_wait_s, a.wan_wait_s) == (0.0, 1.0)
    assert (b.straggler_wait_s, b.wan_wait_s) == (0.5, 3.5)


def test_straggler_wait_is_no_more_than_the_wait():
    (_,), (b,) = records.divide([[_round(0.0, 4.0, 5.0)], [_round(0.0, 1.0, 3.0)]])
    assert (b.straggler_wait_s, b.wan_wait_s) == (2.0, 0.0)


def test_only_rounds_complete_on_all_ranks_in_time_count():
    a = [_round(0, 1, 2, 0), _round(2, 3, 4, 1), _round(4, 5, 6, 2)]
    b = [_round(0, 1, 2.5, 0), _round(2.5, 3, 4.5, 1)]
    assert [len(own) for own in records.complete_rounds([a, b], until=5)] == [2, 2]
    assert [len(own) for own in records.complete_rounds([a, b], until=4.2)] == [1, 1]
    assert records.complete_rounds([a, []], until=9) == [[], []]


def test_a_contribution_is_counted_once_whoever_passes_it_on():
    def last(sent):
        return records.Round(1, 0, 1, 2, 1, 1, 1, 0.0, "", bytes_sent=sent, fp32_bytes=3200)

    # Three codes of 100 bytes, each to two ranks; rank 0 passes on what rank 2 sent once.
    rounds = [[last(0), last(300)], [last(0), last(200)], [last(0), last(100)]]
    assert arm._contribution(rounds) == {"code": 100, "fp32": 3200}
    assert arm._contribution([[last(None)], [last(None)]]) is None
    assert arm._contribution([[last(0)]]) is None


def test_round_that_reached_the_target_counts_on_every_rank(tmp_path):
    settings = Settings(out=tmp_path, speeds=(0.5, 0.5))
    run_ = arm.ArmRun(settings, "geomesh", ArmView("GeoMesh"), target=2.0, initial_loss=5.0)
    writers = [records.RecordWriter(run_.folder / f"rank{rank}.jsonl") for rank in range(2)]
    now = time.monotonic()

    def write_round(rank, number, end_s):
        times = {"begin": now, "ready": now, "end": now + end_s}
        fields = dataclasses.asdict(_round(0, 0, 0, number, digest="same"))
        writers[rank].write("round", **{**fields, **times})

    class Regions:
        def torchrun(self, script, folder):
            for writer in writers:
                writer.write("ready")

        def reset_bytes(self):
            for rank in range(2):
                write_round(rank, 0, 1.0)
            write_round(0, 1, 2.0)

        def ended(self):
            return False

        def end(self):
            pass

        def wan_bytes(self):
            return 7

    class Evaluator:
        busy = False

        def ask(self, snapshot):
            self.busy = True

        def answer(self, timeout_s=0.0):
            if run_.reached_at is None:
                write_round(1, 1, 9.0)  # long after rank 0
            self.busy = False
            return 1.5

    class Display:
        def update(self, view, done=False):
            pass

    run_.run(Regions(), Evaluator(), Display(), budget_s=60.0)
    figures = run_.figures()
    assert (figures["reached"], figures["rounds"], figures["wan_bytes"]) == (True, 2, 7)
    assert [len(rank["timeline"]) for rank in figures["ranks"]] == [2, 2]
    assert figures["time_to_target_s"] == pytest.approx(2.0, abs=1.0)


def test_identity_is_seen_and_needs_something_to_compare():
    same = [[_round(0, 1, 2)], [_round(0, 1, 2)]]
    assert records.identical(same)
    assert not records.identical([[_round(0, 1, 2)], [_round(0, 1, 2, digest="b")]])
    assert not records.identical([[], []])


def test_tail_waits_for_whole_lines(tmp_path):
    path = tmp_path / "r.jsonl"
    tail = records.RecordTail(path)
    assert list(tail.new()) == []
    writer = records.RecordWriter(path)
    writer.write("step", loss=1.5)
    with path.open("a") as file:
        file.write('{"kind": "st')
    assert list(tail.new()) == [{"kind": "step", "loss": 1.5}]
    assert list(tail.new()) == []
    with path.open("a") as file:
        file.write('ep"}\n')
    assert list(tail.new()) == [{"kind": "step"}]


# Settings.


def test_settings_travel_unchanged(tmp_path):
    settings = Settings(out=tmp_path, data=tmp_path / "text", seed=7)
    assert Settings.from_json(settings.to_json()) == settings
    assert json.loads(settings.to_json())["seed"] == 7


def test_settings_are_the_stated_ones():
    settings = Settings(out=Path("."))
    assert settings.speeds == (0.232, 0.574, 0.852, 0.827)
    backends = {arm: values.backend for arm, values in settings.arms.items()}
    assert backends == {"ddp": "gloo", "diloco": "gloo", "geomesh": "geomesh"}


def test_budget_shows_the_published_ratio_where_time_allows():
    done = {"arms": {"geomesh": {"time_to_target_s": 40.0}}}
    assert run._budget({"arms": {}}, 350.0, 3) == run._GEOMESH_BUDGET_S
    assert 40.0 / run._budget(done, 310.0, 2) < 0.298
    assert run._budget(done, 100.0, 2) == pytest.approx(50.0 - run._START_S)


def test_held_out_batch_is_spread_over_the_text():
    text = bytes(range(256)) * 10
    inputs, targets = data.held_out_batch(text, 10, 16)
    assert inputs.shape == targets.shape == (16, 10)
    starts = np.diff(inputs[:, 0].numpy().astype(int) % 256)
    assert len(set(starts % 256)) == 1
