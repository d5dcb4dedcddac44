"""Pipeline schedules of torch.distributed.pipelining over the backend's sends and receives.

Losses and gradients are those of the whole model in one process.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

STAGES = 4
MICROBATCHES = 6
ONE_STAGE_A_RANK = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
IN_A_LOOP = {  # rank r has stages r, r + world, ...
    "interleaved": ScheduleInterleaved1F1B,
    "breadth first": ScheduleLoopedBFS,
    "zero bubble": ScheduleInterleavedZeroBubble,
}
THERE_AND_BACK = {  # the first rank has the first stage and the last
    "zero bubble V": ScheduleZBVZeroBubble,
    "dual pipe V": ScheduleDualPipeV,
}
SEVERAL_STAGES = IN_A_LOOP | THERE_AND_BACK


def parts() -> list[nn.Module]:
    """Return the stages, of different widths: each sends tensors of another size."""
    torch.manual_seed(0)
    widths = [5, 8, 3, 11, 2]
    return [
        nn.Sequential(nn.Linear(widths[i], widths[i + 1]), nn.Tanh()).double()
        for i in range(STAGES)
    ]


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    rows = 2 * MICROBATCHES
    return (
        torch.randn(rows, 5, generator=generator, dtype=torch.float64),
        torch.randn(rows, 2, generator=generator, dtype=torch.float64),
    )


def pipeline(name: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = [rank, STAGES - 1 - rank] if name in THERE_AND_BACK else range(rank, STAGES, world)
    models = {index: part for index, part in enumerate(parts()) if index in mine}
    stages = [
        PipelineStage(model, index, STAGES, torch.device("cpu")) for index, model in models.items()
    ]
    schedule = (ONE_STAGE_A_RANK | SEVERAL_STAGES)[name](
        stages if name in SEVERAL_STAGES else stages[0],
        n_microbatches=MICROBATCHES,
        loss_fn=nn.functional.mse_loss,
    )
    whole = nn.Sequential(*parts())
    for step in range(2):  # the second with weights that the first has changed
        x, y = data(step)
        losses: list[torch.Tensor] = []
        last = STAGES - 1 in mine
        out = schedule.step(
            *([x] if 0 in mine else []),
            **({"target": y, "losses": losses} if last else {}),
        )
        want = whole(x)
        loss = nn.functional.mse_loss(want, y)
        loss.backward()
        if last:
            torch.testing.assert_close(out, want)
            torch.testing.assert_close(torch.stack(losses).mean(), loss)
            assert len(losses) == MICROBATCHES
        for index, model in models.items():
            pairs = zip(model.parameters(), whole[index].parameters(), strict=True)
            for ours, alone in pairs:
                torch.testing.assert_close(ours.grad, alone.grad)
        for module in (whole, *models.values()):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= 0.1 * parameter.grad
            module.zero_grad()


def one_stage_a_rank() -> None:
    pipeline("gpipe")
    pipeline("1f1b")


def schedules_that_split_the_backward_pass_or_go_by_stage() -> None:
    for name in SEVERAL_STAGES:
        if name != "interleaved":  # which has a test of its own
            pipeline(name)


def test_gpipe_and_1f1b() -> None:
    run_ranks(4, one_stage_a_rank)


def test_interleaved() -> None:
    run_ranks(2, pipeline, "interleaved")


def test_zero_bubble_breadth_first_and_v_shaped_schedules() -> None:
    run_ranks(2, schedules_that_split_the_backward_pass_or_go_by_stage)
