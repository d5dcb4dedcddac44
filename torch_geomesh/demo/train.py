"""One rank of one arm of the demo; torchrun starts it in each region.

Trains until it is ended from outside: whoever started it reads the records and decides.  The
training loops below are what a user would write, plus the pacing to an emulated GPU and the
records.  Usage: ``train.py SETTINGS.json ARM``.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from torch_geomesh.demo import data
from torch_geomesh.demo.model import build, loss_of
from torch_geomesh.demo.records import RecordWriter
from torch_geomesh.demo.settings import ArmSettings, Settings
from torch_geomesh.demo.speeds import Pacer

_GROUP_TIMEOUT = timedelta(minutes=5)
_PR_SET_PDEATHSIG = 1


def snapshot_path(folder: Path, number: int) -> Path:
    """Where rank 0 puts the parameters after round `number`."""
    return folder / f"snapshot{number}.bin"


def gate_path(folder: Path) -> Path:
    """Return the file that opens the arm: it holds the moment at which all ranks start."""
    return folder / "start"


class Rank:
    """What all arms share: model, optimizer, pacer and records."""

    def __init__(self, settings: Settings, arm: str) -> None:
        self.settings = settings
        self.arm: ArmSettings = settings.arms[arm]
        self.folder = settings.out / "run" / arm
        self.rank = dist.get_rank()
        self.records = RecordWriter(self.folder / f"rank{self.rank}.jsonl")
        text = data.load(settings.data, least_bytes=settings.model.context + 1)
        self.windows = data.ByteWindows(text.train, settings.model.context)
        self.model = build(settings.model, settings.seed)
        self.optimizer = self._optimizer(self.model)
        self._warm_up()
        self.pacer = Pacer(self.model, settings.cost, settings.speeds[self.rank])
        self._started = 0.0
        self._round_loss: list[float] = []

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            model.parameters(),
            lr=self.arm.lr,
            betas=self.settings.betas,
            weight_decay=self.settings.weight_decay,
            fused=True,
        )

    def _warm_up(self) -> None:
        """Run a copy once, so that no first step pays for what is made on first use."""
        model = build(self.settings.model, self.settings.seed)
        optimizer = self._optimizer(model)
        batch = self.windows.__getitems__(list(range(self.arm.batch_size)))
        for _ in range(2):
            loss_of(model, *batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    def loader(self, sampler: object) -> DataLoader:
        """Return a loader over `sampler`: a batch sampler, or a sampler of single samples."""
        if isinstance(sampler, DistributedSampler):
            return DataLoader(
                self.windows,
                sampler=sampler,
                batch_size=self.arm.batch_size,
                drop_last=True,
                collate_fn=data.as_is,
            )
        return DataLoader(self.windows, batch_sampler=sampler, collate_fn=data.as_is)  # type: ignore[arg-type]

    def equal_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's batches for the arms with equal steps, without end."""
        sampler: DistributedSampler[Any] = DistributedSampler(
            self.windows, seed=self.settings.seed, drop_last=True
        )
        loader = self.loader(sampler)
        for epoch in range(1 << 30):
            sampler.set_epoch(epoch)
            yield from loader

    def schedule(self) -> torch.optim.lr_scheduler.LambdaLR:
        """Warm the learning rate up, then keep it."""
        steps = self.arm.warmup_steps
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: min(1, (n + 1) / steps))

    def wait_for_start(self) -> None:
        """Say that this rank is ready, and wait for the moment at which all start."""
        self.records.write("ready", rank=self.rank, region=os.environ.get("GEOMESH_REGION", ""))
        gate = gate_path(self.folder)
        while not gate.exists():
            time.sleep(0.01)
        self._started = float(gate.read_text())
        time.sleep(max(0.0, self._started - time.monotonic()))

    def step_done(self, loss: Tensor, tokens: int) -> None:
        """Record one inner step."""
        value = loss.item()
        self._round_loss.append(value)
        self.records.write("step", t=time.monotonic(), loss=value, tokens=tokens)

    def round_done(
        self,
        number: int,
        *,
        begin: float,
        ready: float,
        steps: int,
        samples: int,
        bytes_sent: int | None = None,
        fp32_bytes: int | None = None,
    ) -> None:
        """Record the end of a round, which is now: hash the parameters, rank 0 saves them."""
        end = time.monotonic()
        flat = torch.cat([p.detach().reshape(-1) for p in self.model.parameters()]).numpy()
        losses, self._round_loss = self._round_loss, []
        if self.rank == 0:
            path = snapshot_path(self.folder, number)
            flat.tofile(path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
        self.records.write(
            "round",
            number=number,
            begin=max(begin, self._started),
            ready=ready,
            end=end,
            steps=steps,
            samples=samples,
            tokens=samples * self.settings.model.context,
            loss=sum(losses) / max(len(losses), 1),
            hash=hashlib.blake2b(flat.tobytes(), digest_size=8).hexdigest(),
            bytes_sent=bytes_sent,
            fp32_bytes=fp32_bytes,
            late_s=self.pacer.late_s,
        )
        self.pacer.restart()


def run_ddp(rank: Rank) -> None:
    """DistributedDataParallel: an all-reduce a step, overlapped with the backward pass."""
    model = DistributedDataParallel(
        rank.model,
        bucket_cap_mb=rank.arm.bucket_mb,
        gradient_as_bucket_view=True,
        init_sync=False,  # all ranks made the same model from the seed
    )
    batches, schedule = rank.equal_batches(), rank.schedule()
    rank.wait_for_start()
    begin = time.monotonic()
    for number, (inputs, targets) in enumerate(batches):
        loss = loss_of(model, inputs, targets)
        loss.backward()
        rank.optimizer.step()
        rank.optimizer.zero_grad(set_to_none=True)
        schedule.step()
        rank.step_done(loss, inputs.numel())
        rank.round_done(
            number, begin=begin, ready=rank.pacer.computed_at, steps=1, samples=len(inputs)
        )
        begin = time.monotonic()


def run_rounds(rank: Rank, arm: str) -> None:
    """DiLoCo and GeoMesh: rounds of inner steps, then an outer step."""
    from torch_geomesh.baselines import DiLoCo
    from torch_geomesh.rounds import OuterLoop, RoundEvent
    from torch_geomesh.sampler import GeoMeshSampler
    from torch_geomesh.train import GeoMesh

    samples = 0

    def on_round(event: RoundEvent) -> None:
        nonlocal samples
        rank.round_done(
            event.round,
            begin=event.begin,
            ready=event.ready,
            steps=event.inner_steps,
            samples=samples,
            bytes_sent=event.bytes_sent,
            fp32_bytes=event.fp32_bytes,
        )
        samples = 0

    settings = rank.arm
    mesh: OuterLoop
    batches: Iterator[tuple[Tensor, Tensor]]
    if arm == "geomesh":
        sampler = GeoMeshSampler(
            rank.windows,
            max_batch_size=settings.batch_size,
            inner_steps=settings.inner_steps,
            seed=rank.settings.seed,
        )
        loader = rank.loader(sampler)
        batches = (batch for _ in iter(int, 1) for batch in loader)
        mesh = GeoMesh(
            rank.model,
            rank.optimizer,
            sampler=sampler,
            outer_lr=settings.outer_lr,
            outer_momentum=settings.outer_momentum,
            form=settings.form,
            on_round=on_round,
        )
    else:
        batches = rank.equal_batches()
        mesh = DiLoCo(
            rank.model,
            rank.optimizer,
            inner_steps=settings.inner_steps,
            outer_lr=settings.outer_lr,
            outer_momentum=settings.outer_momentum,
            parallel_groups=_more_groups(settings.parallel_groups - 1),
            on_round=on_round,
        )
    schedule = rank.schedule()
    # All ranks made the same model from the seed: as after loading a checkpoint, nothing is sent.
    mesh.load_state_dict(mesh.state_dict())
    with mesh:
        rank.wait_for_start()
        mesh.restart_clock()  # waiting for the start is not waiting for data
        for inputs, targets in batches:
            loss = loss_of(rank.model, inputs, targets)
            loss.backward()
            samples += len(inputs)
            rank.step_done(loss, inputs.numel())
            rank.optimizer.step()  # the last one of a round ends it
            rank.optimizer.zero_grad(set_to_none=True)
            schedule.step()


def _more_groups(count: int) -> list[dist.ProcessGroup]:
    groups = [dist.new_group() for _ in range(count)]
    return [group for group in groups if isinstance(group, dist.ProcessGroup)]


def main() -> None:
    """Run one rank until it is ended."""
    # Whatever ends torchrun ends its workers.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    settings = Settings.from_json(Path(sys.argv[1]).read_text())
    arm = sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group(settings.arms[arm].backend, timeout=_GROUP_TIMEOUT)
    rank = Rank(settings, arm)
    if arm == "ddp":
        run_ddp(rank)
    else:
        run_rounds(rank, arm)


if __name__ == "__main__":
    main()
