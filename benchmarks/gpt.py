"""GPT-2's smallest model, 124 M parameters, in plain torch; untrained, for timing training steps.

Shapes: B sequences, H heads, T positions, D width, K width of a head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    """By default GPT-2's smallest (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019)."""

    num_layers: int = 12
    width: int = 768
    num_heads: int = 12
    vocabulary: int = 50257
    context: int = 1024


class GPT(nn.Module):
    """Reads tokens [B, T] (int64), returns logits [B, T, vocabulary]; embedding and output share their weights."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Parameter(torch.zeros(size.context, size.width))
        self.layers = nn.Sequential(*(Layer(size.width, size.num_heads) for _ in range(size.num_layers)))
        self.norm = nn.LayerNorm(size.width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        x_btd = self.tokens(tokens_bt) + self.positions[: tokens_bt.shape[1]]
        return F.linear(self.norm(self.layers(x_btd)), self.tokens.weight)


class Layer(nn.Module):
    """Causal self-attention, then a feed-forward network; [B, T, D] in and out."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x_btd: Tensor) -> Tensor:
        split = self.query_key_value(self.attention_norm(x_btd)).unflatten(-1, (3, self.num_heads, -1))
        query_bhtk, key_bhtk, value_bhtk = split.permute(2, 0, 3, 1, 4)
        mixed_bhtk = F.scaled_dot_product_attention(query_bhtk, key_bhtk, value_bhtk, is_causal=True)
        x_btd = x_btd + self.attention_out(mixed_bhtk.transpose(1, 2).flatten(-2))
        x_btd = x_btd + self.feed_forward(x_btd)
        return x_btd
