"""What a bucket does with its flat tensor: operations with names, and the methods that check and append them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from torchbagua.codecs.base import Compressor, sum_dtype
from torchbagua.codecs.blocks import TensorSpec
from torchbagua.codecs.cast import Identity
from torchbagua.codecs.lookup import by_name
from torchbagua.collectives.all_reduce_mean import AllReduceMean
from torchbagua.collectives.centralized_mean import Mean, centralized_mean
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.low_precision_ring import Replicas, check_ring_compression, low_precision_ring
from torchbagua.collectives.neighbourhood_mean import check_topology, neighbourhood_mean
from torchbagua.collectives.overlapping import OverlappingMean
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.collectives.reduce_scatter import EncodingFailure
from torchbagua.collectives.topology import AllRanks, Topology, topology_of
from torchbagua.collectives.value_form import ValueForm
from torchbagua.transport.errors import CommunicationError, cause_of

B = TypeVar("B", bound="BucketOperations")


@dataclass(frozen=True)
class Operation:
    """One operation of a bucket.

    Attributes:
        name: what a debugger and a profile show.
        group: over which it communicates; closed where the bucket fails.
        run: works on the flat tensor of the bucket, its argument, in place or into another.
        finish: what is left to do once the flat tensor is final.
        is_local: whether it sends nothing and waits for nobody.
        may_begin, steps: of one that may begin while another bucket is under way, see `OverlappingMean`; `steps` takes
            the place of `run`.
    """

    name: str
    group: BaguaProcessGroup
    run: Callable[[Any], None]
    finish: Callable[[], None] | None = None
    is_local: bool = False
    may_begin: Callable[[], bool] | None = None
    steps: Callable[[Any], Iterator[None]] | None = None


class BucketOperations:
    """The operations of a `BaguaBucket`, each checked when it is appended.

    An operation is given its bucket when it runs, and does not hold it: such a reference cycle would keep the flat
    tensor alive.
    """

    name: str
    flat: torch.Tensor
    group: BaguaProcessGroup
    round_index: int
    operations: list[Operation]

    @property
    def spec(self) -> TensorSpec:
        """What `flat` is, for collectives."""
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
        """Append a function of yours. It changes `bucket.flat` in place, on the CPU or on a GPU.

        To send, it calls the methods of the group: `BaguaProcessGroup.all_reduce`, `BaguaProcessGroup.all_gather`,
        `BaguaProcessGroup.reduce_scatter` and `BaguaProcessGroup.exchange`. They work on CPUs and GPUs. It may also
        send tensors of the CPU with torch.distributed over the torch group `group.world.torch_group`. That fails with
        tensors of a GPU, and observers are not notified of it.

        The function runs on the thread of the lane; in stream order on that of backward, on the lane's stream. If it
        raises, the training step raises a RuntimeError that names the function, the bucket, the rank and the error.

        Args:
            python_function: a function of the bucket and the group.
            group: the group that it is given; by default that of the bucket.
        """
        return self._append_python(python_function, group or self.group, is_local=False)

    def append_local_op(self: B, python_function: Callable[[B, BaguaProcessGroup], None]) -> B:
        """Append a function of yours that sends nothing and waits for nobody; see `append_python_op`.

        Such a function may run while the mean of the bucket before is still under way.
        """
        return self._append_python(python_function, self.group, is_local=True)

    def append_centralized_synchronous_op(
        self: B,
        hierarchical: bool = True,
        average: bool = True,
        scattergather: bool = False,
        compression: str | Compressor | None = None,
        group: BaguaProcessGroup | None = None,
        *,
        error_feedback: TwoPhaseResiduals | None = None,
        intra_compression: str | Compressor | None = None,
        form: ValueForm | None = None,
    ) -> B:
        """Append the mean (or sum) of the flat tensor over the group. It is bit-identical on all ranks.

        Args:
            hierarchical: with several nodes of several ranks: sum within nodes in `intra_compression`, and use
                `compression` between them.
            average: divide by the number of ranks.
            scattergather: without effect; it is there because Bagua's method has it.
            compression: None for full precision; the name of a codec, see `torchbagua.codecs`; or a Compressor.
            group: the group; by default that of the bucket.
            error_feedback: the residuals of a float32 bucket, from `residual_state`. What compression leaves out is
                kept there. It is added the next time, if it has been committed.
            intra_compression: what is used within nodes, named as for `compression`; by default full precision. Without
                `hierarchical`, or on one node, it has no effect.
            form: another form of a float32 bucket's values, in which they are averaged.

        Raises:
            ValueError: no compression has that name, or it does not encode the bucket's dtype, or the bucket cannot
                have error feedback.
        """
        if error_feedback is not None and self.spec.dtype != torch.float32:
            raise ValueError(
                f"BaguaBucket: error_feedback needs a float32 bucket, got {self.spec.dtype}; leave it out if "
                "Runner.codec_for(bucket) is not Runner.codec"
            )
        group = group or self.group
        compressor = _compressor(compression, self.spec.dtype)
        intra = _compressor(intra_compression, self.spec.dtype)
        mean = centralized_mean(
            group,
            compressor,
            self.spec,
            hierarchical=hierarchical,
            average=average,
            intra_compressor=intra,
            residuals=error_feedback,
            form=form,
        )

        return self._append_mean(f"centralized_mean in {compressor!r}", group, mean)

    def append_all_reduce_op(self: B, average: bool = True, group: BaguaProcessGroup | None = None) -> B:
        """Append the mean (or sum) of the flat tensor by the backend's all-reduce, in the backend's order of summation.

        The bits are those of torch's `allreduce_hook`, which divides and then adds, and the same on all ranks. A
        transport that has messages and no all-reduce sends them as `append_centralized_synchronous_op` does.

        Args:
            average: divide by the number of ranks.
            group: the group; by default that of the bucket.
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
        """Append the mean of the flat tensor with this rank's peers, which `round_index` chooses.

        Args:
            peer_weight: receives the mean. It is like the flat tensor, which stays as it is, or that tensor itself. The
                name is Bagua's.
            hierarchical: with several nodes of several ranks: average within the node first, and then with other nodes.
            peer_selection_mode: "all" for all ranks; "shift_one" for one of them, another one each time; or a Topology.
            group: the group; by default that of the bucket.

        Raises:
            ValueError: `peer_weight` is not such a tensor, no mode has that name, or the topology does not fit.
        """
        group = group or self.group
        _check_like_flat("peer_weight", peer_weight, self.spec, self.spec.dtype)
        topology = topology_of("BaguaBucket", peer_selection_mode)
        check_topology("BaguaBucket", topology, group, hierarchical=hierarchical)
        name = f"neighbourhood_mean over {topology!r}"
        if isinstance(topology, AllRanks) or group.size == 1:
            mean = centralized_mean(group, Identity(), self.spec, hierarchical=hierarchical)
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

        The flat tensor becomes the weights that this rank has agreed on with its neighbours. `BaguaBucket.finish` sends
        them the change.

        Args:
            weight: this rank's replica, changed in place. It is as long as the flat tensor; float64 if that is float64,
                else float32.
            left_peer_weight: the replica of the rank before this one, of the same kind.
            right_peer_weight: the replica of the rank after this one, of the same kind.
            hierarchical: with several nodes of several ranks: a ring of nodes.
            compression: the codec that sends differences: its name, see `torchbagua.codecs`; None for full precision;
                or a Compressor. One that needs error feedback is refused.
            group: the group; by default that of the bucket.
            is_bounded: keep each element between its own value and the mean of the three replicas.

        Raises:
            ValueError: a replica is not such a tensor, no compression has that name, it needs error feedback, or it
                does not encode the bucket's dtype.
        """
        group = group or self.group
        replicas = Replicas(weight, left_peer_weight, right_peer_weight)
        for name, replica in vars(replicas).items():
            _check_like_flat(f"the replica {name}", replica, self.spec, sum_dtype(self.spec.dtype))
        check_ring_compression("append_low_precision_decentralized_synchronous_op", compression)
        compressor = _compressor(compression, self.spec.dtype)
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
        """Append the mean over all ranks in full precision, for a thread that runs beside training.

        The backend's all-reduce sums float32 and float64, in its own order; shorter formats are summed in rank order,
        in float32. There is no codec, since weights are averaged: the error of compression would be relative to the
        weights and not to their changes, in every round.

        Args:
            peer_selection_mode: "all"; there is no other.
            group: the group; by default that of the bucket.
            snapshot: a tensor like the flat one, which becomes its mean. By default the flat tensor itself is averaged.

        Raises:
            ValueError: another mode, or `snapshot` is not such a tensor.
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

        def steps(bucket: B) -> Iterator[None]:
            with _name_failures(name, bucket.name, group):
                yield from mean.steps(bucket.flat, out_N)

        return self._append(Operation(name, group, run, may_begin=mean.may_begin, steps=steps))

    def _append(self: B, operation: Operation) -> B:
        self.operations.append(operation)
        return self


