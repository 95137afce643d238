"""The model: a decoder-only transformer over bytes, in plain PyTorch (GPT-2, Radford et al., 2019).

Two models made from one size and seed are equal to the bit, whatever the device they are moved to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tierstore.demo.options import HEAD_WIDTH

BYTES = 256


@dataclass(frozen=True, slots=True)
class Size:
    """Width is a multiple of HEAD_WIDTH; context is the longest run of bytes the model can be shown."""

    width: int
    layers: int
    context: int


class ByteTransformer(nn.Module):
    """Bytes (batch, length) to the logits of the byte after each (batch, length, 256)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(BYTES, size.width)
        self.position_embedding = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict. `tokens` are int64, at most `context` long."""
        hidden: Tensor = self.byte_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class Block(nn.Module):
    """Attention to what came before, then a layer on each position by itself; both add to what they were given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Shapes (batch, length, width)."""
        hidden = hidden + self.attention_out(self._attend(self.attention_in(self.attention_norm(hidden))))
        update: Tensor = self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(hidden))))
        return hidden + update

    def _attend(self, joined: Tensor) -> Tensor:
        batch, length, triple = joined.shape
        heads = triple // 3 // HEAD_WIDTH
        query, key, value = joined.view(batch, length, 3, heads, HEAD_WIDTH).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, length, triple // 3)


def make_model(size: Size, *, seed: int, device: torch.device) -> ByteTransformer:
    """Make the model of a seed; the global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ByteTransformer(size)
        _initialise(model, size.layers)
    return model.to(device)


def _initialise(model: ByteTransformer, layers: int) -> None:
    """GPT-2's way, what adds to the residual scaled by its depth; embeddings larger, which learns faster at first."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            continue
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif "embedding" in name:
            nn.init.normal_(parameter, std=0.1)
        else:
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if "_out." in name else 0.02)
