"""Hugging Face Accelerate and PyTorch Lightning train over geomesh when told so by their switches.

Ranks have torchrun's environment, so both take them as started by it. The result is that of the
same training in one process; with the sign hook it is a like one, and the bytes are counted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from ranks import run_ranks
from small_model import batch, make_model, reference, sgd, together, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_geomesh as gm
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


WIDTH = 256
PARAMETERS = WIDTH * WIDTH + WIDTH
FULL_BYTES = 4 * PARAMETERS  # of one rank's gradients in fp32; two ranks send each other as much
HOOKED_STEPS = 2


def wide_model() -> nn.Linear:
    """Return a model whose gradients are more than what else an exchange sends."""
    torch.manual_seed(2)
    return nn.Linear(WIDTH, WIDTH)


def wide_data(rank: int) -> TensorDataset:
    """Return the same batch for each step, so that losses can be compared."""
    generator = torch.Generator().manual_seed(40 + rank)
    x, y = (torch.randn(8, WIDTH, generator=generator) for _ in range(2))
    return TensorDataset(x.repeat(HOOKED_STEPS, 1), y.repeat(HOOKED_STEPS, 1))


def bytes_sent() -> int:
    """Return the bytes that this rank has sent to others."""
    dist.barrier()  # all that was called before has been sent
    return sum(peer["bytes_sent"] for peer in gm.stats())


def check_hooked(
    sent: dict[str, int],
    losses: dict[str, list[float]],
    ends: dict[str, list[torch.Tensor]],
    state: gm.SignHookState,
) -> None:
    """Compare a training with the sign hook with the same one without."""
    full = HOOKED_STEPS * FULL_BYTES
    assert full <= sent["plain"] < 1.1 * full, sent
    # A bit an element is a 32nd, and no exchange of full gradients hides beside it.
    assert full / 40 < sent["hooked"] < full / 20, sent
    assert state.step == HOOKED_STEPS
    assert 0 < state.bytes_sent <= sent["hooked"]
    for kind in ("plain", "hooked"):
        assert len(losses[kind]) == HOOKED_STEPS
        assert losses[kind][1] < losses[kind][0], losses
    assert losses["hooked"][0] == losses["plain"][0]  # from the same weights
    assert losses["hooked"][1] != losses["plain"][1]
    for kind, mine in ends.items():
        everyone = [torch.empty_like(mine[0]) for _ in range(2)]
        dist.all_gather(everyone, mine[0])
        assert torch.equal(*everyone), f"{kind}: the ranks' weights differ"


def accelerate_hooked() -> None:
    from accelerate import Accelerator
    from accelerate.utils import (
        DistributedDataParallelKwargs,
        broadcast_object_list,
        gather_object,
    )

    dist.init_process_group("geomesh")
    # Its comm_hook is one of an enumeration: another hook is registered on the prepared model.
    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    state = gm.SignHookState()
    sent, losses, ends = {}, {}, {}
    for kind in ("plain", "hooked"):
        accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
        rank = accelerator.process_index
        plain = wide_model()
        model, optimizer = accelerator.prepare(plain, sgd(plain))
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        if kind == "hooked":
            model.register_comm_hook(state, gm.sign_hook)
        before = bytes_sent()
        losses[kind] = []
        for x, y in DataLoader(wide_data(rank), batch_size=8):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[kind].append(loss.item())
        sent[kind] = bytes_sent() - before
        ends[kind] = weights(accelerator.unwrap_model(model))
        accelerator.wait_for_everyone()
    assert gather_object([{"rank": rank}]) == [{"rank": 0}, {"rank": 1}]
    assert broadcast_object_list([f"from {rank}"], from_process=1) == ["from 1"]
    check_hooked(sent, losses, ends, state)


def lightning_hooked() -> None:
    import logging

    import lightning.pytorch as pl
    from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
    from lightning.pytorch.strategies import DDPStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class OnCpuToo(DDPStrategy):
        """Lightning leaves hooks out where the device is no GPU; all else is as there."""

        def _register_ddp_hooks(self) -> None:
            assert isinstance(self.model, nn.parallel.DistributedDataParallel)
            _register_ddp_comm_hook(
                self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper
            )

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = wide_model()
            self.losses: list[float] = []
            self.sent = 0

        def on_train_start(self) -> None:
            self.sent = -bytes_sent()

        def on_train_end(self) -> None:
            self.sent += bytes_sent()

        def training_step(self, pair, index):
            loss = nn.functional.mse_loss(self.model(pair[0]), pair[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return sgd(self)

    state = gm.SignHookState()  # before there is a group: the strategy makes it
    sent, losses, ends = {}, {}, {}
    for kind in ("plain", "hooked"):
        hook = {"ddp_comm_state": state, "ddp_comm_hook": gm.sign_hook} if kind == "hooked" else {}
        module = Module()
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=OnCpuToo(process_group_backend="geomesh", **hook),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        rank = trainer.strategy.cluster_environment.global_rank()
        trainer.fit(module, DataLoader(wide_data(rank), batch_size=8))
        assert trainer.global_step == HOOKED_STEPS
        sent[kind], losses[kind], ends[kind] = module.sent, module.losses, weights(module.model)
    trainer.strategy.barrier("done")
    gathered: list[object] = [None, None]
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": 0}, {"rank": 1}]
    at_root: list[object] | None = [None, None] if rank == 0 else None
    dist.gather_object(f"from {rank}", at_root)
    assert at_root == (["from 0", "from 1"] if rank == 0 else None)
    assert trainer.strategy.broadcast(f"from {rank}", src=1) == "from 1"
    check_hooked(sent, losses, ends, state)


def test_accelerate() -> None:
    under_torchrun(accelerate)


def test_lightning() -> None:
    under_torchrun(lightning)


def test_accelerate_trains_with_the_sign_hook() -> None:
    under_torchrun(accelerate_hooked)


def test_lightning_trains_with_the_sign_hook() -> None:
    under_torchrun(lightning_hooked)
