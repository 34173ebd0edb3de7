"""Buckets: a flat tensor of several parameters' values and the operations that a lane runs on it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from torchbagua.collectives import (
    BaguaProcessGroup,
    CommunicationError,
    Mean,
    Replicas,
    TwoPhaseResiduals,
    cause_of,
    centralized_mean,
    decentralized_mean,
    low_precision_ring,
)
from torchbagua.compressors import Compressor, TensorSpec, by_name, sum_dtype
from torchbagua.events import Details
from torchbagua.memory_order import flat_length, shape_like
from torchbagua.tracer import Span


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

Finish = Callable[[], None]
Operation = Callable[["BaguaBucket"], Finish | None]
"""Works on a bucket's flat tensor, in place or into another. What is left to do once that is final, it may return."""


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
        self._operations: list[Operation] = []
        self._groups = [group]

    def parts(self, flat: torch.Tensor) -> list[tuple[BaguaTensor, torch.Tensor]]:
        """Return each tensor with its part of `flat`, elements in the order of the tensor's memory."""
        return list(zip(self.tensors, flat.split(self._segment_lengths), strict=True))

    def views(self, flat: torch.Tensor) -> list[tuple[BaguaTensor, torch.Tensor]]:
        """Return each tensor with its part of `flat`, in its shape."""
        return [(tensor, shape_like(tensor.parameter, part)) for tensor, part in self.parts(flat)]

    def run(self) -> torch.Tensor:
        """Run the operations in order, in place on `flat`, and return it; one that raises fails the step."""
        self.start()()
        return self.flat

    def start(self) -> Finish:
        """Run the operations up to where `flat` is final; what is returned does the rest.

        An operation that raises fails the step, and closes the groups of all operations, since no later message on them
        would be matched, and so that peers hear of it at once.
        """
        with self._closed_on_failure(), self._span():
            rest = [finish for operation in self._operations if (finish := operation(self)) is not None]
        self.num_runs += 1

        def finish_all() -> None:
            with self._closed_on_failure(), self._span():
                for finish in rest:
                    finish()

        return finish_all if rest else lambda: None

    def _span(self) -> Span:
        details = Details(bucket=self.name, num_elements=self.flat.numel(), raw_bytes=self.flat.nbytes)
        return self.group.tracer.span("bucket", details)

    @contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for group in self._groups:
                group.close()
            raise

    def clear_ops(self) -> "BaguaBucket":
        """Remove all operations."""
        self._operations.clear()
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
        group = self._using(group)
        name = getattr(python_function, "__qualname__", repr(python_function))

        def operation(bucket: "BaguaBucket") -> None:
            try:
                python_function(bucket, group)
            except CommunicationError:
                raise
            except Exception as error:
                cause = f"{type(error).__name__}: {cause_of(error)}"
                raise RuntimeError(
                    f"torchbagua: {name} on {bucket.name} failed on rank {group.rank}: {cause}"
                ) from error

        self._operations.append(operation)
        return self

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
        if error_feedback is not None and self.flat.dtype != torch.float32:
            raise ValueError(f"BaguaBucket: error_feedback needs a float32 bucket, got {self.flat.dtype}")
        mean = self._centralized_mean(
            group, compression, hierarchical=hierarchical, average=average, error_feedback=error_feedback
        )
        self._operations.append(lambda bucket: mean(bucket.flat))
        return self

    def append_decentralized_synchronous_op(
        self,
        peer_weight: torch.Tensor,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        group: BaguaProcessGroup | None = None,
    ) -> "BaguaBucket":
        """Append the mean of the flat tensor with this rank's peers, which is written to `peer_weight`.

        Args:
            peer_weight: like the flat tensor, which is left as it is.
            hierarchical: where there are several nodes with several ranks: the mean of the node, averaged with the
                node's peers.
            peer_selection_mode: "all" ranks, or "shift_one" for one of them, another one each time.
            group: default the bucket's.

        Raises:
            ValueError: `peer_weight` is not such a tensor, no mode has that name, or ranks cannot be paired.
        """
        self._check_like_flat("peer_weight", peer_weight, self.flat.dtype)
        mean = decentralized_mean(
            self._using(group), self.spec, hierarchical=hierarchical, peer_selection_mode=peer_selection_mode
        )

        def operation(bucket: "BaguaBucket") -> None:
            mean(bucket.flat, peer_weight, bucket.num_runs)

        self._operations.append(operation)
        return self

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
        by what `start` returns.

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
        replicas = Replicas(weight, left_peer_weight, right_peer_weight)
        for name, replica in vars(replicas).items():
            self._check_like_flat(f"the replica {name}", replica, sum_dtype(self.flat.dtype))
        update, exchange = low_precision_ring(
            self._using(group),
            self._compressor(compression),
            self.spec,
            replicas,
            hierarchical=hierarchical,
            is_bounded=is_bounded,
        )

        def operation(bucket: "BaguaBucket") -> Finish:
            update(bucket.flat)
            return exchange

        self._operations.append(operation)
        return self

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
        if snapshot is None:
            return self.append_centralized_synchronous_op(group=group)
        self._check_like_flat("snapshot", snapshot, self.flat.dtype)
        mean = self._centralized_mean(group, None, hierarchical=False, average=True)
        self._operations.append(lambda bucket: mean(snapshot, bucket.flat))
        return self

    def _centralized_mean(
        self,
        group: BaguaProcessGroup | None,
        compression: str | Compressor | None,
        *,
        hierarchical: bool,
        average: bool,
        error_feedback: TwoPhaseResiduals | None = None,
    ) -> Mean:
        return centralized_mean(
            self._using(group),
            self._compressor(compression),
            self.spec,
            hierarchical=hierarchical,
            average=average,
            residuals=error_feedback,
        )

    @property
    def spec(self) -> TensorSpec:
        """What `flat` is, for collectives."""
        return TensorSpec(tuple(self._segment_lengths), self.flat.dtype, self.flat.device, self.name)

    @property
    def _segment_lengths(self) -> list[int]:
        return [flat_length(tensor.parameter) for tensor in self.tensors]

    def _compressor(self, compression: str | Compressor | None) -> Compressor:
        compressor = by_name(compression)
        if not compressor.encodes(self.flat.dtype):
            raise ValueError(
                f"BaguaBucket: compression must be one that encodes {self.flat.dtype}, or None for full precision, got "
                f"{compressor!r}"
            )
        return compressor

    def _check_like_flat(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        if tensor.shape != self.flat.shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"BaguaBucket: {name} must be contiguous, {dtype}, {list(self.flat.shape)}, got "
                f"{'' if tensor.is_contiguous() else 'non-contiguous, '}{tensor.dtype}, {list(tensor.shape)}"
            )

    def _using(self, group: BaguaProcessGroup | None) -> BaguaProcessGroup:
        if group is not None and group not in self._groups:
            self._groups.append(group)
        return group or self.group
