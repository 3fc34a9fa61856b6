"""A small GPT in plain `torch.nn`: pre-norm blocks, learned positions, tied embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from bench.demo.settings import Settings

NUM_BYTES = 256  # the vocabulary: every byte is a token


class Attention(nn.Module):
    """Causal self-attention with several heads.

    Args:
        width: Features of a token.
        num_heads: Heads; divides `width`.
        dropout: Share of attention weights and of outputs that are dropped in training.
    """

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[batch, token, feature]` to the same shape."""
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        merged = mixed.transpose(1, 2).reshape(batch, length, width)
        dropped: torch.Tensor = self.drop(self.out(merged))
        return dropped


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each beside a residual path."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[batch, token, feature]` to the same shape."""
        x = x + self.attention(self.norm_attention(x))
        out: torch.Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class GPT(nn.Module):
    """A byte-level language model."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.tokens = nn.Embedding(NUM_BYTES, width)
        self.positions = nn.Embedding(settings.context, width)
        self.drop = nn.Dropout(settings.dropout)
        self.blocks = nn.Sequential(
            *(Block(width, settings.num_heads, settings.dropout) for _ in range(settings.layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight  # tied: stored once, and tied after a load

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Give the logits of the next byte, `[batch, token, 256]`, for `[batch, token]`."""
        places = torch.arange(tokens.shape[1])
        x = self.drop(self.tokens(tokens) + self.positions(places))
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits
