"""Buckets: a flat tensor of several parameters' values and the operations that a lane runs on it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from torchbagua.collectives import BaguaProcessGroup, Replicas, TwoPhaseResiduals
from torchbagua.compressors import Compressor, TensorSpec
from torchbagua.events import Details
from torchbagua.memory_order import flat_length, shape_like
from torchbagua.operations import Operation, centralized_op, decentralized_op, low_precision_op, python_op
from torchbagua.topology import Topology
from torchbagua.tracer import NO_SPAN, Span


@dataclass(frozen=True)
class BaguaTensor:
    """A parameter's place in a bucket.

    Attributes:
        name: the parameter's name in its module; behind the plain hook, which knows no module, its place in the bucket.
        parameter: the parameter itself, or the buffer.
    """

    name: str
    parameter: torch.Tensor


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
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{what} must be on the CPU or on a CUDA device, got {tensor.device}")


class BaguaBucket:
    """A flat tensor and the ordered operations to run on it.

    Args:
        name: for errors and events.
        tensors: the parameters whose values (gradients, say) lie one after the other in the flat tensor; complex ones
            as pairs of real and imaginary part.
        group: the group that operations use unless they are given another.
        flat: the flat tensor, real, contiguous, as long as the tensors together; where it is another one in each step
            (DDP's), it is set before `run`, and is alike.

    Attributes:
        num_runs: how often it has run; the same on all ranks.
        operations: what it runs, in this order; `append_...` adds one.

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
        self.num_runs = 0
        self.operations: list[Operation] = []

    def __repr__(self) -> str:
        """Return its name, size and operations."""
        operations = ", ".join(operation.name for operation in self.operations)
        return f"BaguaBucket({self.name!r}, {self.flat.numel():,} elements of {self.flat.dtype}, [{operations}])"

    @property
    def spec(self) -> TensorSpec:
        """What `flat` is, for collectives."""
        lengths = tuple(flat_length(tensor.parameter) for tensor in self.tensors)
        return TensorSpec(lengths, self.flat.dtype, self.flat.device, self.name)

    def parts(self, flat: torch.Tensor) -> list[tuple[BaguaTensor, torch.Tensor]]:
        """Return each tensor with its part of `flat`, elements in the order of the tensor's memory."""
        return list(zip(self.tensors, flat.split(self.spec.segment_lengths), strict=True))

    def views(self, flat: torch.Tensor) -> list[tuple[BaguaTensor, torch.Tensor]]:
        """Return each tensor with its part of `flat`, in its shape."""
        return [(tensor, shape_like(tensor.parameter, part)) for tensor, part in self.parts(flat)]

    def run(self) -> torch.Tensor:
        """Run the operations in order, in place on `flat`, and return it; one that raises fails the step."""
        self.start()
        self.finish()
        return self.flat

    def start(self) -> None:
        """Run the operations up to where `flat` is final, which the caller may use before `finish` does the rest.

        An operation that raises fails the step, and closes the groups of all operations, since no later message on them
        would be matched, and so that peers hear of it at once.
        """
        with self._closed_on_failure(), self._span():
            for operation in self.operations:
                with self.group.tracer.range(operation.name):
                    operation.run(self)
        self.num_runs += 1

    def finish(self) -> None:
        """Do what the operations have left for later: of the low-precision ring, tell the neighbours of the change."""
        rest = [operation.finish for operation in self.operations if operation.finish is not None]
        if rest:
            with self._closed_on_failure(), self._span():
                for finish in rest:
                    finish()

    def _span(self) -> Span:
        if self.group.tracer.is_idle:
            return NO_SPAN
        details = Details(bucket=self.name, num_elements=self.flat.numel(), raw_bytes=self.flat.nbytes)
        return self.group.tracer.span("bucket", details)

    @contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for group in {self.group, *(operation.group for operation in self.operations)}:
                group.close()
            raise

    def clear_ops(self) -> "BaguaBucket":
        """Remove all operations."""
        self.operations.clear()
        return self

    def append_python_op(
        self,
        python_function: Callable[["BaguaBucket", BaguaProcessGroup], None],
        group: BaguaProcessGroup | None = None,
    ) -> "BaguaBucket":
        """Append a function of the bucket and the group, which changes `bucket.flat` in place, on the CPU or a GPU.

        Leave sending to the operations beside it, which work on both. The function may also send tensors of the CPU
        with torch.distributed over `group.world.process_group`, a gloo group, which fails with tensors of a GPU, and
        of which observers hear nothing. It runs on the lane's thread, or over NCCL on that of backward; with a GPU, on
        the lane's stream. Where it raises, the training step raises a RuntimeError that names the function, the bucket,
        the rank and the error.
        """
        return self._append(python_op(python_function, group or self.group))

    def append_centralized_synchronous_op(
        self,
        hierarchical: bool = False,
        average: bool = True,
        scattergather: bool = False,
        compression: str | Compressor | None = None,
        group: BaguaProcessGroup | None = None,
        *,
        error_feedback: TwoPhaseResiduals | None = None,
    ) -> "BaguaBucket":
        """Append the mean (or sum) of the flat tensor over the group, bit-identical on all ranks afterwards.

        Args:
            hierarchical: respect node boundaries, where there are several nodes: full precision within them.
            average: divide by the number of ranks.
            scattergather: accepted for Bagua's sake; every mean here is a scatter and a gather.
            compression: None for full precision, "MinMaxUInt8", "sign1bit", "bfloat16", "float16", or a Compressor.
            group: default the bucket's.
            error_feedback: what compression leaves out is kept there, and added the next time, when it has been
                committed; a float32 bucket.

        Raises:
            ValueError: no compression has that name, or it does not encode the bucket's dtype, or the bucket cannot
                have error feedback.
        """
        return self._append(
            centralized_op(
                self.spec,
                group or self.group,
                compression,
                hierarchical=hierarchical,
                average=average,
                residuals=error_feedback,
            )
        )

    def append_decentralized_synchronous_op(
        self,
        peer_weight: torch.Tensor,
        hierarchical: bool = True,
        peer_selection_mode: str | Topology = "all",
        group: BaguaProcessGroup | None = None,
    ) -> "BaguaBucket":
        """Append the mean of the flat tensor with this rank's peers, which is written to `peer_weight`.

        Args:
            peer_weight: like the flat tensor, which is left as it is; or that tensor itself.
            hierarchical: where there are several nodes with several ranks: the mean of the node, averaged with the
                node's peers.
            peer_selection_mode: "all" ranks, or "shift_one" for one of them, another one each time, or a Topology.
            group: default the bucket's.

        Raises:
            ValueError: `peer_weight` is not such a tensor, no mode has that name, or the topology does not fit.
        """
        return self._append(
            decentralized_op(
                self.spec, group or self.group, peer_weight, peer_selection_mode, hierarchical=hierarchical
            )
        )

    def append_low_precision_decentralized_synchronous_op(
        self,
        weight: torch.Tensor,
        left_peer_weight: torch.Tensor,
        right_peer_weight: torch.Tensor,
        hierarchical: bool = True,
        compression: str | Compressor | None = "MinMaxUInt8",
        group: BaguaProcessGroup | None = None,
        *,
        is_bounded: bool = False,
    ) -> "BaguaBucket":
        """Append one round of the ring of compressed differences (see `LowPrecisionRing`).

        The flat tensor becomes what this rank has agreed on with its neighbours; what they have to hear of it is sent
        by `finish`.

        Args:
            weight, left_peer_weight, right_peer_weight: own and the neighbours' replicas, as long as the flat tensor,
                float32, or float64 where that is; changed in place.
            hierarchical: where there are several nodes with several ranks: a ring of nodes.
            compression: of the differences: "MinMaxUInt8", None for full precision, or a Compressor.
            group: default the bucket's.
            is_bounded: keep each element between its own value and the mean of the three replicas.

        Raises:
            ValueError: a replica is not such a tensor, no compression has that name, or it does not encode the
                bucket's dtype.
        """
        return self._append(
            low_precision_op(
                self.spec,
                group or self.group,
                Replicas(weight, left_peer_weight, right_peer_weight),
                compression,
                hierarchical=hierarchical,
                is_bounded=is_bounded,
            )
        )

    def append_asynchronous_model_average_op(
        self,
        peer_selection_mode: str = "all",
        group: BaguaProcessGroup | None = None,
        *,
        snapshot: torch.Tensor | None = None,
    ) -> "BaguaBucket":
        """Append the mean over all ranks, in full precision, for a thread that runs beside training.

        Args:
            peer_selection_mode: "all"; there is no other.
            group: default the bucket's.
            snapshot: like the flat tensor, which becomes its mean; by default the flat tensor itself is averaged.

        Raises:
            ValueError: another mode, or `snapshot` is not such a tensor.
        """
        if peer_selection_mode != "all":
            raise ValueError(
                f"append_asynchronous_model_average_op: peer_selection_mode must be 'all', got {peer_selection_mode!r}"
            )
        return self._append(centralized_op(self.spec, group or self.group, None, snapshot=snapshot))

    def _append(self, operation: Operation) -> "BaguaBucket":
        self.operations.append(operation)
        return self