def _mean_by_backend(
    group: BaguaProcessGroup, spec: TensorSpec, *, average: bool = True, divides_first: bool = False
) -> tuple[str, Mean]:
    """Return the mean in full precision by the backend's all-reduce, and its name; else by messages, in rank order.

    A mean that is divided first has the bits of torch's hook, in any dtype. Others are summed in their `sum_dtype`: a
    backend would round the sum of weights in bfloat16 at every addition.
    """
    is_summed_by_backend = divides_first or spec.dtype == sum_dtype(spec.dtype)
    if group.size > 1 and is_summed_by_backend and group.world.has_all_reduce(spec.device):
        divisor = group.size if average else 1
        return "all_reduce", AllReduceMean(group.world, spec, divisor, divides_first=divides_first)
    codec = Identity()
    mean = centralized_mean(group, codec, spec, hierarchical=False, average=average)
    return f"centralized_mean in {codec!r}", mean


@contextmanager
def _name_failures(what: str, bucket_name: str, group: BaguaProcessGroup) -> Iterator[None]:
    """Raise a RuntimeError that names function or codec, bucket and rank in place of an error of theirs."""
    try:
        yield
    except CommunicationError:
        raise
    except Exception as error:
        if isinstance(error, EncodingFailure):
            what, bucket_name, error = error.what, error.bucket, error.cause
        cause = f"{type(error).__name__}: {cause_of(error)}"
        raise RuntimeError(f"torchbagua: {what} on {bucket_name} failed on rank {group.rank}: {cause}") from error


def _compressor(compression: str | Compressor | None, dtype: torch.dtype) -> Compressor:
    compressor = by_name(compression)
    if not compressor.encodes(dtype):
        raise ValueError(
            f"BaguaBucket: compression must be one that encodes {dtype}, or None for full precision, got "
            f"{compressor!r}; Runner.codec_for(bucket) is that of the algorithm, or full precision"
        )
    return compressor


def _check_like_flat(name: str, tensor: torch.Tensor, spec: TensorSpec, dtype: torch.dtype) -> None:
    if tensor.shape != (spec.num_elements,) or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"BaguaBucket: {name} must be contiguous, {dtype}, [{spec.num_elements}], got "
            f"{'' if tensor.is_contiguous() else 'non-contiguous, '}{tensor.dtype}, {list(tensor.shape)}"
        )
