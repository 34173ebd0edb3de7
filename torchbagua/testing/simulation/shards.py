"""Sharded modules in a simulation: gathers and reduce-scatters rows as FSDP2 does, which cannot be simulated."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from torchbagua.codecs.base import MeanCodecs, TensorSpec
from torchbagua.collectives.exact_gather import ExactGather
from torchbagua.collectives.row_gather import RowGather
from torchbagua.collectives.row_mean import RowMean
from torchbagua.fsdp.collectives import GatherRunner
from torchbagua.fsdp.comm_runner import FsdpCommRunner
from torchbagua.fsdp.parts import CommunicatingPart, Row
from torchbagua.fsdp.same_rows import SameRows
from torchbagua.runtime.runner import Runner
from torchbagua.testing.simulation.ddp import Compute


class SimulatedShards:
    """The rows of a module's parts, of which every rank stores one, and gathers the others when it needs them.

    Forward gathers the weights of a part. Backward gathers them again, and reduce-scatters the gradients when the last
    one of the part is ready.

    Attributes:
        shards: this rank's row of each part, which an optimizer steps.
    """

    def __init__(
        self,
        parts: Sequence[torch.nn.Module],
        runner: Runner,
        codecs: MeanCodecs,
        compute: Compute,
        *,
        quantizes_weights: bool,
        backward_s: Callable[[torch.nn.Parameter], float] = lambda parameter: 0.0,
    ) -> None:
        communication = FsdpCommRunner(runner)
        gathers = None
        if not quantizes_weights:
            gathers = GatherRunner(communication.group, communication.failure)
            runner.on_close(gathers.close, first=True)
        named = [
            CommunicatingPart(number, part, None, f"part {number}", [name for name, _ in part.named_parameters()])
            for number, part in enumerate(parts)
        ]
        same_rows = SameRows(communication.group.world, named)
        self._parts = [_Part(part, communication, same_rows, gathers, codecs, compute, backward_s) for part in named]
        self.shards = [part.shard for part in self._parts]
        for part in self._parts:
            for hook in part.hooks:
                runner.on_close(hook.remove)

    def gather(self) -> None:
        """Gather the weights of all parts. Collective."""
        for part in self._parts:
            part.gather()


class _Part:
    def __init__(
        self,
        part: CommunicatingPart,
        communication: FsdpCommRunner,
        same_rows: SameRows,
        gathers: GatherRunner | None,
        codecs: MeanCodecs,
        compute: Compute,
        backward_s: Callable[[torch.nn.Parameter], float],
    ) -> None:
        self._communication = communication
        self._same_rows = same_rows
        self._gathers = gathers
        self._part = part
        self._name = part.label
        module = part.part
        self._parameters = list(module.parameters())
        group = communication.group
        self._size = group.size
        self._lengths = [-(-parameter.numel() // self._size) for parameter in self._parameters]
        self._ready: list[torch.nn.Parameter] = []
        row = TensorSpec(tuple(self._lengths), torch.float32, torch.device("cpu"), self._name)
        self._mean = RowMean(group, codecs.codec, row, divisor=self._size, intra_compressor=codecs.intra_codec)
        if gathers is None:
            self._gather = RowGather(group, codecs.codec, row, hierarchical=codecs.intra_codec is not None)
        else:
            ranks = list(range(self._size))
            self._exact_gather = ExactGather(gathers.communicator, ranks, group.nodes, f"weights of {self._name}")
        with torch.no_grad():
            own_row = self._rows(self._parameters)[group.rank]
            self.shard = torch.nn.Parameter(own_row.clone())
        self.hooks = [
            module.register_forward_pre_hook(lambda *_: self.gather()),
            module.register_forward_hook(self._gather_in_backward),
        ]
        for parameter in self._parameters:
            seconds = backward_s(parameter)
            self.hooks.append(parameter.register_hook(lambda gradient, seconds=seconds: compute(seconds)))
            self.hooks.append(parameter.register_post_accumulate_grad_hook(self._reduce_when_ready))

    def gather(self) -> None:
        """Write all ranks' rows to the parameters."""
        rows = torch.empty(self._size, sum(self._lengths))
        if self._gathers is None:
            communicate = partial(self._gather, self.shard.detach(), rows.view(-1))
            self._communication.run(self._communication.group, f"weights of {self._name}", rows, communicate)
        else:
            rows[self._communication.group.rank] = self.shard.detach()
            self._gathers.run(partial(self._exact_gather, rows.view(-1)), async_op=False)
        start = 0
        for parameter, length in zip(self._parameters, self._lengths, strict=True):
            flat = rows[:, start : start + length].reshape(-1)[: parameter.numel()]
            parameter.data.copy_(flat.view(parameter.shape))  # not seen by autograd, which has stored the weights
            start += length

    def _gather_in_backward(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: self.gather())

    def _reduce_when_ready(self, parameter: torch.nn.Parameter) -> None:
        self._ready.append(parameter)
        if len(self._ready) < len(self._parameters):
            return
        self._ready.clear()
        gradients = [own.grad for own in self._parameters if own.grad is not None]
        rows = self._rows(gradients)
        for own in self._parameters:
            own.grad = None
        earlier = self.shard.grad
        mean = torch.zeros(sum(self._lengths))
        row = Row(self._part.parameter_names, tuple(self._lengths), tuple(range(len(self._lengths))))
        communicate = partial(self._same_rows.reduce, self._part, row, self._mean, rows.view(-1), mean)
        # FSDP reads a first gradient only after backward, and adds a further one at once.
        self._communication.run(
            self._communication.group, self._part.name, rows, communicate, until_end=earlier is None
        )
        self.shard.grad = mean if earlier is None else earlier + mean

    def _rows(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return all ranks' rows of these tensors, padded with zeros, [ranks, elements of a row]."""
        padded = []
        for tensor, length in zip(tensors, self._lengths, strict=True):
            rows = torch.zeros(self._size * length)
            rows[: tensor.numel()] = tensor.detach().flatten()
            padded.append(rows.view(self._size, length))
        return torch.cat(padded, 1).contiguous()
