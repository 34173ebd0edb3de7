"""What lies in the gradients that one FSDP parameter group communicates: the row of a rank, its shards end to end."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchbagua._torch import fsdp_param_groups, fsdp_shards, queue_callback
from torchbagua._warnings import warn_user
from torchbagua.algorithms.gradient.compressed_all_reduce import CompressedMeanAlgorithm
from torchbagua.algorithms.impl import AlgorithmImpl
from torchbagua.codecs.blocks import TensorSpec
from torchbagua.codecs.cast import Identity
from torchbagua.collectives.centralized_mean import Mean, centralized_mean
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.observe.events import Details
from torchbagua.runtime.lane import Job
from torchbagua.training.fsdp2.first_failure import FirstFailure

# The names of the parameters whose gradients lie in a row, with the padded lengths of their shards.
Row = tuple[tuple[str, int], ...]


class CommunicatingPart:
    """A part on which fully_shard was called, and whose parameters communicate together.

    Args:
        part: the FSDPModule.
        param_group: its FSDP parameter group.
        label: of the part, in events and errors.
        parameter_names: of all its parameters, in the order in which they lie in a row.

    Attributes:
        part, param_group, label: the same.
        name: that of its gradients.
    """

    def __init__(self, part: Any, param_group: Any, label: str, parameter_names: Sequence[str]) -> None:
        self.part = part
        self.param_group = param_group
        self.label = label
        self.name = f"gradients of {label}"
        self._parameter_names = parameter_names
        self._told_lengths: set[int] = set()

    @property
    def whole_row(self) -> Row:
        """The row of all its parameters, which are gathered together."""
        shards = zip(self._parameter_names, fsdp_shards(self.param_group), strict=True)
        return tuple((name, length) for name, (_, length) in shards)

    def row(self, num_elements: int) -> Row:
        """Return the row of the parameters that are trained now: layers may be frozen and set free at any time.

        If it has not so many elements, some have had no gradient, and FSDP does not tell which. Then the row is that of
        one parameter, and a RuntimeWarning says so, once for each length.
        """
        shards = zip(self._parameter_names, fsdp_shards(self.param_group), strict=True)
        row = tuple((name, length) for name, (one, length) in shards if one.requires_grad)
        if sum(length for _, length in row) == num_elements:
            return row
        if num_elements not in self._told_lengths:
            self._told_lengths.add(num_elements)
            warn_user(
                f"torchbagua: {self.name}: not all parameters had a gradient, and FSDP does not say which: all share "
                "blocks, and small ones lose precision; call set_reduce_scatter_unused_params(True), which needs "
                "torch 2.13 or newer"
            )
        return ((self.name, num_elements),)


def communicating_parts(module: torch.nn.Module, parts: Mapping[str, Any]) -> list[CommunicatingPart]:
    """Return those of `parts` of `module` that communicate, each parameter group once.

    A parameter outside of the module has the name "".
    """
    names = {id(one): name for name, one in module.named_parameters()}
    found: dict[int, CommunicatingPart] = {}
    for part_name, part in parts.items():
        for param_group in fsdp_param_groups(part):  # the same for both with fully_shard([a, b])
            label = part_name or type(part).__name__
            parameters = [one for one, _ in fsdp_shards(param_group)]
            own = [names.get(id(parameter), "") for parameter in parameters]
            found.setdefault(id(param_group), CommunicatingPart(part, param_group, label, own))
    return list(found.values())


def check_parameters_inside(module: torch.nn.Module, parts: Sequence[CommunicatingPart]) -> None:
    """Raise ValueError where one of these parts communicates together with parameters outside of the module."""
    for part in parts:
        if any(name == "" for name, _ in part.whole_row):
            raise ValueError(
                f"attach: {part.label} communicates together with parameters that are not in "
                f"{type(module).__name__}, as after fully_shard([...]); attach to a module around all of them"
            )


def spec_of_row(row: Row, x: torch.Tensor, name: str) -> TensorSpec:
    """Return what collectives are told of a row with the dtype and device of `x`, called `name`."""
    return TensorSpec(tuple(length for _, length in row), x.dtype, x.device, name)


class RowAllReduce:
    """The means, or sums, of rows over a group. What forms them is made once for each kind of row.

    Args:
        algorithm: whose codecs are used.
        group: over which they are formed.
    """

    def __init__(self, algorithm: CompressedMeanAlgorithm, group: BaguaProcessGroup) -> None:
        self._algorithm = algorithm
        self._group = group
        self._means: dict[tuple[Row, torch.dtype, torch.device, bool], Mean] = {}

    def mean(self, row: Row, x_L: torch.Tensor, name: str, *, average: bool) -> Mean:
        """Return what averages a tensor like `x_L` in place.

        Args:
            row: what lies in it.
            x_L: the tensor.
            name: in events and errors.
            average: divide the sum by the number of ranks.
        """
        key = (row, x_L.dtype, x_L.device, average)
        if key not in self._means:
            compressor, intra = self._algorithm.make_compressors()
            self._means[key] = centralized_mean(
                self._group,
                compressor if compressor.encodes(x_L.dtype) else Identity(),
                spec_of_row(row, x_L, name),
                hierarchical=self._algorithm.hierarchical,
                average=average,
                intra_compressor=intra if intra.encodes(x_L.dtype) else Identity(),
            )
        return self._means[key]


class RowRunner:
    """Runs what communicates rows, in forward and backward.

    Args:
        impl: whose lane and traces are used; over the ranks among which the module is sharded.
        replicas: the ranks that hold the same shards, where there are several.

    Attributes:
        impl, replicas: the same.
        failure: is notified of errors.
    """

    def __init__(self, impl: AlgorithmImpl, replicas: BaguaProcessGroup | None = None) -> None:
        self.impl = impl
        self.replicas = replicas
        self.failure = FirstFailure([impl.process_group] if replicas is None else [impl.process_group, replicas])
        self._under_way: Job[None] | None = None

    def run(
        self,
        group: BaguaProcessGroup,
        name: str,
        x: torch.Tensor,
        communicate: Callable[[], None],
        *,
        until_end: bool = False,
    ) -> None:
        """Call `communicate`: over NCCL on this thread and its current stream, else on the lane; then it is waited for.

        Args:
            group: over which it communicates.
            name: of what it does, in events.
            x: the tensor that it is about.
            communicate: where it fails all groups are closed, so that other ranks are told at once.
            until_end: on the lane it may go on until backward ends, or the next is run: it holds the gradient of a
                whole layer, and more than one would cost the memory that sharding saves.
        """
        tracer = self.impl.process_group.tracer

        def traced() -> None:
            details = Details(bucket=name, num_elements=x.numel(), raw_bytes=x.nbytes)
            with self.failure.guard(), tracer.span("bucket", details), tracer.range(name):
                communicate()

        if group.world.in_stream_order(x.device):
            with torch.inference_mode(False):  # scratch that is made now is written to outside of it too
                traced()
            return
        self._wait()
        self._under_way = self.impl.lane.submit(traced)
        if not (until_end and self._will_wait()):
            self._wait()

    def _will_wait(self) -> bool:
        try:
            queue_callback(self._wait)
        except RuntimeError:  # no backward is under way
            return False
        return True

    def _wait(self) -> None:
        job, self._under_way = self._under_way, None
        if job is not None:
            job.result()
