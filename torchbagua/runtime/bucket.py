"""Buckets: a flat tensor of the values of several parameters, and the operations that the lane runs on it."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from torchbagua.codecs.base import Compressor, Identity, TensorSpec, by_name, sum_dtype
from torchbagua.collectives.all_reduce_mean import AllReduceMean
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.low_precision_ring import Replicas, check_ring_compression, low_precision_ring
from torchbagua.collectives.mean import EncodingFailure, Mean, OverlappingMean, centralized_mean
from torchbagua.collectives.neighbourhood_mean import check_topology, neighbourhood_mean
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.topology import AllRanks, Topology, topology_of
from torchbagua.runtime.parameters import BaguaTensor, flat_length
from torchbagua.transport.errors import CommunicationError, cause_of

B = TypeVar("B", bound="BucketOperations")

_SUPPORTED_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex128,
    torch.complex64,
)


@dataclass(frozen=True)
class Operation:
    """One operation of a bucket.

    Attributes:
        name: the name in debuggers and profiles.
        group: the group over which it communicates; closed if the bucket fails.
        run: processes the flat tensor of its argument, the bucket, in place or into another tensor.
        finish: the deferred work that follows when the flat tensor is final.
        is_local: whether it neither sends nor waits for another rank.
        may_begin, run_overlapping: set for an operation that may begin while another bucket is in progress, see
            `OverlappingMean`. `run_overlapping` then replaces `run`.
    """

    name: str
    group: BaguaProcessGroup
    run: Callable[[Any], None]
    finish: Callable[[], None] | None = None
    is_local: bool = False
    may_begin: Callable[[], bool] | None = None
    run_overlapping: Callable[[Any], Iterator[None]] | None = None


class BucketOperations:
    """The operations of a `BaguaBucket`. Each is checked when it is appended.

    An operation receives its bucket as an argument when it runs. It does not store the bucket, since such a reference
    cycle would keep the flat tensor alive.
    """

    name: str
    flat: torch.Tensor
    group: BaguaProcessGroup
    round_index: int
    operations: list[Operation]

    @property
    def spec(self) -> TensorSpec:
        """The description of `flat`, for collectives."""
        raise NotImplementedError

    def clear_ops(self: B) -> B:
        """Remove all operations."""
        self.operations.clear()
        return self

    def append_python_op(
        self: B,
        python_function: Callable[[B, BaguaProcessGroup], None],
        group: BaguaProcessGroup | None = None,
    ) -> B:
        """Append a user-defined function. It changes `bucket.flat` in place, on the CPU or on a GPU.

        To communicate, the function calls the methods of the group: `BaguaProcessGroup.all_reduce`,
        `BaguaProcessGroup.all_gather`, `BaguaProcessGroup.reduce_scatter` and `BaguaProcessGroup.exchange`. These
        support CPUs and GPUs. The function may also send CPU tensors with torch.distributed over the torch group
        `group.world.torch_group`. This fails with GPU tensors, and observers are not notified of it.

        The function runs on the lane's thread. In stream order, it runs on the backward thread, on the lane's stream.
        If it raises, the training step raises a RuntimeError that names the function, the bucket, the rank and the
        error.

        Args:
            python_function: a function of the bucket and the group.
            group: the group to pass to the function; by default the group of the bucket.
        """
        return self._append_python(python_function, group or self.group, is_local=False)

    def append_local_op(self: B, python_function: Callable[[B, BaguaProcessGroup], None]) -> B:
        """Append a user-defined function that neither sends nor waits for another rank; see `append_python_op`.

        Such a function may run while the mean of the previous bucket is still in progress.
        """
        return self._append_python(python_function, self.group, is_local=True)

    def append_centralized_synchronous_op(
        self: B,
        hierarchical: bool = True,
        average: bool = True,
        compression: str | Compressor | None = None,
        group: BaguaProcessGroup | None = None,
        *,
        error_feedback: TwoPhaseResiduals | None = None,
        intra_compression: str | Compressor | None = None,
    ) -> B:
        """Append the mean (or sum) of the flat tensor over the group. The result is bitwise identical on all ranks.

        Args:
            hierarchical: on several nodes with several ranks each: sum within nodes with `intra_compression`, and use
                `compression` between nodes.
            average: divide by the number of ranks.
            compression: None for full precision; the name of a codec, see `torchbagua.codecs`; or a Compressor.
            group: the group; by default the group of the bucket.
            error_feedback: the residuals of a float32 bucket, from `residual_state`. This operation stores its
                residuals there, and adds those that were committed to the next values.
            intra_compression: the codec within nodes, given as for `compression`; by default full precision. It has no
                effect without `hierarchical` or on a single node.

        Raises:
            ValueError: no codec has that name, the codec does not encode the bucket's dtype, or the bucket does not
                support error feedback.
        """
        if error_feedback is not None and self.spec.dtype != torch.float32:
            raise ValueError(
                f"BaguaBucket: error_feedback requires a float32 bucket, got {self.spec.dtype}; omit it if "
                "Runner.codec_for(bucket) is not Runner.codec"
            )
        group = group or self.group
        compressor = _resolve_codec(compression, self.spec.dtype)
        intra = None if intra_compression is None else _resolve_codec(intra_compression, self.spec.dtype)
        mean = centralized_mean(
            group,
            compressor,
            self.spec,
            hierarchical=hierarchical,
            average=average,
            intra_compressor=intra,
            residuals=error_feedback,
            overlap=group.overlap,
        )
        return self._append_mean(f"centralized_mean in {compressor!r}", group, mean)

    def append_all_reduce_op(self: B, average: bool = True, group: BaguaProcessGroup | None = None) -> B:
        """Append the mean (or sum) of the flat tensor by the backend's all-reduce, in the backend's order of summation.

        The result is bitwise identical to torch's `allreduce_hook`, which divides and then sums, and on all ranks. A
        transport with messages and without all-reduce sends messages as `append_centralized_synchronous_op` does.

        Args:
            average: divide by the number of ranks.
            group: the group; by default the group of the bucket.
        """
        group = group or self.group
        name, mean = _mean_by_backend(group, self.spec, average=average, divides_first=True)
        return self._append(Operation(name, group, lambda bucket: mean(bucket.flat)))

    def append_decentralized_synchronous_op(
        self: B,
        peer_weight: torch.Tensor,
        hierarchical: bool = True,
        peer_selection_mode: str | Topology = "all",
        group: BaguaProcessGroup | None = None,
    ) -> B:
        """Append the mean of the flat tensor with this rank's peers, which `round_index` selects.

        Args:
            peer_weight: receives the mean. Either a tensor of the same kind as the flat tensor, which then does not
                change, or the flat tensor itself. The name is Bagua's.
            hierarchical: on several nodes with several ranks each: average within the node first, then with other
                nodes.
            peer_selection_mode: "all" for all ranks; "shift_one" for a single peer, a different one in each round; or a
                Topology.
            group: the group; by default the group of the bucket.

        Raises:
            ValueError: `peer_weight` does not match the flat tensor, no mode has that name, or the topology does not
                fit the group.
        """
        group = group or self.group
        _check_like_flat("peer_weight", peer_weight, self.spec, self.spec.dtype)
        topology = topology_of("BaguaBucket", peer_selection_mode)
        check_topology("BaguaBucket", topology, group, hierarchical=hierarchical)
        name = f"neighbourhood_mean over {topology!r}"
        if isinstance(topology, AllRanks) or group.size == 1:
            mean = centralized_mean(group, Identity(), self.spec, hierarchical=hierarchical, overlap=group.overlap)
            return self._append_mean(name, group, mean, peer_weight)
        mean_with_peers = neighbourhood_mean(group, topology, self.spec, hierarchical=hierarchical)

        def run(bucket: B) -> None:
            mean_with_peers(bucket.flat, peer_weight, bucket.round_index)

        return self._append(Operation(name, group, run))

    def append_low_precision_decentralized_synchronous_op(
        self: B,
        weight: torch.Tensor,
        left_peer_weight: torch.Tensor,
        right_peer_weight: torch.Tensor,
        hierarchical: bool = True,
        compression: str | Compressor | None = "minmax_uint8",
        group: BaguaProcessGroup | None = None,
        *,
        is_bounded: bool = False,
    ) -> B:
        """Append one round of the ring of compressed differences, see `LowPrecisionDecentralizedAlgorithm`.

        The flat tensor becomes the weights that this rank has agreed on with its neighbors. `BaguaBucket.finish` sends
        the change to them.

        Args:
            weight: this rank's replica, updated in place. It has the length of the flat tensor, and is float64 if the
                flat tensor is float64, else float32.
            left_peer_weight: the replica of the previous rank, of the same kind.
            right_peer_weight: the replica of the next rank, of the same kind.
            hierarchical: on several nodes with several ranks each: a ring of nodes.
            compression: the codec for the differences: its name, see `torchbagua.codecs`; None for full precision; or a
                Compressor. A codec that needs error feedback is rejected.
            group: the group; by default the group of the bucket.
            is_bounded: clamp each element between its local value and the mean of the three replicas.

        Raises:
            ValueError: a replica does not match the flat tensor, no codec has that name, or the codec needs error
                feedback or does not encode the bucket's dtype.
        """
        group = group or self.group
        replicas = Replicas(weight, left_peer_weight, right_peer_weight)
        for name, replica in vars(replicas).items():
            _check_like_flat(f"the replica {name}", replica, self.spec, sum_dtype(self.spec.dtype))
        check_ring_compression("append_low_precision_decentralized_synchronous_op", compression)
        compressor = _resolve_codec(compression, self.spec.dtype)
        update, exchange = low_precision_ring(
            group, compressor, self.spec, replicas, hierarchical=hierarchical, is_bounded=is_bounded
        )
        name = f"low_precision_ring in {compressor!r}"
        return self._append(Operation(name, group, lambda bucket: update(bucket.flat), finish=exchange))

    def append_asynchronous_model_average_op(
        self: B,
        peer_selection_mode: str = "all",
        group: BaguaProcessGroup | None = None,
        *,
        snapshot: torch.Tensor | None = None,
    ) -> B:
        """Append the mean over all ranks in full precision, for a thread that runs concurrently with training.

        The backend's all-reduce sums float32 and float64, in the backend's order. Shorter formats are summed in rank
        order, in float32. The operation takes no codec because it averages weights: in every round, the residual would
        be relative to the weights rather than to their changes.

        Args:
            peer_selection_mode: "all", the only mode.
            group: the group; by default the group of the bucket.
            snapshot: a tensor of the same kind as the flat tensor, which becomes the mean of the snapshots. By default
                the flat tensor itself is averaged.

        Raises:
            ValueError: another mode, or `snapshot` does not match the flat tensor.
        """
        if peer_selection_mode != "all":
            raise ValueError(
                f"append_asynchronous_model_average_op: peer_selection_mode must be 'all', got {peer_selection_mode!r}"
            )
        if snapshot is not None:
            _check_like_flat("snapshot", snapshot, self.spec, self.spec.dtype)
        group = group or self.group
        name, mean = _mean_by_backend(group, self.spec)

        def run(bucket: B) -> None:
            if snapshot is None:
                mean(bucket.flat)
            else:
                mean(snapshot, bucket.flat)

        return self._append(Operation(name, group, run))

    def _append_python(
        self: B,
        python_function: Callable[[B, BaguaProcessGroup], None],
        group: BaguaProcessGroup,
        *,
        is_local: bool,
    ) -> B:
        name = getattr(python_function, "__qualname__", repr(python_function))

        def run(bucket: B) -> None:
            with _name_failures(name, bucket.name, group):
                python_function(bucket, group)

        return self._append(Operation(f"python_op {name}", group, run, is_local=is_local))

    def _append_mean(self: B, name: str, group: BaguaProcessGroup, mean: Mean, out_N: torch.Tensor | None = None) -> B:
        def run(bucket: B) -> None:
            with _name_failures(name, bucket.name, group):
                mean(bucket.flat, out_N)

        if not isinstance(mean, OverlappingMean):
            return self._append(Operation(name, group, run))

        def run_overlapping(bucket: B) -> Iterator[None]:
            with _name_failures(name, bucket.name, group):
                yield from mean.run_overlapping(bucket.flat, out_N)

        return self._append(Operation(name, group, run, may_begin=mean.may_begin, run_overlapping=run_overlapping))

    def _append(self: B, operation: Operation) -> B:
        self.operations.append(operation)
        return self


def _mean_by_backend(
    group: BaguaProcessGroup, spec: TensorSpec, *, average: bool = True, divides_first: bool = False
) -> tuple[str, Mean]:
    """Return the name and the function of the full-precision mean: the backend's all-reduce, or rank-order messages.

    With `divides_first`, the result is bitwise identical to torch's hook, in any dtype. Otherwise values are summed in
    their `sum_dtype`, since a backend would round a bfloat16 sum of weights at every addition.
    """
    is_summed_by_backend = divides_first or spec.dtype == sum_dtype(spec.dtype)
    if group.size > 1 and is_summed_by_backend and group.world.has_all_reduce(spec.device):
        divisor = group.size if average else 1
        return "all_reduce", AllReduceMean(group.world, spec, divisor, divides_first=divides_first)
    codec = Identity()
    mean = centralized_mean(group, codec, spec, hierarchical=False, average=average)
    return f"centralized_mean in {codec!r}", mean


@contextmanager
def _name_failures(operation: str, bucket_name: str, group: BaguaProcessGroup) -> Iterator[None]:
    """Replace an error by a RuntimeError that names the function or codec, the bucket and the rank."""
    try:
        yield
    except CommunicationError:
        raise
    except Exception as error:
        if isinstance(error, EncodingFailure):
            operation, bucket_name, error = error.what, error.bucket, error.cause
        cause = f"{type(error).__name__}: {cause_of(error)}"
        raise RuntimeError(f"torchbagua: {operation} on {bucket_name} failed on rank {group.rank}: {cause}") from error


def _resolve_codec(compression: str | Compressor | None, dtype: torch.dtype) -> Compressor:
    compressor = by_name(compression)
    if not compressor.encodes(dtype):
        raise ValueError(
            f"BaguaBucket: compression must be a codec that encodes {dtype}, or None for full precision, got "
            f"{compressor!r}; pass Runner.codec_for(bucket), which falls back to full precision"
        )
    return compressor


def _check_like_flat(name: str, tensor: torch.Tensor, spec: TensorSpec, dtype: torch.dtype) -> None:
    if tensor.shape != (spec.num_elements,) or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"BaguaBucket: {name} must be contiguous, {dtype}, [{spec.num_elements}], got "
            f"{'' if tensor.is_contiguous() else 'non-contiguous, '}{tensor.dtype}, {list(tensor.shape)}"
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

    def set_round(self, round_index: int) -> None:
        """Continue after so many rounds."""
        self.round_index = round_index

    def receive(self, flat: torch.Tensor, number: int) -> None:
        """Take the flat tensor of a DDP bucket, the runner's bucket of this number."""
        self.flat = flat
        self.num_received = number

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
        for _ in self._start_overlapping():
            pass

    def may_begin(self) -> bool:
        """Return whether the bucket may begin now, while another bucket waits; see `OverlappingMean.may_begin`."""
        mean = self._overlapping
        return mean is not None and mean.may_begin is not None and mean.may_begin()

    def run_overlapping(self) -> Generator[None, None, torch.Tensor]:
        """Run the operations as `run` does. Yield before the first wait, and then whenever another bucket may begin.

        Another bucket may begin when all messages of this bucket are queued and this bucket only waits.
        """
        yield from self._start_overlapping()
        self.finish()
        return self.flat

    def _start_overlapping(self) -> Iterator[None]:
        tracer, overlapping = self.group.tracer, self._overlapping
        try:
            with tracer.bucket_span(self.name, self.flat):
                for operation in self.operations:
                    if operation is overlapping and operation.run_overlapping is not None:
                        yield from self._in_range(operation.name, operation.run_overlapping(self))
                    else:
                        with tracer.range(operation.name):
                            operation.run(self)
        except BaseException:
            self._close_groups()
            raise
        self.round_index += 1

    def _in_range(self, name: str, steps: Iterator[None]) -> Iterator[None]:
        """Yield as `run_overlapping` does. Each part runs in a range of its own, since ranges of a thread must nest."""
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
        return sending[0] if len(sending) == 1 and sending[0].run_overlapping is not None else None

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
