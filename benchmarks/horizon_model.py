"""The demo's GPT for many replicas at once: a bmm instead of each linear layer.

Shapes: R replicas, N elements of the parameters of one replica, B sequences, T positions, M = B T, D model width.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from torchbagua.cli.demo.model import GPT, VOCABULARY
from torchbagua.cli.demo.train import CONTEXT

NUM_HEADS = 4


@dataclass(frozen=True)
class Parameter:
    """A parameter of one replica, in the columns `start` to `stop` of the flat weights [R, N]."""

    name: str
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()

    @property
    def kind(self) -> str:
        """The name without the layer's number."""
        return _kind(self.name)

    @property
    def is_hidden(self) -> bool:
        """Whether this is a matrix in a layer."""
        return len(self.shape) == 2 and self.name.startswith("layers")


def _kind(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith("layers") else name


def _order(item: tuple[str, Tensor]) -> tuple[int, str]:
    """Order hidden matrices first, by kind, then the embedding, then the norms: see `StackedGPT.num_hidden`."""
    name, value = item
    is_hidden = value.ndim == 2 and not name.startswith("embedding")
    return (0 if is_hidden else 1 if value.ndim == 2 else 2, _kind(name))


class StackedGPT:
    """Computes the losses of R replicas of a GPT from their flat weights [R, N].

    Attributes:
        parameters: the parameters of a replica, in the order of the flat weights.
        num_elements: N.
        num_hidden: the number of elements of the matrices in the layers, which are the first columns.
    """

    def __init__(self, width: int, num_layers: int) -> None:
        self.width, self.num_layers = width, num_layers
        self.parameters: list[Parameter] = []
        start = 0
        for name, value in sorted(self._gpt(0).named_parameters(), key=_order):
            self.parameters.append(Parameter(name, value.shape, start))
            start += value.numel()
        self.num_elements = start
        self.num_hidden = sum(parameter.shape.numel() for parameter in self.hidden_parameters)

    @property
    def hidden_parameters(self) -> list[Parameter]:
        """The matrices in the layers, in order."""
        return [parameter for parameter in self.parameters if parameter.is_hidden]

    def hidden_kinds(self) -> Iterator[tuple[int, int, torch.Size]]:
        """Yield the first column, the number of layers and the shape of each kind of matrix."""
        for _, group in groupby(self.hidden_parameters, key=lambda parameter: parameter.kind):
            parameters = list(group)
            yield parameters[0].start, len(parameters), parameters[0].shape

    def _gpt(self, seed: int) -> GPT:
        torch.manual_seed(seed)
        return GPT(width=self.width, num_layers=self.num_layers, num_heads=NUM_HEADS)

    def initial_weights(self, seed: int) -> Tensor:
        """Return the flat weights [N] of a GPT that is created after `torch.manual_seed(seed)`."""
        return self.flatten(self._gpt(seed))

    def flatten(self, gpt: GPT) -> Tensor:
        """Return the weights of a GPT as [N]."""
        values = dict(gpt.named_parameters())
        return torch.cat([values[parameter.name].detach().flatten() for parameter in self.parameters])

    def views(self, flat_rn: Tensor) -> list[Tensor]:
        """Return a view [R, ...] of the flat weights for each parameter."""
        return [
            flat_rn[:, parameter.start : parameter.stop].unflatten(1, parameter.shape) for parameter in self.parameters
        ]

    def losses(self, views: Sequence[Tensor], windows_rbt: Tensor) -> Tensor:
        """Return the mean loss [R] of each replica on its token windows [R, B, T + 1]."""
        named = {parameter.name: view for parameter, view in zip(self.parameters, views, strict=True)}
        inputs_rbt, targets_rbt = windows_rbt[..., :-1], windows_rbt[..., 1:]
        num_replicas, num_sequences, length = inputs_rbt.shape
        embedding_rvd = named["embedding.weight"]

        def norm(x_rmd: Tensor, name: str) -> Tensor:
            weight_rd, bias_rd = named[f"{name}.weight"], named[f"{name}.bias"]
            return torch.addcmul(bias_rd[:, None], F.layer_norm(x_rmd, x_rmd.shape[-1:]), weight_rd[:, None])

        def linear(x_rmd: Tensor, name: str) -> Tensor:
            return torch.bmm(x_rmd, named[f"{name}.weight"].mT)

        def attention(x_rmd: Tensor, name: str) -> Tensor:
            heads = (num_replicas * num_sequences, length, 3, NUM_HEADS, -1)
            query_key, value = linear(x_rmd, f"{name}.query_key_value").view(heads).split((2, 1), dim=2)
            query, key = _rotate(query_key).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(query, key, value.squeeze(2).transpose(1, 2), is_causal=True)
            mixed_rmd = mixed.transpose(1, 2).reshape(num_replicas, num_sequences * length, -1)
            return linear(mixed_rmd, f"{name}.attention_out")

        indices_rm1 = inputs_rbt.reshape(num_replicas, -1, 1)
        x_rmd = embedding_rvd.gather(1, indices_rm1.expand(-1, -1, embedding_rvd.shape[-1]))
        x_rmd = norm(x_rmd, "input_norm")
        for layer in range(self.num_layers):
            name = f"layers.{layer}"
            x_rmd = x_rmd + attention(norm(x_rmd, f"{name}.attention_norm"), name)
            hidden = F.gelu(linear(norm(x_rmd, f"{name}.feed_forward.0"), f"{name}.feed_forward.1"))
            x_rmd = x_rmd + linear(hidden, f"{name}.feed_forward.3")
        logits_rmv = torch.bmm(norm(x_rmd, "output_norm"), embedding_rvd.mT)
        losses = F.cross_entropy(logits_rmv.flatten(0, 1), targets_rbt.reshape(-1), reduction="none")
        return losses.view(num_replicas, -1).mean(1)

    def step_flops(self, num_sequences: int) -> float:
        """Return the operations of a forward and a backward pass of one replica."""
        matrices = self.num_hidden + VOCABULARY * self.width
        attention = 4 * self.num_layers * CONTEXT * self.width  # per token; torch computes no masked half of it
        return 3 * 2 * num_sequences * CONTEXT * (matrices + attention / 2)


@functools.cache
def _angles(length: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines [T, 1, 1, head width / 2] of `rotate_by_position` of the demo's model."""
    frequencies = torch.logspace(0, 2 / head_width - 1, head_width // 2, base=10_000)
    angles = torch.outer(torch.arange(length), frequencies)[:, None, None]
    return angles.cos().to(device), angles.sin().to(device)


def _rotate(x: Tensor) -> Tensor:
    """Rotate queries and keys [R B, T, 2, heads, head width], as `rotate_by_position` of the demo's model does."""
    cosine, sine = _angles(x.shape[1], x.shape[-1], x.device)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
