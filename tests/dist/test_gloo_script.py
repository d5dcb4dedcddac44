"""A script made for Gloo says "geomesh" instead: the same losses and weights come out of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCABULARY, LENGTH = 17, 12


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.place = nn.Parameter(torch.zeros(LENGTH, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.embed(tokens) + self.place[: tokens.shape[1]]
        return self.head(self.block(hidden, src_mask=mask, is_causal=True))


def script(backend: str) -> dict[str, Any]:
    """Train, as a script under torchrun does."""
    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # DDP brings rank 0's weights to all
    model = DistributedDataParallel(LanguageModel(), bucket_cap_mb=0.004)
    # With a small eps, Adam would make steps of rounding noise where gradients are zero.
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, eps=1e-4)
    starts = torch.arange(48)[:, None]
    text = (starts * 5 + torch.arange(LENGTH + 1) ** 2) % VOCABULARY
    dataset = TensorDataset(text)
    sampler = DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=12 // world, sampler=sampler)
    losses, norms = [], []
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for (tokens,) in loader:
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / world)
    accuracy = [None] * world
    dist.all_gather_object(accuracy, (logits.argmax(-1) == tokens[:, 1:]).float().mean().item())
    dist.barrier()
    weights = {name: value.tolist() for name, value in model.module.state_dict().items()}
    dist.destroy_process_group()
    return {"losses": losses, "norms": norms, "accuracy": accuracy, "weights": weights}


def run(world: int, backend: str) -> list[dict[str, Any]]:
    # As under torchrun: the store runs already.
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    return run_ranks(world, script, backend, initialize=False, environment=environment)


@pytest.mark.parametrize("world", [1, 3])
def test_a_script_for_gloo(world: int) -> None:
    gloo, ours = run(world, "gloo"), run(world, "geomesh")
    assert ours[0]["losses"][-1] < ours[0]["losses"][0] - 0.3  # it learned something
    if world == 1:
        assert ours == gloo  # bit for bit
        return
    for rank in range(world):
        assert ours[rank]["losses"] == pytest.approx(gloo[rank]["losses"], rel=1e-4)
        assert ours[rank]["norms"] == pytest.approx(gloo[rank]["norms"], rel=1e-3)
        for name, value in gloo[rank]["weights"].items():
            got = torch.tensor(ours[rank]["weights"][name])
            torch.testing.assert_close(got, torch.tensor(value), rtol=1e-3, atol=1e-4)
        assert ours[rank] == ours[0]  # bit for bit between ranks
