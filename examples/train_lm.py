"""A whole training script: a small byte-level language model on any text, across regions.

On one machine, three ranks:

    torchrun --nproc-per-node 3 examples/train_lm.py --text README.md

In several regions, on one machine of each (the first one's address after --master-addr):

    GEOMESH_REGION=eastus torchrun --nnodes 3 --node-rank 0 --nproc-per-node 1 \
        --master-addr 10.0.0.1 --master-port 29500 examples/train_lm.py --text corpus.txt

What makes it a GeoMesh script are the five lines marked with <<<.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import torch_geomesh as gm


class Bytes(Dataset[Tensor]):
    """A text as overlapping windows of bytes, each one longer than the context."""

    def __init__(self, text: bytes, context: int) -> None:
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return max(0, (len(self.data) - 1) // self.context)

    def __getitem__(self, index: int) -> Tensor:
        begin = index * self.context
        return self.data[begin : begin + self.context + 1].long()


class Model(nn.Module):
    """Two transformer layers over bytes."""

    def __init__(self, context: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next byte; ``tokens`` is (batch, context)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.layers(x, mask=mask, is_causal=True))


def main() -> None:
    """Train for some epochs and print the loss of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="any file, such as README.md")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--max-batch-size", type=int, default=8)
    args = parser.parse_args()

    dist.init_process_group("geomesh")  # <<<
    torch.manual_seed(0)
    model = Model(args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = Bytes(args.text.read_bytes(), args.context)
    sampler = gm.GeoMeshSampler(dataset, max_batch_size=args.max_batch_size, seed=0)  # <<<
    loader = DataLoader(dataset, batch_sampler=sampler)  # <<<
    with gm.GeoMesh(model, optimizer, sampler=sampler, outer_lr=0.7, outer_momentum=0.9):  # <<<
        for epoch in range(args.epochs):
            total = torch.zeros(2)
            for batch in loader:
                logits = model(batch[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                total += torch.tensor([loss.item() * len(batch), len(batch)])
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: loss {total[0] / total[1]:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
