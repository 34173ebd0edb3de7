"""A byte-level GPT: the model that the demo trains.

Shapes: B sequences, H heads, T positions, D model width, K head width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
"""Every byte is a token, so no tokenizer is needed."""


class GPT(nn.Module):
    """Predicts the next byte from the bytes before it.

    Reads tokens [B, T] (int64), returns logits [B, T, vocabulary]. The output layer shares the embedding's weights.
    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019, with rotary positions.
    In so short a training they learn far more than learned position embeddings.
    """

    def __init__(self, *, width: int, num_layers: int, num_heads: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.input_norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(Layer(width, num_heads) for _ in range(num_layers)))
        self.output_norm = nn.LayerNorm(width)
        self.apply(_initialise)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        x_btd = self.layers(self.input_norm(self.embedding(tokens_bt)))
        return F.linear(self.output_norm(x_btd), self.embedding.weight)


class Layer(nn.Module):
    """One transformer layer: causal self-attention, then a feed-forward network; [B, T, D] in and out."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x_btd: Tensor) -> Tensor:
        split = (3, self.num_heads, -1)
        query_bhtk, key_bhtk, value_bhtk = (
            self.query_key_value(self.attention_norm(x_btd)).unflatten(-1, split).permute(2, 0, 3, 1, 4)
        )
        mixed_bhtk = F.scaled_dot_product_attention(
            rotate_by_position(query_bhtk), rotate_by_position(key_bhtk), value_bhtk, is_causal=True
        )
        x_btd = x_btd + self.attention_out(mixed_bhtk.transpose(1, 2).flatten(-2))
        x_btd = x_btd + self.feed_forward(x_btd)
        return x_btd


def rotate_by_position(x_bhtk: Tensor) -> Tensor:
    """Rotates pairs of elements by angles proportional to the position, so that attention sees relative distances.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equation 34.
    """
    length, width = x_bhtk.shape[-2:]
    frequencies = torch.logspace(0, 2 / width - 1, width // 2, base=10_000, device=x_bhtk.device)
    angles = torch.outer(torch.arange(length, device=x_bhtk.device), frequencies)
    cosine, sine = angles.cos(), angles.sin()
    first, second = x_bhtk.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.05)
