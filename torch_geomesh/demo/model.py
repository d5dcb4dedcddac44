"""A byte-level GPT of about one million parameters, small enough for one CPU thread.

Knows nothing of regions, speeds or communication.  ``GPT.blocks`` is the list of transformer
blocks, which ``speeds.Pacer`` hooks.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Shape of the model; the defaults give 1.1 M parameters."""

    context: int = 64
    width: int = 192
    layers: int = 2
    heads: int = 6


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then a GELU feed-forward."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        # A byte says little; the two before it come along, so that no layer spends its first
        # thousand steps on learning to look one place back.
        self.bytes = nn.ModuleList(nn.Embedding(VOCABULARY, config.width) for _ in range(3))
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        # Residual branches start small, so that depth does not change the scale of the stream.
        for block in self.blocks:
            assert isinstance(block, Block)
            for layer in (block.project, block.contract):
                nn.init.normal_(layer.weight, std=0.02 / (2 * self.config.layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) bytes to (batch, length, 256) logits."""
        x = self.positions.weight[: tokens.shape[1]]
        for back, table in enumerate(self.bytes):
            x = x + table(F.pad(tokens, (back, -back)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(config: GPTConfig, seed: int) -> GPT:
    """Return a model whose weights depend on `seed` only, so every rank and arm starts alike."""
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = GPT(config)
    torch.set_rng_state(generator_state)
    return model


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats a byte, of `targets` given `inputs`."""
    logits = model(inputs)
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))
