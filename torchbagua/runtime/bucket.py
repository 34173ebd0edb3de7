"""Buckets: a flat tensor of several parameters' values and the operations that a lane runs on it."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import InitVar, dataclass, field

import torch

from torchbagua.codecs.blocks import TensorSpec
from torchbagua.collectives.overlapping import exhaust
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.runtime.memory_order import MemoryOrder, flat_length
from torchbagua.runtime.operations import BucketOperations, Operation


@dataclass(frozen=True)
class BaguaTensor:
    """A parameter or buffer that lies in a bucket.

    Attributes:
        name: its name in the module. Without `attach`, which knows the module, its place in the optimizers that
            `Algorithm.reify` was given, or else its place in the bucket. Of a shard it also says which that is.
        parameter: the parameter itself, or the buffer. Of a DTensor, the shard of this rank lies in the bucket.
        order: the order in which its elements lie in the bucket. It stays that of the parameter's memory when this was
            made, also if the parameter's memory format changes.

    Args:
        kept_order: the order of an earlier one of this name, on which the flat tensors of ranks agree.
    """

    name: str
    parameter: torch.Tensor
    kept_order: InitVar[MemoryOrder | None] = None
    order: MemoryOrder = field(init=False, repr=False, compare=False)

    def __post_init__(self, kept_order: MemoryOrder | None) -> None:
        object.__setattr__(self, "order", kept_order or MemoryOrder(self.parameter))

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, and not a buffer."""
        return isinstance(self.parameter, torch.nn.Parameter)


_CARRIED_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex128,
    torch.complex64,
)


def check_elements(what: str, tensor: torch.Tensor) -> None:
    """Raise ValueError, with `what` as its subject, where tensors like `tensor` cannot be communicated."""
    if tensor.layout is not torch.strided:
        raise ValueError(f"{what} must be dense, got a {tensor.layout} tensor")
    if tensor.dtype not in _CARRIED_DTYPES:
        *others, last = (str(dtype).removeprefix("torch.") for dtype in _CARRIED_DTYPES)
        raise ValueError(f"{what} must be {', '.join(others)} or {last}, got {tensor.dtype}")


class BaguaBucket(BucketOperations):
    """A flat tensor, and the operations to run on it in their order. The `append_...` methods add operations.

    Args:
        name: for errors and events.
        tensors: the parameters whose values, gradients for instance, lie one after the other in the flat tensor.
            Complex ones lie there as pairs of real and imaginary part.
        group: the group that operations use unless they are given another.
        flat: the flat tensor, real, contiguous, as long as the tensors together. In a DDP bucket it may be another one
            in each step, of the same kind, and is set before `run`.

    Attributes:
        round_index: how often the bucket has run, the same on all ranks. A topology chooses peers by it.
        operations: what it runs, in this order.

    Raises:
        ValueError: `flat` is not such a tensor.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[BaguaTensor],
        group: BaguaProcessGroup,
        flat: torch.Tensor,
    ) -> None:
        num_elements = sum(flat_length(tensor.parameter) for tensor in tensors)
        if flat.shape != (num_elements,) or not flat.is_contiguous():
            raise ValueError(
                f"BaguaBucket: flat must be contiguous, [{num_elements}] as its tensors together, got "
                f"{'' if flat.is_contiguous() else 'non-contiguous '}{list(flat.shape)}"
            )
        if flat.is_complex():
            raise ValueError(f"BaguaBucket: flat must be real, complex numbers as pairs, got {flat.dtype}")
        self.name = name
        self.tensors = tuple(tensors)
        self.group = group
        self.flat = flat
        self.round_index = 0
        self.operations: list[Operation] = []

    def __repr__(self) -> str:
        """Return its name, size and operations."""
        operations = ", ".join(operation.name for operation in self.operations)
        return f"BaguaBucket({self.name!r}, {self.flat.numel():,} elements of {self.flat.dtype}, [{operations}])"

    @property
    def spec(self) -> TensorSpec:
        """The lengths, dtype and device of `flat`, for collectives."""
        lengths = [flat_length(tensor.parameter) for tensor in self.tensors]
        return TensorSpec(tuple(lengths), self.flat.dtype, self.flat.device, self.name)

    def parts(self, flat: torch.Tensor) -> list[tuple[BaguaTensor, torch.Tensor]]:
        """Return each tensor with its part of `flat`, elements in its `order`."""
        return list(zip(self.tensors, flat.split(self.spec.segment_lengths), strict=True))

    def views(self, flat: torch.Tensor) -> list[tuple[BaguaTensor, torch.Tensor]]:
        """Return each tensor with its part of `flat`, in its shape."""
        return [(tensor, tensor.order.shape(part)) for tensor, part in self.parts(flat)]

    def run(self) -> torch.Tensor:
        """Run the operations in order, and return `flat`. An operation that raises fails the step."""
        self.start()
        self.finish()
        return self.flat

    def start(self) -> None:
        """Run all operations, and return when `flat` is final. What only other ranks wait for is left to `finish`.

        An operation that raises fails the step. The groups of all operations are then closed, so that other ranks are
        told at once.
        """
        exhaust(self._start_in_steps())

    def may_begin(self) -> bool:
        """Return whether `steps` comes to its first yield without a wait for another rank."""
        mean = self._overlapping
        return mean is not None and mean.may_begin is not None and mean.may_begin()

    def steps(self) -> Generator[None, None, torch.Tensor]:
        """Run the operations as `run` does. Yield before the first wait, and then wherever another bucket may begin.

        Another bucket may begin when everything that this bucket sends is queued, and this bucket only waits.
        """
        yield from self._start_in_steps()
        self.finish()
        return self.flat

    def _start_in_steps(self) -> Iterator[None]:
        tracer, overlapping = self.group.tracer, self._overlapping
        try:
            with tracer.bucket_span(self.name, self.flat):
                for operation in self.operations:
                    if operation is overlapping and operation.steps is not None:
                        yield from self._in_range(operation.name, operation.steps(self))
                    else:
                        with tracer.range(operation.name):
                            operation.run(self)
        except BaseException:
            self._close_groups()
            raise
        self.round_index += 1

    def _in_range(self, name: str, steps: Iterator[None]) -> Iterator[None]:
        """Yield as `steps` does, each in a range of its own, since ranges of a thread must nest."""
        end = object()
        while True:
            with self.group.tracer.range(name):
                if next(steps, end) is end:
                    return
            yield

    @property
    def _overlapping(self) -> Operation | None:
        """The one operation that sends, where it is one that may begin beside another bucket's."""
        sending = [operation for operation in self.operations if not operation.is_local]
        return sending[0] if len(sending) == 1 and sending[0].steps is not None else None

    def finish(self) -> None:
        """Do what the operations have left for later, such as telling neighbours of the low-precision ring."""
        rest = [operation.finish for operation in self.operations if operation.finish is not None]
        if not rest:
            return
        try:
            with self.group.tracer.bucket_span(self.name, self.flat):
                for finish in rest:
                    finish()
        except BaseException:
            self._close_groups()
            raise

    def _close_groups(self) -> None:
        for group in {self.group, *(operation.group for operation in self.operations)}:
            group.close()
