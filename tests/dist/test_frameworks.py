"""Hugging Face Accelerate and PyTorch Lightning train over geomesh when told so by their switches.

Ranks have torchrun's environment, so both take them as started by it. The result is that of the
same training in one process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from ranks import run_ranks
from small_model import batch, make_model, reference, sgd, together, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_geomesh.backend import backend_of

STEPS = 3


def under_torchrun(function: Callable[[], None]) -> None:
    common = {
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "OMP_NUM_THREADS": "1",
    }
    run_ranks(
        2,
        function,
        initialize=False,
        environment=common,
        per_rank_environment=[{"LOCAL_RANK": str(rank)} for rank in range(2)],
    )


def loader() -> DataLoader:
    """Return a loader of both ranks' batches in turns, as Accelerate deals them out."""
    x, y = zip(*(together(2, step) for step in range(STEPS)), strict=True)
    return DataLoader(TensorDataset(torch.cat(x), torch.cat(y)), batch_size=4)


def accelerate() -> None:
    from accelerate import Accelerator

    dist.init_process_group("geomesh")
    # On CPUs it refuses InitProcessGroupKwargs(backend=...) for all but Gloo, and takes a group
    # that is there.
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    assert backend_of() is not None
    plain = make_model()
    model, optimizer, batches = accelerator.prepare(plain, sgd(plain), loader())
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    seen = 0
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        gathered = accelerator.gather_for_metrics(x)
        seen += len(gathered)
    assert seen == 2 * 4 * STEPS
    mean = accelerator.reduce(torch.tensor([float(accelerator.process_index)]), "mean")
    assert mean.item() == 0.5
    accelerator.wait_for_everyone()
    torch.testing.assert_close(weights(accelerator.unwrap_model(model)), reference(2, STEPS))


def lightning() -> None:
    import logging

    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, pair, index):
            assert backend_of() is not None
            loss = nn.functional.mse_loss(self.model(pair[0]), pair[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return sgd(self)

    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="geomesh"),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # it would shuffle
    )
    rank = trainer.strategy.cluster_environment.global_rank()
    x, y = zip(*(batch(rank, step) for step in range(STEPS)), strict=True)
    trainer.fit(module, DataLoader(TensorDataset(torch.cat(x), torch.cat(y)), batch_size=4))
    assert trainer.world_size == 2
    assert trainer.global_step == STEPS
    torch.testing.assert_close(weights(module.model), reference(2, STEPS))


def test_accelerate() -> None:
    under_torchrun(accelerate)


def test_lightning() -> None:
    under_torchrun(lightning)
