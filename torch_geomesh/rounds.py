"""The loop around a user's training loop: inner steps, rounds, outer steps.

A context manager hooks the user's optimizer and counts its steps. At the end of a round the ranks'
pseudo-gradients are averaged (by a subclass: train.py, baselines.py) and an outer Nesterov step
moves the common anchor. Knows models, optimizers and clocks; nothing of codecs or samples' order.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_geomesh import backend
from torch_geomesh.arguments import check_state, number, whole_number
from torch_geomesh.sampler import GeoMeshSampler, RankReport
from torch_geomesh.steptimer import StepTimer

_log = logging.getLogger("torch_geomesh")

_STATE_VERSION = 1
_EVENTS_KEPT = 10_000
_MOST_TOKENS = 1 << 48  # in one call: sums over steps and ranks stay exact
# What a rank's report says of its weight in the mean.
_UNKNOWN, _COUNTS, _COUNTS_NOT = 0.0, 1.0, 2.0
# The ranks' reports travel while the last inner steps are computed.
_REPORT_AT = 0.7


@dataclass
class RoundEvent:
    """What happened in one round on one rank.

    Parameters
    ----------
    round, epoch, rank
        Which round, counted from 0; the sampler's epoch (None without a sampler).
    inner_steps, batch_size, samples, tokens
        This rank's work: steps, largest batch, samples (0 without a sampler), and its weight in
        the mean.
    total_tokens
        The weights of all ranks in this round.
    loss
        Mean of what `OuterLoop.record_loss` was given in the round.
    compute_s, data_wait_s
        Time in steps, from the first forward call to the end of the optimizer's step, and
        between steps.
    begin, ready, end
        Seconds of ``time.monotonic``: the round's first step began; inner steps done, the
        exchange began; the exchange was done.
    ready_unix
        ``time.time`` at ``ready``, to compare ranks.
    bytes_sent, fp32_bytes
        What this rank put on the wire (None where the backend does not say), and the bytes of
        its pseudo-gradient in fp32.
    straggler_wait_s, wan_wait_s, waited_for
        ``end - ready`` split into waiting for the last rank's inner steps and for bytes, and that
        rank. Known once the next round's reports have come, so None at first, and for the last
        round of a run. As accurate as the machines' clocks agree.
    """

    round: int
    epoch: int | None
    rank: int
    inner_steps: int
    batch_size: int
    samples: int
    tokens: int
    total_tokens: int
    loss: float | None
    compute_s: float
    data_wait_s: float
    begin: float
    ready: float
    end: float
    ready_unix: float
    bytes_sent: int | None
    fp32_bytes: int
    straggler_wait_s: float | None = None
    wan_wait_s: float | None = None
    waited_for: int | None = None


class OuterLoop:
    """Base of `GeoMesh` and of the baselines: everything but the exchange itself."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        sampler: GeoMeshSampler | None,
        inner_steps: int | None,
        outer_lr: float,
        outer_momentum: float,
        process_group: dist.ProcessGroup | None,
        on_round: Callable[[RoundEvent], None] | None,
    ) -> None:
        self._name = type(self).__name__
        if not isinstance(model, nn.Module):
            raise TypeError(f"{self._name}: expected a torch.nn.Module, got {type(model).__name__}")
        self._parameters = self._trainable(model, optimizer)
        if (sampler is None) == (inner_steps is None):
            raise ValueError(f"{self._name} takes either a sampler or inner_steps")
        if sampler is not None and not isinstance(sampler, GeoMeshSampler):
            raise TypeError(
                f"{self._name}: expected a GeoMeshSampler, got {type(sampler).__name__}"
            )
        if inner_steps is not None:
            inner_steps = whole_number(self._name, "inner_steps", inner_steps)
            if inner_steps < 1:
                raise ValueError(f"expected inner_steps >= 1, got {inner_steps}")
        if on_round is not None and not callable(on_round):
            raise TypeError(f"{self._name}: expected a function for on_round, got {on_round!r}")
        outer_lr = number(self._name, "outer_lr", outer_lr)
        outer_momentum = number(self._name, "outer_momentum", outer_momentum)
        if not 0 < outer_lr < math.inf or not 0 <= outer_momentum < 1:
            raise ValueError(
                f"expected a finite outer_lr > 0 and 0 <= outer_momentum < 1, got {outer_lr} and "
                f"{outer_momentum}"
            )
        self.model = model
        self.optimizer = optimizer
        self._sampler = sampler
        self._fixed_steps = inner_steps
        self._outer_lr = outer_lr
        self._outer_momentum = outer_momentum
        self._group = process_group
        self._on_round = on_round

        alone = process_group is None and not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if alone else dist.get_rank(process_group)
        self.world_size = 1 if alone else dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError(f"this process is not in {self._name}'s process group")
        if sampler is not None and sampler.world_size != self.world_size:
            raise ValueError(
                f"the sampler was made for {sampler.world_size} ranks, the process group has "
                f"{self.world_size}: make it after init_process_group, for the same group"
            )

        sizes = [p.numel() for p in self._parameters.values()]
        self._anchor_flat = torch.empty(sum(sizes))
        self._momentum = torch.zeros(sum(sizes))
        self._mean = torch.empty(sum(sizes))
        self._anchor = self._views(self._anchor_flat)
        self._copy_parameters_to_anchor()

        self._round = 0
        self._steps = 0
        self._samples = 0
        self._tokens = 0
        self._counts_tokens = False
        self._total_tokens = 0
        self._losses: list[Tensor | float] = []
        self._started = False  # all ranks hold the same anchor
        self._failure: BaseException | None = None
        self._hooks: list[Any] = []
        self._timer = StepTimer(self._device)
        self._compute_s = self._data_wait_s = 0.0
        self._begin = time.monotonic()
        self._pending_reports: tuple[Any, list[Tensor]] | None = None
        self.events: deque[RoundEvent] = deque(maxlen=_EVENTS_KEPT)

    # What subclasses do.

    def _exchange(self, weight: int) -> tuple[int, int | None]:
        """Average all ranks' pseudo-gradients into ``self._mean``.

        Returns the sum of all ranks' weights and the bytes that this rank sent. On an error
        nothing but ``self._mean`` has changed. Only called with several ranks.
        """
        raise NotImplementedError

    def _committed(self) -> None:
        """Make lasting what `_exchange` has prepared; can't fail."""

    def _settings(self) -> tuple[object, ...]:
        """Return what must be equal on all ranks."""
        return (self._name, self._fixed_steps, self._outer_lr, self._outer_momentum)

    # What users see.

    @property
    def round(self) -> int:
        """Rounds completed, and the number of the one in progress."""
        return self._round

    @property
    def inner_step(self) -> int:
        """Inner steps done in the round in progress."""
        return self._steps

    @property
    def total_tokens(self) -> int:
        """Tokens of all ranks in the completed rounds (samples, where tokens are not counted)."""
        return self._total_tokens

    def count_tokens(self, tokens: int) -> None:
        """Add to this rank's weight in the round in progress; call it before the step.

        Without any call a rank counts its samples (its steps, without a sampler). With one, all
        ranks must count, and go on to: a round in which some do and some do not is refused.
        """
        tokens = whole_number(self._name, "tokens", tokens)
        if not 0 <= tokens < _MOST_TOKENS:
            raise ValueError(f"expected 0 <= tokens < 2**48, got {tokens}")
        self._counts_tokens = True
        self._tokens += tokens

    def record_loss(self, loss: Tensor | float) -> None:
        """Add to the mean that the round's event shows. Does not wait for the device."""
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise ValueError(
                    f"expected one element, got shape {tuple(loss.shape)}: reduce the loss"
                )
            self._losses.append(loss.detach())
        else:
            self._losses.append(float(loss))

    def skip_step(self) -> None:
        """Count an inner step without an optimizer step.

        For loops that leave out ``optimizer.step()``, as GradScaler does after an overflow.
        """
        if not self._hooks:
            raise RuntimeError(f"{self._name}: skip_step() counts inside the with block only")
        self._step_done()

    def restart_clock(self) -> None:
        """Begin the step in progress now; what went before counts neither as compute nor as wait.

        For loops that do something else between two steps, such as an evaluation or a barrier:
        otherwise that time is taken for waiting for data, and the sampler plans with it.
        """
        self._timer.restart()
        if self._steps == 0:
            self._begin = time.monotonic()

    def round_hash(self) -> str:
        """Hash all parameters' bytes: 16 hex digits, equal on all ranks between rounds."""
        return _hash(p.detach() for p in self.model.parameters())

    def __enter__(self) -> Self:
        if self._hooks:
            raise RuntimeError(f"{self._name} is already running")
        if self._failure is not None:
            raise self._after_failure()
        self._check_parameters()
        self._meet()
        if self._sampler is not None:
            if self._sampler.inner_step != self._steps:
                raise ValueError(
                    f"{self._name} has done {self._steps} inner steps of its round, the sampler "
                    f"{self._sampler.inner_step}: load the states of the same moment into both"
                )
            self._sampler.attach(self._end_empty_rounds)
        self._hooks = [
            self.optimizer.register_step_post_hook(lambda *_: self._step_done()),
            self.model.register_forward_pre_hook(self._forward),
        ]
        self._timer.restart()
        self._begin = time.monotonic()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._sampler is not None:
            self._sampler.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the outer loop's state; tensors are not copied.

        Taken at any moment, also in the middle of a round. The sampler has a state of its own, and
        so have the model and the inner optimizer. In the middle of a round all four differ from
        rank to rank: each rank's belong in the checkpoint. At the end of a round (``on_round``)
        any rank's will do, except for the inner optimizer and an optional residual.
        """
        return {
            "version": _STATE_VERSION,
            "world_size": self.world_size,
            "rank": self.rank,
            "round": self._round,
            "inner_step": self._steps,
            "samples": self._samples,
            "tokens": self._tokens,
            "counts_tokens": self._counts_tokens,
            "total_tokens": self._total_tokens,
            "anchor": dict(zip(self._parameters, self._anchor, strict=True)),
            "momentum": dict(zip(self._parameters, self._views(self._momentum), strict=True)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken. Load the model's and the sampler's states too.

        Anchor and momentum are the same on all ranks, so a state may be loaded at another world
        size: a round that was in progress then starts again from the anchor, which is written to
        the model's parameters.
        """
        check_state(self._name, state, _STATE_VERSION, OuterLoop.state_dict(self))
        same_world = state["world_size"] == self.world_size
        if same_world and state["rank"] != self.rank and state["inner_step"]:
            raise ValueError(
                f"the state was taken by rank {state['rank']} in the middle of a round, this is "
                f"rank {self.rank}: only states of the ends of rounds are common to all ranks"
            )
        for part in ("anchor", "momentum"):
            for name, anchor in zip(self._parameters, self._anchor, strict=True):
                saved = state[part].get(name)
                if saved is None or saved.shape != anchor.shape:
                    shape = "nothing" if saved is None else f"shape {tuple(saved.shape)}"
                    raise ValueError(
                        f"parameter {name!r} has shape {tuple(anchor.shape)}, the state's {part} "
                        f"has {shape}"
                    )
                if not saved.isfinite().all():
                    raise ValueError(f"the state's {part} of {name!r} has NaN or infinity")
        if more := state["anchor"].keys() - self._parameters.keys():
            raise ValueError(f"the state has parameters that the model has not: {sorted(more)}")
        self._load_views(self._anchor_flat, state["anchor"])
        self._load_views(self._momentum, state["momentum"])
        self._round = state["round"]
        self._total_tokens = state["total_tokens"]
        self._counts_tokens = state["counts_tokens"]
        self._steps = self._samples = self._tokens = 0
        if same_world and state["rank"] == self.rank:
            self._steps = state["inner_step"]
            self._samples = state["samples"]
            self._tokens = state["tokens"]
        elif not same_world:
            with torch.no_grad():
                for parameter, anchor in zip(self._parameters.values(), self._anchor, strict=True):
                    parameter.copy_(anchor)
        self._pending_reports = None
        self._failure = None
        self._started = True

    # Inner steps.

    def _forward(self, module: nn.Module, inputs: Any) -> None:
        # Inside a compiled model this traces to nothing; steps then count as compute as a whole.
        if not torch.compiler.is_compiling() and module.training:
            self._timer.forward()

    def _round_steps(self) -> int:
        return self._fixed_steps or (self._sampler.share.steps if self._sampler else 0)

    def _check_parameters(self) -> None:
        """Raise if something is trained that is not averaged: the ranks would drift apart."""
        known = {id(p) for p in self._parameters.values()}
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad and id(p) not in known:
                    names = [name for name, q in self.model.named_parameters() if q is p]
                    raise RuntimeError(
                        f"{self._name}, rank {self.rank}: parameter "
                        f"{names[0] if names else 'of shape ' + str(tuple(p.shape))!r} is trained "
                        f"but was frozen, or not there, when {self._name} was made, so it is not "
                        f"averaged: unfreeze and add parameters first, and make {self._name} again"
                    )

    def _step_done(self) -> None:
        if self._failure is not None:
            raise self._after_failure()
        if not self._steps:
            self._check_parameters()
        batch_size = self._sampler.step_done() if self._sampler is not None else 0
        self._timer.step(batch_size)
        self._steps += 1
        self._samples += batch_size
        steps = self._round_steps()
        if self._steps < steps:
            if self._steps >= _REPORT_AT * steps:
                self._send_report()
            return
        epoch = self._sampler.epoch if self._sampler is not None else None
        self._end_round()
        self._end_empty_rounds(epoch)

    def _end_empty_rounds(self, epoch: int | None) -> None:
        """Take part in the rounds of ``epoch`` in which this rank has no step.

        Not in those of the next epoch: the user may not want another.
        """
        sampler = self._sampler
        while (
            sampler is not None
            and sampler.epoch == epoch
            and sampler.shares
            and not sampler.share.steps
        ):
            self._end_round()

    # The round's end.

    @torch.no_grad()
    def _end_round(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        ready, ready_unix = time.monotonic(), time.time()
        self._measure()
        weight = self._tokens if self._counts_tokens else self._samples
        if self._sampler is None and not self._counts_tokens:
            weight = self._steps
        try:
            self._send_report()
            total, bytes_sent = self._reduce(weight)
            reports = self._receive_reports()
        except BaseException as error:
            self._failure = error
            raise
        # Nothing below can fail on one rank alone, short of its death: the round commits here.
        if total > 0:
            backend.extension().outer_step_(
                self._anchor,
                [p.detach() for p in self._parameters.values()],
                self._momentum,
                self._mean,
                self._outer_lr,
                self._outer_momentum,
            )
        self._committed()
        self._close_last_event(reports)
        event = RoundEvent(
            round=self._round,
            epoch=self._sampler.epoch if self._sampler is not None else None,
            rank=self.rank,
            inner_steps=self._steps,
            batch_size=self._sampler.share.batch_size if self._sampler is not None else 0,
            samples=self._samples,
            tokens=weight,
            total_tokens=total,
            loss=self._mean_loss(),
            compute_s=self._compute_s,
            data_wait_s=self._data_wait_s,
            begin=self._begin,
            ready=ready,
            end=time.monotonic(),
            ready_unix=ready_unix,
            bytes_sent=bytes_sent,
            fp32_bytes=4 * self._mean.numel(),
        )
        self.events.append(event)
        self._round += 1
        self._total_tokens += total
        self._steps = self._samples = self._tokens = 0
        self._compute_s = self._data_wait_s = 0.0
        if self._sampler is not None:
            self._sampler.round_done([report for _, report in reports])
        if self._on_round is not None:
            self._on_round(event)
        self.restart_clock()

    def _reduce(self, weight: int) -> tuple[int, int | None]:
        if self.world_size > 1:
            return self._exchange(weight)
        self._write_pseudo_gradient()
        for name, part in zip(self._parameters, self._views(self._mean), strict=True):
            if not part.isfinite().all():
                raise RuntimeError(
                    f"round {self._round}: the pseudo-gradient of {name!r} has NaN or infinity"
                )
        return weight, 0

    def _write_pseudo_gradient(self) -> None:
        parts = self._views(self._mean)
        for part, anchor, parameter in zip(
            parts, self._anchor, self._parameters.values(), strict=True
        ):
            part.copy_(parameter.detach())
            torch.sub(anchor, part, out=part)

    def _after_failure(self) -> RuntimeError:
        error = RuntimeError(
            f"round {self._round} failed ({self._failure}); parameters, anchor and momentum are as "
            f"before its exchange: go on from a checkpoint, or save one with state_dict()"
        )
        error.__cause__ = self._failure
        return error

    def _mean_loss(self) -> float | None:
        losses, self._losses = [float(loss) for loss in self._losses], []
        return sum(losses) / len(losses) if losses else None

    # Reports: what ranks tell each other once a round besides their pseudo-gradients.

    def _measure(self) -> None:
        for step in self._timer.take():
            self._compute_s += step.compute_s
            self._data_wait_s += step.wait_s
            if self._sampler is not None:
                self._sampler.observe(step.batch_size, step.compute_s, step.wait_s)

    def _send_report(self) -> None:
        if self._pending_reports is not None:
            return
        self._measure()
        last_ready = self.events[-1].ready_unix if self.events else 0.0
        report = self._sampler.report().to_list() if self._sampler is not None else []
        # Of a rank that has not stepped yet nobody knows whether it is going to count.
        counts = _COUNTS if self._counts_tokens else _COUNTS_NOT if self._steps else _UNKNOWN
        mine = torch.tensor([float(self._round), last_ready, counts, *report], dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        work = None
        if self.world_size > 1:
            work = dist.all_gather(everyone, mine, group=self._group, async_op=True)
        else:
            everyone = [mine]
        self._pending_reports = (work, everyone)

    def _receive_reports(self) -> list[tuple[float, RankReport]]:
        """Return each rank's ready time in the last round, and its report for the sampler."""
        assert self._pending_reports is not None
        work, everyone = self._pending_reports
        if work is not None:
            work.wait()
        self._pending_reports = None
        numbers = [tensor.tolist() for tensor in everyone]
        rounds = [int(n[0]) for n in numbers]
        if any(r != self._round for r in rounds):
            raise RuntimeError(
                f"the ranks are in different rounds: {rounds} (by rank); a round that failed on "
                f"some ranks only was not repeated by all"
            )
        counting, not_counting = (
            [rank for rank, n in enumerate(numbers) if n[2] == kind]
            for kind in (_COUNTS, _COUNTS_NOT)
        )
        if counting and not_counting:
            raise RuntimeError(
                f"ranks {counting} call count_tokens(), ranks {not_counting} do not: tokens and "
                f"samples can't be weighed against each other; call it on all ranks, before each "
                f"step, or on none"
            )
        if self._sampler is None:
            return [(n[1], RankReport(0.0, 0.0, 0.0, 1, 0)) for n in numbers]
        reports = [(n[1], RankReport.from_list(n[3:])) for n in numbers]
        self._sampler.check([report for _, report in reports])
        return reports

    def _close_last_event(self, reports: Sequence[tuple[float, RankReport]]) -> None:
        if not self.events or self.events[-1].straggler_wait_s is not None:
            return
        event = self.events[-1]
        ready = [at for at, _ in reports]
        last = max(range(len(ready)), key=ready.__getitem__)
        whole_s = event.end - event.ready
        event.straggler_wait_s = min(max(ready[last] - event.ready_unix, 0.0), whole_s)
        event.wan_wait_s = whole_s - event.straggler_wait_s
        event.waited_for = last if last != self.rank else None
        _log.info(
            "round %d: rank %d waited %.3f s for rank %d and %.3f s for bytes",
            event.round,
            self.rank,
            event.straggler_wait_s,
            last,
            event.wan_wait_s,
        )

    # The start.

    def _meet(self) -> None:
        """Compare what must be equal on all ranks; at the first start make the models equal."""
        if self.world_size == 1:
            if not self._started:
                self._copy_parameters_to_anchor()
                self._started = True
            return
        structure = [
            (name, tuple(p.shape), str(p.dtype), p.requires_grad)
            for name, p in self.model.named_parameters()
        ]
        checked = {
            "settings": zlib.crc32(repr(self._settings()).encode()),
            "model structure": zlib.crc32(repr(structure).encode()),
            "whether a state was loaded": int(self._started),
            "round": self._round,
            "anchor (the states loaded are of different moments)": (
                int(_hash([self._anchor_flat]), 16) >> 1 if self._started else 0
            ),
        }
        mine = torch.tensor(list(checked.values()))
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine, group=self._group)
        for row, what in enumerate(checked):
            values = [int(tensor[row]) for tensor in everyone]
            odd = [rank for rank, value in enumerate(values) if value != values[0]]
            if odd:
                raise ValueError(f"{self._name}: ranks 0 and {odd} differ in: {what}")
        if not self._started:
            self._broadcast_model()
            self._copy_parameters_to_anchor()
            self._started = True

    @torch.no_grad()
    def _broadcast_model(self) -> None:
        """Give all ranks rank 0's parameters and buffers; later on, buffers stay local."""
        tensors = [t.detach() for t in (*self.model.parameters(), *self.model.buffers())]
        source = dist.get_global_rank(self._group, 0) if self._group is not None else 0
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            alike = [t for t in tensors if t.dtype == dtype]
            flat = torch.cat([t.reshape(-1).cpu() for t in alike])
            dist.broadcast(flat, src=source, group=self._group)
            for tensor, part in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([p.numel() for p in self._parameters.values()])
        shapes = [p.shape for p in self._parameters.values()]
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _load_views(self, flat: Tensor, saved: dict[str, Tensor]) -> None:
        for name, part in zip(self._parameters, self._views(flat), strict=True):
            part.copy_(saved[name])

    def _copy_parameters_to_anchor(self) -> None:
        for anchor, parameter in zip(self._anchor, self._parameters.values(), strict=True):
            anchor.copy_(parameter.detach())

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    def _trainable(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, nn.Parameter]:
        """Return the parameters that take part, tied ones once; refuse what can't work."""
        self._refuse_wrappers(model, optimizer)
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not parameters:
            raise ValueError(f"{self._name}: the model has no parameter that requires a gradient")
        devices = sorted({str(p.device) for p in parameters.values()})
        if len(devices) > 1:
            raise ValueError(f"{self._name}: parameters lie on several devices: {devices}")
        for name, p in parameters.items():
            if isinstance(p, nn.parameter.UninitializedParameter):
                raise ValueError(
                    f"{self._name}: parameter {name!r} is lazy and has no shape yet: run the "
                    f"model once before"
                )
            if p.is_sparse or p.layout != torch.strided:
                raise ValueError(f"{self._name}: parameter {name!r} is sparse: not supported")
            if p.is_meta:
                raise ValueError(f"{self._name}: parameter {name!r} has no data (meta device)")
            if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(
                    f"{self._name}: parameter {name!r} is {p.dtype}: only float32, bfloat16 and "
                    f"float16 are supported"
                )
        held = {id(p) for p in model.parameters()}
        if any(id(p) not in held for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"{self._name}: the optimizer has parameters that are not the model's; they would "
                f"drift apart on the ranks"
            )
        self._refuse_overlap(parameters)
        return parameters

    def _refuse_wrappers(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                raise ValueError(
                    f"{self._name}: the model is wrapped in DistributedDataParallel, which "
                    f"averages gradients every step; pass the plain model, or use DDP with "
                    f"sign_hook instead"
                )
            if type(module).__name__ == "FullyShardedDataParallel":
                raise ValueError(
                    f"{self._name}: FullyShardedDataParallel models are not supported yet: each "
                    f"rank must hold whole parameters"
                )
        if any(hasattr(p, "device_mesh") for p in model.parameters()):
            raise ValueError(
                f"{self._name}: DTensor parameters (FSDP2, tensor parallel) are not supported "
                f"yet: each rank must hold whole parameters"
            )
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise ValueError(
                f"{self._name}: ZeroRedundancyOptimizer shares its state between ranks every "
                f"step; use a plain optimizer"
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"{self._name}: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
            )

    def _refuse_overlap(self, parameters: dict[str, nn.Parameter]) -> None:
        spans = sorted(
            (p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name)
            for name, p in parameters.items()
            if p.numel() and p.is_contiguous()
        )
        for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
            if begin < end:
                raise ValueError(
                    f"{self._name}: parameters {name!r} and {other!r} share memory but are not the "
                    f"same Parameter: tie weights by assigning the Parameter itself"
                )


def _hash(tensors: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    return digest.hexdigest()
