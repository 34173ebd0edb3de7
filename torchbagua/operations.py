"""What a bucket does with its flat tensor: operations with names, each of which checks what it is given."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torchbagua.collectives import (
    BaguaProcessGroup,
    CommunicationError,
    Replicas,
    TwoPhaseResiduals,
    cause_of,
    centralized_mean,
    check_topology,
    low_precision_ring,
    neighbourhood_mean,
)
from torchbagua.compressors import Compressor, TensorSpec, by_name, sum_dtype
from torchbagua.topology import Topology, topology_of


@dataclass(frozen=True)
class Operation:
    """One operation of a bucket.

    Attributes:
        name: what a debugger and a profile show.
        group: over which it communicates; closed where the bucket fails.
        run: works on the flat tensor of the bucket that it is given, in place or into another.
        finish: what is left to do once the flat tensor is final.
    """

    name: str
    group: BaguaProcessGroup
    run: Callable[[Any], None]
    finish: Callable[[], None] | None = None


class Bucket(Protocol):
    """What an operation knows of the bucket that it runs on."""

    name: str
    flat: torch.Tensor
    num_runs: int


def python_op(function: Callable[[Any, BaguaProcessGroup], None], group: BaguaProcessGroup) -> Operation:
    """Return a call of `function`, which is named where it raises."""
    name = getattr(function, "__qualname__", repr(function))

    def run(bucket: Bucket) -> None:
        try:
            function(bucket, group)
        except CommunicationError:
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {cause_of(error)}"
            raise RuntimeError(f"torchbagua: {name} on {bucket.name} failed on rank {group.rank}: {cause}") from error

    return Operation(f"python_op {name}", group, run)


def centralized_op(
    spec: TensorSpec,
    group: BaguaProcessGroup,
    compression: str | Compressor | None,
    *,
    hierarchical: bool = False,
    average: bool = True,
    residuals: TwoPhaseResiduals | None = None,
    snapshot: torch.Tensor | None = None,
) -> Operation:
    """Return the mean of the flat tensor over the group, or of `snapshot`, which is left as it is."""
    if residuals is not None and spec.dtype != torch.float32:
        raise ValueError(f"BaguaBucket: error_feedback needs a float32 bucket, got {spec.dtype}")
    if snapshot is not None:
        _check_like_flat("snapshot", snapshot, spec, spec.dtype)
    compressor = _compressor(compression, spec.dtype)
    mean = centralized_mean(group, compressor, spec, hierarchical=hierarchical, average=average, residuals=residuals)

    def run(bucket: Bucket) -> None:
        if snapshot is None:
            mean(bucket.flat)
        else:
            mean(snapshot, bucket.flat)

    return Operation(f"centralized_mean in {compressor!r}", group, run)


def decentralized_op(
    spec: TensorSpec,
    group: BaguaProcessGroup,
    peer_weight: torch.Tensor,
    peer_selection_mode: str | Topology,
    *,
    hierarchical: bool,
) -> Operation:
    """Return the mean of the flat tensor with this rank's neighbours, which is written to `peer_weight`."""
    _check_like_flat("peer_weight", peer_weight, spec, spec.dtype)
    topology = topology_of("BaguaBucket", peer_selection_mode)
    check_topology("BaguaBucket", topology, group, hierarchical=hierarchical)
    mean = neighbourhood_mean(group, topology, spec, hierarchical=hierarchical)

    def run(bucket: Bucket) -> None:
        mean(bucket.flat, peer_weight, bucket.num_runs)

    return Operation(f"neighbourhood_mean over {topology!r}", group, run)


def low_precision_op(
    spec: TensorSpec,
    group: BaguaProcessGroup,
    replicas: Replicas,
    compression: str | Compressor | None,
    *,
    hierarchical: bool,
    is_bounded: bool,
) -> Operation:
    """Return one round of the ring; the neighbours hear of it when the operation finishes."""
    for name, replica in vars(replicas).items():
        _check_like_flat(f"the replica {name}", replica, spec, sum_dtype(spec.dtype))
    compressor = _compressor(compression, spec.dtype)
    update, exchange = low_precision_ring(
        group, compressor, spec, replicas, hierarchical=hierarchical, is_bounded=is_bounded
    )

    def run(bucket: Bucket) -> None:
        update(bucket.flat)

    return Operation(f"low_precision_ring in {compressor!r}", group, run, finish=exchange)


def _compressor(compression: str | Compressor | None, dtype: torch.dtype) -> Compressor:
    compressor = by_name(compression)
    if not compressor.encodes(dtype):
        raise ValueError(
            f"BaguaBucket: compression must be one that encodes {dtype}, or None for full precision, got {compressor!r}"
        )
    return compressor


def _check_like_flat(name: str, tensor: torch.Tensor, spec: TensorSpec, dtype: torch.dtype) -> None:
    if tensor.shape != (spec.num_elements,) or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"BaguaBucket: {name} must be contiguous, {dtype}, [{spec.num_elements}], got "
            f"{'' if tensor.is_contiguous() else 'non-contiguous, '}{tensor.dtype}, {list(tensor.shape)}"
        )
