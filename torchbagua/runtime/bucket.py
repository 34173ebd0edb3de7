"""Buckets: a flat tensor of the values of several parameters, and the operations that the lane runs on it."""

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
    """A parameter or buffer in a bucket.

    Attributes:
        name: its name in the module. Without `attach`, which knows the module, its position in the optimizers that were
            passed to `Algorithm.reify`, or else its position in the bucket. The name of a shard includes its number.
        parameter: the parameter or the buffer. For a DTensor, the bucket contains the shard of this rank.
        order: the order of its elements in the bucket: the parameter's memory order when this object was created. It
            does not change if the parameter's memory format changes.

    Args:
        kept_order: the order of an earlier tensor of this name, on which the flat tensors of all ranks agree.
    """

    name: str
    parameter: torch.Tensor
    kept_order: InitVar[MemoryOrder | None] = None
    order: MemoryOrder = field(init=False, repr=False, compare=False)

    def __post_init__(self, kept_order: MemoryOrder | None) -> None:
        object.__setattr__(self, "order", kept_order or MemoryOrder(self.parameter))

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter rather than a buffer."""
        return isinstance(self.parameter, torch.nn.Parameter)


_SUPPORTED_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex128,
    torch.complex64,
)


def check_elements(subject: str, tensor: torch.Tensor) -> None:
    """Raise ValueError, which begins with `subject`, if tensors like `tensor` cannot be communicated."""
    if tensor.layout is not torch.strided:
        raise ValueError(f"{subject} must be dense, got a {tensor.layout} tensor")
    if tensor.dtype not in _SUPPORTED_DTYPES:
        *first, last = (str(dtype).removeprefix("torch.") for dtype in _SUPPORTED_DTYPES)
        raise ValueError(f"{subject} must be {', '.join(first)} or {last}, got {tensor.dtype}")


class BaguaBucket(BucketOperations):
    """A flat tensor, and the operations to run on it in order. The `append_...` methods add operations.

    Args:
        name: the name for errors and events.
        tensors: the parameters. The flat tensor is the concatenation of their values, for example their gradients. It
            stores complex values as pairs of real and imaginary part.
        group: the default group of the operations.
        flat: the flat tensor: real, contiguous, with the total length of the tensors. For a DDP bucket it may be a
            different tensor of the same kind in each step, and is set before `run`.

    Attributes:
        round_index: the number of times the bucket has run, the same on all ranks. A topology chooses peers by it.
        operations: the operations that it runs, in order.
        num_received: the runner's number of buckets when DDP last passed this one, or 0.

    Raises:
        ValueError: `flat` does not meet these requirements.
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
                f"BaguaBucket: flat must be contiguous, with the total length of its tensors, [{num_elements}], got "
                f"{'' if flat.is_contiguous() else 'non-contiguous '}{list(flat.shape)}"
            )
        if flat.is_complex():
            raise ValueError(f"BaguaBucket: flat must be real, with complex numbers as pairs, got {flat.dtype}")
        self.name = name
        self.tensors = tuple(tensors)
        self.group = group
        self.flat = flat
        self.round_index = 0
        self.num_received = 0
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
        """Return each tensor with its part of `flat`, a vector in the tensor's `order`."""
        return list(zip(self.tensors, flat.split(self.spec.segment_lengths), strict=True))

    def views(self, flat: torch.Tensor) -> list[tuple[BaguaTensor, torch.Tensor]]:
        """Return each tensor with its part of `flat`, viewed in the tensor's shape."""
        return [(tensor, tensor.order.shape(part)) for tensor, part in self.parts(flat)]

    def run(self) -> torch.Tensor:
        """Run the operations in order, and return `flat`. An error in an operation fails the step."""
        self.start()
        self.finish()
        return self.flat

    def start(self) -> None:
        """Run all operations, and return when `flat` is final. Work that only other ranks wait for is left to `finish`.

        An error in an operation fails the step. It also closes the groups of all operations, so that other ranks are
        notified immediately.
        """
        exhaust(self._start_in_steps())

    def may_begin(self) -> bool:
        """Return whether `steps` reaches its first yield without waiting for another rank."""
        mean = self._overlapping
        return mean is not None and mean.may_begin is not None and mean.may_begin()

    def steps(self) -> Generator[None, None, torch.Tensor]:
        """Run the operations as `run` does. Yield before the first wait, and then whenever another bucket may begin.

        Another bucket may begin when all messages of this bucket are queued and this bucket only waits.
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
        """Yield as `steps` does. Run each step in a separate range, since the ranges of a thread must nest."""
        end = object()
        while True:
            with self.group.tracer.range(name):
                if next(steps, end) is end:
                    return
            yield

    @property
    def _overlapping(self) -> Operation | None:
        """The bucket's only operation that sends, if it may begin while another bucket is in progress; else None."""
        sending = [operation for operation in self.operations if not operation.is_local]
        return sending[0] if len(sending) == 1 and sending[0].steps is not None else None

    def finish(self) -> None:
        """Run the deferred work of the operations, for example send changes to neighbors in the low-precision ring."""
        deferred = [operation.finish for operation in self.operations if operation.finish is not None]
        if not deferred:
            return
        try:
            with self.group.tracer.bucket_span(self.name, self.flat):
                for finish in deferred:
                    finish()
        except BaseException:
            self._close_groups()
            raise

    def _close_groups(self) -> None:
        for group in {self.group, *(operation.group for operation in self.operations)}:
            group.fail()
